"""What policies may decide about a draft before it is verified: its size, and which nodes stay."""

from __future__ import annotations

from typing import Protocol

import torch

from acceptmoe.policies.history import StepHistory
from acceptmoe.table import CommitmentTable
from acceptmoe.tree import DraftTree


class TreePolicy(Protocol):
    """Decides which nodes of a draft are verified; under natural routing always lossless.

    `min_probability`: no node with a lower path probability is ever kept, 0 where there is no such
    limit. A drafter that knows it draws its trees no larger than they will be verified.
    """

    min_probability: float

    def prune(self, tree: DraftTree) -> DraftTree:
        """`tree` without some of its nodes; the root and every kept node's parent stay."""


class StepPolicy(Protocol):
    """Decides how many nodes are drafted for a step; under natural routing always lossless."""

    def num_nodes(self, history: StepHistory) -> int:
        """Nodes to ask the drafter for, the root included; 1 for a step without a draft."""


class CommitmentFloor:
    """Leaves out the nodes that the output hardly ever commits; a `TreePolicy`.

    A node stays when its commitment, calibrated by the table where there is one, is at least
    `min_commitment`. A path is committed from its start, so what stays is a tree.
    """

    def __init__(self, min_commitment: float, table: CommitmentTable | None) -> None:
        self._min_commitment, self._table = min_commitment, table
        self.min_probability = (
            min_commitment if table is None else table.min_path_probability(min_commitment)
        )

    def prune(self, tree: DraftTree) -> DraftTree:
        order, commitments = by_commitment(tree, self._table)
        num_kept = sum(commitment >= self._min_commitment for commitment in commitments)
        return keep_nodes(tree, order[: max(1, num_kept)])


def by_commitment(tree: DraftTree, table: CommitmentTable | None) -> tuple[list[int], list[float]]:
    """The nodes by falling commitment, parents before children, and these commitments.

    Of equals the earlier node comes first. A child counts for no more than its parent: a path is
    committed from its start.
    """
    commitments = list(tree.path_probabilities)
    if table is not None:
        commitments = table.path_commitment(torch.tensor(commitments)).tolist()
    for node, parent in enumerate(tree.parents[1:], start=1):
        commitments[node] = min(commitments[node], commitments[parent])
    order = sorted(range(tree.num_nodes), key=lambda node: (-commitments[node], node))
    return order, [commitments[node] for node in order]


def keep_nodes(tree: DraftTree, nodes: list[int]) -> DraftTree:
    """The tree of these nodes, which hold the root and every node's parent, in their old order."""
    if len(nodes) == tree.num_nodes:
        return tree
    kept = sorted(nodes)
    place = {node: index for index, node in enumerate(kept)}
    return DraftTree(
        tokens=tuple(tree.tokens[node] for node in kept),
        parents=(tree.parents[0], *(place[tree.parents[node]] for node in kept[1:])),
        path_probabilities=tuple(tree.path_probabilities[node] for node in kept),
    )
