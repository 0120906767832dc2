"""What a measured number must carry to be measured again: versions, machine, commit, command."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from acceptmoe import __version__

CHECKOUT = Path(__file__).resolve().parents[3]  # the repository, when the package runs from one


def provenance(*, seed: int | None = None) -> dict[str, Any]:
    """Versions, machine and command of a measurement made now, as JSON values.

    `git_commit` is None in an installed wheel; `-dirty` marks uncommitted changes of the sources.
    """
    return {
        "acceptmoe": __version__,
        "git_commit": git_commit(),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "num_cpus": usable_cpus(),
        "num_threads": torch.get_num_threads(),
        "gpu": gpu_name(),
        "seed": seed,
        "command": command_line(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def git_commit() -> str | None:
    """The commit of the checkout that the package runs from, or None when it runs from none."""
    if not (CHECKOUT / ".git").exists():
        return None
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return None
    return commit + ("-dirty" if _git("status", "--porcelain", "--", "src") else "")


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(CHECKOUT), *arguments], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):  # no git here, or not its repository
        return None
    return done.stdout.strip()


def cpu_name() -> str:
    """The processor as /proc/cpuinfo names it, elsewhere its architecture."""
    return cpu_info().get("model name") or platform.processor() or platform.machine()


def cpu_flags() -> frozenset[str]:
    """The instruction sets that /proc/cpuinfo lists; empty where there is no such file."""
    return frozenset(cpu_info().get("flags", "").split())


def cpu_info() -> dict[str, str]:
    """The fields of the first processor in /proc/cpuinfo; empty where there is no such file."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return {}
    fields: dict[str, str] = {}
    for line in text.partition("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    return fields


def usable_cpus() -> int:
    """The processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def gpu_name() -> str | None:
    """The CUDA device that torch sees first, or None."""
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def command_line() -> str:
    """The command as the user typed it, without the interpreter and the folder of the script."""
    program = Path(sys.argv[0]).name
    return shlex.join(["acceptmoe" if program == "__main__.py" else program, *sys.argv[1:]])
