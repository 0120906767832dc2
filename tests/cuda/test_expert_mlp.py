"""The whole CUDA path of `acceptmoe::expert_mlp` on the CPU against the op in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from interpreter import Interpreter, interpreter
from torch import Tensor

from acceptmoe.errors import InvalidArgumentError
from acceptmoe.ops.expert_mlp_cuda import expert_mlp_cuda
from acceptmoe.ops.reference import expert_mlp as reference


@dataclass(frozen=True)
class Case:
    """Sizes T, E, K, H, I and one layout; `bound` is the union bound."""

    rows: int
    experts: int
    top: int
    hidden: int = 72
    inner: int = 40
    activation: str = "silu"
    is_transposed: bool = False
    is_interleaved: bool = False
    has_bias: bool = False
    dtype: torch.dtype = torch.float32
    bound: int = 0
    skipped: float = 0.0

    def arguments(self) -> tuple[Any, ...]:
        generator = torch.Generator().manual_seed(self.rows)

        def random(*shape: int) -> Tensor:
            values = torch.randn(*shape, generator=generator) / shape[-1] ** 0.5
            return values.to(self.dtype)

        up, down = (
            (self.experts, 2 * self.inner, self.hidden),
            (self.experts, self.hidden, self.inner),
        )
        if self.is_transposed:
            up, down = (up[0], up[2], up[1]), (down[0], down[2], down[1])
        ids = torch.rand(self.rows, self.experts, generator=generator).argsort(dim=1)[:, : self.top]
        is_skipped = torch.rand(ids.shape, generator=generator) < self.skipped
        return (
            random(self.rows, self.hidden) * 8,
            ids.masked_fill(is_skipped, -1),
            torch.rand(ids.shape, generator=generator),
            random(*up),
            random(self.experts, 2 * self.inner) if self.has_bias else None,
            random(*down),
            random(self.experts, self.hidden) if self.has_bias else None,
            self.activation,
            self.is_transposed,
            self.is_interleaved,
            1.0,
            1.702,
            self.bound,
        )


GPT_OSS = {
    "activation": "clamped_swiglu",
    "is_transposed": True,
    "is_interleaved": True,
    "has_bias": True,
}
CASES = [
    Case(1, 8, 2),
    Case(7, 5, 3, hidden=33, inner=17),
    Case(7, 12, 3, dtype=torch.bfloat16),
    Case(7, 6, 2, dtype=torch.float16, has_bias=True),
    Case(5, 9, 4, bound=3),  # fewer programs than touched experts: these take turns
    Case(6, 9, 3, skipped=0.4),
    Case(3, 9, 3, skipped=1.0),
    Case(70, 2, 2, hidden=16, inner=8),  # more rows of an expert than a tile has
    Case(5, 4, 2, **GPT_OSS),
    Case(5, 4, 2, **GPT_OSS, dtype=torch.bfloat16, hidden=40, inner=70),
    Case(4, 4, 2, is_interleaved=True, activation="gelu"),
    Case(4, 4, 2, is_transposed=True, activation="gelu_tanh", has_bias=True),
    Case(4, 4, 2, activation="relu"),
]
# Of the root of the mean square. fp32: sums of 72 products in another order. 16 bits: activations
# between the products and the result are rounded, by the interpreter towards zero.
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interpreter]:
    with interpreter(tmp_path_factory.mktemp("interpreter")) as running:
        yield running


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_cuda_path_computes_what_the_reference_does(case: Case, triton: Interpreter) -> None:
    arguments = case.arguments()
    expected = reference(*arguments).float()
    error = (triton.expert_mlp(*arguments).float() - expected).square().mean().sqrt()
    assert error <= TOLERANCES[case.dtype] * expected.square().mean().sqrt()


def test_an_expert_that_a_row_names_twice_counts_twice(triton: Interpreter) -> None:
    # 36 pairs of one expert where a tile has 16 rows for a block of 9.
    arguments = list(Case(9, 3, 2).arguments())
    arguments[1] = torch.ones(9, 4, dtype=torch.int64)
    arguments[2] = torch.rand(9, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(triton.expert_mlp(*arguments), reference(*arguments))


def test_a_row_without_experts_is_zero(triton: Interpreter) -> None:
    arguments = list(Case(3, 4, 2).arguments())
    arguments[1] = torch.tensor([[0, 1], [-1, -1], [2, 3]])
    output = triton.expert_mlp(*arguments)
    assert (output[1] == 0).all()
    assert (output[0] != 0).any()


def test_other_dtypes_of_weights_are_refused() -> None:
    arguments = list(Case(1, 4, 2).arguments())
    arguments[0] = arguments[0].bfloat16()
    with pytest.raises(InvalidArgumentError, match=r"bfloat16 and the experts' .*float32; on CUDA"):
        expert_mlp_cuda(*arguments)


def test_more_experts_than_the_kernels_count_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"513 experts; the CUDA .* up to 512"):
        expert_mlp_cuda(*Case(1, 513, 2, hidden=2, inner=1).arguments())
