"""What a routing policy is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from acceptmoe.policies.drafts import StepPolicy, TreePolicy
from acceptmoe.policies.history import StepHistory
from acceptmoe.selection import RoutedBlock, Selection
from acceptmoe.table import CommitmentTable


class RoutingPolicy(ABC):
    """Chooses the experts that one layer may use for one verification block.

    `select` is pure and deterministic, reads nothing back to the host and leaves padded rows out.
    The class variables say what a policy needs from a `CommitmentTable`. What a policy decides
    outside the layers, the drafts, is in the objects of `tree_policy` and `step_policy`; they may
    keep state, since every `generate` asks for new ones.
    """

    name: ClassVar[str]
    is_natural: ClassVar[bool] = False  # every row keeps the router's own experts
    reads_depths: ClassVar[bool] = False  # uses `depth_commitment`
    reads_paths: ClassVar[bool] = False  # uses `path_commitment`
    uses_table: ClassVar[bool] = False  # is better with a table, and does without

    @property
    def reads_table(self) -> bool:
        return self.reads_depths or self.reads_paths

    @abstractmethod
    def select(self, block: RoutedBlock) -> Selection:
        """The eligible experts of `block`; at least as many as a row is routed to."""

    def params(self) -> dict[str, Any]:
        """The policy's settings, for reports and tables."""
        return {}

    def tree_policy(self, history: StepHistory, table: CommitmentTable | None) -> TreePolicy | None:
        """What prunes the drafts of one `generate`; None keeps them whole."""
        return None

    def step_policy(self, num_nodes: int) -> StepPolicy | None:
        """What sizes the drafts of one `generate`, up to `num_nodes`; None always asks for all."""
        return None
