"""What a routing policy is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from acceptmoe.policies.drafts import StepPolicy, TreePolicy
from acceptmoe.policies.history import StepHistory
from acceptmoe.policies.trust import Trust
from acceptmoe.selection import BlockRows, Combine, RoutedBlock, Selection, Sizing
from acceptmoe.table import CommitmentTable


@dataclass(frozen=True)
class FusedParams:
    """A commitment-weighted policy as `acceptmoe::select_experts` takes it: one pass, all layers.

    `row_weights` [T] fp32: how much each row's gates count in the demand. `num_anchored` [T] int32:
    how many of each row's own best experts stay eligible; the root's always do. `sizing` and
    `size_parameter`: "effective-rank" times the parameter, or the "mass" of the others' demand to
    hold. `combine` as in `Selection`.
    """

    row_weights: Tensor
    num_anchored: Tensor
    sizing: Sizing = "effective-rank"
    size_parameter: float = 1.0
    combine: Combine = "router"

    def to(self, device: torch.device) -> FusedParams:
        """The same parameters on another device (a model spread over several)."""
        if self.row_weights.device == device:
            return self
        return replace(
            self, row_weights=self.row_weights.to(device), num_anchored=self.num_anchored.to(device)
        )


class RoutingPolicy(ABC):
    """Chooses the experts that one layer may use for one verification block.

    `select` is pure and deterministic, reads nothing back to the host and leaves padded rows out.
    The class variables say what a policy needs from a `CommitmentTable`. What a policy decides
    outside the layers, the drafts, is in the objects of `tree_policy` and `step_policy`; they may
    keep state, since every `generate` asks for new ones.
    """

    name: ClassVar[str]
    is_natural: ClassVar[bool] = False  # every row keeps the router's own experts
    keeps_root: ClassVar[bool] = False  # whatever it restricts, the root has its own experts
    reads_depths: ClassVar[bool] = False  # uses `depth_commitment`
    reads_paths: ClassVar[bool] = False  # uses `path_commitment`
    uses_table: ClassVar[bool] = False  # is better with a table, and does without
    trust: Trust | None = None  # which rows may be accepted; None trusts all

    @property
    def reads_table(self) -> bool:
        return self.reads_depths or self.reads_paths

    def check_model(self, num_experts: int, experts_per_token: int) -> None:
        """Raise `InvalidArgumentError` for settings that mean nothing for such a model.

        `wrap` asks before it changes anything.
        """
        return None

    @abstractmethod
    def select(self, block: RoutedBlock) -> Selection:
        """The eligible experts of `block`; at least as many as a row is routed to."""

    def fused_params(self, rows: BlockRows) -> FusedParams | None:
        """What makes the fused op select as `select` does, or None where it cannot.

        Computed once for a pass, whatever its number of layers.
        """
        return None

    def params(self) -> dict[str, Any]:
        """The policy's settings, for reports and tables."""
        return {}

    def tree_policy(self, history: StepHistory, table: CommitmentTable | None) -> TreePolicy | None:
        """What prunes the drafts of one `generate`; None keeps them whole."""
        return None

    def step_policy(self, num_nodes: int) -> StepPolicy | None:
        """What sizes the drafts of one `generate`, up to `num_nodes`; None always asks for all."""
        return None
