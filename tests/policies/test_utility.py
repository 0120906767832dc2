"""`utility`: which size pays is found, held, given up and found again; without any clock."""

from __future__ import annotations

from collections.abc import Callable

from acceptmoe.policies import load_policy
from acceptmoe.policies.history import PLAIN, DecodingStep, StepHistory
from acceptmoe.policies.utility import (
    FIRST_BACK_OFF_STEPS,
    HOLD_STEPS,
    TRIAL_SHARE,
    TRIAL_STEPS,
    UtilityGate,
)


def drive(
    gate: UtilityGate,
    history: StepHistory,
    num_steps: int,
    num_tokens: Callable[[int], int],
    cost: Callable[[int], float],
) -> list[int]:
    """The sizes that the gate asks for in steps of this yield and cost."""
    sizes = []
    for _ in range(num_steps):
        size = gate.num_nodes(history)
        sizes.append(size)
        history.record(DecodingStep(size, size, num_tokens(size), 0.0, cost(size)))
    return sizes


def linear_cost(size: int) -> float:
    return 0.9 + 0.1 * size


def test_plain_steps_are_timed_first_then_every_size():
    history = StepHistory()
    gate = UtilityGate([2, 4])
    sizes = drive(gate, history, 4 + 2 * TRIAL_STEPS, lambda size: size, lambda size: 1.0)
    assert sizes == [PLAIN] * 4 + [2] * TRIAL_STEPS + [4] * TRIAL_STEPS
    assert gate.state == "measuring"


def test_the_size_of_largest_utility_is_held():
    """Tokens 1.. at costs of 1, 1.1, 1.3 and 1.7: utilities 1.8, 2.3 (size 4) and 1.8."""
    gate = UtilityGate([2, 4, 8])
    yields = {1: 1, 2: 2, 4: 3, 8: 3}
    sizes = drive(gate, StepHistory(), 4 + 3 * TRIAL_STEPS + 100, yields.__getitem__, linear_cost)
    assert gate.state == "speculating"
    held = sizes[4 + 3 * TRIAL_STEPS :]
    assert held[:HOLD_STEPS] == [4] * HOLD_STEPS
    assert held.count(4) > 0.8 * len(held)
    assert {2, 8} <= set(held)  # neighbours are tried


def test_where_nothing_pays_steps_are_plain_and_trials_stay_in_their_budget():
    history, gate = StepHistory(), UtilityGate([32])
    num_steps = 4000
    sizes = drive(gate, history, num_steps, lambda size: 1, linear_cost)
    assert gate.state == "plain"
    num_trials = sizes.count(32)
    assert num_trials >= 2
    lost = num_trials * (linear_cost(32) - 1)
    assert lost <= TRIAL_SHARE * num_steps + 3 * linear_cost(32)
    assert gate.num_plain_steps == num_steps - num_trials


def test_a_new_text_goes_on_where_the_last_one_ended():
    history = StepHistory()
    drive(UtilityGate([8]), history, 40, lambda size: 1, linear_cost)
    sizes = drive(UtilityGate([8]), history, FIRST_BACK_OFF_STEPS, lambda size: 1, linear_cost)
    assert sizes == [PLAIN] * FIRST_BACK_OFF_STEPS
    history = StepHistory()
    drive(UtilityGate([8]), history, 40, lambda size: size, linear_cost)
    assert drive(UtilityGate([8]), history, 9, lambda size: size, linear_cost) == [8] * 9


def test_drafts_that_stop_paying_are_given_up_and_those_that_pay_again_taken_up():
    history, gate = StepHistory(), UtilityGate([8])
    drive(gate, history, 60, lambda size: 4 if size > 1 else 1, linear_cost)
    assert gate.state == "speculating"
    drive(gate, history, 40, lambda size: 1, linear_cost)
    assert gate.state == "plain"
    drive(gate, history, 80, lambda size: 4 if size > 1 else 1, linear_cost)
    assert gate.state == "speculating"


def test_a_drafter_that_seldom_proposes_anything_is_let_be():
    history, gate = StepHistory(), UtilityGate([8])
    for _ in range(60):
        size = gate.num_nodes(history)
        history.record(DecodingStep(size, PLAIN, 1, 0.001 if size > PLAIN else 0.0, 1.0))
    assert gate.state == "speculating"


def test_while_drafting_the_plain_step_is_timed_now_and_then():
    history, gate = StepHistory(), UtilityGate([8])
    sizes = drive(gate, history, 400, lambda size: size, linear_cost)
    assert 2 <= sizes[8:].count(PLAIN) <= 6


def test_it_loads_by_name_and_needs_room_for_a_draft():
    policy = load_policy("utility")
    assert policy.is_natural
    assert policy.step_policy(32).sizes == (2, 4, 8, 16, 32)
    assert policy.step_policy(24).sizes == (2, 4, 8, 16, 24)
    assert policy.step_policy(2).sizes == (2,)
    assert policy.step_policy(1) is None
