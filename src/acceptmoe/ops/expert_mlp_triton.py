"""The two grouped products of `acceptmoe::expert_mlp` on tensor cores, in Triton.

Axes: P row-expert pairs in the order of `cuda/route_rows.cu` (the rows of one expert lie together),
E experts, H hidden, I inner. Along grid axis 1 a program takes a touched expert, by its place in
the union, whose size it reads on the device: programs beyond it leave at once, and where the grid
is smaller than the union they take several in turn. Along axis 0 it takes a tile of outputs and
rows; tiles of rows are neighbours, so that the second one finds the weights in the cache.

Products add up in fp32. Between the two, activations have the type of the rows.

Imported only where a product is launched: `import acceptmoe` needs no Triton.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from acceptmoe.ops.routed_pairs import RoutedPairs


@dataclass(frozen=True)
class Tiles:
    """Rows, outputs and inputs of a program's tile, all powers of two, at least 16.

    `outputs` counts weight rows; of the gate-up product half of them are gates.
    """

    rows: int
    outputs: int
    inputs: int
    num_warps: int = 4
    num_stages: int = 4


@dataclass(frozen=True)
class Grid:
    """What sizes a launch, all known on the host: the union bound and the rows of the block."""

    routed: RoutedPairs
    union_bound: int
    num_rows: int

    def programs(self, num_outputs: int, tiles: Tiles) -> tuple[int, tuple[int, int]]:
        """Tiles of rows, and programs along both axes."""
        num_row_tiles = triton.cdiv(self.num_rows, tiles.rows)
        num_tiles = num_row_tiles * triton.cdiv(num_outputs, tiles.outputs)
        return num_row_tiles, (num_tiles, self.union_bound)


def default_tiles(num_rows: int, dtype: torch.dtype) -> Tiles:
    """Tiles for a block of `num_rows` rows, each normally once at most with an expert.

    64 by 128 bytes of weights in four stages: at most 64 KiB of shared memory, which every
    architecture has, and enough in flight to keep memory busy. Not tuned on a device.
    """
    rows = min(64, max(16, triton.next_power_of_2(num_rows)))
    return Tiles(rows=rows, outputs=64, inputs=128 // dtype.itemsize)


@triton.jit
def _activate(gate, up, limit, alpha, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        result = gate * tl.sigmoid(gate) * up
    elif ACTIVATION == "gelu":
        result = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    elif ACTIVATION == "gelu_tanh":
        # tanh(x) = 2 sigmoid(2 x) - 1; 0.7978... is sqrt(2 / pi).
        slope = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        result = gate * tl.sigmoid(2.0 * slope) * up
    elif ACTIVATION == "relu":
        result = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL) * up
    else:
        tl.static_assert(ACTIVATION == "clamped_swiglu")
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
        result = (up + 1.0) * gate * tl.sigmoid(alpha * gate)
    return result


@triton.jit
def _product(
    rows,
    weight,
    row_ids,
    is_row,
    output_ids,
    is_output,
    input_size,
    output_stride,
    input_stride,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """[ROWS, OUTPUTS] fp32: rows [P, input_size] times one expert's weight."""
    total = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    inputs = tl.arange(0, INPUTS)
    row_starts = rows + row_ids.to(tl.int64)[:, None] * input_size
    weight_starts = weight + output_ids.to(tl.int64)[None, :] * output_stride
    for first in range(0, input_size, INPUTS):
        input_ids = first + inputs
        is_input = input_ids < input_size
        x = tl.load(
            row_starts + input_ids[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0
        )
        w = tl.load(
            weight_starts + input_ids.to(tl.int64)[:, None] * input_stride,
            mask=is_input[:, None] & is_output[None, :],
            other=0.0,
        )
        total = tl.dot(x, w, total, input_precision="ieee")
    return total


@triton.jit
def gate_up_kernel(
    rows,  # [P, H]
    weight,  # [E, 2I, H], or transposed
    bias,  # [E, 2I]
    inner,  # [P, I], written
    union_experts,
    union_offsets,
    num_union,
    hidden_size,
    inner_size,
    expert_stride,
    output_stride,
    input_stride,
    num_row_tiles,
    limit,
    alpha,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    PAIRS: tl.constexpr = OUTPUTS // 2
    row_tile = tl.program_id(0) % num_row_tiles
    first_column = tl.program_id(0) // num_row_tiles * PAIRS
    columns = first_column + tl.arange(0, PAIRS)
    is_column = columns < inner_size
    # A gate and its up side by side, so that one product gives both.
    places = tl.arange(0, OUTPUTS)
    is_output = first_column + places // 2 < inner_size
    if IS_INTERLEAVED:
        output_ids = 2 * first_column + places
    else:
        output_ids = first_column + places // 2 + places % 2 * inner_size
    for index in range(tl.program_id(1), tl.load(num_union), tl.num_programs(1)):
        expert = tl.load(union_experts + index).to(tl.int64)
        begin = tl.load(union_offsets + index)
        end = tl.load(union_offsets + index + 1)
        for first in range(begin + row_tile * ROWS, end, num_row_tiles * ROWS):
            row_ids = first + tl.arange(0, ROWS)
            is_row = row_ids < end
            total = _product(
                rows, weight + expert * expert_stride, row_ids, is_row, output_ids, is_output,
                hidden_size, output_stride, input_stride, ROWS, OUTPUTS, INPUTS,
            )  # fmt: skip
            if HAS_BIAS:
                own_bias = bias + expert * 2 * inner_size + output_ids
                total += tl.load(own_bias, mask=is_output, other=0.0)[None, :]
            gate, up = tl.split(tl.reshape(total, (ROWS, PAIRS, 2)))
            result = _activate(gate, up, limit, alpha, ACTIVATION)
            tl.store(
                inner + row_ids.to(tl.int64)[:, None] * inner_size + columns[None, :],
                result.to(inner.dtype.element_ty),
                mask=is_row[:, None] & is_column[None, :],
            )


@triton.jit
def down_kernel(
    inner,  # [P, I]
    weight,  # [E, H, I], or transposed
    bias,  # [E, H]
    results,  # [P, H] fp32, written
    union_experts,
    union_offsets,
    num_union,
    hidden_size,
    inner_size,
    expert_stride,
    output_stride,
    input_stride,
    num_row_tiles,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    row_tile = tl.program_id(0) % num_row_tiles
    columns = tl.program_id(0) // num_row_tiles * OUTPUTS + tl.arange(0, OUTPUTS)
    is_column = columns < hidden_size
    for index in range(tl.program_id(1), tl.load(num_union), tl.num_programs(1)):
        expert = tl.load(union_experts + index).to(tl.int64)
        begin = tl.load(union_offsets + index)
        end = tl.load(union_offsets + index + 1)
        for first in range(begin + row_tile * ROWS, end, num_row_tiles * ROWS):
            row_ids = first + tl.arange(0, ROWS)
            is_row = row_ids < end
            total = _product(
                inner, weight + expert * expert_stride, row_ids, is_row, columns, is_column,
                inner_size, output_stride, input_stride, ROWS, OUTPUTS, INPUTS,
            )  # fmt: skip
            if HAS_BIAS:
                own_bias = bias + expert * hidden_size + columns
                total += tl.load(own_bias, mask=is_column, other=0.0)[None, :]
            tl.store(
                results + row_ids.to(tl.int64)[:, None] * hidden_size + columns[None, :],
                total,
                mask=is_row[:, None] & is_column[None, :],
            )


def gate_up(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    grid: Grid,
    *,
    activation: str,
    is_transposed: bool,
    is_interleaved: bool,
    limit: float,
    alpha: float,
    tiles: Tiles | None = None,
) -> Tensor:
    """[P, I]: activation(gate, up) of the sorted `rows` [P, H], in their dtype.

    Places without a pair are left as they are. `weight` is [E, 2I, H], or [E, H, 2I] if
    `is_transposed`; `bias` [E, 2I].
    """
    tiles = tiles or default_tiles(grid.num_rows, rows.dtype)
    num_outputs = weight.shape[2 if is_transposed else 1]
    num_row_tiles, programs = grid.programs(num_outputs, tiles)
    inner = rows.new_empty(rows.shape[0], num_outputs // 2)
    gate_up_kernel[programs](
        rows,
        weight,
        weight if bias is None else bias,  # never read then; a pointer must be one
        inner,
        grid.routed.union_experts,
        grid.routed.union_offsets,
        grid.routed.num_union,
        rows.shape[1],
        inner.shape[1],
        *_strides(weight, is_transposed),
        num_row_tiles,
        limit,
        alpha,
        ACTIVATION=activation,
        HAS_BIAS=bias is not None,
        IS_INTERLEAVED=is_interleaved,
        **_constants(tiles),
    )
    return inner


def down(
    inner: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    grid: Grid,
    *,
    is_transposed: bool,
    tiles: Tiles | None = None,
) -> Tensor:
    """[P, H] fp32: the experts' outputs for `inner` [P, I].

    Places without a pair are left as they are. `weight` is [E, H, I], or [E, I, H] if
    `is_transposed`; `bias` [E, H].
    """
    tiles = tiles or default_tiles(grid.num_rows, inner.dtype)
    num_outputs = weight.shape[2 if is_transposed else 1]
    num_row_tiles, programs = grid.programs(num_outputs, tiles)
    results = inner.new_empty(inner.shape[0], num_outputs, dtype=torch.float32)
    down_kernel[programs](
        inner,
        weight,
        weight if bias is None else bias,
        results,
        grid.routed.union_experts,
        grid.routed.union_offsets,
        grid.routed.num_union,
        num_outputs,
        inner.shape[1],
        *_strides(weight, is_transposed),
        num_row_tiles,
        HAS_BIAS=bias is not None,
        **_constants(tiles),
    )
    return results


def _constants(tiles: Tiles) -> dict[str, int | bool]:
    return {
        "ROWS": tiles.rows,
        "OUTPUTS": tiles.outputs,
        "INPUTS": tiles.inputs,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
        "enable_fp_fusion": False,  # Triton's default differs between versions
    }


def _strides(weight: Tensor, is_transposed: bool) -> tuple[int, int, int]:
    """Of an expert, an output and an input, in elements."""
    expert, first, second = weight.stride()
    return (expert, second, first) if is_transposed else (expert, first, second)
