"""The files that benchmarks write and that `compare` and `report` read."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from acceptmoe.bench.provenance import provenance
from acceptmoe.errors import InvalidArgumentError

Row = dict[str, Any]

# What tells the rows of one file apart, by benchmark.
KEYS = {
    "quality": ("target", "task", "policy", "params"),
    "speed": ("target", "drafter", "policy", "params", "num_nodes", "max_depth", "is_chain"),
}


@dataclass(frozen=True)
class Results:
    """One benchmark's rows, in a fixed order, and how they were made."""

    benchmark: str
    rows: list[Row]
    content: dict[str, Any]

    def keyed(self) -> dict[tuple[str, ...], Row]:
        """The rows by what tells them apart."""
        return {row_key(self.benchmark, row): row for row in self.rows}


def row_key(benchmark: str, row: Row) -> tuple[str, ...]:
    """A row's identity, as texts: parameters are a dictionary."""
    return tuple(_as_text(row.get(name)) for name in KEYS[benchmark])


def _as_text(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{name}={setting}" for name, setting in sorted(value.items()))
    return "-" if value is None else str(value)


def save_results(
    path: Path, benchmark: str, rows: list[Row], *, seed: int, **more: Any
) -> dict[str, Any]:
    """Write rows, provenance and whatever else the benchmark has to say; what was written.

    The file is there whole or not at all.
    """
    content = {
        "benchmark": benchmark,
        **more,
        "provenance": provenance(seed=seed),
        "rows": rows,
    }
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)
    return content


def load_results(path: Path) -> Results:
    """The results in a file; raises `InvalidArgumentError` for anything that holds none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgumentError(
            f"{path} cannot be read ({error.strerror}); give a file of 'acceptmoe bench run'"
        ) from error
    except ValueError as error:
        raise InvalidArgumentError(
            f"{path} is no JSON text ({error}); give a file of 'acceptmoe bench run'"
        ) from error
    benchmark = content.get("benchmark") if isinstance(content, dict) else None
    if benchmark not in KEYS:
        raise InvalidArgumentError(
            f"{path} has the benchmark {benchmark!r}; it must be one of {', '.join(KEYS)}, as "
            "'acceptmoe bench run' writes them"
        )
    rows = content.get("rows")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows) or not rows:
        raise InvalidArgumentError(f"{path} has no rows; measure anew with 'acceptmoe bench run'")
    return Results(benchmark, rows, content)
