"""What a routing policy is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from acceptmoe.selection import RoutedBlock, Selection


class RoutingPolicy(ABC):
    """Chooses the experts that one layer may use for one verification block.

    `select` is pure and deterministic, reads nothing back to the host and leaves padded rows out.
    The class variables say what a policy needs from a `CommitmentTable`.
    """

    name: ClassVar[str]
    is_natural: ClassVar[bool] = False  # every row keeps the router's own experts
    reads_depths: ClassVar[bool] = False  # uses `depth_commitment`
    reads_paths: ClassVar[bool] = False  # uses `path_commitment`

    @property
    def reads_table(self) -> bool:
        return self.reads_depths or self.reads_paths

    @abstractmethod
    def select(self, block: RoutedBlock) -> Selection:
        """The eligible experts of `block`; at least as many as a row is routed to."""

    def params(self) -> dict[str, Any]:
        """The policy's settings, for reports and tables."""
        return {}
