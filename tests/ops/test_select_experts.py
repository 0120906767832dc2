"""`acceptmoe::select_experts` against the pure functions it fuses."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from acceptmoe.errors import InvalidArgumentError
from acceptmoe.ops import select_experts_reference as reference
from acceptmoe.ops.select_experts import select_experts
from acceptmoe.policies import AcceptDepthPolicy, AcceptPolicy, FusedParams
from acceptmoe.routing import NaturalRouting, RoutingRule, route
from acceptmoe.selection import BlockRows, RoutedBlock, demand

# exp and sums differ in the last places between vector libraries; a set may differ only where two
# demands are that close.
NEAR = 1e-6
WEIGHT_TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}  # relative


@dataclass(frozen=True)
class Case:
    """What one call of the op takes."""

    natural: NaturalRouting
    rule: RoutingRule
    params: FusedParams
    rest: dict[str, Tensor | None] = field(default_factory=dict)

    def fused(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return select_experts(self.natural, self.rule, self.params, **self.rest)

    def expected(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return reference.select_experts(self.natural, self.rule, self.params, **self.rest)

    def demand(self) -> Tensor:
        block = RoutedBlock(
            gates=reference.routing.gates(self.rule, self.natural.logits),
            choice=self.natural.logits,
            natural_ids=self.natural.ids,
            rows=BlockRows(
                *[self.rest["path_commitment"]] * 3,
                self.rest["is_real"],
            ),
        )
        return demand(block, self.params.row_weights)


def make_case(
    seed: int,
    num_rows: int = 9,
    num_experts: int = 24,
    experts_per_row: int = 4,
    *,
    rule: RoutingRule | None = None,
    is_coarse: bool = False,
    num_padded: int = 0,
    has_resident: bool = False,
    has_anchors: bool = False,
    logits_dtype: torch.dtype = torch.float32,
    weights_dtype: torch.dtype = torch.float32,
    **params,
) -> Case:
    """A random block with its natural routing; coarse logits are halves, so that many tie."""
    generator = torch.Generator().manual_seed(seed)
    rule = replace(
        rule or RoutingRule("softmax_topk", experts_per_row), experts_per_row=experts_per_row
    )
    logits = 2 * torch.randn(num_rows, num_experts, generator=generator)
    if is_coarse:
        logits = (2 * logits).round() / 2
    logits = logits.to(logits_dtype)
    bias = None
    if rule.scoring == "sigmoid_bias_group":
        bias = 0.1 * torch.randn(num_experts, generator=generator)
    unknown = NaturalRouting(
        logits,
        torch.empty(num_rows, experts_per_row, dtype=weights_dtype),
        torch.zeros(num_rows, experts_per_row, dtype=torch.int64),
    )
    everything = torch.ones(1, num_experts, dtype=torch.bool)
    weights, ids = route(rule, unknown, everything, correction_bias=bias)
    commitment = torch.randint(1, 65, (num_rows,), generator=generator) / 64
    commitment[0] = 1
    num_anchored = torch.zeros(num_rows, dtype=torch.int32)
    if has_anchors:  # of most rows none, of some a few, of some all
        drawn = torch.randint(0, experts_per_row + 2, (num_rows,), generator=generator)
        num_anchored = drawn.int() * (torch.rand(num_rows, generator=generator) < 0.4)
    return Case(
        NaturalRouting(logits, weights, ids),
        rule,
        FusedParams(commitment**1.5, num_anchored, **params),
        {
            "path_commitment": commitment,
            "is_real": torch.arange(num_rows) < num_rows - num_padded,
            "is_enabled": torch.tensor(True),
            "correction_bias": bias,
            "resident": torch.rand(num_experts, generator=generator) < 0.5
            if has_resident
            else None,
        },
    )


def check_case(case: Case) -> None:
    """The fused result is the reference's: sets, ids and counts equal, weights to rounding."""
    weights, ids, eligible, counts = case.fused()
    expected_weights, expected_ids, expected_eligible, expected_counts = case.expected()
    if not torch.equal(eligible, expected_eligible):
        differing = case.demand()[eligible != expected_eligible]
        assert differing.max() <= differing.min() * (1 + NEAR), "no near tie explains it"
        return
    assert weights.dtype == case.natural.weights.dtype
    assert torch.equal(ids, expected_ids)
    tolerance = WEIGHT_TOLERANCE[weights.dtype]
    torch.testing.assert_close(weights, expected_weights, rtol=tolerance, atol=1e-7)
    torch.testing.assert_close(counts, expected_counts, rtol=1e-5, atol=1e-6)
    is_kept = eligible[case.natural.ids].all(dim=1) & case.rest["is_real"]
    assert is_kept[0]
    assert torch.equal(ids[is_kept], case.natural.ids[is_kept])
    assert torch.equal(weights[is_kept], case.natural.weights[is_kept])


RULES = (
    RoutingRule("softmax_topk", 0, renormalize=True),
    RoutingRule("softmax_topk", 0, renormalize=False),
    RoutingRule("topk_softmax", 0),
    RoutingRule("sigmoid_bias_group", 0, renormalize=True, scale=2.5),
    RoutingRule("sigmoid_bias_group", 0, renormalize=False),
)
SIZES = (
    {},
    {"size_parameter": 0.6},
    {"size_parameter": 1.7},
    {"sizing": "mass", "size_parameter": 0.5},
    {"sizing": "mass", "size_parameter": 0.9},
    {"sizing": "mass", "size_parameter": 1.0},
)


@st.composite
def cases(draw, max_experts=33):
    num_experts = draw(st.integers(2, max_experts))
    num_rows = draw(st.integers(1, 20))
    return make_case(
        draw(st.integers(0, 2**31)),
        num_rows,
        num_experts,
        draw(st.integers(1, num_experts)),
        rule=draw(st.sampled_from(RULES)),
        is_coarse=draw(st.booleans()),
        num_padded=draw(st.integers(0, num_rows - 1)),
        has_resident=draw(st.booleans()),
        has_anchors=draw(st.booleans()),
        combine=draw(st.sampled_from(("router", "natural"))),
        **draw(st.sampled_from(SIZES)),
    )


@given(cases())
@settings(deadline=None, max_examples=250)
def test_fused_equals_the_pure_functions(case):
    check_case(case)


@given(
    st.integers(0, 2**31),
    st.sampled_from([(4, 2, 8), (8, 4, 4), (2, 1, 6), (4, 3, 2), (4, 4, 3), (3, 1, 5)]),
    st.integers(1, 12),
    st.booleans(),
    st.booleans(),
)
@settings(deadline=None, max_examples=200)
def test_fused_equals_the_pure_functions_with_groups(seed, layout, count, has_resident, is_raw):
    num_groups, groups_per_row, group_size = layout
    case = make_case(
        seed,
        7,
        num_groups * group_size,
        min(count, groups_per_row * group_size),
        rule=RoutingRule("sigmoid_bias_group", 0, not is_raw, 1.5, num_groups, groups_per_row),
        num_padded=1,
        has_resident=has_resident,
    )
    check_case(case)
    _, ids, eligible, _ = case.fused()
    assert eligible[ids[case.rest["is_real"]]].all()


@pytest.mark.parametrize("logits_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rule", RULES[:4], ids=lambda rule: f"{rule.scoring}-{rule.renormalize}")
def test_every_dtype_of_logits_and_weights(rule, logits_dtype, weights_dtype):
    for seed in range(20):
        case = make_case(
            seed, 17, 40, 5, rule=rule, logits_dtype=logits_dtype, weights_dtype=weights_dtype
        )
        check_case(case)


@pytest.mark.parametrize(
    ("num_rows", "num_experts", "experts_per_row"), [(1, 2, 1), (64, 256, 8), (3, 513, 32)]
)
def test_sizes_at_the_ends(num_rows, num_experts, experts_per_row):
    for seed in range(5):
        check_case(make_case(seed, num_rows, num_experts, experts_per_row, has_resident=True))


@given(cases())
@settings(deadline=None)
def test_switched_off_the_natural_routing_comes_out_bit_for_bit(case):
    off = replace(case, rest={**case.rest, "is_enabled": torch.tensor(False)})
    weights, ids, eligible, counts = off.fused()
    is_real = case.rest["is_real"]
    assert torch.equal(ids[is_real], case.natural.ids[is_real])
    assert torch.equal(weights[is_real], case.natural.weights[is_real])
    assert eligible.all()
    union = len(case.natural.ids[is_real].unique())
    pairs = int(is_real.sum()) * ids.shape[1]
    assert counts.tolist() == [union, len(eligible), union, 0, pairs]
    torch.testing.assert_close(counts, off.expected()[3], rtol=0, atol=0)


@given(cases(), st.integers(0, 2**31))
@settings(deadline=None)
def test_padded_rows_touch_no_expert_and_change_nothing(case, seed):
    is_real, (weights, ids, eligible, counts) = case.rest["is_real"], case.fused()
    assert (ids[~is_real] == -1).all()
    assert (weights[~is_real] == 0).all()
    num_rows, num_experts = case.natural.logits.shape
    junk = make_case(seed, num_rows, num_experts, ids.shape[1], rule=case.rule)

    def with_junk(tensor: Tensor, other: Tensor) -> Tensor:
        column = is_real.view(-1, *[1] * (tensor.dim() - 1))
        return torch.where(column, tensor, other)

    other = Case(
        NaturalRouting(*map(with_junk, vars(case.natural).values(), vars(junk.natural).values())),
        case.rule,
        replace(
            case.params,
            row_weights=with_junk(case.params.row_weights, junk.params.row_weights),
            num_anchored=torch.where(is_real, case.params.num_anchored, 3),
        ),
        {
            **case.rest,
            "path_commitment": with_junk(
                case.rest["path_commitment"], junk.rest["path_commitment"]
            ),
        },
    ).fused()
    for got, wanted in zip(other, (weights, ids, eligible, counts), strict=True):
        assert torch.equal(got, wanted)


def block_of_one_expert_rows(ids: list[int], row_weights: list[float], num_experts: int) -> Case:
    """Rows that want one expert each, with all gates equal: demand is the row weights / E."""
    natural = NaturalRouting(
        torch.zeros(len(ids), num_experts), torch.ones(len(ids), 1), torch.tensor(ids)[:, None]
    )
    weights = torch.tensor(row_weights)
    return Case(
        natural,
        RoutingRule("softmax_topk", 1),
        FusedParams(weights, torch.zeros(len(ids), dtype=torch.int32)),
        {
            "path_commitment": weights,
            "is_real": torch.ones(len(ids), dtype=torch.bool),
            "is_enabled": torch.tensor(True),
        },
    )


def test_of_equal_demands_the_lower_id_enters():
    """Anchor 3; demands 8, 1, 1 of experts 2, 1, 0 have effective rank 1.9, so two enter."""
    case = block_of_one_expert_rows([3, 1, 2, 0], [1.0, 1.0, 8.0, 1.0], 5)
    weights, ids, eligible, counts = case.fused()
    assert eligible.tolist() == [True, False, True, True, False]
    # Row 1 lost expert 1. All scores are equal: the lowest eligible id takes its place.
    assert ids.flatten().tolist() == [3, 0, 2, 0]
    assert weights.flatten().tolist() == [1.0] * 4
    assert counts[[0, 1, 2, 4]].tolist() == [4, 3, 3, 4]
    assert float(counts[3]) == pytest.approx(1 / 11)


def test_of_equal_candidates_for_pruning_the_higher_id_leaves():
    """Anchor 0; 4 is displaced, which pays for one of the equally wanted 1, 2 and 3."""
    case = block_of_one_expert_rows([0, 1, 2, 3, 4], [1.0, 8.0, 8.0, 8.0, 1.0], 6)
    case.rest["resident"] = torch.zeros(6, dtype=torch.bool)
    # Demands 8, 8, 8, 1 have effective rank 3.4, scaled by 0.8 to 2.7: three enter.
    case = replace(case, params=replace(case.params, size_parameter=0.8))
    assert case.fused()[2].tolist() == [True, True, True, False, False, False]
    case.rest["resident"][3] = True
    assert case.fused()[2].tolist() == [True, True, False, True, False, False]


def test_anchor_rows_keep_their_own_experts():
    """Demands 8, 0.01, 0.01 have effective rank 1.02, so two enter beside the root's expert."""
    case = block_of_one_expert_rows([0, 1, 2, 3], [1.0, 8.0, 0.01, 0.01], 4)
    assert case.fused()[2].tolist() == [True, True, True, False]
    case.params.num_anchored[3] = 1
    assert case.fused()[2].all()


@given(cases(), st.sampled_from([0.0, 0.5, 1.0, 3.0]), st.sampled_from([0.2, 0.7, 1.0]))
@settings(deadline=None)
def test_the_op_selects_what_the_policy_selects(case, exponent, anchor_above):
    num_rows = case.natural.logits.shape[0]
    depths = torch.arange(num_rows).clamp_max(4)
    rows = BlockRows(depths, 0.7**depths, case.rest["path_commitment"], case.rest["is_real"])
    block = RoutedBlock(
        reference.routing.gates(case.rule, case.natural.logits),
        reference.routing.choice(
            case.rule, case.natural.logits, case.rest["correction_bias"]
        ).float(),
        case.natural.ids,
        rows,
        case.rest["resident"],
    )
    for policy in (
        AcceptPolicy(exponent, anchor_above),
        AcceptPolicy(exponent, anchor_above, top=0, sizing="mass", size=0.8, combine="natural"),
        AcceptPolicy(exponent, top=2, size=0.1),
        AcceptDepthPolicy(0.5),
    ):
        params = policy.fused_params(rows)
        selection = policy.select(block)
        assert params.combine == selection.combine
        assert torch.equal(replace(case, params=params).expected()[2], selection.eligible)
        check_case(replace(case, params=params))


def test_strided_inputs_are_read_as_what_they_are():
    case = make_case(3, 8, 16, 3, has_resident=True)

    def strided(tensor: Tensor | None) -> Tensor | None:
        return (
            tensor if tensor is None or tensor.dim() == 0 else torch.stack([tensor] * 2, -1)[..., 0]
        )

    other = Case(
        NaturalRouting(*map(strided, vars(case.natural).values())),
        case.rule,
        replace(
            case.params,
            row_weights=strided(case.params.row_weights),
            num_anchored=strided(case.params.num_anchored),
        ),
        {name: strided(value) for name, value in case.rest.items()},
    )
    for got, wanted in zip(other.fused(), case.fused(), strict=True):
        assert torch.equal(got, wanted)


def arguments(case: Case) -> tuple:
    rest, rule, params = case.rest, case.rule, case.params
    return (
        *vars(case.natural).values(),
        params.row_weights,
        params.num_anchored,
        rest["path_commitment"],
        rest["is_real"],
        rest["correction_bias"],
        rest["resident"],
        rest["is_enabled"],
        rule.scoring,
        rule.renormalize,
        rule.scale,
        rule.num_groups,
        rule.groups_per_row,
        params.sizing,
        params.size_parameter,
        params.combine,
    )


@pytest.mark.parametrize("rule", [RULES[0], RULES[3]], ids=["softmax", "sigmoid"])
def test_the_op_keeps_the_rules_of_custom_ops(rule):
    case = make_case(1, 6, 16, 2, rule=rule, num_padded=1, has_resident=True)
    op = torch.ops.acceptmoe.select_experts.default
    torch.library.opcheck(op, arguments(case))


BAD = {
    "logits": (0, torch.zeros(16), "logits has shape"),
    "weights": (1, torch.zeros(6, 3), "natural_weights is torch.float32 of shape \\(6, 3\\)"),
    "ids": (2, torch.zeros(6, 2, dtype=torch.int32), "natural_ids is torch.int32"),
    "row_weights": (3, torch.zeros(6, dtype=torch.float64), "row_weights is torch.float64"),
    "num_anchored": (4, torch.zeros(6), "num_anchored is torch.float32 of shape \\(6,\\)"),
    "is_enabled": (9, torch.ones(1, dtype=torch.bool), "is_enabled .* of shape \\(1,\\)"),
    "scoring": (10, "softmax", "scoring is 'softmax'; it must be one of 'softmax_topk'"),
    "groups": (13, 3, "num_groups is 3; it must divide 16 experts"),
    "groups_per_row": (14, 2, "groups_per_row is 2; it must be 1 to num_groups, 1"),
    "sizing": (15, "rank", "sizing is 'rank'"),
    "combine": (17, "none", "combine is 'none'"),
    "unknown id": (2, torch.full((6, 2), 16), "names an expert that there is not"),
    "negative id": (2, torch.full((6, 2), -1), "names an expert that there is not"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_inputs_are_refused(name):
    place, value, message = BAD[name]
    values = list(arguments(make_case(1, 6, 16, 2)))
    values[place] = value
    with pytest.raises(InvalidArgumentError, match=message):
        torch.ops.acceptmoe.select_experts.default(*values)
