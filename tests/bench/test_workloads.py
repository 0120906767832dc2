"""Test prompts come in turn from every task, and never from another split."""

from __future__ import annotations

import pytest

from acceptmoe.bench.workloads import mixed_problems
from acceptmoe.errors import InvalidArgumentError
from acceptmoe.targets.tasks import TASKS, split_of


def test_problems_take_the_tasks_in_turn() -> None:
    found = mixed_problems("test", 6)
    assert [problem.task for problem in found] == [*TASKS, *TASKS[:2]]
    assert len({problem.prompt for problem in found}) == 6
    assert {split_of(problem.prompt) for problem in found} == {"test"}


def test_problems_follow_from_the_seed() -> None:
    assert mixed_problems("test", 5, 3) == mixed_problems("test", 5, 3)
    assert mixed_problems("test", 5, 3) != mixed_problems("test", 5, 4)


def test_unknown_tasks_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="task is 'chess'; known tasks"):
        mixed_problems("test", 1, tasks=("chess",))
