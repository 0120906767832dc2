"""A drafter that learns what was committed only when it has to draft."""

from __future__ import annotations

import torch
from torch import Tensor

from acceptmoe.drafting.drafter import Drafter
from acceptmoe.tree import DraftTree

MAX_PENDING_TOKENS = 512  # their features are kept meanwhile: 512 rows of a few hidden sizes


class DeferredDrafter:
    """Hands `start` and `extend` on together, at the next `propose`.

    While nothing is drafted, a drafter with weights would otherwise run for every plain step. It
    gets the tokens of several steps at once instead, which costs it about as much as those of one.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._start: tuple[Tensor, int, Tensor | None] | None = None
        self._tokens: list[int] = []
        self._features: list[Tensor] = []

    def start(self, prompt: Tensor, first_token: int, features: Tensor | None) -> None:
        self._start = (prompt, first_token, features)
        self._tokens, self._features = [], []

    def extend(self, tokens: list[int], features: Tensor | None) -> None:
        self._tokens.extend(tokens)
        if features is not None:
            self._features.append(features)
        if len(self._tokens) >= MAX_PENDING_TOKENS:
            self._catch_up()

    def propose(self, num_nodes: int, max_depth: int) -> DraftTree:
        self._catch_up()
        return self._drafter.propose(num_nodes, max_depth)

    def _catch_up(self) -> None:
        if self._start is not None:
            self._drafter.start(*self._start)
            self._start = None
        if self._tokens:
            features = torch.cat(self._features) if self._features else None
            self._drafter.extend(self._tokens, features)
            self._tokens, self._features = [], []
