"""The selection math against slow loops and its own properties."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import selection_oracle as oracle
from acceptmoe.policies import (
    POLICIES,
    AcceptDepthPolicy,
    AcceptPolicy,
    NaturalPolicy,
    load_policy,
)
from acceptmoe.selection import (
    BlockRows,
    RoutedBlock,
    anchors,
    demand,
    depth_counts,
    effective_rank,
    group_floor,
    prune_nonresident,
    select_eligible,
    select_eligible_by_mass,
)

EVERY_POLICY = (
    "natural",
    "accept",
    "accept:sizing=mass,size=0.9,anchor_above=0.5,top=0,combine=natural",
    "accept:top=2,size=0.1",
    "accept-depth",
    "moe-spec:budget=6",
    "xshare:size=6",
    "oea:top=2",
    "lynx:drop=0.25",
    "evict",
    "utility",
    "s2:size=6",
)


def make_block(
    seed: int,
    num_rows: int,
    num_experts: int,
    experts_per_row: int,
    num_padded: int = 0,
    resident: torch.Tensor | None = None,
) -> RoutedBlock:
    """A random block; gates are multiples of 1/64 so that sums are exact and ties happen."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-6, 7, (num_rows, num_experts), generator=generator) / 2
    gates = (torch.softmax(logits, dim=-1) * 64).round().clamp_min(1) / 64
    parents = [-1] + [
        int(torch.randint(0, row, (1,), generator=generator)) for row in range(1, num_rows)
    ]
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    path = torch.randint(1, 65, (num_rows,), generator=generator) / 64
    path[0] = 1
    is_real = torch.arange(num_rows) < num_rows - num_padded
    return RoutedBlock(
        gates=gates,
        choice=logits,
        natural_ids=logits.argsort(dim=-1, descending=True, stable=True)[:, :experts_per_row],
        rows=BlockRows(torch.tensor(depths), 0.7 ** torch.tensor(depths), path, is_real),
        resident=resident,
    )


@st.composite
def blocks(draw, max_experts=24, with_padding=True, with_resident=False):
    num_experts = draw(st.integers(1, max_experts))
    experts_per_row = draw(st.integers(1, num_experts))
    num_rows = draw(st.integers(1, 20))
    num_padded = draw(st.integers(0, num_rows - 1)) if with_padding else 0
    resident = None
    if with_resident:
        resident = torch.tensor(
            draw(st.lists(st.booleans(), min_size=num_experts, max_size=num_experts))
        )
    seed = draw(st.integers(0, 2**31))
    return make_block(seed, num_rows, num_experts, experts_per_row, num_padded, resident)


def as_set(mask: torch.Tensor) -> set[int]:
    return set(mask.nonzero().flatten().tolist())


def oracle_demand(block: RoutedBlock, weights: torch.Tensor) -> list[float]:
    return oracle.demand(
        block.gates.tolist(), block.natural_ids.tolist(), weights.tolist(), block.rows.is_real
    )


@given(blocks())
@settings(deadline=None)
def test_demand_is_the_weighted_gate_mass_of_rows_that_want_the_expert(block):
    weights = block.rows.path_commitment
    torch.testing.assert_close(
        demand(block, weights), torch.tensor(oracle_demand(block, weights)), rtol=1e-5, atol=1e-6
    )


@given(blocks())
@settings(deadline=None)
def test_eligible_set_equals_the_loop(block):
    weights = block.rows.path_commitment
    anchored = anchors(block)
    expected = oracle.eligible(oracle_demand(block, weights), as_set(anchored))
    assert as_set(select_eligible(demand(block, weights), anchored)) == expected


@given(blocks())
@settings(deadline=None)
def test_anchors_are_always_eligible_and_the_set_holds_a_full_row(block):
    for policy in (AcceptDepthPolicy(), AcceptPolicy(), AcceptPolicy(exponent=1.0)):
        eligible = policy.select(block).eligible
        assert set(block.natural_ids[0].tolist()) <= as_set(eligible)
        assert eligible.sum() >= block.natural_ids.shape[1]


@given(blocks())
@settings(deadline=None)
def test_every_policy_keeps_enough_experts_and_ignores_padding(block):
    assert {spec.partition(":")[0] for spec in EVERY_POLICY} == set(POLICIES)
    num_real = int(block.rows.is_real.sum())
    rows = BlockRows(*(value[:num_real] for value in vars(block.rows).values()))
    real = RoutedBlock(
        *(tensor[:num_real] for tensor in (block.gates, block.choice, block.natural_ids)), rows
    )
    for spec in EVERY_POLICY:
        eligible = load_policy(spec).select(block).eligible
        assert eligible.sum() >= block.natural_ids.shape[1]
        assert torch.equal(eligible, load_policy(spec).select(real).eligible)


@given(blocks(), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_permuting_experts_permutes_the_eligible_set(block, random):
    expert_demand = demand(block, block.rows.path_commitment)
    if len(set(expert_demand.tolist())) < len(expert_demand):
        return  # ties go by expert id, which a permutation changes on purpose
    order = list(range(block.num_experts))
    random.shuffle(order)
    permutation = torch.tensor(order)
    anchored = anchors(block)
    eligible = select_eligible(expert_demand, anchored)
    permuted = select_eligible(expert_demand[permutation], anchored[permutation])
    assert torch.equal(permuted, eligible[permutation])


@given(blocks(with_padding=False), st.integers(1, 5), st.integers(0, 2**31))
@settings(deadline=None)
def test_padded_rows_change_nothing(block, num_padding, seed):
    junk = make_block(seed, num_padding + 1, block.num_experts, block.natural_ids.shape[1])

    def padded(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.cat([a, b[1:]])

    rows, junk_rows = block.rows, junk.rows
    longer = RoutedBlock(
        gates=padded(block.gates, junk.gates),
        choice=padded(block.choice, junk.choice),
        natural_ids=padded(block.natural_ids, junk.natural_ids),
        rows=BlockRows(
            padded(rows.depths, junk_rows.depths),
            padded(rows.depth_commitment, junk_rows.depth_commitment),
            padded(rows.path_commitment, junk_rows.path_commitment),
            torch.cat([rows.is_real, torch.zeros(num_padding, dtype=torch.bool)]),
        ),
    )
    for policy in (AcceptDepthPolicy(), AcceptPolicy()):
        assert torch.equal(policy.select(longer).eligible, policy.select(block).eligible)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 31, 100, 127])
def test_n_equal_demands_have_effective_rank_n(count):
    expert_demand = torch.zeros(128)
    expert_demand[:count] = 0.1
    assert float(effective_rank(expert_demand)) == pytest.approx(count, rel=1e-5)
    eligible = select_eligible(expert_demand, torch.zeros(128, dtype=torch.bool))
    assert as_set(eligible) == set(range(count))


def test_without_demand_only_the_anchors_are_eligible():
    anchored = torch.tensor([True, False, True, False])
    expert_demand = torch.tensor([3.0, 0.0, 1.0, 0.0])
    assert torch.equal(select_eligible(expert_demand, anchored), anchored)


def test_the_lower_id_wins_a_tie_for_entry():
    # Demands 4, 1, 1, 1: effective rank exp(1.15) = 3.2, so 4 enter; with 9, 1, 1: rank 1.9 -> 2.
    expert_demand = torch.tensor([1.0, 9.0, 1.0])
    eligible = select_eligible(expert_demand, torch.zeros(3, dtype=torch.bool))
    assert as_set(eligible) == {0, 1}


def eligible_ids(demands: list[float], anchored: set[int], size, parameter: float) -> set[int]:
    is_anchored = torch.tensor([expert in anchored for expert in range(len(demands))])
    return as_set(size(torch.tensor(demands), is_anchored, parameter))


@pytest.mark.parametrize(
    ("scale", "expected"),
    [(0.3, {0, 3}), (0.5, {0, 1, 3}), (1.0, {0, 1, 2, 3}), (4.0, {0, 1, 2, 3})],
)
def test_a_scale_multiplies_the_effective_rank(scale, expected):
    """Demands 2, 2, 2 outside the anchor have effective rank 3; nobody wants expert 4."""
    assert eligible_ids([2.0, 2.0, 2.0, 9.0, 0.0], {3}, select_eligible, scale) == expected


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (0.01, {2, 4}),
        (0.5, {2, 4}),  # exactly half
        (0.51, {0, 2, 4}),
        (0.75, {0, 2, 4}),
        (0.76, {0, 1, 2, 4}),
        (0.876, {0, 1, 2, 3, 4}),
        (1.0, {0, 1, 2, 3, 4}),
    ],
)
def test_mass_is_held_by_the_fewest_experts(share, expected):
    """Outside the anchor 4 the demands are 4, 2, 1, 1 of experts 2, 0, 1, 3; 5 has none."""
    demands = [2.0, 1.0, 4.0, 1.0, 9.0, 0.0]
    assert eligible_ids(demands, {4}, select_eligible_by_mass, share) == expected


@pytest.mark.parametrize("count", [1, 3, 7, 10, 100])
def test_a_share_of_equal_demands_is_that_share_of_their_number(count):
    demands = [0.1] * count
    for taken in range(1, count + 1):
        got = eligible_ids(demands, set(), select_eligible_by_mass, taken / count)
        assert got == set(range(taken))


def test_mass_without_demand_leaves_the_anchors():
    assert eligible_ids([3.0, 0.0], {0}, select_eligible_by_mass, 1.0) == {0}


def test_demand_does_not_depend_on_the_order_of_the_rows():
    """So that experts which are wanted equally tie exactly, whoever sums."""
    block = make_block(3, 19, 24, 5)
    weights = block.rows.path_commitment**0.3
    order = torch.randperm(19, generator=torch.Generator().manual_seed(1))
    shuffled = RoutedBlock(
        block.gates[order], block.choice[order], block.natural_ids[order], block.rows
    )
    assert torch.equal(demand(shuffled, weights[order]), demand(block, weights))


def test_hand_computed_block_of_the_paper():
    """Two children at depth 1: p(1) = 0.64, beta 0.5, so alpha = 0.8 / sqrt(2) for both."""
    gates = torch.tensor([[0.7, 0.1, 0.1, 0.1], [0.1, 0.6, 0.2, 0.1], [0.1, 0.5, 0.1, 0.3]])
    block = RoutedBlock(
        gates=gates,
        choice=gates.log(),
        natural_ids=torch.tensor([[0], [1], [3]]),
        rows=BlockRows(
            torch.tensor([0, 1, 1]),
            torch.tensor([1.0, 0.64, 0.64]),
            torch.tensor([1.0, 0.5, 0.25]),
            torch.ones(3, dtype=torch.bool),
        ),
    )
    assert depth_counts(block.rows).tolist() == [1, 2, 2]
    alpha = 0.8 / math.sqrt(2)
    expected = torch.tensor([0.7, 0.6 * alpha, 0.0, 0.3 * alpha])
    weights = block.rows.depth_commitment.sqrt() * depth_counts(block.rows).rsqrt()
    torch.testing.assert_close(demand(block, weights), expected)
    # Shares 2/3 and 1/3 have entropy 0.637 and effective rank 1.89: both enter.
    assert as_set(AcceptDepthPolicy().select(block).eligible) == {0, 1, 3}


@given(blocks(with_resident=True))
@settings(deadline=None)
def test_pruning_equals_the_loop_and_keeps_its_promises(block):
    expert_demand = demand(block, block.rows.path_commitment)
    anchored = anchors(block)
    eligible = select_eligible(expert_demand, anchored)
    min_experts = block.natural_ids.shape[1]
    kept = prune_nonresident(block, eligible, anchored, expert_demand, min_experts)
    assert as_set(kept) == oracle.prune(
        as_set(eligible),
        as_set(anchored),
        as_set(block.resident),
        expert_demand.tolist(),
        block.natural_ids.tolist(),
        block.rows.is_real.tolist(),
        min_experts,
    )
    assert as_set(anchored) <= as_set(kept)
    assert as_set(eligible & block.resident) <= as_set(kept)
    assert kept.sum() >= min_experts
    is_real = block.rows.is_real
    assigned = torch.bincount(block.natural_ids[is_real].flatten(), minlength=block.num_experts)
    assert assigned[eligible & ~kept].sum() <= assigned[~eligible].sum()


def test_pruning_stops_at_the_first_candidate_that_does_not_fit():
    """Budget 1 (expert 5 is displaced): the least wanted candidate costs 2, so none leaves."""
    natural_ids = torch.tensor([[0], [1], [1], [2], [5]])
    block = RoutedBlock(
        gates=torch.full((5, 6), 1 / 6),
        choice=torch.zeros(5, 6),
        natural_ids=natural_ids,
        rows=BlockRows(*[torch.ones(5)] * 3, torch.ones(5, dtype=torch.bool)),
        resident=torch.zeros(6, dtype=torch.bool),
    )
    eligible = torch.tensor([True, True, True, False, False, False])
    anchored = torch.tensor([True, False, False, False, False, False])
    expert_demand = torch.tensor([1.0, 0.1, 0.5, 0.0, 0.0, 0.0])
    assert torch.equal(prune_nonresident(block, eligible, anchored, expert_demand, 1), eligible)
    # With the demands swapped expert 2 is first, costs 1 and leaves; expert 1 then costs too much.
    swapped = torch.tensor([1.0, 0.5, 0.1, 0.0, 0.0, 0.0])
    assert as_set(prune_nonresident(block, eligible, anchored, swapped, 1)) == {0, 1}


def test_of_equal_candidates_the_higher_id_leaves_first():
    block = RoutedBlock(
        gates=torch.full((4, 4), 0.25),
        choice=torch.zeros(4, 4),
        natural_ids=torch.tensor([[0], [1], [2], [3]]),
        rows=BlockRows(*[torch.ones(4)] * 3, torch.ones(4, dtype=torch.bool)),
        resident=torch.zeros(4, dtype=torch.bool),
    )
    eligible = torch.tensor([True, True, True, False])
    anchored = torch.tensor([True, False, False, False])
    expert_demand = torch.tensor([1.0, 0.5, 0.5, 0.0])
    assert as_set(prune_nonresident(block, eligible, anchored, expert_demand, 1)) == {0, 1}


def test_without_residency_nothing_is_pruned():
    block = make_block(0, 6, 12, 3)
    expert_demand = demand(block, block.rows.path_commitment)
    eligible = select_eligible(expert_demand, anchors(block))
    assert prune_nonresident(block, eligible, anchors(block), expert_demand, 3) is eligible


def test_natural_policy_makes_every_expert_eligible():
    assert NaturalPolicy().select(make_block(0, 5, 9, 2)).eligible.all()


@given(
    st.integers(0, 2**31),
    st.sampled_from([(4, 2, 8), (8, 4, 4), (2, 1, 6), (4, 3, 2), (1, 1, 5), (4, 4, 3)]),
    st.integers(1, 12),
)
@settings(deadline=None)
def test_group_floor_lets_every_group_choice_hold_a_full_row(seed, layout, experts_per_row):
    num_groups, groups_per_row, group_size = layout
    num_experts = num_groups * group_size
    experts_per_row = min(experts_per_row, groups_per_row * group_size)
    block = make_block(seed, 7, num_experts, experts_per_row)
    expert_demand = demand(block, block.rows.path_commitment)
    eligible = select_eligible(expert_demand, anchors(block))
    complete = group_floor(
        block,
        eligible,
        expert_demand,
        num_groups=num_groups,
        groups_per_row=groups_per_row,
        min_group_experts=-(-experts_per_row // groups_per_row),
    )
    assert as_set(eligible) <= as_set(complete)
    counts = complete.view(num_groups, group_size).sum(dim=-1)
    choosable = sorted(count for count in counts.tolist() if count >= 2)
    assert len(choosable) >= groups_per_row
    assert sum(choosable[:groups_per_row]) >= experts_per_row
    root = block.choice[0].tolist()
    two_best = {
        group: sorted(
            range(group * group_size, (group + 1) * group_size), key=lambda e: (-root[e], e)
        )[:2]
        for group in range(num_groups)
    }
    by_score = sorted(two_best, key=lambda group: (-sum(root[e] for e in two_best[group]), group))
    for group in by_score[:groups_per_row]:
        assert set(two_best[group]) <= as_set(complete)


def test_selection_reads_nothing_back_to_the_host():
    """Under a fake device any read of a value fails."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    block = make_block(0, 9, 16, 4, num_padded=2, resident=torch.ones(16, dtype=torch.bool))
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        rows = BlockRows(*(mode.from_tensor(value) for value in vars(block.rows).values()))
        fake = RoutedBlock(
            *(mode.from_tensor(t) for t in (block.gates, block.choice, block.natural_ids)),
            rows,
            mode.from_tensor(block.resident),
        )
        for spec in EVERY_POLICY:
            assert load_policy(spec).select(fake).eligible.shape == (16,)
        floor = group_floor(
            fake,
            AcceptPolicy().select(fake).eligible,
            demand(fake, rows.path_commitment),
            num_groups=4,
            groups_per_row=2,
            min_group_experts=2,
        )
        assert floor.shape == (16,)
