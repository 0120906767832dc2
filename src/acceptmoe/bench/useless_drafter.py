"""A drafter that is useless on purpose: what a guard must cope with, in tests and benchmarks."""

from __future__ import annotations

import random

from torch import Tensor
from transformers import PreTrainedModel

from acceptmoe.models.adapter import num_token_ids
from acceptmoe.tree import ROOT_PARENT, DraftTree

CLAIMED_PROBABILITY = 0.9  # of every node after its parent; a useless drafter is sure of itself


class RandomDrafter:
    """Proposes full trees of random tokens (a `Drafter`); one in a vocabulary's size is right.

    All nodes of a tree have different tokens. The drafts of a text depend on `seed` alone.
    """

    name = "random"
    feature_boundaries: tuple[int, ...] = ()

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._random = random.Random(seed)
        self._num_token_ids = 0
        self._root = 0

    def check_target(self, model: PreTrainedModel) -> None:
        """Every target will do: only the size of its vocabulary is read."""
        self._num_token_ids = num_token_ids(model)

    def start(self, prompt: Tensor, first_token: int, features: Tensor | None) -> None:
        self._random = random.Random(self.seed)
        self._root = first_token

    def extend(self, tokens: list[int], features: Tensor | None) -> None:
        self._root = tokens[-1]

    def propose(self, num_nodes: int, max_depth: int) -> DraftTree:
        """A random tree of `num_nodes` nodes, or of as many as there are tokens."""
        num_drafted = min(num_nodes - 1, self._num_token_ids)
        tokens = self._random.sample(range(self._num_token_ids), num_drafted)
        parents, depths = [ROOT_PARENT], [0]
        for node in range(1, num_drafted + 1):
            parent = self._random.randrange(node)
            while depths[parent] >= max_depth:
                parent = parents[parent]
            parents.append(parent)
            depths.append(depths[parent] + 1)
        return DraftTree(
            tokens=(self._root, *tokens),
            parents=tuple(parents),
            path_probabilities=tuple(CLAIMED_PROBABILITY**depth for depth in depths),
        )
