"""What policies may decide about a draft before it is verified: its size, and which nodes stay."""

from __future__ import annotations

from typing import Protocol

from acceptmoe.policies.history import StepHistory
from acceptmoe.tree import DraftTree


class TreePolicy(Protocol):
    """Decides which nodes of a draft are verified; under natural routing always lossless."""

    def prune(self, tree: DraftTree) -> DraftTree:
        """`tree` without some of its nodes; the root and every kept node's parent stay."""


class StepPolicy(Protocol):
    """Decides how many nodes are drafted for a step; under natural routing always lossless."""

    def num_nodes(self, history: StepHistory) -> int:
        """Nodes to ask the drafter for, the root included; 1 for a step without a draft."""
