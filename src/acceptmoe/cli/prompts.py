"""The prompts that an option names: lines of a file, or problems of tasks."""

from __future__ import annotations

from pathlib import Path

import typer

from acceptmoe.bench.workloads import mixed_problems
from acceptmoe.cli.loading import LoadingError
from acceptmoe.targets.tasks import TASKS


def read_prompts(spec: str, count: int, seed: int, split: str) -> list[str]:
    """At most `count` different prompts, from a text file or from a split of tasks in turn.

    `spec` is a file with one prompt a line, or names of tasks separated by commas.
    """
    tasks = [name.strip() for name in spec.split(",")]
    if all(task in TASKS for task in tasks):
        return [problem.prompt for problem in mixed_problems(split, count, seed, tasks)]
    file = Path(spec)
    if not file.is_file():
        raise typer.BadParameter(
            f"{spec!r} is no file and not among the tasks {', '.join(TASKS)}",
            param_hint="--prompts",
        )
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LoadingError(f"{file} cannot be read as text in UTF-8: {error}") from error
    return list(dict.fromkeys(line for line in lines if line.strip()))[:count]
