"""What the steps of a session have cost and yielded so far, for policies that decide by it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean, median

PLAIN = 1  # nodes of a step without a draft: the root alone
NUM_SECONDS_KEPT = 15  # a median over them follows a growing context and ignores a hiccup
NUM_YIELDS_KEPT = 16  # few, so that a text which turns unpredictable shows soon
WARM_UP_ALLOWANCE = 2.0  # plain steps that the first pass of a size is charged at most


@dataclass(frozen=True)
class DecodingStep:
    """One step of the decode loop; the prefill is none.

    `size` is the number of nodes asked for (1: nothing was drafted), `num_nodes` the rows of the
    pass, root included, `num_tokens` what it emitted. `draft_s` and `pass_s` are wall-clock seconds
    of drafting and of everything after it (verify, accept, commit). `is_cut_short` marks a step
    that the end of the text kept from yielding what it could have.
    """

    size: int
    num_nodes: int
    num_tokens: int
    draft_s: float
    pass_s: float
    is_cut_short: bool = False


class StepHistory:
    """Costs and yields of past steps, robust against outliers; times never come from one step.

    A cost is a median over the last passes of about that many nodes. The first pass of each such
    group is left out: it may pay for allocations, compilation or graph capture. It outlives a
    `generate`, since it describes model, drafter and machine rather than one text.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self.last_plain_step = 0  # the number of the last step whose pass was the root alone
        self.num_guarded_steps = 0  # for which no draft was asked for
        self.num_tokens = 0
        self.balance_tokens = 0.0  # plain steps saved by drafting since the start; below 0: lost
        self._passes: dict[int, _Durations] = {}  # by `_group` of the number of nodes
        self._drafts: dict[int, _Durations] = {}  # by size
        self._yields: dict[int, deque[tuple[int, int]]] = {}  # by size: tokens, nodes of the pass
        self._last_size = PLAIN  # of the last step that drafted
        self._curve: tuple[list[float], list[float]] | None = None

    def record(self, step: DecodingStep) -> None:
        """Take over a finished step."""
        self.num_steps += 1
        self.num_tokens += step.num_tokens
        if step.num_nodes == PLAIN:
            self.last_plain_step = self.num_steps
        self._passes.setdefault(_group(step.num_nodes), _Durations()).add(
            step.num_nodes, step.pass_s
        )
        self._curve = None
        if step.size == PLAIN:
            self.num_guarded_steps += not step.is_cut_short
            return
        self._last_size = step.size
        self._drafts.setdefault(step.size, _Durations()).add(step.size, step.draft_s)
        if not step.is_cut_short:
            kept = self._yields.setdefault(step.size, deque(maxlen=NUM_YIELDS_KEPT))
            kept.append((step.num_tokens, step.num_nodes))
        self.balance_tokens += step.num_tokens - self._charge(step)

    def forget_yield(self, size: int) -> None:
        """Let the next steps of `size` speak for themselves; its costs are kept."""
        self._yields.pop(size, None)

    def num_yields(self, size: int) -> int:
        """How many steps of `size` the estimates below rest on."""
        return len(self._yields.get(size, ()))

    def num_passes(self, num_nodes: int) -> int:
        """How many timed passes of about `num_nodes` nodes there are, warm-ups left out."""
        durations = self._passes.get(_group(num_nodes))
        return 0 if durations is None else len(durations)

    def pass_s(self, num_nodes: int) -> float | None:
        """Seconds of a pass over `num_nodes` rows; None before any was timed.

        Linear between the sizes that occurred, never falling, flat beyond them.
        """
        if self._curve is None:
            groups = sorted(d.point() for d in self._passes.values() if len(d))
            self._curve = ([n for n, _ in groups], list(accumulate((s for _, s in groups), max)))
        nodes, seconds = self._curve
        return interpolate(nodes, seconds, num_nodes) if nodes else None

    def draft_s(self, size: int) -> float | None:
        """Seconds of drafting when `size` nodes are asked for; None before it was timed."""
        durations = self._drafts.get(size)
        return durations.point()[1] if durations is not None and len(durations) else None

    @property
    def latest_draft_s(self) -> float:
        """Seconds of drafting as many nodes as were asked for last; 0 before it was timed."""
        return self.draft_s(self._last_size) or 0.0

    def step_s(self, size: int) -> float | None:
        """Mean seconds of a step that asks for `size` nodes, as far as its recent passes go."""
        if size == PLAIN:
            return self.pass_s(PLAIN) if self.num_passes(PLAIN) else None
        draft_s, yields = self.draft_s(size), self._yields.get(size)
        passes = [self.pass_s(num_nodes) for _, num_nodes in yields or ()]
        known = [seconds for seconds in passes if seconds is not None]
        return draft_s + fmean(known) if draft_s is not None and known else None

    def tokens_per_step(self, size: int) -> float | None:
        """Mean number of tokens that recent steps of `size` emitted."""
        if size == PLAIN:
            return 1.0
        yields = self._yields.get(size)
        return fmean(num_tokens for num_tokens, _ in yields) if yields else None

    def tokens_per_s(self, size: int) -> float | None:
        """Tokens per second when every step asks for `size` nodes; 1 is plain decoding."""
        tokens, seconds = self.tokens_per_step(size), self.step_s(size)
        return tokens / seconds if tokens is not None and seconds else None

    def utility(self, size: int) -> float | None:
        """Tokens gained over time spent, against plain decoding (Cascade, arXiv 2506.20675).

        Above 1 drafting pays. None before both ways were timed.
        """
        drafted, plain = self.tokens_per_s(size), self.tokens_per_s(PLAIN)
        return drafted / plain if drafted is not None and plain else None

    def _charge(self, step: DecodingStep) -> float:
        """What a drafted step cost, in plain steps, by the medians; 0 before plain was timed."""
        plain_s = self.step_s(PLAIN)
        if not plain_s:
            return float(step.num_tokens)
        draft_s, pass_s = self.draft_s(step.size), self.pass_s(step.num_nodes)
        if draft_s is None or pass_s is None or not self.num_passes(step.num_nodes):
            # A first pass may have compiled something for minutes; that is no running cost.
            return min((step.draft_s + step.pass_s) / plain_s, step.num_tokens + WARM_UP_ALLOWANCE)
        return (draft_s + pass_s) / plain_s


class _Durations:
    """The last durations of one group of passes, the very first one left out."""

    def __init__(self) -> None:
        self._is_warm = False
        self._samples: deque[tuple[int, float]] = deque(maxlen=NUM_SECONDS_KEPT)

    def add(self, num_nodes: int, seconds: float) -> None:
        if self._is_warm:
            self._samples.append((num_nodes, seconds))
        self._is_warm = True

    def __len__(self) -> int:
        return len(self._samples)

    def point(self) -> tuple[float, float]:
        """Mean number of nodes and median seconds."""
        return fmean(n for n, _ in self._samples), median(s for _, s in self._samples)


def interpolate(x: Sequence[float], y: Sequence[float], at: float) -> float:
    """The line through the points (x ascending) at `at`; the end values hold beyond them."""
    if at <= x[0]:
        return y[0]
    for left in range(len(x) - 1):
        if at <= x[left + 1]:
            share = (at - x[left]) / (x[left + 1] - x[left])
            return y[left] + share * (y[left + 1] - y[left])
    return y[-1]


def _group(num_nodes: int) -> int:
    """Passes of about as many nodes are timed together: two groups for each doubling."""
    return round(2 * math.log2(num_nodes))
