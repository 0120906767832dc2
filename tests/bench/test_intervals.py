"""Intervals of the bootstrap, against what is known of simple samples."""

from __future__ import annotations

import math

import pytest

from acceptmoe.bench.intervals import (
    interval_text,
    mean_difference_interval,
    mean_interval,
    median_ratio_interval,
    quartiles,
    stratified_mean_interval,
)


def test_the_interval_of_a_mean_is_that_of_the_normal_law() -> None:
    values = [1.0] * 50 + [0.0] * 150
    spread = 1.96 * math.sqrt(0.25 * 0.75 / 200)
    low, high = mean_interval(values)
    # 2000 resamples place a 2.5 % quantile within about 7 % of the half width.
    assert low == pytest.approx(0.25 - spread, abs=0.1 * spread)
    assert high == pytest.approx(0.25 + spread, abs=0.1 * spread)


def test_equal_values_have_an_interval_of_no_width() -> None:
    assert mean_interval([-2.0] * 7) == (-2.0, -2.0)
    assert median_ratio_interval([3.0, 6.0] * 3, [2.0, 4.0] * 3) == (1.5, 1.5)


def test_groups_count_alike_whatever_their_size() -> None:
    low, high = stratified_mean_interval([[1.0] * 100, [0.0] * 5])
    assert (low, high) == (0.5, 0.5)


def test_a_few_values_have_no_interval() -> None:
    """Three equal ones would otherwise be certain, and so would a single ratio."""
    few, enough = [1.0] * 4, [1.0] * 5
    none = (None, None)
    assert mean_interval(few) == none
    assert mean_interval([]) == none
    assert stratified_mean_interval([enough, few]) == none
    assert mean_difference_interval(few, few, is_paired=True) == none
    assert mean_difference_interval(few, enough, is_paired=False) == none
    assert median_ratio_interval(few, few) == none
    assert median_ratio_interval(enough, few, is_paired=False) == none
    for found in (mean_interval(enough), median_ratio_interval(enough, enough)):
        assert found == (1.0, 1.0)
    assert interval_text(*none, "{:.1f}") == "too few prompts for an interval"


def test_intervals_follow_from_the_seed() -> None:
    values = [0.0, 1.0, 3.0, 4.0, 6.0]
    assert mean_interval(values, 1) == mean_interval(values, 1)


def test_quartiles_interpolate() -> None:
    assert quartiles([4.0, 1.0, 3.0, 2.0]) == (1.75, 2.5, 3.25)
    assert quartiles([5.0]) == (5.0, 5.0, 5.0)
