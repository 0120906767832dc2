"""Products of the same rows with rounded weights become one call, bit for bit the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from acceptmoe.models.backend import PassBackend
from acceptmoe.models.rounded import rounded_copy


class Gated(nn.Module):
    """Two products of the same rows, one of theirs, and one of the rows again, in other axes."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(24, 70, bias=bias), nn.Linear(24, 70)
        self.down, self.other = nn.Linear(70, 24), nn.Linear(24, 5, bias=False)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        hidden = nn.functional.silu(self.gate(states)) * self.up(states)
        return self.down(hidden), self.other(states)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_products_of_the_same_rows_are_one_call(bias: bool, backend: str) -> None:
    torch.manual_seed(0)
    model = rounded_copy(Gated(bias=bias))
    states = torch.randn(1, 3, 24)
    expected = model(states)

    def run(states: Tensor) -> tuple[Tensor, Tensor]:
        return model(states)

    pass_backend = PassBackend(backend)
    torch._dynamo.mark_dynamic(states, 1)
    compiled = pass_backend.compile(run)
    found = compiled(states)
    assert pass_backend.num_linears_merged == 2  # gate, up and other are one
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    others = torch.randn(1, 5, 24)
    assert all(torch.equal(a, b) for a, b in zip(compiled(others), model(others), strict=True))
    assert pass_backend.num_graphs == 1


@torch.no_grad()
def test_products_of_different_rows_stay_apart() -> None:
    torch.manual_seed(0)
    model = rounded_copy(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))

    def run(states: Tensor) -> Tensor:
        return model(states)

    backend = PassBackend("eager")
    states = torch.randn(2, 8)
    assert torch.equal(backend.compile(run)(states), model(states))
    assert backend.num_linears_merged == 0
