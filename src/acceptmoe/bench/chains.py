"""Drafters that propose chains: the same models, without siblings."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel

from acceptmoe.drafting import AssistantDrafter, Drafter, Eagle3Drafter
from acceptmoe.tree import DraftTree


def chain_drafter(drafter: Drafter) -> Drafter:
    """A drafter of the same name and weights that proposes one path only."""
    if isinstance(drafter, AssistantDrafter):
        return AssistantDrafter(
            drafter.model,
            num_children=1,
            frontier=1,
            min_reach=drafter.min_reach,
            weights=drafter.weights,
        )
    if isinstance(drafter, Eagle3Drafter):
        return Eagle3Drafter(drafter.head, topk=1, weights=drafter.weights)
    return LikeliestPath(drafter)


class LikeliestPath:
    """The likeliest path of another drafter's trees (a `Drafter`), for those that draft for free.

    From the root down the likeliest child; of equals the first.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.name = drafter.name
        self.feature_boundaries = drafter.feature_boundaries

    def check_target(self, model: PreTrainedModel) -> None:
        self._drafter.check_target(model)

    def start(self, prompt: Tensor, first_token: int, features: Tensor | None) -> None:
        self._drafter.start(prompt, first_token, features)

    def extend(self, tokens: list[int], features: Tensor | None) -> None:
        self._drafter.extend(tokens, features)

    def propose(self, num_nodes: int, max_depth: int) -> DraftTree:
        tree = self._drafter.propose(num_nodes, max_depth)
        path = [0]
        while children := tree.shape.children[path[-1]]:
            path.append(max(children, key=tree.path_probabilities.__getitem__))
        return DraftTree(
            tokens=tuple(tree.tokens[node] for node in path),
            parents=tuple(range(-1, len(path) - 1)),
            path_probabilities=tuple(tree.path_probabilities[node] for node in path),
        )
