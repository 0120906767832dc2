"""Inputs of `acceptmoe::select_experts` by size and option, and their comparison."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from acceptmoe import routing
from acceptmoe.ops.select_experts_reference import select_experts as select_experts_reference
from acceptmoe.policies import FusedParams
from acceptmoe.routing import NaturalRouting, RoutingRule
from acceptmoe.selection import BlockRows, Combine, Sizing

SelectExperts = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Case:
    """One call: `rows` T, `experts` E, `top` K, `padded` rows at the end; the rest as in the op."""

    rows: int
    experts: int
    top: int
    scoring: routing.ScoringName = "softmax_topk"
    renormalize: bool = True
    scale: float = 1.0
    groups: tuple[int, int] = (1, 1)
    sizing: Sizing = "effective-rank"
    size: float = 1.0
    combine: Combine = "router"
    padded: int = 0
    num_resident: int | None = None
    anchors: tuple[int, int] = (0, 0)  # so many rows keep so many of their own best experts
    dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype = torch.float32
    seed: int = 0

    @property
    def name(self) -> str:
        changed = [
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)[3:]
            if getattr(self, field.name) != field.default
        ]
        return "-".join([f"{self.rows}x{self.experts}x{self.top}", *changed])

    @property
    def rule(self) -> RoutingRule:
        return RoutingRule(
            self.scoring, self.top, self.renormalize, self.scale, self.groups[0], self.groups[1]
        )


@dataclass(frozen=True)
class Inputs:
    logits: Tensor
    natural: NaturalRouting
    rows: BlockRows
    row_weights: Tensor
    num_anchored: Tensor
    correction_bias: Tensor | None
    resident: Tensor | None


def make_inputs(case: Case) -> Inputs:
    generator = torch.Generator().manual_seed(case.seed)
    # A permutation of evenly spaced logits in each row: no ties, in bf16 neither, and gates that
    # differ by more than rounding, so that both sides rank alike.
    order = torch.rand(case.rows, case.experts, generator=generator).argsort(dim=1)
    shift = torch.randint(-8, 8, (case.rows, 1), generator=generator) / 16
    logits = ((order - case.experts / 2) / 32 + shift).to(case.dtype)
    bias = None
    if case.scoring == "sigmoid_bias_group":
        bias = torch.rand(case.experts, generator=generator) / 4
    everything = torch.ones(1, case.experts, dtype=torch.bool)
    blank = torch.zeros(case.rows, case.top, dtype=torch.int64)
    unrouted = NaturalRouting(logits, blank.to(case.weight_dtype), blank)
    weights, ids = routing.route(case.rule, unrouted, everything, correction_bias=bias)
    is_real = torch.arange(case.rows) < case.rows - case.padded
    commitment = torch.rand(case.rows, generator=generator)
    commitment[0] = 1
    rows = BlockRows(torch.arange(case.rows), commitment, commitment, is_real)
    resident = None
    if case.num_resident is not None:
        resident = torch.rand(case.experts, generator=generator).argsort() < case.num_resident
    return Inputs(
        logits,
        NaturalRouting(logits, weights, ids),
        rows,
        commitment.sqrt(),
        torch.where(torch.arange(case.rows) < case.anchors[0], case.anchors[1], 0).int(),
        bias,
        resident,
    )


def reference(case: Case, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return select_experts_reference(
        inputs.natural,
        case.rule,
        FusedParams(inputs.row_weights, inputs.num_anchored, case.sizing, case.size, case.combine),
        path_commitment=inputs.rows.path_commitment,
        is_real=inputs.rows.is_real,
        is_enabled=torch.tensor(True),
        correction_bias=inputs.correction_bias,
        resident=inputs.resident,
    )


def run(
    case: Case, inputs: Inputs, select: SelectExperts, *, is_enabled: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return select(
        inputs.logits,
        inputs.natural.weights,
        inputs.natural.ids,
        inputs.row_weights,
        inputs.num_anchored,
        inputs.rows.path_commitment,
        inputs.rows.is_real,
        inputs.correction_bias,
        inputs.resident,
        torch.tensor(is_enabled),
        case.scoring,
        case.renormalize,
        case.scale,
        *case.groups,
        case.sizing,
        case.size,
        case.combine,
    )


def check(case: Case, select: SelectExperts) -> None:
    inputs = make_inputs(case)
    weights, ids, eligible, counts = run(case, inputs, select)
    ref_weights, ref_ids, ref_eligible, ref_counts = reference(case, inputs)
    assert torch.equal(eligible, ref_eligible)
    assert torch.equal(ids, ref_ids)
    assert weights.dtype == ref_weights.dtype
    # The C library's exp and torch's differ by an ulp or two of fp32; in 16 bits that can be one
    # step of the result, 2^-8 for bf16.
    tolerance = 2e-6 if case.weight_dtype == case.dtype == torch.float32 else 2**-8
    torch.testing.assert_close(weights, ref_weights, rtol=tolerance, atol=tolerance / 16)
    torch.testing.assert_close(counts, ref_counts, rtol=1e-5, atol=1e-6)


GROUPED = {"scoring": "sigmoid_bias_group", "scale": 2.5}
CASES = [
    Case(1, 8, 2),
    Case(7, 8, 8),
    Case(1, 1, 1),
    Case(33, 61, 5),
    Case(32, 128, 8, padded=5),
    Case(17, 128, 8, renormalize=False, combine="natural"),
    Case(256, 512, 16),
    Case(31, 40, 4, scoring="topk_softmax"),
    Case(31, 40, 4, scoring="topk_softmax", combine="natural", padded=3),
    Case(31, 60, 6, combine="natural"),
    Case(31, 64, 4, num_resident=20),
    Case(9, 130, 3, num_resident=0, anchors=(3, 3)),
    Case(31, 64, 4, sizing="mass", size=0.9),
    Case(31, 64, 4, sizing="mass", size=0.3, anchors=(4, 99)),
    Case(31, 64, 4, sizing="mass", size=1.0, padded=30),
    Case(31, 64, 4, size=0.5),
    Case(31, 64, 4, size=0.3, padded=3, anchors=(31, 1)),
    Case(23, 128, 8, size=0.1, num_resident=40, anchors=(20, 2)),
    Case(31, 40, 4, scoring="topk_softmax", size=0.2, anchors=(31, 1)),
    Case(19, 64, 6, **GROUPED, groups=(8, 3), size=0.1, anchors=(19, 1)),
    Case(19, 64, 6, **GROUPED, groups=(8, 3)),
    Case(19, 64, 8, **GROUPED, groups=(8, 2), size=0.05, renormalize=False),
    Case(33, 256, 8, **GROUPED, groups=(8, 4), combine="natural", padded=2),
    Case(13, 48, 4, **GROUPED, groups=(1, 1)),
    Case(13, 48, 8, **GROUPED, groups=(4, 2), num_resident=9, size=0.2),
]
TYPES = [
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
]
TYPED_CASES = [
    dataclasses.replace(case, dtype=dtype, weight_dtype=weight_dtype)
    for dtype, weight_dtype in TYPES
    for case in (Case(33, 61, 5, padded=2), Case(31, 40, 4, scoring="topk_softmax"))
]
