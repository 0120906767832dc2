"""The fixed-budget rival against a slow loop, its edges and its errors."""

import pytest
import torch

from acceptmoe.errors import InvalidArgumentError
from acceptmoe.policies.moe_spec import MoeSpecPolicy
from acceptmoe.selection import BlockRows, RoutedBlock


def block(num_rows: int, num_experts: int, top_k: int, num_real: int) -> RoutedBlock:
    torch.manual_seed(num_rows * num_experts)
    choice = torch.randn(num_rows, num_experts)
    rows = BlockRows(
        depths=torch.arange(num_rows),
        depth_commitment=torch.ones(num_rows),
        path_commitment=torch.ones(num_rows),
        is_real=torch.arange(num_rows) < num_real,
    )
    return RoutedBlock(choice.softmax(-1), choice, choice.topk(top_k).indices, rows)


@pytest.mark.parametrize("budget", [1, 3, 5, 16, 100])
@pytest.mark.parametrize("num_real", [1, 5, 9])
def test_equals_a_slow_loop(budget: int, num_real: int) -> None:
    given = block(9, 16, 3, num_real)
    sums = [sum(float(given.gates[t, e]) for t in range(num_real)) for e in range(16)]
    best = sorted(range(16), key=lambda e: (-sums[e], e))[: max(budget, 3)]
    eligible = MoeSpecPolicy(budget).select(given).eligible
    assert eligible.nonzero().flatten().tolist() == sorted(best)


def test_equal_gates_favor_the_lower_id() -> None:
    given = block(4, 8, 2, 4)
    given = RoutedBlock(torch.full((4, 8), 1 / 8), given.choice, given.natural_ids, given.rows)
    assert MoeSpecPolicy(2).select(given).eligible.tolist() == [True] * 2 + [False] * 6


def test_a_budget_below_one_is_refused() -> None:
    with pytest.raises(
        InvalidArgumentError, match="budget is 0; it must be a whole number of experts"
    ):
        MoeSpecPolicy(0)
