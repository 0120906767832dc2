"""`acceptmoe::linear` on the CPU equals its reference."""

from __future__ import annotations

import pytest
import torch
from expert_mlp_cases import TOLERANCE, relative_error

from acceptmoe.errors import InvalidArgumentError
from acceptmoe.ops import cpu_library, reference
from acceptmoe.ops.linear import is_faster_than_stock, linear

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# T, N, H
SIZES = [(1, 1, 1), (1, 7, 33), (2, 64, 64), (7, 130, 67), (33, 9, 1100), (64, 40, 513)]


def make(sizes, dtype, has_bias: bool = True):
    num_rows, num_outputs, num_inputs = sizes
    generator = torch.Generator().manual_seed(num_rows)
    shapes = [(num_rows, num_inputs), (num_outputs, num_inputs), (num_outputs,)]
    input, weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return input, weight, bias if has_bias else None


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_kernel_equals_the_reference(sizes, dtype: torch.dtype, has_bias: bool) -> None:
    arguments = make(sizes, dtype, has_bias)
    result = linear(*arguments)
    assert result.dtype == dtype
    assert relative_error(result, reference.linear(*arguments)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_the_same_bits_alone_among_others_and_on_more_threads(dtype) -> None:
    input, weight, bias = make((19, 50, 1100), dtype)
    together = linear(input, weight, bias)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(linear(input, weight, bias), together)
    finally:
        torch.set_num_threads(before)
    for row in range(19):
        assert torch.equal(linear(input[row : row + 1], weight, bias)[0], together[row])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_number_is_widened_and_narrowed_exactly(dtype: torch.dtype) -> None:
    everything = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    finite = everything[everything.isfinite()]
    one = torch.ones(1, 1)
    widened = linear(one, finite[:, None].contiguous(), None)[0]
    assert torch.equal(widened, finite.float())
    narrowed = linear(finite[:, None].contiguous(), one, None)[:, 0]
    assert torch.equal(narrowed, finite)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_results_are_rounded_to_nearest_even(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (20000,), generator=generator).to(torch.int32)
    values = bits.view(torch.float32)
    halfway = torch.tensor([1.00390625, 1.01171875, 65519.0, 65520.0, 3e-8, 2e-8])
    values = torch.cat([values[values.isfinite()], halfway])
    # The weight's dtype is the identity's; the result is in the input's.
    rows = torch.ones(1, 1, dtype=dtype)
    result = linear(rows, values[:, None].contiguous(), None)[0]
    assert torch.equal(result, values.to(dtype))


def test_infinities_and_nan_pass_through() -> None:
    values = torch.tensor([[torch.inf], [-torch.inf], [torch.nan], [0.0]])
    for dtype in DTYPES:
        result = linear(torch.ones(1, 1, dtype=dtype), values.to(dtype), None)[0]
        assert torch.equal(result.isnan(), torch.tensor([False, False, True, False]))
        assert result[0] == torch.inf
        assert result[1] == -torch.inf


def test_no_rows_are_fine() -> None:
    assert linear(torch.zeros(0, 8), torch.zeros(5, 8), None).shape == (0, 5)


def test_the_op_passes_opcheck() -> None:
    torch.library.opcheck(linear, make((3, 8, 5), torch.bfloat16))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(2, 3), torch.zeros(4, 5), None), r"input has shape \(2, 3\) and weight"),
        ((torch.zeros(2, 3).int(), torch.zeros(4, 3), None), "input is in torch.int32"),
        ((torch.zeros(2, 3), torch.zeros(3, 4).T, None), "weight has the strides"),
        ((torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(3)), r"bias has shape \(3,\)"),
        ((torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(4).half()), "in the weight's"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        linear(*arguments)


@pytest.mark.parametrize(
    ("features", "dtype", "is_faster"),
    [
        (set(), torch.bfloat16, True),
        ({"avx2", "f16c"}, torch.float16, True),
        ({"avx512_bf16"}, torch.bfloat16, True),
        ({"avx512_bf16", "amx_bf16"}, torch.bfloat16, False),
        ({"amx_bf16"}, torch.bfloat16, False),
        ({"amx_bf16"}, torch.float16, True),
        ({"asimdhp", "bf16"}, torch.float16, False),
        (set(), torch.float32, False),
    ],
)
def test_it_is_faster_where_torch_lacks_the_arithmetic(
    monkeypatch, features, dtype, is_faster
) -> None:
    monkeypatch.setattr(cpu_library, "cpu_features", lambda: frozenset(features))
    assert is_faster_than_stock(torch.zeros(1, 1, dtype=dtype)) is is_faster
