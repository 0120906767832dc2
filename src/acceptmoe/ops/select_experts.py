"""`acceptmoe::select_experts`: selection and constrained routing of one layer in one call.

Axes: T rows of the verification block (row 0 is the root), E experts, K experts per row. The op is
out of place, takes its switch (`is_enabled`) from the device and reads nothing back to the host.
`select_experts_reference.py` is what it computes.

The op is defined by its schema rather than by `torch.library.custom_op`, whose wrapper for
autograd costs more per call than the selection itself (38 against 11 microseconds, measured).
"""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor

from acceptmoe.errors import InvalidArgumentError
from acceptmoe.ops import cpu_library
from acceptmoe.ops.cpu_library import DTYPES, pointer
from acceptmoe.ops.select_experts_cuda import select_experts_cuda
from acceptmoe.policies import FusedParams
from acceptmoe.routing import SCORINGS, NaturalRouting, RoutingRule
from acceptmoe.selection import COMBINES, SIZINGS

NAME = "acceptmoe::select_experts"
SCHEMA = (
    "(Tensor logits, Tensor natural_weights, Tensor natural_ids, Tensor row_weights, "
    "Tensor num_anchored, Tensor path_commitment, Tensor is_real, Tensor? correction_bias, "
    "Tensor? resident, Tensor is_enabled, str scoring, bool renormalize, float scale, "
    "int num_groups, int groups_per_row, str sizing, float size_parameter, str combine) "
    "-> (Tensor weights, Tensor ids, Tensor eligible, Tensor counts)"
)
NUM_COUNTS = 5  # natural_union, eligible, experts_used, excluded_mass, routed_pairs
ARGUMENTS = struct.Struct("@14Q11q2d")  # `SelectExpertsArguments` in cpu/select_experts.cpp
FLOATING, FP32, BOOL = tuple(DTYPES), (torch.float32,), (torch.bool,)
INPUTS = (
    ("logits", FLOATING),
    ("natural_weights", FLOATING),
    ("natural_ids", (torch.int64,)),
    ("row_weights", FP32),
    ("num_anchored", (torch.int32,)),
    ("path_commitment", FP32),
    ("is_real", BOOL),
    ("correction_bias", FLOATING),
    ("resident", BOOL),
    ("is_enabled", BOOL),
)

torch.library.define(NAME, SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))


def select_experts(
    natural: NaturalRouting,
    rule: RoutingRule,
    params: FusedParams,
    *,
    path_commitment: Tensor,
    is_real: Tensor,
    is_enabled: Tensor,
    correction_bias: Tensor | None = None,
    resident: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights [T, K], ids [T, K], eligible [E] bool and counts [5] fp32 of one layer and block.

    `path_commitment` [T] fp32 weighs the rows in the counted excluded mass and in the groups'
    floor. `is_enabled` [] bool: False lets the natural routing through. `correction_bias` and
    `resident` [E] as in `routing.route` and `RoutedBlock`. Rows whose own experts are all eligible
    keep `natural.ids` and `natural.weights` bit for bit; padded rows get id -1 and weight 0.

    Raises `InvalidArgumentError` for shapes, dtypes or names that do not fit.
    """
    return torch.ops.acceptmoe.select_experts.default(  # type: ignore[no-any-return]
        natural.logits,
        natural.weights,
        natural.ids,
        params.row_weights,
        params.num_anchored,
        path_commitment,
        is_real,
        correction_bias,
        resident,
        is_enabled,
        rule.scoring,
        rule.renormalize,
        rule.scale,
        rule.num_groups,
        rule.groups_per_row,
        params.sizing,
        params.size_parameter,
        params.combine,
    )


def _new_outputs(
    logits: Tensor, natural_weights: Tensor, natural_ids: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape, device = natural_ids.shape, logits.device
    return (
        torch.empty(shape, dtype=natural_weights.dtype, device=device),
        torch.empty(shape, dtype=torch.int64, device=device),
        torch.empty(logits.shape[1], dtype=torch.bool, device=device),
        torch.empty(NUM_COUNTS, dtype=torch.float32, device=device),
    )


def _select_experts_fake(
    logits: Tensor,
    natural_weights: Tensor,
    natural_ids: Tensor,
    row_weights: Tensor,
    num_anchored: Tensor,
    path_commitment: Tensor,
    is_real: Tensor,
    correction_bias: Tensor | None,
    resident: Tensor | None,
    is_enabled: Tensor,
    scoring: str,
    renormalize: bool,
    scale: float,
    num_groups: int,
    groups_per_row: int,
    sizing: str,
    size_parameter: float,
    combine: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, experts = (
        (row_weights, num_anchored, path_commitment, is_real),
        (correction_bias, resident),
    )
    check_inputs(logits, natural_weights, natural_ids, rows, experts, is_enabled)
    names = (scoring, sizing, combine)
    check_rule(logits, natural_ids, names, num_groups, groups_per_row)
    return _new_outputs(logits, natural_weights, natural_ids)


def _select_experts_cpu(
    logits: Tensor,
    natural_weights: Tensor,
    natural_ids: Tensor,
    row_weights: Tensor,
    num_anchored: Tensor,
    path_commitment: Tensor,
    is_real: Tensor,
    correction_bias: Tensor | None,
    resident: Tensor | None,
    is_enabled: Tensor,
    scoring: str,
    renormalize: bool,
    scale: float,
    num_groups: int,
    groups_per_row: int,
    sizing: str,
    size_parameter: float,
    combine: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, experts = (
        (row_weights, num_anchored, path_commitment, is_real),
        (correction_bias, resident),
    )
    check_inputs(logits, natural_weights, natural_ids, rows, experts, is_enabled)
    names = (scoring, sizing, combine)
    check_rule(logits, natural_ids, names, num_groups, groups_per_row)
    # Named until the kernel has run: a contiguous copy must outlive its address.
    logits, natural_weights = logits.contiguous(), natural_weights.contiguous()
    natural_ids, is_enabled = natural_ids.contiguous(), is_enabled.contiguous()
    row_weights, num_anchored = row_weights.contiguous(), num_anchored.contiguous()
    path_commitment, is_real = path_commitment.contiguous(), is_real.contiguous()
    if correction_bias is not None:
        correction_bias = correction_bias.float().contiguous()
    if resident is not None:
        resident = resident.contiguous()
    outputs = _new_outputs(logits, natural_weights, natural_ids)
    arguments = ARGUMENTS.pack(
        logits.data_ptr(),
        natural_weights.data_ptr(),
        natural_ids.data_ptr(),
        row_weights.data_ptr(),
        num_anchored.data_ptr(),
        path_commitment.data_ptr(),
        is_real.data_ptr(),
        pointer(correction_bias) or 0,
        pointer(resident) or 0,
        is_enabled.data_ptr(),
        *[output.data_ptr() for output in outputs],
        *logits.shape,
        natural_ids.shape[1],
        DTYPES[logits.dtype],
        DTYPES[natural_weights.dtype],
        SCORINGS.index(scoring),
        renormalize,
        num_groups,
        groups_per_row,
        SIZINGS.index(sizing),
        COMBINES.index(combine),
        scale,
        size_parameter,
    )
    cpu_library.check_status(cpu_library.load().acceptmoe_select_experts(arguments))
    return outputs


def _select_experts_cuda(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logits, natural_weights, natural_ids, *tensors = arguments[:10]
    rows, experts, is_enabled = tuple(tensors[:4]), tuple(tensors[4:6]), tensors[6]
    check_inputs(logits, natural_weights, natural_ids, rows, experts, is_enabled)
    scoring, _, _, num_groups, groups_per_row, sizing, _, combine = arguments[10:]
    check_rule(logits, natural_ids, (scoring, sizing, combine), num_groups, groups_per_row)
    return select_experts_cuda(*arguments)


torch.library.impl(NAME, "cpu", _select_experts_cpu)
torch.library.impl(NAME, "cuda", _select_experts_cuda)
torch.library.register_fake(NAME, _select_experts_fake)


def check_inputs(
    logits: Tensor,
    natural_weights: Tensor,
    natural_ids: Tensor,
    rows: tuple[Tensor, Tensor, Tensor, Tensor],
    experts: tuple[Tensor | None, Tensor | None],
    is_enabled: Tensor,
) -> None:
    """Raise `InvalidArgumentError` unless shapes, dtypes and devices belong together."""
    if logits.dim() != 2 or natural_ids.dim() != 2:
        raise InvalidArgumentError(
            f"logits has shape {tuple(logits.shape)} and natural_ids {tuple(natural_ids.shape)}; "
            "they must be [T, E] and [T, K]"
        )
    num_rows, num_experts = logits.shape
    pairs, by_row, by_expert = (num_rows, natural_ids.shape[1]), (num_rows,), (num_experts,)
    values = (logits, natural_weights, natural_ids, *rows, *experts, is_enabled)
    shapes = ((num_rows, num_experts), pairs, pairs, *[by_row] * 4, *[by_expert] * 2, ())
    for index, (tensor, shape) in enumerate(zip(values, shapes, strict=True)):
        if tensor is None:
            continue
        name, dtypes = INPUTS[index]
        if tensor.shape != shape or tensor.dtype not in dtypes or tensor.device != logits.device:
            raise InvalidArgumentError(
                f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}; it "
                f"must be {' or '.join(map(str, dtypes))} of shape {shape} on {logits.device}"
            )


def check_rule(
    logits: Tensor,
    natural_ids: Tensor,
    names: tuple[str, str, str],
    num_groups: int,
    groups_per_row: int,
) -> None:
    """Raise `InvalidArgumentError` unless the router's rule is one that there is."""
    for name, value, allowed in zip(
        ("scoring", "sizing", "combine"), names, (SCORINGS, SIZINGS, COMBINES), strict=True
    ):
        if value not in allowed:
            raise InvalidArgumentError(
                f"{name} is {value!r}; it must be one of {', '.join(map(repr, allowed))}"
            )
    num_experts, experts_per_row = logits.shape[1], natural_ids.shape[1]
    if not 1 <= experts_per_row <= num_experts:
        raise InvalidArgumentError(
            f"natural_ids holds {experts_per_row} experts a row; it must be 1 to {num_experts}"
        )
    if not 1 <= groups_per_row <= num_groups:
        raise InvalidArgumentError(
            f"groups_per_row is {groups_per_row}; it must be 1 to num_groups, {num_groups}"
        )
    if num_groups > 1 and (num_experts % num_groups or num_experts < 2 * num_groups):
        raise InvalidArgumentError(
            f"num_groups is {num_groups}; it must divide {num_experts} experts into groups of two "
            "or more"
        )
