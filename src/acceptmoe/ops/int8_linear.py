"""`acceptmoe::int8_linears`: dense layers for few rows whose weights were rounded to 8 bits.

Axes: T rows, H inputs, N outputs, B blocks of `BLOCK_OUTPUTS` outputs, G groups of `GROUP` inputs.

A draft may be wrong without harm: what it says is verified. So a drafter's weights can be rounded
to half of bfloat16's bytes, which is what drafting at batch one waits for. Weights and activations
are whole numbers from -127 to 127 times a scale for each group of inputs (of an output, of a row),
symmetric, rounded to nearest; activations are rounded anew in each call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from acceptmoe.errors import InvalidArgumentError
from acceptmoe.ops import cpu_library
from acceptmoe.ops.cpu_library import DTYPES, pointer

BLOCK_OUTPUTS = 64  # `kOutputs` in cpu/int8_linear.cpp
GROUP = 128  # `kGroup` there
LARGEST = 127
ZERO = 128  # bytes have no sign: a weight lies as its whole number plus this
QUAD = 4  # inputs that lie side by side


@dataclass(frozen=True)
class Int8Weight:
    """A weight [N, H] as whole numbers and scales, in the order in which the kernel reads them.

    `values` is uint8 [B, H / 4, 64, 4], input and output padded with zeros, `scales` fp32
    [B, G, 64]; `shape` is (N, H).
    """

    values: Tensor
    scales: Tensor
    shape: tuple[int, int]

    @classmethod
    def of(cls, weight: Tensor) -> Int8Weight:
        """`weight` [N, H], floating point on a CPU, rounded.

        Raises `InvalidArgumentError` for another shape or place, or weights that are not finite.
        """
        if weight.dim() != 2 or not weight.is_floating_point() or weight.device.type != "cpu":
            raise InvalidArgumentError(
                f"the weight is {weight.dtype} {tuple(weight.shape)} on {weight.device}; only a "
                "floating-point [N, H] on a CPU can be rounded to 8 bits"
            )
        floats = weight.float()
        if not floats.isfinite().all():
            raise InvalidArgumentError(
                "the weight has entries that are not finite in float32 and cannot be rounded to 8 "
                "bits; check the checkpoint"
            )
        num_outputs, num_inputs = weight.shape
        padded = F.pad(floats, (0, -num_inputs % GROUP, 0, -num_outputs % BLOCK_OUTPUTS))
        groups = padded.view(len(padded), -1, GROUP)
        scales = groups.abs().amax(-1) / LARGEST
        whole = (groups / scales.clamp_min(torch.finfo(torch.float32).tiny)[..., None]).round_()
        values = (whole.flatten(1)[:, : num_inputs + -num_inputs % QUAD] + ZERO).to(torch.uint8)
        return cls(
            values.view(-1, BLOCK_OUTPUTS, values.shape[1] // QUAD, QUAD)
            .transpose(1, 2)
            .contiguous(),
            scales.view(-1, BLOCK_OUTPUTS, scales.shape[1]).transpose(1, 2).contiguous(),
            (num_outputs, num_inputs),
        )

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads: values and scales, the padding included."""
        return self.values.nbytes + self.scales.nbytes

    def dequantize(self) -> Tensor:
        """[N, H] fp32: the weight that products are taken with."""
        num_outputs, num_inputs = self.shape
        whole = self.values.transpose(1, 2).flatten(2).flatten(0, 1).float() - ZERO
        scales = self.scales.transpose(1, 2).flatten(0, 1).repeat_interleave(GROUP, dim=1)
        return (whole * scales[:, : whole.shape[1]])[:num_outputs, :num_inputs]


def weight_state(weight: Tensor) -> object:
    """Equal for two moments between which `weight` has not changed.

    Changes that autograd does not count, through `.data` or in inference mode, show only by place.
    """
    version = None if weight.is_inference() else weight._version
    return version, weight.data_ptr(), weight.dtype, weight.shape


class _Matrix(ctypes.Structure):  # `Matrix` in cpu/int8_linear.cpp, in the same order
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "scales", "bias")),
        ("num_outputs", ctypes.c_int64),
    )


class _Int8Linears(ctypes.Structure):  # `Int8LinearsArguments` there
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input", "matrices", "output")),
        *((name, ctypes.c_int64) for name in ("num_rows", "depth", "num_matrices")),
        *((name, ctypes.c_int64) for name in ("input_dtype", "num_threads")),
    )


@torch.library.custom_op("acceptmoe::int8_linears", mutates_args=(), device_types="cpu")
def int8_linears(
    input: Tensor,
    values: Sequence[Tensor],
    scales: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    num_outputs: Sequence[int],
) -> Tensor:
    """`input @ weight.T + bias` for one weight or several, side by side: [T, sum of all N].

    The result is in the input's dtype; input and weights are rounded to 8 bits.

    Args:
        input: [T, H] in fp32, bfloat16 or fp16.
        values: For each weight uint8 [B, H / 4, 64, 4], see `Int8Weight`.
        scales: For each fp32 [B, G, 64].
        biases: For each fp32 [N], or None.
        num_outputs: For each N.

    A group of a row that is not finite makes the row's outputs NaN. A row's result does not depend
    on the other rows, nor on the number of threads, bit for bit, nor on the weights beside it.
    There is no backward pass.

    Raises `InvalidArgumentError` for shapes and dtypes that are not these, and `KernelBuildError`
    when the kernels cannot be compiled.
    """
    _check(input, values, scales, biases, num_outputs)
    rows = input.contiguous()
    output = torch.empty(rows.shape[0], sum(num_outputs), dtype=rows.dtype)
    if output.numel() == 0:
        return output
    parts = zip(values, scales, biases, num_outputs, strict=True)
    matrices = (_Matrix * len(values))(
        *(_Matrix(pointer(v), pointer(s), pointer(b), n) for v, s, b, n in parts)
    )
    arguments = _Int8Linears(
        pointer(rows),
        ctypes.addressof(matrices),
        pointer(output),
        rows.shape[0],
        rows.shape[1],
        len(values),
        DTYPES[rows.dtype],
        torch.get_num_threads(),
    )
    cpu_library.check_status(cpu_library.load().acceptmoe_int8_linears(ctypes.byref(arguments)))
    return output


@int8_linears.register_fake
def _(
    input: Tensor,
    values: Sequence[Tensor],
    scales: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    num_outputs: Sequence[int],
) -> Tensor:
    _check(input, values, scales, biases, num_outputs)
    return input.new_empty(input.shape[0], sum(num_outputs))


def multiply(input: Tensor, weight: Int8Weight, bias: Tensor | None = None) -> Tensor:
    """`int8_linears` of one weight, for input of any leading axes [..., H]; `bias` is fp32."""
    num_outputs = weight.shape[0]
    rows = input.reshape(-1, weight.shape[1])
    product: Tensor = int8_linears(rows, [weight.values], [weight.scales], [bias], [num_outputs])
    return product.view(*input.shape[:-1], num_outputs)


def _check(
    input: Tensor,
    values: Sequence[Tensor],
    scales: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    num_outputs: Sequence[int],
) -> None:
    """Raise `InvalidArgumentError` unless all fit together; in every call, so it must be quick."""
    cpu_library.check_tensors(input=input)
    if input.dim() != 2:
        raise InvalidArgumentError(f"input has shape {tuple(input.shape)}; it must be [T, H]")
    if not len(values) == len(scales) == len(biases) == len(num_outputs):
        raise InvalidArgumentError(
            f"there are {len(values)} values, {len(scales)} scales, {len(biases)} biases and "
            f"{len(num_outputs)} numbers of outputs; there must be one of each for every weight"
        )
    num_inputs = input.shape[1]
    quads, groups = -(-num_inputs // QUAD), -(-num_inputs // GROUP)
    for value, scale, bias, num in zip(values, scales, biases, num_outputs, strict=True):
        blocks = -(-num // BLOCK_OUTPUTS)
        _check_part(input, num, "values", value, (blocks, quads, BLOCK_OUTPUTS, QUAD), torch.uint8)
        _check_part(input, num, "scales", scale, (blocks, groups, BLOCK_OUTPUTS), torch.float32)
        if bias is not None:
            _check_part(input, num, "bias", bias, (num,), torch.float32)


def _check_part(
    input: Tensor,
    num_outputs: int,
    name: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        raise InvalidArgumentError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)}; for input {tuple(input.shape)} and "
            f"{num_outputs} outputs it must be contiguous {dtype} {shape}; make values and scales "
            "with Int8Weight.of(weight)"
        )
