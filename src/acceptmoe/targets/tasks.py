"""The four tasks: seeded problems in disjoint splits, and exact checkers.

A problem's split is a function of its prompt alone (a stable hash), so no prompt can be in two
splits, whatever the seed, the count or the version of Python.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from random import Random

from acceptmoe.errors import InvalidArgumentError
from acceptmoe.targets.algebra import algebra_problem
from acceptmoe.targets.problem import Problem
from acceptmoe.targets.python_functions import assertions_problem, docstring_problem
from acceptmoe.targets.sandbox import Program, run_programs
from acceptmoe.targets.word_problems import word_problem

MAX_NEW_TOKENS = 256

_GENERATORS: dict[str, Callable[[Random], Problem]] = {
    "word-problems": word_problem,
    "algebra": algebra_problem,
    "python-docstring": docstring_problem,
    "python-asserts": assertions_problem,
}
TASKS = tuple(_GENERATORS)

# Of 20 hash buckets: one each for the three small splits, the rest for training.
_SPLIT_OF_BUCKET = {0: "test", 1: "calibration", 2: "tuning"}
SPLITS = ("train", "calibration", "tuning", "test")

_ANSWER_LINE = re.compile(r"(?:^|\n)Answer: (-?\d+)\s*\Z")


def split_of(prompt: str) -> str:
    """Return the only split that may hold this prompt."""
    digest = hashlib.sha256(prompt.encode()).digest()
    return _SPLIT_OF_BUCKET.get(int.from_bytes(digest[:8], "big") % 20, "train")


def problem_stream(task: str, split: str, seed: int = 0) -> Iterator[Problem]:
    """Yield problems of one split without end; prompts may repeat. Training reads this."""
    _check_names(task, split)
    # Seeded by text: the tuple's hash would change from process to process.
    rng = Random(f"{task}/{split}/{seed}")
    while True:
        problem = _GENERATORS[task](rng)
        if split_of(problem.prompt) == split:
            yield problem


def problems(task: str, split: str, count: int, seed: int = 0) -> list[Problem]:
    """Return `count` problems with different prompts, the same ones for the same seed.

    >>> len(problems("algebra", "test", 3))
    3
    """
    _check_names(task, split)
    if count < 1:
        raise InvalidArgumentError(f"count is {count}; it must be 1 or larger")
    found: dict[str, Problem] = {}
    for drawn, problem in enumerate(problem_stream(task, split, seed)):
        found.setdefault(problem.prompt, problem)
        if len(found) == count:
            return list(found.values())
        if drawn > 50 * count + 10_000:
            break
    raise InvalidArgumentError(
        f"count is {count}; split {split!r} of task {task!r} gave only {len(found)} different "
        "prompts; ask for fewer"
    )


def check(problem: Problem, completion: str, ended: bool) -> bool:
    """Return whether a completion solves the problem; `ended` says that EOS was emitted."""
    return check_all([problem], [completion], [ended])[0]


def check_all(
    problems: Sequence[Problem], completions: Sequence[str], ended: Sequence[bool]
) -> list[bool]:
    """Check many completions; generated code runs in one sandbox process for all of them."""
    if not len(problems) == len(completions) == len(ended):
        raise InvalidArgumentError(
            f"problems, completions and ended have lengths {len(problems)}, {len(completions)} and "
            f"{len(ended)}; they must be equal"
        )
    is_right = [False] * len(problems)
    programs: list[Program] = []
    program_ids: list[int] = []
    for i, (problem, completion) in enumerate(zip(problems, completions, strict=True)):
        if not ended[i]:
            continue
        if problem.cases:
            programs.append(Program(problem.preamble + completion, problem.cases))
            program_ids.append(i)
        else:
            found = _ANSWER_LINE.search(completion)
            is_right[i] = found is not None and int(found.group(1)) == problem.answer
    for i, passed in zip(program_ids, run_programs(programs), strict=True):
        is_right[i] = passed
    return is_right


def _check_names(task: str, split: str) -> None:
    if task not in _GENERATORS:
        raise InvalidArgumentError(f"task is {task!r}; known tasks: {', '.join(TASKS)}")
    if split not in SPLITS:
        raise InvalidArgumentError(f"split is {split!r}; known splits: {', '.join(SPLITS)}")
