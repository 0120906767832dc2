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
from acceptmoe.policies.accept import ALL_OWN
from acceptmoe.policies.history import StepHistory
from acceptmoe.policies.trust import Trust
from acceptmoe.selection import BlockRows, RoutedBlock
from acceptmoe.tree import DraftTree


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


def test_named_choices_follow_the_name_too():
    policy = load_policy("accept:anchor_above=0.5,sizing=mass, size=0.8 ,combine=natural")
    assert policy.params() == {
        **AcceptPolicy().params(),
        "anchor_above": 0.5,
        "sizing": "mass",
        "size": 0.8,
        "combine": "natural",
    }


def test_the_default_settings_are_those_that_the_search_chose():
    assert AcceptPolicy().params() == {
        "exponent": 0.75,
        "anchor_above": 1.0,
        "top": 1,
        "sizing": "effective-rank",
        "size": 0.3,
        "combine": "router",
        "min_commitment": 0.02,
        "max_lost": 0.5,
        "max_lost_unsure": 0.1,
        "sure_above": 0.95,
    }


def test_hand_computed_anchors_and_sizes_of_accept():
    """Demand is 1, 0.6, 0.3 and 0.05 for the experts 0 to 3; the root has expert 0."""
    gates = torch.eye(4).mul(0.9) + 0.025
    rows = make_rows([0, 1, 1, 2], [1.0, 0.6, 0.3, 0.05])
    block = make_block(gates, [[0], [1], [2], [3]], rows)

    def eligible(**settings) -> list[int]:
        policy = AcceptPolicy(**{"exponent": 1.0, "top": 0, "size": 1.0, **settings})
        return policy.select(block).eligible.nonzero().flatten().tolist()

    # Shares 0.632, 0.316, 0.053: entropy 0.809, effective rank 2.25.
    assert eligible() == [0, 1, 2, 3]
    assert eligible(size=0.8) == [0, 1, 2]  # 1.80
    assert eligible(size=0.4) == [0, 1]  # 0.90
    assert eligible(sizing="mass", size=0.6) == [0, 1]  # 0.632 is enough
    assert eligible(sizing="mass", size=0.7) == [0, 1, 2]
    assert eligible(sizing="mass", size=0.96) == [0, 1, 2, 3]
    # With expert 1 anchored the others' shares are 0.857 and 0.143.
    assert eligible(anchor_above=0.5, sizing="mass", size=0.8) == [0, 1, 2]
    assert eligible(anchor_above=0.6, sizing="mass", size=0.6) == [0, 1]  # not above
    assert eligible(anchor_above=0.04, sizing="mass", size=0.1) == [0, 1, 2, 3]
    assert AcceptPolicy(combine="natural").select(block).combine == "natural"


def test_nodes_that_are_hardly_ever_committed_are_not_verified():
    """The calibrated commitment decides, here the square root: 1, 0.5, 0.2, 0.17, 0.016."""

    class SquareRoots:
        def path_commitment(self, probabilities: torch.Tensor) -> torch.Tensor:
            return probabilities.sqrt()

        def min_path_probability(self, commitment: float) -> float:
            return commitment**2

    table = SquareRoots()
    tree = DraftTree((7, 1, 2, 3, 4), (-1, 0, 0, 1, 3), (1.0, 0.25, 0.04, 0.03, 0.25e-3))

    def kept(min_commitment: float, table: SquareRoots | None) -> tuple[int, ...]:
        policy = AcceptPolicy(min_commitment=min_commitment).tree_policy(StepHistory(), table)
        return tree.tokens if policy is None else policy.prune(tree).tokens

    assert kept(0.0, table) == tree.tokens
    assert kept(0.1, table) == (7, 1, 2, 3)
    assert kept(0.19, table) == (7, 1, 2)
    assert kept(0.3, table) == (7, 1)
    assert kept(1.0, table) == (7,)
    assert kept(0.19, None) == (7, 1)  # without a table the drafter's own probabilities


def test_rows_that_lost_much_are_trusted_only_where_they_are_sure():
    """The likeliest token has 0.5 in the rows 0 and 1, 0.98 and more in the rows 2 to 4."""
    logits = torch.tensor([[0.0, 0.0], [0.0, 0.0], [4.0, 0.0], [5.0, 0.0], [5.0, 0.0]])
    lost = torch.tensor([0.0, 0.06, 0.06, 0.35, 0.36])
    trust = Trust(max_lost=0.35, max_lost_unsure=0.05, sure_above=0.98)
    assert trust.trusted(lost, logits).tolist() == [True, False, True, True, False]
    assert Trust(0.35, 0.05, 0.0).trusted(lost, logits).tolist() == [True, True, True, True, False]
    assert Trust(0.05, 1.0, 0.98).trusted(lost, logits).tolist() == [True] + [False] * 4
    assert trust.trusted(lost.double(), logits.bfloat16()).tolist()[:2] == [True, False]
    assert AcceptPolicy(max_lost=1, max_lost_unsure=1).trust is None
    assert AcceptPolicy(max_lost=1, sure_above=0).trust is None
    assert AcceptPolicy(max_lost=0.35, max_lost_unsure=0.05, sure_above=0.98).trust == trust


def test_every_row_keeps_as_many_of_its_best_experts_as_it_is_told():
    """Rows 0 to 2 have the experts 0, 1 and 2, 3 and 4, 5, the second of row 1 the better one."""
    gates = torch.tensor([[0.3, 0.2], [0.1, 0.3], [0.3, 0.1]])
    gates = torch.cat([gates, torch.full((3, 4), 0.1)], dim=1)
    gates = torch.stack([gates[0], gates[1].roll(2), gates[2].roll(4)])
    rows = make_rows([0, 1, 2], [1.0, 0.6, 0.3])
    block = make_block(gates, [[0, 1], [2, 3], [4, 5]], rows)

    def eligible(top: int) -> list[int]:
        # As good as nothing enters by demand.
        selection = AcceptPolicy(top=top, sizing="mass", size=1e-6).select(block)
        return selection.eligible.nonzero().flatten().tolist()

    assert eligible(0) == [0, 1]
    assert eligible(1) == [0, 1, 3, 4]
    assert eligible(2) == eligible(9) == eligible(2**40) == [0, 1, 2, 3, 4, 5]
    rows.is_real[2] = False
    assert eligible(1) == [0, 1, 3]


def test_of_a_rows_equal_experts_the_lower_ids_are_its_best():
    rows = make_rows([0, 1], [1.0, 0.5])
    block = make_block(torch.full((2, 4), 0.25), [[0, 1], [3, 2]], rows)
    policy = AcceptPolicy(top=1, sizing="mass", size=1e-6)
    assert policy.select(block).eligible.tolist() == [True, True, True, False]


def test_padded_rows_anchor_nothing():
    rows = make_rows([0, 1, 1], [1.0, 0.6, 0.9])
    rows.is_real[2] = False
    block = make_block(torch.eye(3).mul(0.9) + 0.1, [[0], [1], [2]], rows)
    assert AcceptPolicy(anchor_above=0.5, top=0).select(block).eligible.tolist() == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize("exponent", [0.5, 1.0])
def test_fused_parameters_are_the_weights_and_anchors_of_the_rule(exponent):
    rows = make_rows([0, 1, 1, 2], [1.0, 0.64, 0.25, 0.16])
    policy = AcceptPolicy(
        exponent, anchor_above=0.25, top=2, sizing="mass", size=0.9, combine="natural"
    )
    params = policy.fused_params(rows)
    torch.testing.assert_close(
        params.row_weights, torch.tensor([1.0, 0.64, 0.25, 0.16]) ** exponent
    )
    assert params.num_anchored.tolist() == [ALL_OWN, ALL_OWN, 2, 2]
    assert (params.sizing, params.size_parameter, params.combine) == ("mass", 0.9, "natural")
    # p(d) = 0.9^d and two rows at depth 1.
    params = AcceptDepthPolicy(exponent).fused_params(rows)
    half = 0.9**exponent / math.sqrt(2)
    expected = torch.tensor([1.0, half, half, 0.81**exponent])
    torch.testing.assert_close(params.row_weights, expected)
    assert params.num_anchored.tolist() == [0, 0, 0, 0]
    assert (params.sizing, params.size_parameter, params.combine) == (
        "effective-rank",
        1.0,
        "router",
    )


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
        ("accept:sizing=rank", "sizing is 'rank'; it must be 'effective-rank' or 'mass'"),
        ("accept:combine=1", "combine is '1'; it must be 'router' or 'natural'"),
        ("accept:size=0", r"size is 0; it must be above 0 \(1 is the effective rank\)"),
        ("accept:size=17", "size is 17; it must be from 0 to 16"),
        ("accept:sizing=mass,size=1.5", "size is 1.5; it must be from 0 to 1"),
        ("accept:anchor_above=1.5", "anchor_above is 1.5; it must be from 0 to 1"),
        ("moe-spec", "'moe-spec' needs budget; write for instance 'moe-spec:budget=16'"),
        ("lynx", "'lynx' needs drop; write for instance 'lynx:drop=0.25'"),
        ("lynx:drop=1", "drop is 1; it must be a share of the union, from 0 to less than 1"),
        (f"lynx:drop={10**400}", f"drop is {10**400}; it must be a share of the union"),
        ("accept:top=1,top=2", "policy 'accept:top=1,top=2' sets top twice; it must be set once"),
        ("lynx:drop=nan", "drop is nan; it must be a share of the union"),
        ("accept:top=-1", "top is -1; it must be a whole number of experts, 0 or more"),
        ("accept:top=1.5", "top is 1.5; it must be a whole number of experts, 0 or more"),
        ("oea:top=0", "top is 0; it must be a whole number of experts, 1 or more"),
        ("xshare:size=1.5", "size is 1.5; it must be a whole number of experts, 1 or more"),
        ("moe-spec:budget=0", "budget is 0; it must be a whole number of experts, 1 or more"),
        ("moe-spec:budget=2.5", "budget is 2.5; it must be a whole number of experts"),
    ],
)
def test_bad_settings_are_refused(spec, message):
    with pytest.raises(InvalidArgumentError, match=message):
        load_policy(spec)


@pytest.mark.parametrize(
    ("spec", "refused", "allowed"),
    [
        ("moe-spec:budget={}", (7, 65, 1000), (8, 64)),
        ("xshare:size={}", (7, 65), (8, 64)),
        ("s2:size={}", (7, 65), (8, 64)),
        ("oea:top={}", (9, 100), (1, 8)),
        ("accept:top={}", (), (0, 100)),  # more than all of a row's own are all of them
        ("lynx:drop={}", (), (0.9,)),
    ],
)
def test_settings_that_mean_nothing_for_a_model_are_refused(spec, refused, allowed):
    for value in allowed:
        load_policy(spec.format(value)).check_model(64, 8)
    for value in refused:
        policy = load_policy(spec.format(value))
        with pytest.raises(
            InvalidArgumentError, match=f"is {value}; this model routes each .* to 8"
        ):
            policy.check_model(64, 8)


@pytest.mark.parametrize("value", [-0.5, 17, 10**400, math.nan, math.inf, True, "0.5", None])
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
    assert (
        AcceptPolicy(exponent=2.0, top=0, size=1.0).select(block).eligible.tolist()
        == [True] * 4 + [False] * 2
    )


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
