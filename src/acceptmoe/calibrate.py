"""Make a commitment table: run natural speculation over prompts, count, fit a monotone curve.

Axes: N draft nodes of all blocks together (roots left out), B blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from acceptmoe.errors import InvalidArgumentError, TreeError
from acceptmoe.table import (
    CalibrationCurve,
    CommitmentTable,
    DepthStatistics,
    HeldOutError,
    Provenance,
)
from acceptmoe.tree import DraftTree

Floats = NDArray[np.float64]

NUM_BINS = 15
MAX_KNOTS = 32
# A knot less than this from the line between its neighbours is left out. A thirtieth of the
# calibration error that a table may have.
KNOT_TOLERANCE = 1e-3


@dataclass
class BlockRecorder:
    """Labels the draft nodes of one prompt's verification blocks as committed or not.

    Blocks in which the drafter proposed nothing are left out: no node of theirs needs a weight.
    """

    path_probabilities: list[float] = field(default_factory=list)  # [N], roots left out
    is_committed: list[bool] = field(default_factory=list)  # [N]
    committed_depths: list[int] = field(default_factory=list)  # [B], the deepest committed node

    def observe(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        """Count one block: `accepted` are the node ids of the accepted path, the root first.

        Every other node counts as not committed, the descendants of a rejected node included.
        Raises `TreeError` when `accepted` is not a path from the root.
        """
        _check_path(tree, accepted)
        if tree.num_nodes == 1:
            return
        committed = set(accepted)
        self.path_probabilities.extend(tree.path_probabilities[1:])
        self.is_committed.extend(node in committed for node in range(1, tree.num_nodes))
        self.committed_depths.append(len(accepted) - 1)


def _check_path(tree: DraftTree, accepted: Sequence[int]) -> None:
    is_path = len(accepted) > 0 and accepted[0] == 0
    for parent, node in pairwise(accepted):
        is_path = is_path and 0 < node < tree.num_nodes and tree.parents[node] == parent
    if not is_path:
        raise TreeError(
            f"accepted is {list(accepted)}; it must be node ids of the tree from the root down"
        )


def depth_statistics(recorders: Sequence[BlockRecorder], max_depth: int) -> DepthStatistics:
    """Over all blocks, how many committed a node at each depth from 0 to `max_depth`."""
    depths = np.concatenate([np.asarray(r.committed_depths, dtype=np.int64) for r in recorders])
    successes = tuple(int((depths >= depth).sum()) for depth in range(max_depth + 1))
    return DepthStatistics(trials=(len(depths),) * (max_depth + 1), successes=successes)


def isotonic_regression(values: ArrayLike, weights: ArrayLike) -> Floats:
    """[N] values, [N] positive weights -> [N]: the closest sequence that never descends.

    Closest in weighted squares; pool adjacent violators (Barlow and others, 1972): neighbours out
    of order are merged into their mean until none is.
    """
    means: list[float] = []
    masses: list[float] = []
    lengths: list[int] = []
    for value, weight in zip(_floats(values), _floats(weights), strict=True):
        mean, mass, length = float(value), float(weight), 1
        while means and means[-1] >= mean:
            merged = masses[-1] + mass
            mean = (means.pop() * masses[-1] + mean * mass) / merged
            masses.pop()
            mass, length = merged, length + lengths.pop()
        means.append(mean)
        masses.append(mass)
        lengths.append(length)
    return np.repeat(_floats(means), lengths)


def fit_curve(
    path_probabilities: ArrayLike,
    labels: ArrayLike,
    *,
    max_knots: int = MAX_KNOTS,
    tolerance: float = KNOT_TOLERANCE,
) -> CalibrationCurve:
    """The monotone curve from path probability to the share of committed nodes, in few knots.

    `path_probabilities` [N] lie in [0, 1], `labels` [N] are 1 for a committed node. The isotonic
    fit is thinned to at most `max_knots`, none of them within `tolerance` of the line through its
    neighbours.

    >>> fit_curve([0.1, 0.1, 0.2, 0.8], [0, 1, 0, 1]).commitments
    (0.3333333333333333, 0.3333333333333333, 1.0)
    """
    # Rounded to fp32, in which the curve is evaluated: two knots closer than that cannot be told
    # apart there. Equal ones are pooled, or their order in the list would matter.
    probabilities = _floats(np.asarray(path_probabilities, dtype=np.float32))
    if probabilities.size == 0:
        raise InvalidArgumentError("there are no draft nodes to fit a curve to")
    knots, index, counts = np.unique(probabilities, return_inverse=True, return_counts=True)
    shares = np.bincount(index, weights=_floats(labels)) / counts
    fitted = isotonic_regression(shares, counts).clip(0.0, 1.0)
    if len(knots) == 1:  # one drafter probability only, as a drafter without any would give
        knots, fitted = _floats([0.0, 1.0]), np.repeat(fitted, 2)
    chosen = _thin_knots(knots, fitted, max_knots, tolerance)
    return CalibrationCurve(tuple(knots[chosen].tolist()), tuple(fitted[chosen].tolist()))


def _thin_knots(x: Floats, y: Floats, max_knots: int, tolerance: float) -> list[int]:
    """Indices of the knots to keep: the ends, then always the one furthest from the line so far.

    The line through some points of a monotone sequence is monotone too.
    """
    chosen = [0, len(x) - 1]
    while len(chosen) < max_knots:
        distance = np.abs(np.interp(x, x[chosen], y[chosen]) - y)
        furthest = int(distance.argmax())
        if distance[furthest] <= tolerance:
            break
        chosen = sorted([*chosen, furthest])
    return chosen


def expected_calibration_error(
    predictions: ArrayLike, labels: ArrayLike, *, num_bins: int = NUM_BINS
) -> float:
    """Mean distance between predicted and observed share, over bins of equal numbers of nodes.

    `predictions` [N] in [0, 1], `labels` [N] of 0 and 1. Nodes are ranked by prediction; equal
    predictions stay in one bin, because calibration is a claim about all of them together, so
    with many equal ones some bins are larger and some empty.
    """
    predicted, observed = _floats(predictions), _floats(labels)
    if predicted.size == 0:
        raise InvalidArgumentError("there are no draft nodes to measure a calibration error on")
    order = np.argsort(predicted, kind="stable")
    predicted, observed = predicted[order], observed[order]
    first_of_equals = np.searchsorted(predicted, predicted)
    bins = first_of_equals * num_bins // len(predicted)
    gaps = np.bincount(bins, weights=predicted - observed)
    return float(np.abs(gaps).sum() / len(predicted))


def fit_table(
    recorders: Sequence[BlockRecorder],
    *,
    target: str,
    target_fingerprint: str,
    drafter: str,
    num_nodes: int,
    max_depth: int,
    held_out_fraction: float,
    seed: int,
    provenance: Provenance,
) -> CommitmentTable:
    """The table for what was recorded, one recorder for each prompt.

    Some *prompts*, chosen by `seed`, are held out: the curve never sees them, and its calibration
    error is measured on them. (Nodes of one prompt are alike; holding out nodes would flatter.)
    The commitment by depth, which is only a count, uses all prompts.

    Raises `InvalidArgumentError` when the drafter proposed nothing on either side.
    """
    held_out_ids = set(_held_out_prompts(len(recorders), held_out_fraction, seed))
    fitted = [r for i, r in enumerate(recorders) if i not in held_out_ids]
    held_out = [r for i, r in enumerate(recorders) if i in held_out_ids]
    for name, part in (("fitted", fitted), ("held-out", held_out)):
        if not any(recorder.path_probabilities for recorder in part):
            raise InvalidArgumentError(
                f"the drafter {drafter!r} proposed no token on the {len(part)} {name} prompts; "
                "there is nothing to count. Give more or longer prompts, or more new tokens"
            )
    curve = fit_curve(*_nodes(fitted))
    return CommitmentTable(
        target=target,
        target_fingerprint=target_fingerprint,
        drafter=drafter,
        num_nodes=num_nodes,
        max_depth=max_depth,
        depths=depth_statistics(recorders, max_depth),
        curve=curve,
        held_out_error=_held_out_error(curve, held_out),
        provenance=provenance,
    )


def _held_out_prompts(num_prompts: int, fraction: float, seed: int) -> list[int]:
    num_held_out = min(max(round(fraction * num_prompts), 1), num_prompts - 1)
    order = np.random.default_rng(seed).permutation(num_prompts)
    return [int(prompt) for prompt in order[:num_held_out]]


def _held_out_error(curve: CalibrationCurve, held_out: Sequence[BlockRecorder]) -> HeldOutError:
    probabilities, labels = _nodes(held_out)
    return HeldOutError(
        curve=expected_calibration_error(
            curve.commitment(torch.from_numpy(probabilities)).numpy(), labels
        ),
        raw=expected_calibration_error(probabilities, labels),
        num_prompts=len(held_out),
        num_nodes=len(labels),
    )


def _nodes(recorders: Sequence[BlockRecorder]) -> tuple[Floats, Floats]:
    probabilities = [p for recorder in recorders for p in recorder.path_probabilities]
    labels = [label for recorder in recorders for label in recorder.is_committed]
    return _floats(probabilities), _floats(labels)


def _floats(values: ArrayLike) -> Floats:
    return np.asarray(values, dtype=np.float64)
