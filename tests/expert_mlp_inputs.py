"""Inputs of `acceptmoe::expert_mlp` by size and layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


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


def relative_error(output: Tensor, expected: Tensor) -> float:
    """Root of the mean square of the difference, over that of what is expected."""
    difference = (output.float() - expected.float()).square().mean().sqrt()
    return float(difference / expected.float().square().mean().sqrt().clamp_min(1e-30))
