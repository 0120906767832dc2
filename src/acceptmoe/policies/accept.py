"""`accept`: path-aware commitment, our own policy and the default."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from acceptmoe.policies.drafts import CommitmentFloor, TreePolicy
from acceptmoe.policies.history import StepHistory
from acceptmoe.policies.policy import FusedParams, RoutingPolicy
from acceptmoe.policies.ranking import check_count
from acceptmoe.policies.trust import Trust
from acceptmoe.policies.weighted import (
    check_choice,
    check_exponent,
    check_number,
    check_size,
    select_by_weight,
)
from acceptmoe.selection import (
    COMBINES,
    SIZINGS,
    BlockRows,
    Combine,
    RoutedBlock,
    Selection,
    Sizing,
)
from acceptmoe.table import CommitmentTable

ALL_OWN = 2**31 - 1  # of a row's own experts; the largest int32


class AcceptPolicy(RoutingPolicy):
    """Rows count by the calibrated probability of their own path: alpha = c^exponent.

    The paper weighs all siblings alike. The drafter knows better: it has a probability for every
    path, and the table maps it to the frequency with which such nodes were committed on held-out
    text. Demand then concentrates on few rows, the effective rank falls, and the experts of the
    rows that the output will keep stay eligible.

    With exponent 1 a row counts by its probability itself, so that demand is the gate mass expected
    to matter. Smaller exponents keep more experts for unlikely rows: what a row suffers grows
    faster than the mass it loses, so the unlikely ones, which lose most, need more than their
    share.

    Two rules keep an unlikely row from paying for the others. A node with a probability below
    `min_commitment` is not verified at all: its experts would be read for an output that is almost
    never committed. And acceptance stops before a row that has lost too much to be trusted
    (`max_lost`, `max_lost_unsure`, `sure_above`: see `Trust`); the next block has it as its root.

    Every row keeps its `top` best experts, as the router ranks them: a row without its best expert
    goes wrong far more often than one without the next few, however improbable it looked. Rows
    whose probability is above `anchor_above` keep all of their own, as the root does; at 1 only the
    root does. `sizing` says how many further experts are eligible: "effective-rank", the paper's
    measure times `size`, or "mass", the fewest that hold the share `size` of the demand outside
    the anchors. `combine` is that of `Selection`.
    """

    name = "accept"
    keeps_root = True
    reads_paths = True

    def __init__(
        self,
        exponent: float = 0.75,
        anchor_above: float = 1.0,
        top: int = 1,
        sizing: Sizing = "effective-rank",
        size: float = 0.3,
        combine: Combine = "router",
        min_commitment: float = 0.02,
        max_lost: float = 0.5,
        max_lost_unsure: float = 0.1,
        sure_above: float = 0.95,
    ) -> None:
        check_choice("sizing", sizing, SIZINGS)
        check_choice("combine", combine, COMBINES)
        self.exponent = check_exponent("exponent", exponent)
        self.anchor_above = check_number(
            "anchor_above", anchor_above, 0, 1, "a probability; 1 anchors the root alone"
        )
        self.top = check_count("top", top, least=0)
        self.sizing: Sizing = sizing
        self.size = check_size(sizing, size)
        self.combine: Combine = combine
        self.min_commitment = check_number(
            "min_commitment", min_commitment, 0, 1, "a probability; 0 verifies every node"
        )
        for name, value in (("max_lost", max_lost), ("max_lost_unsure", max_lost_unsure)):
            check_number(name, value, 0, 1, "a share of routing weights; 1 trusts every row")
        check_number("sure_above", sure_above, 0, 1, "a probability; 0 takes every row for sure")
        trust = Trust(float(max_lost), float(max_lost_unsure), float(sure_above))
        self.trust = None if trust.is_everything else trust
        self._trust_params = vars(trust)

    def select(self, block: RoutedBlock) -> Selection:
        commitment = block.rows.path_commitment
        return select_by_weight(
            block,
            commitment**self.exponent,
            self._num_anchored(commitment),
            sizing=self.sizing,
            size=self.size,
            combine=self.combine,
        )

    def fused_params(self, rows: BlockRows) -> FusedParams:
        commitment = rows.path_commitment
        return FusedParams(
            row_weights=commitment**self.exponent,
            num_anchored=self._num_anchored(commitment),
            sizing=self.sizing,
            size_parameter=self.size,
            combine=self.combine,
        )

    def _num_anchored(self, commitment: Tensor) -> Tensor:
        """[T] int32: how many of its own experts each row keeps in any case."""
        return torch.where(commitment > self.anchor_above, ALL_OWN, min(self.top, ALL_OWN)).int()

    def tree_policy(self, history: StepHistory, table: CommitmentTable | None) -> TreePolicy | None:
        if self.min_commitment == 0:
            return None
        return CommitmentFloor(self.min_commitment, table)

    def params(self) -> dict[str, Any]:
        return {
            "exponent": self.exponent,
            "anchor_above": self.anchor_above,
            "top": self.top,
            "sizing": self.sizing,
            "size": self.size,
            "combine": self.combine,
            "min_commitment": self.min_commitment,
            **self._trust_params,
        }
