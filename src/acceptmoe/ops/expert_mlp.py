"""`acceptmoe::expert_mlp`: the experts of a verification block, each read once and no other.

Axes: T rows, E experts, K experts per row, H hidden, I inner. The CPU kernel is in
`cpu/expert_mlp.cpp`, the CUDA path in `expert_mlp_cuda.py`, what is correct in `reference.py`.

Weights are read in place from the stacked parameters, in the dtype and the layout that Transformers
gives them. Packing them for a matrix library would be faster to multiply by only where rows are
many, would double the memory or take the original bits away from `state_dict`, and is not needed:
at small batch the time goes into reading, and a register is as good a place to convert in.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from acceptmoe.errors import InvalidArgumentError
from acceptmoe.ops import cpu_library
from acceptmoe.ops.cpu_library import DTYPES, pointer
from acceptmoe.ops.expert_mlp_cuda import expert_mlp_cuda

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "clamped_swiglu")
"""The first four are `act(gate) * up`; the last is gpt-oss's. The order is that of `Activation` in
cpu/activations.h."""


class _ExpertMlp(ctypes.Structure):  # `ExpertMlpArguments` in cpu/expert_mlp.cpp
    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("hidden", "ids", "routing"),
                *("gate_up", "gate_up_bias", "down", "down_bias", "output"),
            )
        ),
        *(
            (name, ctypes.c_int64)
            for name in (
                *("num_rows", "experts_per_row", "num_experts", "hidden_size", "inner_size"),
                *("hidden_dtype", "weight_dtype", "activation"),
                *("is_transposed", "is_interleaved", "num_threads"),
            )
        ),
        ("limit", ctypes.c_float),
        ("alpha", ctypes.c_float),
    )


@torch.library.custom_op("acceptmoe::expert_mlp", mutates_args=(), device_types="cpu")
def expert_mlp(
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
) -> Tensor:
    """The weighted sum of each row's experts, [T, H] in hidden's dtype, summed in fp32.

    Args:
        hidden: [T, H] in fp32, bfloat16 or fp16.
        ids: [T, K] int64; below 0 for no expert (padding), which reads and adds nothing.
        weights: [T, K], what each expert's output is multiplied by.
        gate_up: [E, 2I, H], or [E, H, 2I] if `is_transposed`; fp32, bfloat16 or fp16, contiguous.
        gate_up_bias: [E, 2I] in its dtype, or None.
        down: [E, H, I], or [E, I, H] if `is_transposed`; in the same dtype.
        down_bias: [E, H], or None.
        activation: One of `ACTIVATIONS`.
        is_transposed: Whether weights lie with the outputs last.
        is_interleaved: Whether gates and ups alternate, instead of all gates coming first.
        limit, alpha: Of "clamped_swiglu"; the others read neither.
        union_bound: The most distinct experts there can be; sizes launches on a GPU. The CPU
            counts them.

    The experts are added in ascending order of their ids. A row's result depends on that row alone:
    not on the other rows, nor on the number of threads (torch's), bit for bit. Where hidden and
    weights are bfloat16 and the processor multiplies these in pairs (AVX512-BF16), the activated
    units between the products are rounded to bfloat16, as in stock layers; elsewhere they stay in
    fp32. For inference: there is no backward pass.

    Raises `InvalidArgumentError` for what does not fit together and for ids that are too large,
    `KernelBuildError` when the kernels cannot be compiled.
    """
    check_expert_mlp(
        hidden, ids, weights, gate_up, gate_up_bias, down, down_bias, activation, is_transposed
    )
    hidden, ids, weights = hidden.contiguous(), ids.contiguous(), weights.float().contiguous()
    output = torch.empty_like(hidden)
    if output.numel() == 0:
        return output
    arguments = _ExpertMlp(
        pointer(hidden),
        pointer(ids),
        pointer(weights),
        pointer(gate_up),
        pointer(gate_up_bias),
        pointer(down),
        pointer(down_bias),
        pointer(output),
        *ids.shape,
        gate_up.shape[0],
        hidden.shape[1],
        down.shape[1 if is_transposed else 2],
        DTYPES[hidden.dtype],
        DTYPES[gate_up.dtype],
        ACTIVATIONS.index(activation),
        is_transposed,
        is_interleaved,
        torch.get_num_threads(),
        limit,
        alpha,
    )
    cpu_library.check_status(cpu_library.load().acceptmoe_expert_mlp(ctypes.byref(arguments)))
    return output


@expert_mlp.register_fake
def _(
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
) -> Tensor:
    check_expert_mlp(
        hidden, ids, weights, gate_up, gate_up_bias, down, down_bias, activation, is_transposed
    )
    return hidden.new_empty(hidden.shape)


@expert_mlp.register_kernel("cuda")
def _(*arguments: Any) -> Tensor:
    check_expert_mlp(*arguments[:9])
    return expert_mlp_cuda(*arguments)


def check_expert_mlp(
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    activation: str,
    is_transposed: bool,
) -> None:
    """Raise `InvalidArgumentError` unless the arguments fit together; reads no values."""
    if activation not in ACTIVATIONS:
        raise InvalidArgumentError(
            f"activation is {activation!r}; it must be one of {', '.join(map(repr, ACTIVATIONS))}"
        )
    if hidden.dim() != 2 or gate_up.dim() != 3 or down.dim() != 3:
        raise InvalidArgumentError(
            f"hidden, gate_up and down have {hidden.dim()}, {gate_up.dim()} and {down.dim()} axes; "
            "they must have 2, 3 and 3"
        )
    num_rows, hidden_size = hidden.shape
    num_experts, inner_size = gate_up.shape[0], down.shape[1 if is_transposed else 2]
    by_output = ((2 * inner_size, hidden_size), (hidden_size, inner_size))
    gate_up_shape, down_shape = ((shape[::-1] if is_transposed else shape) for shape in by_output)
    expected = {
        "gate_up": (gate_up, (num_experts, *gate_up_shape)),
        "gate_up_bias": (gate_up_bias, (num_experts, 2 * inner_size)),
        "down": (down, (num_experts, *down_shape)),
        "down_bias": (down_bias, (num_experts, hidden_size)),
        "ids": (ids, (num_rows, *ids.shape[1:2])),
        "weights": (weights, (num_rows, *ids.shape[1:2])),
    }
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise InvalidArgumentError(
                f"{name} has shape {tuple(tensor.shape)}; with hidden {tuple(hidden.shape)}, "
                f"{num_experts} experts of inner size {inner_size} and is_transposed="
                f"{is_transposed} it must be {shape}"
            )
    for name in ("gate_up_bias", "down", "down_bias"):
        tensor = expected[name][0]
        if tensor is not None and tensor.dtype != gate_up.dtype:
            raise InvalidArgumentError(
                f"{name} is in {tensor.dtype}; it must be in the dtype of gate_up, {gate_up.dtype}"
            )
    if ids.dtype != torch.int64:
        raise InvalidArgumentError(f"ids is in {ids.dtype}; it must be in torch.int64")
    cpu_library.check_tensors(hidden=hidden)
    cpu_library.check_weights(
        gate_up=gate_up, gate_up_bias=gate_up_bias, down=down, down_bias=down_bias
    )
