"""Bootstrap intervals and quartiles; what a benchmark says about the spread of its numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

NUM_RESAMPLES = 2000
LEVEL = 0.95
# Of fewer values the bootstrap says nothing: equal ones, and a single one, would look certain.
MIN_VALUES = 5

# (None, None): too few values for an interval.
Interval = tuple[float, float] | tuple[None, None]
Floats = NDArray[np.float64]


def mean_interval(values: Sequence[float], seed: int = 0) -> Interval:
    """The 95 % percentile bootstrap interval of the mean of `values`."""
    return stratified_mean_interval([values], seed)


def stratified_mean_interval(groups: Sequence[Sequence[float]], seed: int = 0) -> Interval:
    """The same of the mean of the groups' means, with resampling inside each group.

    The groups (tasks, targets) are fixed, only their prompts are a sample: so the interval is
    about other prompts of these groups, not about other groups. Each needs `MIN_VALUES`.
    """
    if _are_too_few(*groups):
        return None, None
    rng = np.random.default_rng(seed)
    means = [_resample(np.asarray(group, float), rng).mean(axis=1) for group in groups]
    return _percentiles(np.mean(means, axis=0))


def mean_difference_interval(
    after: Sequence[float], before: Sequence[float], *, is_paired: bool, seed: int = 0
) -> Interval:
    """The 95 % bootstrap interval of the mean of `after` minus that of `before`."""
    if is_paired:
        return mean_interval(np.subtract(after, before).tolist(), seed)
    if _are_too_few(after, before):
        return None, None
    rng = np.random.default_rng(seed)
    new, old = (_resample(np.asarray(values, float), rng) for values in (after, before))
    return _percentiles(new.mean(axis=1) - old.mean(axis=1))


def median_ratio_interval(
    numerators: Sequence[float],
    denominators: Sequence[float],
    *,
    is_paired: bool = True,
    seed: int = 0,
) -> Interval:
    """The 95 % bootstrap interval of the median of the paired ratios.

    Of unpaired values, which may differ in number, it is that of the ratio of the medians.
    """
    if _are_too_few(numerators, denominators):
        return None, None
    rng = np.random.default_rng(seed)
    above, below = np.asarray(numerators, float), np.asarray(denominators, float)
    if is_paired:
        return _percentiles(np.median(_resample(above / below, rng), axis=1))
    medians = (np.median(_resample(values, rng), axis=1) for values in (above, below))
    return _percentiles(np.divide(*medians))


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile, by linear interpolation."""
    first, median, third = np.percentile(np.asarray(values, float), (25, 50, 75))
    return float(first), float(median), float(third)


def interval_text(low: float | None, high: float | None, layout: str) -> str:
    """An interval in a sentence, each end as `layout` writes it.

    >>> interval_text(-0.25, 0.5, "{:+.1f}")
    '-0.2 to +0.5'
    """
    if low is None or high is None:
        return "too few prompts for an interval"
    return f"{layout.format(low)} to {layout.format(high)}"


def _are_too_few(*groups: Sequence[float]) -> bool:
    return min(map(len, groups)) < MIN_VALUES


def _resample(values: Floats, rng: np.random.Generator) -> Floats:
    """[resamples, N]: draws of N of the N values with replacement."""
    picks = rng.integers(len(values), size=(NUM_RESAMPLES, len(values)))
    drawn: Floats = values[picks]
    return drawn


def _percentiles(samples: Floats) -> Interval:
    tail = 100 * (1 - LEVEL) / 2
    low, high = np.percentile(samples, (tail, 100 - tail))
    return float(low), float(high)
