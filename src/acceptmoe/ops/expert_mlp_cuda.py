"""`acceptmoe::expert_mlp` on CUDA: route, gather, two grouped products, combine.

Axes: T rows, E experts, K experts per row, P = T K pairs, H hidden, I inner. Five launches: the
first sorts the pairs by expert and writes the union and its size on the device, the last adds up in
the order of the slots. Sizes on the host follow from shapes and the union bound alone, so that a
captured graph stays right whatever the routing turns out to be.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from acceptmoe.errors import InvalidArgumentError, KernelBuildError
from acceptmoe.ops.cuda_kernels import CUPY_KERNELS, Kernels
from acceptmoe.ops.routed_pairs import MAX_EXPERTS, combine_rows, gather_rows, route_rows

# Rows computed together: beyond them (prefill) the buffers for all pairs would be too large.
MAX_CHUNK_ROWS = 4096


def expert_mlp_cuda(
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    activation: str,
    is_transposed: bool,
    is_interleaved: bool,
    limit: float,
    alpha: float,
    union_bound: int,
    *,
    kernels: Kernels = CUPY_KERNELS,
) -> Tensor:
    """The op's CUDA kernel: [T, H] in hidden's dtype.

    `union_bound` (0 or less: unknown) sizes the grid only: a larger union takes longer and stays
    right. Raises `InvalidArgumentError` for more than 512 experts and for weights in another dtype
    than `hidden`: tensor cores multiply equal types.
    """
    _check(hidden, gate_up)
    hidden, ids, weights = hidden.contiguous(), ids.contiguous(), weights.contiguous()
    output = hidden.new_zeros(hidden.shape) if ids.numel() == 0 else hidden.new_empty(hidden.shape)
    largest_union = min(gate_up.shape[0], ids.numel())
    if largest_union == 0:
        return output
    bound = min(union_bound, largest_union) if union_bound > 0 else largest_union

    products = _import_products()
    # Triton launches on torch's current device.
    with torch.cuda.device(hidden.device) if hidden.is_cuda else contextlib.nullcontext():
        chunks = (torch.split(part, MAX_CHUNK_ROWS) for part in (hidden, ids, weights, output))
        for some_hidden, some_ids, some_weights, some_output in zip(*chunks, strict=True):
            routed = route_rows(some_ids, gate_up.shape[0], kernels)
            grid = products.Grid(routed, bound, some_hidden.shape[0])
            inner = products.gate_up(
                gather_rows(some_hidden, routed, kernels),
                gate_up,
                gate_up_bias,
                grid,
                activation=activation,
                is_transposed=is_transposed,
                is_interleaved=is_interleaved,
                limit=limit,
                alpha=alpha,
            )
            results = products.down(inner, down, down_bias, grid, is_transposed=is_transposed)
            combine_rows(results, some_weights, routed, some_output, kernels)
    return output


def _import_products() -> Any:
    """The Triton kernels, or `KernelBuildError` where Triton is not installed."""
    try:
        from acceptmoe.ops import expert_mlp_triton
    except ImportError as error:
        raise KernelBuildError(
            f"the CUDA kernels need Triton, which cannot be imported ({error}); install "
            "acceptmoe[cuda12] or acceptmoe[cuda13], whichever CUDA torch was built for"
        ) from error
    return expert_mlp_triton


def _check(hidden: Tensor, gate_up: Tensor) -> None:
    if gate_up.dtype != hidden.dtype:
        raise InvalidArgumentError(
            f"hidden is in {hidden.dtype} and the experts' weights are in {gate_up.dtype}; on CUDA "
            "they must be the same"
        )
    if gate_up.shape[0] > MAX_EXPERTS:
        raise InvalidArgumentError(
            f"{gate_up.shape[0]} experts; the CUDA kernels of expert_mlp take up to {MAX_EXPERTS}. "
            "Leave experts='acceptmoe' off"
        )
