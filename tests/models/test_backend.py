"""The linear layers of a compiled graph become our own op where they should, and only there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from acceptmoe.errors import InvalidArgumentError
from acceptmoe.models.backend import PassBackend, check_backend


class Block(nn.Module):
    """Two layers, with and without a bias, called in the ways that models use."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5, dtype=dtype)
        self.second = nn.Linear(5, 3, bias=False, dtype=dtype)

    def forward(self, states: Tensor) -> Tensor:
        hidden = torch.nn.functional.linear(input=states, weight=self.first.weight)
        return self.second(self.first(states) + hidden)


def run(dtype: torch.dtype, num_rows: int) -> tuple[list[tuple], PassBackend, Tensor, Tensor]:
    """The shapes that the replacement saw, the backend, the compiled and the eager result."""
    shapes: list[tuple] = []

    def linear(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        shapes.append(tuple(states.shape))
        return torch.nn.functional.linear(states, weight, bias)

    torch.manual_seed(0)
    block, states = Block(dtype), torch.randn(1, num_rows, 6, dtype=dtype)
    backend = PassBackend("eager", linear)
    with torch.no_grad():
        compiled = backend.compile(Block.forward)
        return shapes, backend, compiled(block, states), block(states)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 7, 64])
def test_low_precision_layers_of_few_rows_are_rewritten(dtype: torch.dtype, num_rows: int) -> None:
    shapes, backend, result, expected = run(dtype, num_rows)
    assert backend.num_linears_rewritten == 3
    assert shapes == [(num_rows, 6), (num_rows, 6), (num_rows, 5)]
    assert torch.equal(result, expected)  # the same product on the same rows


@pytest.mark.parametrize(("dtype", "num_rows"), [(torch.float32, 7), (torch.bfloat16, 65)])
def test_others_stay_as_they_are(dtype: torch.dtype, num_rows: int) -> None:
    shapes, backend, result, expected = run(dtype, num_rows)
    assert backend.num_linears_rewritten == 0
    assert not shapes
    assert torch.equal(result, expected)


def test_functions_of_one_definition_are_compiled_apart() -> None:
    # More than Dynamo compiles for one code object: as many sizes and caches may be in use.
    backend = PassBackend("eager")

    def make(offset: int):
        return backend.compile(lambda x: x + offset)

    compiled = [make(offset) for offset in range(10)]
    x = torch.zeros(2)
    for offset, function in enumerate(compiled):
        for _ in range(2):
            assert function(x).tolist() == [offset, offset]
    assert backend.num_graphs == 10


def test_marked_sizes_may_change_and_code_for_others_is_compiled_apart() -> None:
    backend = PassBackend("eager")
    compiled = backend.compile(lambda x: x + 1 if x.shape[0] <= 8 else x - 1)
    for num_rows in (8, 2, 5, 9, 20, 3):
        x = torch.zeros(num_rows)
        torch._dynamo.mark_dynamic(x, 0)
        assert compiled(x).tolist() == [1 if num_rows <= 8 else -1] * num_rows
    assert backend.num_graphs == 2


@pytest.mark.parametrize("name", ["inductors", "", 1, None])
def test_an_unknown_backend_is_refused(name: object) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"compile is .*must be True, False, or a backend"
    ):
        check_backend(name)
