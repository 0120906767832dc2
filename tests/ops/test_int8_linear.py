"""`acceptmoe::int8_linears` equals a product of whole numbers, on every kind of processor."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

import pytest
import torch

from acceptmoe.errors import InvalidArgumentError
from acceptmoe.ops import cpu_library, reference
from acceptmoe.ops.int8_linear import GROUP, LARGEST, Int8Weight, int8_linears, multiply

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# T, N, H
SIZES = [
    (1, 1, 1),
    (1, 7, 33),
    (2, 64, 64),
    (7, 130, 67),
    (5, 65, 130),
    (33, 9, 1100),
    (64, 40, 513),
]
# How products of bytes are taken: in pairs of 16 bits, in fours, or without an instruction for it.
PROCESSORS = ("x86-64", "haswell", "skylake-avx512", "native")


def make(sizes, dtype: torch.dtype = torch.float32):
    num_rows, num_outputs, num_inputs = sizes
    generator = torch.Generator().manual_seed(num_rows)
    shapes = [(num_rows, num_inputs), (num_outputs, num_inputs), (num_outputs,)]
    input, weight, bias = (torch.randn(shape, generator=generator) for shape in shapes)
    # Rows and groups of very different size: each has a scale of its own.
    input *= torch.logspace(-2, 1, num_rows)[:, None]
    weight *= torch.logspace(-2, 1, num_outputs)[:, None]
    return input.to(dtype), weight.to(dtype), bias


def exact(input: torch.Tensor, weight: Int8Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """[T, N] fp64: the same rounding, in plain arithmetic."""
    rounded = torch.cat([round_group(part) for part in input.double().split(GROUP, dim=1)], dim=1)
    product = rounded @ weight.dequantize().double().T
    return product if bias is None else product + bias


def round_group(values: torch.Tensor) -> torch.Tensor:
    scales = values.abs().amax(1, keepdim=True) / LARGEST
    return torch.where(scales > 0, (values / scales).round() * scales, 0.0)


def error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error of an output, over the size of its row."""
    return float(((result - expected).abs().amax(1) / expected.abs().amax(1).clamp_min(1e-9)).max())


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_kernel_equals_the_product_of_what_was_rounded(sizes, has_bias: bool) -> None:
    input, weight, bias = make(sizes)
    rounded = Int8Weight.of(weight)
    result = multiply(input, rounded, bias if has_bias else None)
    # A value half way between two whole numbers may go either way in fp32: one step of one input.
    assert error(result.double(), exact(input, rounded, bias if has_bias else None)) < 2e-3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_changes_a_product_by_a_percent_or_two(dtype: torch.dtype) -> None:
    input, weight, bias = make((16, 96, 640), dtype)
    result = multiply(input, Int8Weight.of(weight), bias)
    expected = reference.linear(input, weight, bias.to(dtype)).double()
    assert result.dtype == dtype
    relative = (result.double() - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(relative.max()) < 0.03


def test_a_weight_is_rounded_to_the_nearest_whole_number_of_its_group() -> None:
    weight = torch.zeros(2, GROUP + 3)
    weight[0, 0], weight[0, 1], weight[0, 2] = 127.0, -3.4, 2.6
    weight[1, GROUP], weight[1, GROUP + 1] = -1.27, 0.5
    restored = Int8Weight.of(weight).dequantize()
    assert restored.shape == weight.shape
    torch.testing.assert_close(restored[0, :3], torch.tensor([127.0, -3.0, 3.0]))
    torch.testing.assert_close(restored[1, GROUP:], torch.tensor([-1.27, 0.5, 0.0]))
    assert not restored[1, :GROUP].any()


def test_a_row_is_the_same_bits_alone_among_others_and_on_more_threads() -> None:
    input, weight, bias = make((19, 150, 1100))
    rounded = Int8Weight.of(weight)
    together = multiply(input, rounded, bias)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(multiply(input, rounded, bias), together)
    finally:
        torch.set_num_threads(before)
    for row in range(19):
        assert torch.equal(multiply(input[row], rounded, bias), together[row])


@pytest.mark.skipif(platform.machine() != "x86_64", reason="these are x86 processors")
@pytest.mark.parametrize("processor", PROCESSORS)
def test_every_processor_finds_the_same(
    processor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = {"haswell": {"avx2", "fma"}, "skylake-avx512": {"avx512f", "avx512bw"}}
    missing = needed.get(processor, set()) - cpu_library.cpu_features()
    flags = [flag.replace("native", processor) for flag in cpu_library.FLAGS]
    sources = tmp_path / "sources"
    sources.mkdir()
    for path in [*cpu_library.SOURCES.glob("*.h"), cpu_library.SOURCES / "int8_linear.cpp"]:
        (sources / path.name).write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    expected = [multiply(*rounded_case(sizes)) for sizes in SIZES]
    monkeypatch.setattr(cpu_library, "SOURCES", sources)
    monkeypatch.setattr(cpu_library, "FLAGS", tuple(flags))
    monkeypatch.setenv("ACCEPTMOE_CACHE", str(tmp_path))
    library = cpu_library.build()  # it compiles for processors other than this one too
    if missing:
        return
    monkeypatch.setattr(cpu_library, "_library", ctypes.CDLL(str(library)))
    for sizes, known in zip(SIZES, expected, strict=True):
        # Whole numbers are the same everywhere; groups are added with or without fused rounding.
        assert error(multiply(*rounded_case(sizes)), known) < 1e-5


def rounded_case(sizes):
    input, weight, bias = make(sizes)
    return input, Int8Weight.of(weight), bias


def test_weights_side_by_side_are_the_same_bits_as_each_alone() -> None:
    input, *_ = make((7, 1, 300))
    generator = torch.Generator().manual_seed(1)
    weights = [Int8Weight.of(torch.randn(n, 300, generator=generator)) for n in (70, 1, 64, 130)]
    biases = [None, torch.ones(1), torch.randn(64, generator=generator), None]
    together = int8_linears(
        input,
        [weight.values for weight in weights],
        [weight.scales for weight in weights],
        biases,
        [weight.shape[0] for weight in weights],
    )
    alone = [multiply(input, *each) for each in zip(weights, biases, strict=True)]
    assert torch.equal(together, torch.cat(alone, dim=1))


def test_what_is_no_number_stays_none_and_spoils_its_row_alone() -> None:
    input, weight, bias = make((4, 10, 300))
    rounded = Int8Weight.of(weight)
    clean = multiply(input, rounded, bias)
    input[1, 299], input[2, 0] = torch.nan, -torch.inf
    result = multiply(input, rounded, bias)
    assert result[1:3].isnan().all()
    assert torch.equal(result[[0, 3]], clean[[0, 3]])


def test_zeros_and_numbers_too_small_for_a_reciprocal_give_the_bias() -> None:
    _, weight, bias = make((1, 10, 20))
    rounded = Int8Weight.of(weight)
    for value in (0.0, 1e-42):
        assert torch.equal(multiply(torch.full((1, 20), value), rounded, bias)[0], bias)
    assert not multiply(torch.ones(1, 20), Int8Weight.of(torch.zeros(3, 20))).any()


def test_leading_axes_stay_and_no_rows_are_fine() -> None:
    _, weight, bias = make((1, 10, 20))
    rounded = Int8Weight.of(weight)
    assert multiply(torch.zeros(2, 3, 20), rounded, bias).shape == (2, 3, 10)
    assert multiply(torch.zeros(0, 20), rounded).shape == (0, 10)


def test_the_op_passes_opcheck() -> None:
    input, weight, bias = make((3, 8, 5), torch.bfloat16)
    rounded = Int8Weight.of(weight)
    several = [rounded.values] * 2, [rounded.scales] * 2, [bias, None], [8, 8]
    torch.library.opcheck(int8_linears, (input, *several))


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.zeros(2, 3, 4), r"\(2, 3, 4\) on cpu; only a floating-point \[N, H\]"),
        (torch.zeros(2, 3).int(), "torch.int32"),
        (torch.zeros(2, 3, device="meta"), "on meta"),
        (torch.tensor([[1.0, torch.inf]]), "entries that are not finite"),
        (torch.tensor([[1.0, 1e300]], dtype=torch.float64), "entries that are not finite"),
    ],
)
def test_weights_that_cannot_be_rounded_are_refused(weight, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        Int8Weight.of(weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"input": torch.zeros(2, 21)},
            r"values is torch.uint8 \(1, 5, 64, 4\)",
        ),
        ({"input": torch.zeros(2, 20).int()}, "input is in torch.int32"),
        ({"input": torch.zeros(1, 2, 20)}, r"input has shape \(1, 2, 20\)"),
        ({"biases": [torch.zeros(9)]}, r"bias is torch.float32 \(9,\)"),
        ({"biases": [torch.zeros(10).half()]}, "bias is torch.float16"),
        ({"biases": []}, "1 values, 1 scales, 0 biases and 1 numbers of outputs"),
        ({"num_outputs": [100]}, "and 100 outputs it must be contiguous torch.uint8"),
    ],
)
def test_what_does_not_fit_is_refused(change, message: str) -> None:
    rounded = Int8Weight.of(torch.ones(10, 20))
    arguments = {
        "input": torch.zeros(2, 20),
        "values": [rounded.values],
        "scales": [rounded.scales],
        "biases": [None],
        "num_outputs": [10],
    }
    with pytest.raises(InvalidArgumentError, match=message):
        int8_linears(**{**arguments, **change})
