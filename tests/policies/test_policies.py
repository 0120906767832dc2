"""Policies by name, and their settings."""

from __future__ import annotations

import math

import pytest
import torch

from acceptmoe.errors import InvalidArgumentError
from acceptmoe.policies import (
    POLICIES,
    AcceptDepthPolicy,
    AcceptPolicy,
    LynxPolicy,
    MoeSpecPolicy,
    NaturalPolicy,
    OEAPolicy,
    XSharePolicy,
    load_policy,
)
from acceptmoe.selection import BlockRows, RoutedBlock


def make_rows(depths: list[int], path_commitment: list[float]) -> BlockRows:
    return BlockRows(
        torch.tensor(depths),
        0.9 ** torch.tensor(depths),
        torch.tensor(path_commitment),
        torch.ones(len(depths), dtype=torch.bool),
    )


def make_block(gates: torch.Tensor, natural_ids: list[list[int]], rows: BlockRows) -> RoutedBlock:
    return RoutedBlock(gates, gates.log(), torch.tensor(natural_ids), rows)


def test_policies_load_by_name_with_their_defaults():
    assert isinstance(load_policy("natural"), NaturalPolicy)
    assert load_policy("accept-depth").params() == {"beta": 0.5}
    assert all(kind.name == name for name, kind in POLICIES.items())


def test_settings_follow_the_name():
    assert load_policy("accept:exponent=1.5").params()["exponent"] == 1.5
    assert load_policy("moe-spec:budget=16").params() == {"budget": 16}


def test_the_default_policy_is_path_aware_and_an_object_passes_through():
    assert isinstance(load_policy(None), AcceptPolicy)
    policy = AcceptPolicy(exponent=1.0)
    assert load_policy(policy) is policy


@pytest.mark.parametrize("spec", ["acept", "", 3, object, ["accept"], ":exponent=1"])
def test_an_unknown_policy_is_refused_with_the_known_names(spec):
    with pytest.raises(
        InvalidArgumentError, match=f"must be one of {', '.join(sorted(POLICIES))}, or a"
    ):
        load_policy(spec)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("accept:beta=1", "sets 'beta'; the settings of 'accept' are: exponent"),
        ("natural:beta=1", "the settings of 'natural' are: none"),
        ("accept:exponent=", "sets exponent to ''; it must be a number"),
        ("accept:exponent=much", "sets exponent to 'much'; it must be a number"),
        ("accept:exponent=-1", r"exponent is -1; it must be from 0 to 16"),
        ("moe-spec", "'moe-spec' needs budget; write for instance 'moe-spec:budget=16'"),
        ("lynx", "'lynx' needs drop; write for instance 'lynx:drop=0.25'"),
        ("lynx:drop=1", "drop is 1; it must be a share of the union, from 0 to less than 1"),
        ("lynx:drop=nan", "drop is nan; it must be a share of the union"),
        ("oea:top=0", "top is 0; it must be a whole number of experts, 1 or more"),
        ("xshare:size=1.5", "size is 1.5; it must be a whole number of experts, 1 or more"),
        ("moe-spec:budget=0", "budget is 0; it must be a whole number of experts, 1 or more"),
        ("moe-spec:budget=2.5", "budget is 2.5; it must be a whole number of experts"),
    ],
)
def test_bad_settings_are_refused(spec, message):
    with pytest.raises(InvalidArgumentError, match=message):
        load_policy(spec)


@pytest.mark.parametrize("value", [-0.5, 17, math.nan, math.inf, True, "0.5", None])
def test_absurd_exponents_are_refused(value):
    with pytest.raises(InvalidArgumentError, match=r"exponent is .*; it must be"):
        AcceptPolicy(exponent=value)
    with pytest.raises(InvalidArgumentError, match=r"beta is .*; it must be"):
        AcceptDepthPolicy(beta=value)


def test_a_likely_path_outweighs_its_equally_deep_sibling():
    """Row 1 is committed almost surely, row 2 hardly ever; by depth alone they count the same."""
    natural_ids = [[0, 1], [2, 3], [4, 5]]
    gates = torch.full((3, 6), 0.02).scatter_(1, torch.tensor(natural_ids), 0.46)
    block = make_block(gates, natural_ids, make_rows([0, 1, 1], [1.0, 0.9, 1e-4]))
    assert AcceptDepthPolicy().select(block).eligible.tolist() == [True] * 6
    assert AcceptPolicy(exponent=2.0).select(block).eligible.tolist() == [True] * 4 + [False] * 2


def test_moe_spec_takes_the_largest_gate_sums_of_all_rows():
    """Sums .5, .6, .2, .7: a budget of 2 takes experts 3 and 1, though the root wants expert 0."""
    gates = torch.tensor([[0.4, 0.1, 0.1, 0.4], [0.1, 0.5, 0.1, 0.3]])
    block = make_block(gates, [[0], [1]], make_rows([0, 1], [1.0, 1e-4]))
    assert MoeSpecPolicy(2).select(block).eligible.tolist() == [False, True, False, True]


def test_xshare_keeps_every_rows_best_expert_and_fills_by_gate_sums():
    """Row bests 0 and 1; sums .5, .6, .5, .4: a size of 3 adds expert 2."""
    gates = torch.tensor([[0.4, 0.1, 0.3, 0.2], [0.1, 0.5, 0.2, 0.2]])
    block = make_block(gates, [[2, 0], [1, 3]], make_rows([0, 1], [1.0, 0.5]))
    assert XSharePolicy(3).select(block).eligible.tolist() == [True, True, True, False]
    three_rows = torch.cat([gates, torch.tensor([[0.1, 0.1, 0.1, 0.7]])])
    block = make_block(three_rows, [[0], [1], [3]], make_rows([0, 1, 1], [1.0, 0.5, 0.1]))
    assert XSharePolicy(1).select(block).eligible.tolist() == [True, True, False, True]


def test_oea_shares_the_union_of_the_rows_best_experts():
    """Best experts 0 and 3; with top=2 the second ones, 2 and 1, join."""
    gates = torch.tensor([[0.4, 0.1, 0.3, 0.2], [0.1, 0.2, 0.1, 0.6]])
    block = make_block(gates, [[2, 0], [3, 1]], make_rows([0, 1], [1.0, 0.5]))
    assert OEAPolicy(1).select(block).eligible.tolist() == [True, False, False, True]
    assert OEAPolicy(2).select(block).eligible.all()
    # One row alone gives one expert where two are needed: the largest gate sum fills up.
    one_row = make_block(gates[:1], [[2, 0]], make_rows([0], [1.0]))
    assert OEAPolicy(1).select(one_row).eligible.tolist() == [True, False, True, False]


def test_lynx_drops_the_least_used_experts_of_the_union():
    """Uses 3, 1, 1, 1, 0: a quarter of the union of four is one expert, the highest id of three."""
    gates = torch.full((3, 5), 0.2)
    natural_ids = [[0, 1], [0, 2], [0, 3]]
    block = make_block(gates, natural_ids, make_rows([0, 1, 1], [1.0, 0.5, 0.1]))
    assert LynxPolicy(0.25).select(block).eligible.tolist() == [True, True, True, False, False]
    assert LynxPolicy(0).select(block).eligible.tolist() == [True] * 4 + [False]
    assert LynxPolicy(0.9).select(block).eligible.tolist() == [True, True, False, False, False]


def test_moe_spec_never_leaves_fewer_experts_than_a_row_needs_nor_counts_padding():
    gates = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.1, 0.1, 0.7]])
    rows = make_rows([0, 1], [1.0, 0.5])
    padded = BlockRows(
        rows.depths, rows.depth_commitment, rows.path_commitment, torch.tensor([True, False])
    )
    block = make_block(gates, [[0, 1], [3, 0]], padded)
    assert MoeSpecPolicy(1).select(block).eligible.tolist() == [True, True, False, False]
    assert MoeSpecPolicy(99).select(block).eligible.all()
