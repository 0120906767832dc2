"""The times of each step of a wrapped model's decoding, from the session's own statistics."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from acceptmoe.decoding.session import Session
from acceptmoe.models.counters import RoutingCounters, RoutingCounts
from acceptmoe.tree import DraftTree
from floors import Work


@dataclass(frozen=True)
class Step:
    """Milliseconds of one step: the draft, the verification pass, and all else between two steps'
    ends: acceptance, keys and values, emission, Python.
    """

    num_nodes: int
    draft_ms: float
    pass_ms: float
    rest_ms: float
    routing: RoutingCounts | None  # of this pass alone; a root alone has none


@dataclass(frozen=True)
class _Mark:
    """Sums in seconds as they are when a block has been accepted: those of all steps before."""

    num_nodes: int
    now_s: float
    draft_s: float
    pass_s: float
    drafted: Work
    counters: RoutingCounters | None = None  # of this pass; read when the text is over


@dataclass
class StepLog:
    """Observes a session; `work` is what its drafter has read and computed, while it is counted.

    It takes the session's routing counters pass by pass, so `report()` has no sums of them.
    """

    session: Session
    work: Work | None = None
    _marks: list[_Mark] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.session.observers.append(self)

    def __call__(self, tree: DraftTree, nodes: tuple[int, ...]) -> None:
        self._marks.append(self._mark(tree.num_nodes))
        self.session.patch.reset_counters()

    def clear(self) -> None:
        """Begin another text."""
        self._marks.clear()

    def steps(self) -> list[Step]:
        """All steps of the text but the first, whose draft reads the prompt.

        A step's draft and pass are added to the statistics after it was observed, so they are the
        difference between the sums at its mark and at the next one.
        """
        marks = [*self._marks, self._mark(0)]
        found = []
        for before, mark, after in zip(marks, marks[1:], marks[2:], strict=False):
            draft_s, pass_s = after.draft_s - mark.draft_s, after.pass_s - mark.pass_s
            rest_s = mark.now_s - before.now_s - draft_s - pass_s
            routing = None if mark.counters is None else mark.counters.read()
            times = (1e3 * draft_s, 1e3 * pass_s, 1e3 * rest_s)
            found.append(Step(mark.num_nodes, *times, routing))
        return found

    def drafted_after_first(self) -> Work:
        """What the drafts of `steps()` have read and computed together."""
        if len(self._marks) < 2:
            return Work()
        first, last = self._marks[0].drafted, self._marks[-1].drafted
        return Work(last.num_bytes - first.num_bytes, last.num_operations - first.num_operations)

    def _mark(self, num_nodes: int) -> _Mark:
        statistics = self.session.statistics
        drafted = Work() if self.work is None else replace(self.work)
        return _Mark(
            num_nodes,
            time.perf_counter(),
            statistics.draft_s,
            statistics.verify_s,
            drafted,
            self.session.patch.counters,
        )
