"""The four tasks: disjoint splits, reproducible problems, exact checkers."""

import hashlib
import subprocess
import sys
from dataclasses import replace

import pytest

from acceptmoe.errors import InvalidArgumentError
from acceptmoe.targets import tasks
from acceptmoe.targets.arithmetic import (
    worked_difference,
    worked_product,
    worked_quotient,
    worked_sum,
)
from acceptmoe.targets.tasks import (
    SPLITS,
    TASKS,
    check,
    check_all,
    problem_stream,
    problems,
    split_of,
)

CODE_TASKS = ("python-docstring", "python-asserts")
NUMBER_TASKS = ("word-problems", "algebra")


@pytest.mark.parametrize("task", TASKS)
def test_no_prompt_is_in_two_splits(task: str) -> None:
    found = {
        split: {p.prompt for p in problems(task, split, 40, seed)}
        for split in SPLITS
        for seed in (0, 1)
    }
    for split, prompts in found.items():
        assert all(split_of(prompt) == split for prompt in prompts)
        for other in SPLITS:
            assert other == split or not prompts & found[other]


@pytest.mark.parametrize("task", TASKS)
def test_training_never_sees_a_test_prompt(task: str) -> None:
    test_prompts = {p.prompt for p in problems(task, "test", 60)}
    stream = problem_stream(task, "train", seed=0)
    assert not test_prompts & {next(stream).prompt for _ in range(600)}


@pytest.mark.parametrize("task", TASKS)
def test_the_seed_alone_decides_the_problems(task: str) -> None:
    assert problems(task, "test", 5, seed=3) == problems(task, "test", 5, seed=3)
    assert problems(task, "test", 5, seed=3) != problems(task, "test", 5, seed=4)


def test_another_process_draws_the_same_problems() -> None:
    program = (
        "import hashlib; from acceptmoe.targets.tasks import TASKS, problems\n"
        "text = repr([problems(task, 'test', 5) for task in TASKS])\n"
        "print(hashlib.sha256(text.encode()).hexdigest())"
    )
    # Each process has its own hash seed, which must not matter.
    other = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, text=True
    ).stdout.strip()
    text = repr([problems(task, "test", 5) for task in TASKS])
    assert other == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("task", TASKS)
def test_reference_solutions_pass(task: str) -> None:
    asked = problems(task, "tuning", 50)
    assert all(check_all(asked, [p.solution for p in asked], [True] * len(asked)))


@pytest.mark.parametrize("task", TASKS)
def test_without_the_end_token_nothing_passes(task: str) -> None:
    problem = problems(task, "tuning", 1)[0]
    assert not check(problem, problem.solution, ended=False)


@pytest.mark.parametrize("task", NUMBER_TASKS)
@pytest.mark.parametrize(
    "edit",
    [
        lambda text: text[:-1] + str((int(text[-1]) + 1) % 10),
        lambda text: text + "0",
        lambda text: text + "\nmore",
        lambda text: text.replace("Answer: ", ""),
        lambda text: "",
    ],
)
def test_a_wrong_or_missing_answer_fails(task: str, edit: object) -> None:
    problem = problems(task, "tuning", 1)[0]
    assert callable(edit)
    assert not check(problem, edit(problem.solution), ended=True)


@pytest.mark.parametrize("task", CODE_TASKS)
def test_the_solution_of_another_problem_fails(task: str) -> None:
    asked = problems(task, "tuning", 40)
    swapped = [p.solution for p in asked[1:] + asked[:1]]
    assert sum(check_all(asked, swapped, [True] * len(asked))) <= 2


@pytest.mark.parametrize("task", CODE_TASKS)
def test_the_cases_are_more_than_the_visible_assertions(task: str) -> None:
    for problem in problems(task, "tuning", 30):
        hidden = [case for case in problem.cases if case.call not in problem.prompt]
        assert hidden


def test_the_answer_is_the_last_line_of_the_reference() -> None:
    for task in NUMBER_TASKS:
        for problem in problems(task, "tuning", 50):
            assert problem.answer is not None
            assert problem.solution.endswith(f"\nAnswer: {problem.answer}")
            assert not check(replace(problem, answer=problem.answer + 1), problem.solution, True)


def test_worked_arithmetic_is_right_for_every_small_pair() -> None:
    for a in range(100):
        for b in range(100):
            assert worked_sum(a, b).endswith(str(a + b))
            if a >= b:
                assert worked_difference(a, b).endswith(str(a - b))
            if 0 < b < 10:
                assert worked_product(a, b).endswith(str(a * b))
                assert worked_quotient(a * b, b).endswith(f"={a}")


def test_every_worked_step_is_true() -> None:
    for task in NUMBER_TASKS:
        for problem in problems(task, "tuning", 50):
            for part in problem.solution.replace("\n", ", ").split(", "):
                left, _, right = part.rpartition("=")
                expression = left.split(": ")[-1].split("=")[-1]
                if (
                    right.rstrip(".").isdigit()
                    and expression
                    and set(expression) <= set("0123456789+-*/")
                ):
                    assert eval(expression) == int(right.rstrip(".")), part


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: problems("chess", "test", 1), "task is 'chess'; known tasks: word-problems"),
        (lambda: problems("algebra", "dev", 1), "split is 'dev'; known splits: train"),
        (lambda: problems("algebra", "test", 0), "count is 0; it must be 1 or larger"),
        (lambda: check_all([], ["x"], []), "lengths 0, 1 and 0; they must be equal"),
    ],
)
def test_bad_arguments_are_named(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(InvalidArgumentError, match=message):
        call()


def test_asking_for_more_prompts_than_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    only = problems("algebra", "test", 1)[0]
    monkeypatch.setitem(tasks._GENERATORS, "algebra", lambda rng: only)
    with pytest.raises(InvalidArgumentError, match="gave only 1 different prompts"):
        problems("algebra", "test", 2)
