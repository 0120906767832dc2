"""Routing inside an eligible set, against the real routers of every family and a slow oracle."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from acceptmoe.models.adapter import MoEAdapter
from acceptmoe.models.patching import read_block, route_block, select_inside_groups
from acceptmoe.models.scoring import Scoring, SigmoidBiasGroup, TopKSoftmax
from acceptmoe.policies import RoutingPolicy
from acceptmoe.selection import BlockRows, RoutedBlock, Selection
from tiny_models import is_available, make_model

NUM_ROWS = 9
# One router of each kind and each setting of its rule, from the models themselves.
ROUTERS = {
    "softmax, renormalised": ("qwen3_moe", {"norm_topk_prob": True}),
    "softmax, not renormalised": ("olmoe", {"norm_topk_prob": False}),
    "softmax, always renormalised": ("mixtral", {}),
    "softmax over the chosen": ("gpt_oss", {}),
    "sigmoid": ("glm4_moe", {"norm_topk_prob": True}),
    "sigmoid, not renormalised": ("glm4_moe", {"norm_topk_prob": False}),
    "sigmoid, 2 of 4 groups": ("deepseek_v3", {}),
    "sigmoid, 1 of 4 groups": ("deepseek_v3", {"topk_group": 1}),
    "sigmoid, 2 of 2 groups": ("deepseek_v3", {"n_group": 2}),
    "sigmoid, 3 of 8 groups of 2": ("axk1", {"n_group": 8, "topk_group": 3}),
}


class FixedPolicy(RoutingPolicy):
    """Answers with one selection, whatever the block."""

    name = "fixed"

    def __init__(self, selection: Selection) -> None:
        self.selection = selection

    def select(self, block: RoutedBlock) -> Selection:
        return self.selection


@pytest.fixture(scope="module", params=ROUTERS, ids=lambda name: name.replace(" ", "-"))
def routing(request):
    """A scoring kind, a router with random weights, and its natural output for random rows."""
    family, changes = ROUTERS[request.param]
    if not is_available(family):
        pytest.skip(f"this Transformers version has no {family}")
    adapter = MoEAdapter(make_model(family, **changes))
    router = adapter.layers[-1].router
    hidden = 3 * torch.randn(
        NUM_ROWS, router.hidden_dim, generator=torch.Generator().manual_seed(5)
    )
    with torch.no_grad():
        router.weight.mul_(4)  # scores far enough apart to make groups and weights differ
        return adapter.family.scoring, router, router(hidden)


def make_rows() -> BlockRows:
    depths = torch.tensor([0, *[1 + row % 3 for row in range(NUM_ROWS - 1)]])
    commitment = 0.7**depths
    return BlockRows(depths, commitment, commitment, torch.ones(NUM_ROWS, dtype=torch.bool))


def reroute(scoring: Scoring, router, output, selection: Selection):
    block = read_block(scoring, router, output, make_rows())
    return route_block(scoring, router, output, block, selection)


def random_eligible(scoring: Scoring, router, output, generator: torch.Generator) -> Tensor:
    """A random set of any size that holds the root's experts, completed as in a real pass."""
    size = int(torch.randint(router.num_experts + 1, (), generator=generator))
    eligible = torch.zeros(router.num_experts, dtype=torch.bool)
    eligible[torch.randperm(router.num_experts, generator=generator)[:size]] = True
    eligible[output[2][0]] = True
    block = read_block(scoring, router, output, make_rows())
    return select_inside_groups(scoring, router, block, FixedPolicy(Selection(eligible))).eligible


def oracle_route(
    scoring: Scoring, router, logits: list[float], eligible: set[int], bias: list[float]
) -> dict[int, float]:
    """Expert -> numerator of its weight, for one row, as plainly as it can be said."""
    if isinstance(scoring, SigmoidBiasGroup):
        scores = [1 / (1 + math.exp(-x)) for x in logits]
        ranked = {
            e: scores[e] + float(router.e_score_correction_bias[e]) + bias[e] for e in eligible
        }
        size = len(logits) // router.num_group
        group_scores = {}
        for group in range(router.num_group):
            best = sorted((ranked[e] for e in ranked if e // size == group), reverse=True)[:2]
            group_scores[group] = sum(best) if len(best) == 2 else -math.inf
        chosen_groups = sorted(group_scores, key=lambda g: -group_scores[g])[: router.topk_group]
        ranked = {e: value for e, value in ranked.items() if e // size in chosen_groups}
    else:
        highest = max(logits)
        scores = [math.exp(x - highest) for x in logits]
        total = sum(scores)
        scores = [score / total for score in scores]
        ranked = {e: logits[e] + bias[e] for e in eligible}
    chosen = sorted(ranked, key=lambda e: -ranked[e])[: router.top_k]
    return {e: scores[e] for e in chosen}


def is_renormalised(scoring: Scoring, router) -> bool:
    if isinstance(scoring, TopKSoftmax):
        return True
    fixed = getattr(scoring, "renormalize", None)
    return bool(router.norm_topk_prob if fixed is None else fixed)


def expected_weights(scoring: Scoring, router, kept: dict[int, float], total: float) -> list[float]:
    scale = getattr(router, "routed_scaling_factor", 1.0)
    divisor = total if is_renormalised(scoring, router) else 1.0
    return [scale * score / divisor for score in kept.values()]


def check_row(ids: Tensor, weights: Tensor, kept: dict[int, float], expected: list[float]) -> None:
    got = dict(zip(ids.tolist(), weights.tolist(), strict=True))
    assert got.keys() == kept.keys()
    for expert, weight in zip(kept, expected, strict=True):
        assert got[expert] == pytest.approx(weight, rel=1e-5, abs=1e-7)  # fp32 against double


@torch.no_grad()
def test_with_everything_eligible_the_routers_own_bits_come_out(routing) -> None:
    scoring, router, output = routing
    everything = torch.ones(1, router.num_experts, dtype=torch.bool)
    weights, ids = scoring.route(router, output, everything)
    assert weights.dtype == output[1].dtype
    assert torch.equal(weights, output[1])
    assert torch.equal(ids, output[2])


@torch.no_grad()
def test_rows_are_routed_inside_the_eligible_set_by_the_routers_own_rule(routing) -> None:
    scoring, router, output = routing
    generator = torch.Generator().manual_seed(6)
    no_bias = [0.0] * router.num_experts
    for _ in range(60):
        eligible = random_eligible(scoring, router, output, generator)
        inside = set(eligible.nonzero().flatten().tolist())
        _, weights, ids = reroute(scoring, router, output, Selection(eligible))
        assert eligible[ids].all()
        for row in range(NUM_ROWS):
            assert len(set(ids[row].tolist())) == router.top_k
            if eligible[output[2][row]].all():
                continue  # the next test's case
            kept = oracle_route(scoring, router, output[0][row].tolist(), inside, no_bias)
            expected = expected_weights(scoring, router, kept, sum(kept.values()))
            check_row(ids[row], weights[row], kept, expected)


@torch.no_grad()
def test_rows_whose_experts_are_eligible_keep_the_routers_own_bits(routing) -> None:
    scoring, router, output = routing
    generator = torch.Generator().manual_seed(7)
    num_kept = 0
    for _ in range(60):
        eligible = random_eligible(scoring, router, output, generator)
        _, weights, ids = reroute(scoring, router, output, Selection(eligible))
        is_kept = eligible[output[2]].all(dim=-1)
        assert is_kept[0]  # the root
        assert torch.equal(weights[is_kept], output[1][is_kept])
        assert torch.equal(ids[is_kept], output[2][is_kept])
        num_kept += int(is_kept.sum())
    assert num_kept > 60  # not the roots alone


@torch.no_grad()
def test_the_root_routes_naturally_through_groups_too(routing) -> None:
    # Without `route_block`'s exception: masking must not move the root's choice of groups.
    scoring, router, output = routing
    generator = torch.Generator().manual_seed(8)
    for _ in range(60):
        eligible = random_eligible(scoring, router, output, generator)
        _, ids = scoring.route(router, output, eligible[None])
        assert set(ids[0].tolist()) == set(output[2][0].tolist())


@torch.no_grad()
def test_combine_natural_keeps_the_denominator_of_the_natural_experts(routing) -> None:
    scoring, router, output = routing
    generator = torch.Generator().manual_seed(9)
    no_bias = [0.0] * router.num_experts
    everything = set(range(router.num_experts))
    for _ in range(20):
        eligible = random_eligible(scoring, router, output, generator)
        inside = set(eligible.nonzero().flatten().tolist())
        weights, ids = scoring.route(router, output, eligible[None], combine="natural")
        for row in range(NUM_ROWS):
            logits = output[0][row].tolist()
            kept = oracle_route(scoring, router, logits, inside, no_bias)
            natural = oracle_route(scoring, router, logits, everything, no_bias)
            expected = expected_weights(scoring, router, kept, sum(natural.values()))
            check_row(ids[row], weights[row], kept, expected)


@torch.no_grad()
def test_a_choice_bias_moves_the_choice_and_never_the_weights(routing) -> None:
    scoring, router, output = routing
    generator = torch.Generator().manual_seed(10)
    everything = torch.ones(router.num_experts, dtype=torch.bool)
    for _ in range(20):
        bias = torch.randn(NUM_ROWS, router.num_experts, generator=generator)
        selection = Selection(everything, choice_bias=bias)
        _, weights, ids = reroute(scoring, router, output, selection)
        for row in range(NUM_ROWS):
            logits = output[0][row].tolist()
            kept = oracle_route(
                scoring, router, logits, set(range(router.num_experts)), bias[row].tolist()
            )
            expected = expected_weights(scoring, router, kept, sum(kept.values()))
            check_row(ids[row], weights[row], kept, expected)


@torch.no_grad()
def test_gates_sum_to_one_and_order_experts_as_the_scores_do(routing) -> None:
    scoring, router, output = routing
    gates = scoring.gates(router, output[0])
    assert gates.dtype == torch.float32
    torch.testing.assert_close(gates.sum(dim=-1), torch.ones(NUM_ROWS))
    assert torch.equal(gates.argsort(dim=-1), output[0].argsort(dim=-1))
    natural = scoring.choice(router, output[0])
    if not getattr(router, "num_group", 1) > 1:
        chosen = natural.topk(router.top_k).indices.sort().values
        assert torch.equal(chosen, output[2].sort().values)
