"""Runs generated programs against their cases in a separate, limited process."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from acceptmoe.targets.problem import Case

_WORKER = Path(__file__).with_name("sandbox_worker.py")


@dataclass(frozen=True)
class Program:
    """Source text and the calls that it must answer."""

    source: str
    cases: tuple[Case, ...]


def run_programs(programs: Sequence[Program]) -> list[bool]:
    """Return for each program whether it passed all its cases.

    One worker interpreter (isolated, empty environment, empty folder) forks a limited child for
    each program, so a program that hangs, eats memory or dies takes only itself along.
    """
    if not programs:
        return []
    jobs = [
        {"source": program.source, "cases": [[c.call, c.expected] for c in program.cases]}
        for program in programs
    ]
    with tempfile.TemporaryDirectory(prefix="acceptmoe-sandbox-") as folder:
        done = subprocess.run(
            [sys.executable, "-I", str(_WORKER)],
            input=json.dumps(jobs),
            capture_output=True,
            text=True,
            cwd=folder,
            env={},
            check=False,
        )
    if done.returncode != 0:
        raise RuntimeError(
            f"the sandbox worker exited with {done.returncode} instead of 0: {done.stderr[-500:]}"
        )
    return [bool(passed) for passed in json.loads(done.stdout)]
