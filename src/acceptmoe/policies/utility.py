"""`utility`: draft only while it pays (Cascade, arXiv 2506.20675); also the rule of the guard."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from acceptmoe.policies.drafts import StepPolicy
from acceptmoe.policies.history import PLAIN, StepHistory
from acceptmoe.policies.natural import NaturalPolicy

MIN_PLAIN_PASSES = 3  # plain steps that must have been timed before anything is compared
TRIAL_STEPS = 4  # steps of one size in a trial
HOLD_STEPS = 32  # steps of the size that won, before its neighbours are tried
MIN_LOSING_STEPS = 8  # yields below which a size that won is not given up
PLAIN_REFRESH_STEPS = 64  # while drafting, a plain step is timed this often
FIRST_BACK_OFF_STEPS = 16
LAST_BACK_OFF_STEPS = 256
# A drafter that proposes nothing costs almost nothing: a loss below one in a hundred is let be, or
# it could not step in when there is something to propose.
BREAK_EVEN = 0.99
# What trials that do not pay may cost: a share of all tokens, and a few at the start.
TRIAL_SHARE = 0.01
TRIAL_CREDIT_TOKENS = 2.0

GateState = Literal["measuring", "speculating", "plain"]


class UtilityPolicy(NaturalPolicy):
    """Natural routing of drafts whose size pays most; no drafts where none pays.

    A size pays while its utility is above 1: the tokens it gains over the time it takes, both
    against plain decoding. Powers of two up to the tree's size are tried in turn; the best is held,
    its neighbours are tried now and then. While nothing pays steps are plain, with trials at
    growing distances.

    Only time depends on these decisions, never the output.
    """

    name = "utility"

    def step_policy(self, num_nodes: int) -> StepPolicy | None:
        if num_nodes == PLAIN:
            return None
        smaller = [2**power for power in range(1, num_nodes.bit_length()) if 2**power < num_nodes]
        return UtilityGate([*smaller, num_nodes])


@dataclass(frozen=True)
class Verdict:
    """What the gate decided last: the best size, and tokens per second with it and without."""

    size: int
    drafted_tokens_per_s: float
    plain_tokens_per_s: float

    @property
    def utility(self) -> float:
        return self.drafted_tokens_per_s / self.plain_tokens_per_s


class UtilityGate:
    """Chooses among draft sizes, and none, by what the steps of this session cost and yield.

    A `StepPolicy` for one `generate`. It times plain steps, tries each of `sizes` (ascending), and
    then either *holds* the best or *backs off* to plain steps. What earlier texts showed spares
    both. Trial steps that do not pay come out of a budget, `StepHistory.balance_tokens`, so that
    all trials together cost no more than `TRIAL_SHARE` of the tokens, however bad the drafter is.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self.verdict: Verdict | None = None
        self.num_plain_steps = 0  # steps for which no draft was asked for
        self._phase: Literal["begin", "trial", "hold", "back-off"] = "begin"
        self._queue: deque[int] = deque()  # the trial's steps to come, by their size
        self._steps_left = 0  # of the hold or the back-off
        self._back_off_steps = FIRST_BACK_OFF_STEPS
        self._num_trials = 0

    @property
    def state(self) -> GateState:
        """What steps are for the time being; single steps of trials differ."""
        if self.verdict is None:
            return "measuring"
        return "speculating" if self.verdict.utility >= BREAK_EVEN else "plain"

    def num_nodes(self, history: StepHistory) -> int:
        size = self._choose(history)
        self.num_plain_steps += size == PLAIN
        return size

    def _choose(self, history: StepHistory) -> int:
        if history.num_passes(PLAIN) < MIN_PLAIN_PASSES:
            return PLAIN
        if self._phase == "begin":
            self._begin_trial([size for size in self.sizes if history.utility(size) is None])
        elif self._phase == "hold" and self._is_losing(history):
            self._settle(history)
        elif self._phase != "trial" and self._steps_left == 0:
            self._begin_next_trial(history)
        if self._phase == "trial" and not (self._queue and has_budget(history)):
            self._queue.clear()
            self._settle(history)
        if self._phase == "trial":
            return self._queue.popleft()
        self._steps_left -= 1
        return self._held_size if self._phase == "hold" else PLAIN

    def _begin_trial(self, sizes: Iterable[int]) -> None:
        self._phase = "trial"
        self._queue.extend(size for size in sizes for _ in range(TRIAL_STEPS))

    def _begin_next_trial(self, history: StepHistory) -> None:
        """After a hold the neighbours of the best size; after a back-off it, and others in turn."""
        self._num_trials += 1
        best = self.sizes.index(self._held_size)
        if self._phase == "hold":
            if history.num_steps - history.last_plain_step >= PLAIN_REFRESH_STEPS:
                self._queue.append(PLAIN)
            other = best + (1 if self._num_trials % 2 else -1)
            self._begin_trial(self.sizes[other : other + 1] if other >= 0 else ())
            return
        if not has_budget(history):
            self._steps_left = FIRST_BACK_OFF_STEPS
            return
        others = (self._held_size, self.sizes[self._num_trials % len(self.sizes)])
        for size in set(others):  # they failed on an earlier stretch of text
            history.forget_yield(size)
        self._begin_trial(dict.fromkeys(others))

    def _settle(self, history: StepHistory) -> None:
        """Hold the best size, or back off where it does not pay."""
        rates = {size: history.tokens_per_s(size) for size in self.sizes}
        known = {size: rate for size, rate in rates.items() if rate is not None}
        plain = history.tokens_per_s(PLAIN)
        if known and plain is not None:
            best = max(known, key=known.__getitem__)
            self.verdict = Verdict(best, known[best], plain)
        if self.state == "speculating":
            self._phase, self._steps_left = "hold", HOLD_STEPS
            self._back_off_steps = FIRST_BACK_OFF_STEPS
        else:
            self._phase, self._steps_left = "back-off", self._back_off_steps
            self._back_off_steps = min(2 * self._back_off_steps, LAST_BACK_OFF_STEPS)

    def _is_losing(self, history: StepHistory) -> bool:
        utility = history.utility(self._held_size)
        is_known = history.num_yields(self._held_size) >= MIN_LOSING_STEPS
        return is_known and utility is not None and utility < BREAK_EVEN

    @property
    def _held_size(self) -> int:
        return self.sizes[-1] if self.verdict is None else self.verdict.size


def has_budget(history: StepHistory) -> bool:
    """Whether trials may still lose something."""
    budget = TRIAL_CREDIT_TOKENS + TRIAL_SHARE * history.num_tokens
    return history.balance_tokens > -budget
