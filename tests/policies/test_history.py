"""Costs and yields of steps: medians, groups of sizes, utility, the balance of trials."""

from __future__ import annotations

import pytest

from acceptmoe.policies.history import DecodingStep, StepHistory, interpolate


def record(history: StepHistory, size: int, num_tokens: int, draft_s: float, pass_s: float, n=1):
    for _ in range(n):
        history.record(DecodingStep(size, size, num_tokens, draft_s, pass_s))


def test_nothing_is_known_at_first():
    history = StepHistory()
    assert history.pass_s(4) is None
    assert history.draft_s(4) is None
    assert history.tokens_per_s(1) is None
    assert history.utility(4) is None


def test_a_cost_is_a_median_without_the_first_pass():
    history = StepHistory()
    record(history, 1, 1, 0.0, 100.0)  # a first pass may compile
    for seconds in (1.0, 1.2, 50.0, 1.1, 1.2):
        record(history, 1, 1, 0.0, seconds)
    assert history.pass_s(1) == 1.2
    assert history.num_passes(1) == 5


def test_costs_between_sizes_are_linear_and_never_fall():
    history = StepHistory()
    for size, seconds in ((1, 1.0), (8, 3.0), (4, 5.0)):
        record(history, size, 1, 0.0, seconds, n=2)
    assert [history.pass_s(n) for n in (1, 2, 4, 6, 8, 99)] == pytest.approx(
        [1.0, 1 + 4 / 3, 5.0, 5.0, 5.0, 5.0]
    )


def test_utility_is_tokens_gained_over_time_spent():
    """Three tokens in 0.5 + 1.5 seconds against one in one: 1.5."""
    history = StepHistory()
    record(history, 1, 1, 0.0, 1.0, n=4)
    record(history, 16, 3, 0.5, 1.5, n=4)
    assert history.tokens_per_s(16) == 1.5
    assert history.utility(16) == 1.5
    assert history.utility(1) == 1.0
    history.forget_yield(16)
    assert history.utility(16) is None
    assert history.pass_s(16) == 1.5  # costs stay


def test_a_drafter_without_ideas_costs_its_drafting_only():
    history = StepHistory()
    record(history, 1, 1, 0.0, 1.0, n=4)
    for _ in range(4):
        history.record(DecodingStep(16, 1, 1, 0.25, 1.0))
    assert history.utility(16) == 0.8


def test_the_balance_counts_plain_steps_saved_and_lost():
    history = StepHistory()
    record(history, 1, 1, 0.0, 1.0, n=4)
    record(history, 8, 1, 0.0, 30.0)  # the first of its size is charged two steps at most
    assert history.balance_tokens == -2.0
    record(history, 8, 4, 0.0, 2.0)
    assert history.balance_tokens == 0.0
    record(history, 8, 1, 0.0, 2.0)
    assert history.balance_tokens == -1.0
    assert history.num_tokens == 10


def test_steps_cut_short_by_the_end_of_the_text_are_no_evidence_of_yield():
    history = StepHistory()
    record(history, 1, 1, 0.0, 1.0, n=4)
    record(history, 8, 4, 0.0, 2.0, n=2)
    history.record(DecodingStep(8, 8, 1, 0.0, 2.0, is_cut_short=True))
    assert history.tokens_per_step(8) == 4.0


def test_interpolation_is_flat_beyond_the_ends():
    assert [interpolate([1, 3], [2.0, 6.0], x) for x in (0, 1, 2, 3, 9)] == [2, 2, 4, 6, 6]
