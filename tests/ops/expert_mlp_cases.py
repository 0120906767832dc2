"""Random arguments of `acceptmoe::expert_mlp`, of any size, dtype and layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    is_transposed: bool = False
    is_interleaved: bool = False
    has_bias: bool = False
    activation: str = "silu"


STANDARD = Layout()
GPT_OSS = Layout(True, True, True, "clamped_swiglu")
LAYOUTS = {
    "standard": STANDARD,
    "gpt_oss": GPT_OSS,
    "transposed": Layout(is_transposed=True),
    "interleaved": Layout(is_interleaved=True, has_bias=True),
    "biased": Layout(has_bias=True),
}
# Relative to the largest output. Sums in fp32 differ by their order; the others by the rounding of
# the output, and bfloat16 by that of the activated units where the processor multiplies pairs.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def make_arguments(
    num_rows: int,
    experts_per_row: int,
    num_experts: int,
    hidden_size: int,
    inner_size: int,
    dtype: torch.dtype = torch.float32,
    layout: Layout = STANDARD,
    seed: int = 0,
) -> dict[str, Any]:
    """Keyword arguments; products have about unit variance, so that clamps and gates bite."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*shape, generator=generator)).to(dtype)

    def weight(outputs: int, inputs: int) -> Tensor:
        shape = (inputs, outputs) if layout.is_transposed else (outputs, inputs)
        return random(num_experts, *shape, scale=4 * inputs**-0.5)

    scores = torch.rand(num_rows, num_experts, generator=generator)
    return {
        "hidden": random(num_rows, hidden_size),
        "ids": scores.topk(experts_per_row).indices,
        "weights": torch.rand(num_rows, experts_per_row, generator=generator).to(dtype),
        "gate_up": weight(2 * inner_size, hidden_size),
        "gate_up_bias": random(num_experts, 2 * inner_size) if layout.has_bias else None,
        "down": weight(hidden_size, inner_size),
        "down_bias": random(num_experts, hidden_size) if layout.has_bias else None,
        "activation": layout.activation,
        "is_transposed": layout.is_transposed,
        "is_interleaved": layout.is_interleaved,
        "limit": 7.0,
        "alpha": 1.702,
        "union_bound": num_experts,
    }


def relative_error(result: Tensor, expected: Tensor, *summands: Tensor | None) -> float:
    """Largest difference over the largest number that was expected, or added on the way to it.

    Summands that cancel leave a small result with the rounding of the large ones.
    """
    difference = (result.float() - expected.float()).abs().max()
    numbers = [expected, *(summand for summand in summands if summand is not None)]
    return float(difference / max(number.float().abs().max() for number in numbers))
