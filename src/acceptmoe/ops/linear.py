"""`acceptmoe::linear`: a dense layer for few rows, at the speed of reading its weight.

Axes: T rows, H inputs, N outputs. torch packs or converts the weight anew in every call, or
multiplies at a small share of the processor's rate; here the weight is read in place, once, and
multiplied as it is or widened in registers.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from acceptmoe.errors import InvalidArgumentError
from acceptmoe.ops import cpu_library
from acceptmoe.ops.cpu_library import DTYPES, pointer


class _Linear(ctypes.Structure):  # `LinearArguments` in cpu/linear.cpp, in the same order
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input", "weight", "bias", "output")),
        *((name, ctypes.c_int64) for name in ("num_rows", "depth", "num_outputs")),
        *((name, ctypes.c_int64) for name in ("input_dtype", "weight_dtype", "num_threads")),
    )


@torch.library.custom_op("acceptmoe::linear", mutates_args=(), device_types="cpu")
def linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`input @ weight.T + bias`, [T, N] in the input's dtype, summed in fp32.

    Args:
        input: [T, H] in fp32, bfloat16 or fp16.
        weight: [N, H] in one of these, contiguous; it is read in place.
        bias: [N] in the weight's dtype, or None.

    A row's result does not depend on the other rows, nor on the number of threads, bit for bit.
    For inference: there is no backward pass. Any T is right, up to about 64 it is fast.

    Raises `InvalidArgumentError` for shapes, dtypes or strides that are not these, and
    `KernelBuildError` when the kernels cannot be compiled.
    """
    check_linear(input, weight, bias)
    rows = input.contiguous()
    output = torch.empty(rows.shape[0], weight.shape[0], dtype=rows.dtype)
    if output.numel() == 0:
        return output
    arguments = _Linear(
        pointer(rows),
        pointer(weight),
        pointer(bias),
        pointer(output),
        rows.shape[0],
        rows.shape[1],
        weight.shape[0],
        DTYPES[rows.dtype],
        DTYPES[weight.dtype],
        torch.get_num_threads(),
    )
    cpu_library.check_status(cpu_library.load().acceptmoe_linear(ctypes.byref(arguments)))
    return output


@linear.register_fake
def _(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    check_linear(input, weight, bias)
    return input.new_empty(input.shape[0], weight.shape[0])


# What /proc/cpuinfo calls arithmetic with which torch's own products are the faster ones. Pairs of
# bfloat16 (avx512_bf16) are no such: our kernel multiplies them too, and packs no weight for it.
_ARITHMETIC = {
    torch.bfloat16: {"amx_bf16", "bf16"},
    torch.float16: {"avx512_fp16", "amx_fp16", "asimdhp"},
}


def suits_linear(states: Tensor, weight: Tensor) -> bool:
    """Whether `linear` can take the place of `F.linear` here: contiguous low precision on a CPU."""
    return (
        weight.dim() == 2
        and weight.dtype in _ARITHMETIC
        and states.dtype == weight.dtype
        and weight.device.type == "cpu"
        and weight.is_contiguous()
    )


def is_faster_than_stock(weight: Tensor) -> bool:
    """Whether `linear` beats torch's own product with this weight, by what the processor can do.

    True for bfloat16 and float16 on a CPU without arithmetic in that dtype, and for bfloat16 on one
    with AVX512-BF16 but no AMX. Measured in bfloat16, weight [4096, 2048], one thread: on AMD Zen 3
    1.4x at 1 row, 3x at 2, 4.6x at 8, 5.7x at 32; on Zen 4 1.7x at 1 row, 1.4x at 4, 1.2x at 16, 1x
    at 48. In float32 torch is left alone: its results are the ones that exactness is measured by.
    """
    needed = _ARITHMETIC.get(weight.dtype)
    if needed is None or weight.device.type != "cpu":
        return False
    return not needed & cpu_library.cpu_features()


def check_linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise `InvalidArgumentError` unless the three fit together."""
    if input.dim() != 2 or weight.dim() != 2 or input.shape[1] != weight.shape[1]:
        raise InvalidArgumentError(
            f"input has shape {tuple(input.shape)} and weight {tuple(weight.shape)}; they must be "
            "[T, H] and [N, H]"
        )
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != weight.dtype):
        raise InvalidArgumentError(
            f"bias has shape {tuple(bias.shape)} in {bias.dtype}; it must be [{weight.shape[0]}] "
            f"in the weight's {weight.dtype}"
        )
    cpu_library.check_tensors(input=input)
    cpu_library.check_weights(weight=weight, bias=bias)
