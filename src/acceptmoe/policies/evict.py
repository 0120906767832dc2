"""`evict`: verify only the part of a draft that pays for itself (EVICT, arXiv 2605.00342)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

from acceptmoe.errors import InvalidArgumentError
from acceptmoe.policies.drafts import TreePolicy, by_commitment, keep_nodes
from acceptmoe.policies.history import PLAIN, StepHistory, interpolate
from acceptmoe.policies.natural import NaturalPolicy
from acceptmoe.table import CommitmentTable
from acceptmoe.tree import DraftTree

MIN_PASSES = 3  # timed passes of a size before its cost is believed
REFRESH_STEPS = 64  # a size that is never chosen is timed again this often, one after another

MAX_COST = sys.float_info.max
Cost = Callable[[int], float]


class EvictPolicy(NaturalPolicy):
    """Natural routing of the best n nodes of the draft, n = argmax E[tokens](n) / C(n).

    Nodes are taken by falling commitment. E[tokens](n) is the sum of the first n commitments, the
    root's 1 included: the expected number of tokens that verifying them emits. The commitment of a
    node is the calibrated one of the table where `wrap` got a table, otherwise the product of the
    drafter's probabilities on its path. C(n) is the cost of a step whose pass has n nodes.

    Without `costs` C is measured: the session's own steps, drafting included, which is paid
    whatever n is. Each size of a ladder of powers of two is verified until three of its passes were
    timed, and once in a while later on. With `costs`, numbers of nodes and their costs in any one
    unit, the choice depends on nothing but the draft; between them C is linear, beyond them flat.

    Only time depends on the choice, never the output.
    """

    name = "evict"
    uses_table = True

    def __init__(self, *, costs: Mapping[int, float] | None = None) -> None:
        self.costs = None if costs is None else check_costs(costs)

    def tree_policy(self, history: StepHistory, table: CommitmentTable | None) -> TreePolicy:
        if self.costs is None:
            return MeasuredEviction(history, table)
        nodes, costs = list(self.costs), list(self.costs.values())
        return Eviction(lambda num_nodes: interpolate(nodes, costs, num_nodes), table)

    def params(self) -> dict[str, Any]:
        return {"costs": "measured" if self.costs is None else dict(self.costs)}


class Eviction:
    """Prunes by a cost that is known; a `TreePolicy`."""

    min_probability = 0.0

    def __init__(self, cost: Cost, table: CommitmentTable | None) -> None:
        self._cost, self._table = cost, table

    def prune(self, tree: DraftTree) -> DraftTree:
        order, commitments = by_commitment(tree, self._table)
        return keep_nodes(tree, order[: best_size(commitments, self._cost)])


class MeasuredEviction:
    """Prunes by the costs of this session's own steps, and sees that there are some."""

    min_probability = 0.0

    def __init__(self, history: StepHistory, table: CommitmentTable | None) -> None:
        self._history, self._table = history, table
        self._next_refresh = history.num_steps + REFRESH_STEPS
        self._num_refreshed = 0

    def prune(self, tree: DraftTree) -> DraftTree:
        order, commitments = by_commitment(tree, self._table)
        size = self._size_to_measure(tree.num_nodes) or best_size(commitments, self._cost)
        return keep_nodes(tree, order[:size])

    def _cost(self, num_nodes: int) -> float:
        pass_s = self._history.pass_s(num_nodes)
        assert pass_s is not None  # every size of the ladder has been measured
        return pass_s + self._history.latest_draft_s

    def _size_to_measure(self, num_nodes: int) -> int | None:
        """A size whose cost is not known well enough; None when all are."""
        ladder = powers_of_two(num_nodes)
        for size in ladder:
            if self._history.num_passes(size) < MIN_PASSES:
                return size
        if self._history.num_steps < self._next_refresh:
            return None
        self._next_refresh = self._history.num_steps + REFRESH_STEPS
        self._num_refreshed += 1
        return ladder[self._num_refreshed % len(ladder)]


def powers_of_two(largest: int) -> list[int]:
    """1, 2, 4, ... up to `largest`."""
    return [2**power for power in range(largest.bit_length())]


def best_size(commitments: list[float], cost: Cost) -> int:
    """The n with the most expected tokens for their cost; of equals the smallest."""
    expected_tokens = accumulate(commitments)
    rates = [tokens / cost(n) for n, tokens in enumerate(expected_tokens, start=1)]
    return max(range(len(rates)), key=rates.__getitem__) + 1


def check_costs(costs: Mapping[int, float]) -> dict[int, float]:
    """`costs` by ascending number of nodes, or `InvalidArgumentError` when they are no costs."""
    is_valid = isinstance(costs, Mapping) and PLAIN in costs
    for num_nodes, cost in costs.items() if is_valid else ():
        is_valid = is_valid and type(num_nodes) is int and num_nodes >= PLAIN
        is_valid = is_valid and isinstance(cost, (int, float)) and 0 < cost <= MAX_COST
    if not is_valid:
        raise InvalidArgumentError(
            f"costs is {costs!r:.80}; it must map numbers of nodes, 1 among them, to positive "
            "costs of a step, for instance {1: 1.0, 32: 2.5}"
        )
    return {num_nodes: float(costs[num_nodes]) for num_nodes in sorted(costs)}
