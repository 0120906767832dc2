"""What changed between two measurements of one benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from acceptmoe.bench.intervals import mean_difference_interval, median_ratio_interval
from acceptmoe.bench.results import KEYS, Results, Row, load_results
from acceptmoe.errors import InvalidArgumentError

# A change smaller than this is none, however certain it is: with hundreds of rows some are.
ACCURACY_TOLERANCE_POINTS = 1.0
SPEED_TOLERANCE = 0.05

Verdict = Literal["better", "worse", "same", "unknown"]
# Different versions or machines explain a difference before the code does.
WATCHED = ("acceptmoe", "git_commit", "torch", "transformers", "cpu", "gpu", "num_threads", "seed")


@dataclass(frozen=True)
class Comparison:
    """The rows that both files have, what only one has, and how the settings differ."""

    benchmark: str
    is_paired: bool
    rows: list[Row]
    num_only_before: int
    num_only_after: int
    provenance: dict[str, tuple[Any, Any]]

    @property
    def num_worse(self) -> int:
        return sum(row["verdict"] == "worse" for row in self.rows)


def compare_results(before_path: Path, after_path: Path) -> Comparison:
    """Join the rows of two files and compare each: accuracy in points, speed as a ratio.

    Prompts are paired where both files drew them with the same seed. Raises `InvalidArgumentError`
    for files that hold no results, those of two benchmarks, or no row in common.
    """
    before, after = load_results(before_path), load_results(after_path)
    if before.benchmark != after.benchmark:
        raise InvalidArgumentError(
            f"{before_path} has the benchmark {before.benchmark!r} and {after_path} "
            f"{after.benchmark!r}; compare two files of one benchmark"
        )
    old_rows, new_rows = before.keyed(), after.keyed()
    common = [key for key in new_rows if key in old_rows]
    if not common:
        raise InvalidArgumentError(
            f"{before_path} and {after_path} have no row in common, by "
            f"{', '.join(KEYS[before.benchmark])}; were other targets or policies measured?"
        )
    is_paired = _seed(before) == _seed(after) is not None
    change_of = accuracy_change if before.benchmark == "quality" else speed_change
    try:
        rows = [change_of(old_rows[key], new_rows[key], is_paired) for key in common]
    except (KeyError, TypeError) as error:
        raise InvalidArgumentError(
            f"a row of {before_path} or {after_path} lacks {error}; measure anew with 'acceptmoe "
            "bench run'"
        ) from error
    old, new = (results.content.get("provenance", {}) for results in (before, after))
    return Comparison(
        before.benchmark,
        is_paired,
        rows,
        num_only_before=len(old_rows) - len(common),
        num_only_after=len(new_rows) - len(common),
        provenance={
            name: (old.get(name), new.get(name))
            for name in WATCHED
            if old.get(name) != new.get(name)
        },
    )


def _seed(results: Results) -> Any:
    return results.content.get("provenance", {}).get("seed")


def accuracy_change(before: Row, after: Row, is_paired: bool) -> Row:
    """The difference in percentage points; both rows' first prompts are the same when paired."""
    old, new = ([100.0 * int(c) for c in row["answers"]] for row in (before, after))
    if is_paired:
        num = min(len(old), len(new))
        old, new = old[:num], new[:num]
    low, high = mean_difference_interval(new, old, is_paired=is_paired)
    return {
        **_identity("quality", after),
        "before": statistics.fmean(old) / 100,
        "after": statistics.fmean(new) / 100,
        "difference_points": statistics.fmean(new) - statistics.fmean(old),
        "low": low,
        "high": high,
        "kl_before": before["kl"],
        "kl_after": after["kl"],
        "experts_used_before": before["experts_used"],
        "experts_used_after": after["experts_used"],
        "verdict": verdict(low, high, ACCURACY_TOLERANCE_POINTS),
    }


def speed_change(before: Row, after: Row, is_paired: bool) -> Row:
    """The ratio of tokens/s, after over before."""
    old, new = speeds_of(before, after, is_paired)
    row = {
        **_identity("speed", after),
        "before": before["tokens_per_s"],
        "after": after["tokens_per_s"],
        "same_as_natural_before": before["same_as_natural"],
        "same_as_natural_after": after["same_as_natural"],
    }
    if not old or not new:
        return row | {"ratio": None, "low": None, "high": None, "verdict": "unknown"}
    low, high = median_ratio_interval(new, old, is_paired=is_paired)
    ratio = statistics.median(new) / statistics.median(old)
    if is_paired:
        ratio = statistics.median(b / a for a, b in zip(old, new, strict=True))
    return row | {
        "ratio": ratio,
        "low": low,
        "high": high,
        "verdict": verdict(low, high, SPEED_TOLERANCE, unchanged=1.0),
    }


def speeds_of(before: Row, after: Row, is_paired: bool) -> tuple[list[float], list[float]]:
    """The speeds by prompt of both rows; when paired, those of prompts that have both."""
    old, new = before["tokens_per_s_by_prompt"], after["tokens_per_s_by_prompt"]
    if is_paired:
        # The longer list goes on where the shorter one ends: the first prompts are the same.
        pairs = [(a, b) for a, b in zip(old, new, strict=False) if a is not None and b is not None]
        return [a for a, _ in pairs], [b for _, b in pairs]
    return _known(old), _known(new)


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def verdict(
    low: float | None, high: float | None, tolerance: float, *, unchanged: float = 0.0
) -> Verdict:
    """Whether a change, whose interval is given, is certain and larger than `tolerance`.

    `unchanged` is the value of no change. Without an interval nothing is certain.
    """
    if low is None or high is None:
        return "unknown"
    if high - unchanged < -tolerance:
        return "worse"
    return "better" if low - unchanged > tolerance else "same"


def _identity(benchmark: str, row: Row) -> Row:
    return {name: row.get(name) for name in KEYS[benchmark]}
