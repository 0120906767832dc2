"""A commitment table that learns, while it decodes, from what was actually committed."""

from __future__ import annotations

import sys
from dataclasses import fields
from importlib import metadata
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from acceptmoe.errors import InvalidArgumentError
from acceptmoe.table import (
    MIN_COMMITMENT,
    CalibrationCurve,
    CommitmentTable,
    DepthStatistics,
    HeldOutError,
    Provenance,
    config_fingerprint,
)
from acceptmoe.tree import DraftTree

Floats = NDArray[np.float64]

HALF_LIFE_BLOCKS = 64.0
PRIOR_NODES = 32.0  # so many observed nodes of a bin weigh as much as what the table says of it
PRIOR_NODES_OF_DRAFTER = 2.0  # the drafter's own probabilities deserve far less trust
PRIOR_BLOCKS = 16.0  # the same for the commitment by depth
WARM_UP_BLOCKS = 16  # routed naturally where there is no table to begin with
# Nodes are pooled by what the table says of them; most drafted nodes are unlikely ones.
BIN_EDGES = np.array([0.003, 0.01, 0.03, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97])
# Path probabilities between which the corrected curve is linear, beside the table's own.
GRID = np.array([0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97, 1.0])


class OnlineCommitmentTable(CommitmentTable):
    """`table`, corrected by exponential averages over the blocks of the running `generate`.

    In each bin of similar commitments the observed share of committed nodes is set against the
    share that the table predicts, which weighs as much as `prior_nodes` observed nodes; the
    difference in log odds shifts the table's curve there, linearly between bins. The curve never
    descends. The commitment by depth is averaged likewise. An observation counts half after
    `half_life` blocks.

    What was learnt is forgotten when a `generate` begins, so that equal calls give equal texts;
    with `carries_over` it is kept, and a text then depends on those before it.

    It goes where a table goes: `wrap(model, OnlineCommitmentTable(table), drafter=...)`.
    """

    def __init__(
        self,
        table: CommitmentTable,
        *,
        half_life: float = HALF_LIFE_BLOCKS,
        carries_over: bool = False,
        warm_up_blocks: int = 0,
        prior_nodes: float = PRIOR_NODES,
    ) -> None:
        is_number = isinstance(half_life, (int, float)) and not isinstance(half_life, bool)
        if not is_number or not 1.0 <= half_life <= sys.float_info.max:
            raise InvalidArgumentError(
                f"half_life is {half_life!r}; it must be a number of blocks, 1 or larger (64 is "
                "the default)"
            )
        parts = {part.name: getattr(table, part.name) for part in fields(table) if part.init}
        super().__init__(**parts)
        state: dict[str, Any] = {
            "_learnt": _Averages(table, 0.5 ** (1.0 / half_life), prior_nodes),
            "_carries_over": carries_over,
            "_warm_up_blocks": warm_up_blocks,
        }
        for name, value in state.items():
            object.__setattr__(self, name, value)  # the table's own fields are frozen

    @classmethod
    def without_table(
        cls,
        model: PreTrainedModel,
        drafter: str,
        *,
        num_nodes: int = 32,
        max_depth: int = 5,
        carries_over: bool = False,
    ) -> OnlineCommitmentTable:
        """One that begins with the drafter's own probabilities, for `model` and a drafter's name.

        The first `WARM_UP_BLOCKS` blocks of a text (with `carries_over`: of the session) route
        naturally, until there is something to go by.
        """
        num_trials = 2**max_depth
        begin = CommitmentTable(
            target=type(model).__name__,
            target_fingerprint=config_fingerprint(model.config),
            drafter=drafter,
            num_nodes=num_nodes,
            max_depth=max_depth,
            depths=DepthStatistics(
                (num_trials,) * (max_depth + 1),
                tuple(num_trials >> depth for depth in range(max_depth + 1)),
            ),
            curve=CalibrationCurve((0.0, 1.0), (0.0, 1.0)),
            held_out_error=HeldOutError(curve=1.0, raw=1.0, num_prompts=1, num_nodes=1),
            provenance=Provenance(
                dataset="none: learnt while decoding",
                seeds=(),
                num_prompts=1,
                acceptmoe_version=metadata.version("acceptmoe"),
                command="OnlineCommitmentTable.without_table",
            ),
            source="the table learnt online",
        )
        return cls(
            begin,
            carries_over=carries_over,
            warm_up_blocks=WARM_UP_BLOCKS,
            prior_nodes=PRIOR_NODES_OF_DRAFTER,
        )

    _learnt: _Averages
    _carries_over: bool
    _warm_up_blocks: int

    @property
    def is_warm(self) -> bool:
        """Whether a policy may go by this table; until then blocks route naturally."""
        return self._learnt.num_blocks >= self._warm_up_blocks

    def begin_text(self) -> None:
        """Forget what the text before has taught, unless it carries over."""
        if not self._carries_over:
            object.__setattr__(self, "_learnt", self._learnt.anew())

    def observe(self, tree: DraftTree, nodes: tuple[int, ...]) -> None:
        """Learn from one block whose rows `nodes` were committed; a session's observer."""
        if tree.num_nodes > 1:
            self._learnt.add(tree, nodes)

    def depth_commitment(self, depths: Tensor) -> Tensor:
        by_depth = torch.tensor(self._learnt.by_depth, dtype=torch.float32, device=depths.device)
        return by_depth[depths.clamp(0, self.max_depth)]

    def min_path_probability(self, commitment: float) -> float:
        """0: what is too little now may be enough some blocks later in the same text."""
        return 0.0

    def path_commitment(self, path_probabilities: Tensor) -> Tensor:
        commitment = self._learnt.curve.commitment(path_probabilities)
        return torch.cat([torch.ones_like(commitment[:1]), commitment[1:]])


class _Averages:
    """Decayed counts of nodes and blocks, and the curve that follows from them."""

    def __init__(self, table: CommitmentTable, decay: float, prior_nodes: float) -> None:
        self._table, self._decay, self._prior_nodes = table, decay, prior_nodes
        self.num_blocks = 0
        self._x = np.asarray(table.curve.path_probabilities, dtype=np.float64)
        self._y = np.asarray(table.curve.commitments, dtype=np.float64)
        # In fp32, in which the curve is evaluated, all knots must differ.
        self._knots = np.unique(np.union1d(self._x, GRID).astype(np.float32)).astype(np.float64)
        self._prior_by_depth = np.asarray(table.depths.commitment, dtype=np.float64)
        num_bins = len(BIN_EDGES) + 1
        self._trials = np.zeros(num_bins)
        self._predicted = np.zeros(num_bins)
        self._committed = np.zeros(num_bins)
        self._blocks = 0.0
        self._reached = np.zeros(len(self._prior_by_depth))
        self._curve: CalibrationCurve | None = None

    def anew(self) -> _Averages:
        """The same before anything was seen."""
        return _Averages(self._table, self._decay, self._prior_nodes)

    def add(self, tree: DraftTree, nodes: tuple[int, ...]) -> None:
        self.num_blocks += 1
        predicted = self._predict(np.asarray(tree.path_probabilities[1:]))
        is_committed = np.zeros(tree.num_nodes)
        is_committed[list(nodes)] = 1.0
        bins = np.searchsorted(BIN_EDGES, predicted, side="right")
        for sums, weights in (
            (self._trials, None),
            (self._predicted, predicted),
            (self._committed, is_committed[1:]),
        ):
            sums *= self._decay
            sums += np.bincount(bins, weights, minlength=len(sums))
        self._blocks = self._blocks * self._decay + 1.0
        self._reached *= self._decay
        self._reached[: len(nodes)] += 1.0
        self._curve = None

    @property
    def by_depth(self) -> list[float]:
        """The marginal commitment of depths 0 to D."""
        mass = self._reached + PRIOR_BLOCKS * self._prior_by_depth
        by_depth: list[float] = (mass / (self._blocks + PRIOR_BLOCKS)).tolist()
        return by_depth

    @property
    def curve(self) -> CalibrationCurve:
        """Path probability to commitment, as corrected so far."""
        if self._curve is None:
            corrected = np.maximum.accumulate(self._correct(self._predict(self._knots)))
            self._curve = CalibrationCurve(tuple(self._knots.tolist()), tuple(corrected.tolist()))
        return self._curve

    def _predict(self, path_probabilities: Floats) -> Floats:
        """What the table itself says."""
        return np.interp(path_probabilities, self._x, self._y).clip(MIN_COMMITMENT, 1.0)

    def _correct(self, predicted: Floats) -> Floats:
        is_seen = self._trials > 0
        if not is_seen.any():
            return predicted
        trials, committed = self._trials[is_seen], self._committed[is_seen]
        mean = self._predicted[is_seen] / trials
        observed = (committed + self._prior_nodes * mean) / (trials + self._prior_nodes)
        shift = _log_odds(observed) - _log_odds(mean)
        odds = _log_odds(predicted)
        return 1.0 / (1.0 + np.exp(-odds - np.interp(odds, _log_odds(mean), shift)))


def _log_odds(probability: Floats) -> Floats:
    bounded = probability.clip(MIN_COMMITMENT, 1.0 - MIN_COMMITMENT)
    return np.log(bounded / (1.0 - bounded))
