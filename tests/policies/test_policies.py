"""Policies by name, and their exponents."""

from __future__ import annotations

import math

import pytest
import torch

from acceptmoe.errors import InvalidArgumentError
from acceptmoe.policies import POLICIES, AcceptDepthPolicy, AcceptPolicy, load_policy
from acceptmoe.selection import BlockRows, RoutedBlock


def test_every_policy_loads_by_its_name():
    for name, kind in POLICIES.items():
        assert type(load_policy(name)) is kind
        assert kind.name == name


def test_the_default_policy_is_path_aware_and_an_object_passes_through():
    assert isinstance(load_policy(None), AcceptPolicy)
    policy = AcceptPolicy(exponent=1.0)
    assert load_policy(policy) is policy


@pytest.mark.parametrize("spec", ["acept", "", 3, object, ["accept"]])
def test_an_unknown_policy_is_refused_with_the_known_names(spec):
    with pytest.raises(InvalidArgumentError, match="must be one of accept, accept-depth, natural"):
        load_policy(spec)


@pytest.mark.parametrize("value", [-0.5, 17, math.nan, math.inf, True, "0.5", None])
def test_absurd_exponents_are_refused(value):
    with pytest.raises(InvalidArgumentError, match=r"exponent is .*; it must be"):
        AcceptPolicy(exponent=value)
    with pytest.raises(InvalidArgumentError, match=r"beta is .*; it must be"):
        AcceptDepthPolicy(beta=value)


def test_a_likely_path_outweighs_its_equally_deep_sibling():
    """Row 1 is committed almost surely, row 2 hardly ever; by depth alone they count the same."""
    gates = torch.full((3, 6), 0.02)
    natural_ids = torch.tensor([[0, 1], [2, 3], [4, 5]])
    gates.scatter_(1, natural_ids, 0.46)
    block = RoutedBlock(
        gates=gates,
        choice=gates.log(),
        natural_ids=natural_ids,
        rows=BlockRows(
            torch.tensor([0, 1, 1]),
            torch.tensor([1.0, 0.9, 0.9]),
            torch.tensor([1.0, 0.9, 1e-4]),
            torch.ones(3, dtype=torch.bool),
        ),
    )
    assert AcceptDepthPolicy().select(block).eligible.tolist() == [True] * 6
    assert AcceptPolicy(exponent=2.0).select(block).eligible.tolist() == [True] * 4 + [False] * 2
