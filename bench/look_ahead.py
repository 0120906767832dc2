"""Drafting behind tokens that may yet turn out wrong: a drafter that can be taken back.

`Drafter.extend` is for good, and a prediction that is still to be confirmed is not. These wrappers
know what the two drafters with weights keep of a text, and restore it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from acceptmoe.bench.chains import LikeliestPath
from acceptmoe.drafting import AssistantDrafter, Drafter, Eagle3Drafter
from acceptmoe.errors import DrafterError
from acceptmoe.tree import DraftTree


class LookAhead(ABC):
    """A drafter that also continues tokens which are not committed.

    `start` and `propose` are the drafter's own. `extend` commits as the drafter's does, whatever
    `continuation` was asked for since.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    def start(self, prompt: Tensor, first_token: int, features: Tensor | None) -> None:
        self._drafter.start(prompt, first_token, features)

    def propose(self, num_nodes: int, max_depth: int) -> DraftTree:
        return self._drafter.propose(num_nodes, max_depth)

    def continuation(
        self, tokens: Sequence[int], features: Tensor | None, num_tokens: int
    ) -> list[int]:
        """At most `num_tokens` tokens that probably follow `tokens`, which follow the text.

        `features` [n, F] belong to the rows before `tokens`, as in `Drafter.extend`.
        """
        self._go_ahead(list(tokens), features)
        tree = LikeliestPath(self._drafter).propose(num_tokens + 1, num_tokens)
        return list(tree.tokens[1:])

    @abstractmethod
    def extend(self, tokens: Sequence[int], features: Tensor | None) -> None:
        """Commit `tokens`; nothing else remains of what was looked at ahead."""

    @abstractmethod
    def _go_ahead(self, tokens: list[int], features: Tensor | None) -> None:
        """Let the drafter take `tokens` for committed until the next `extend`."""


class AssistantLookAhead(LookAhead):
    """Keeps the assistant's keys and values of all tokens ahead that come true."""

    _drafter: Any  # an `AssistantDrafter`, seen from inside

    def __init__(self, drafter: AssistantDrafter) -> None:
        super().__init__(drafter)
        self._ahead: list[int] = []

    def extend(self, tokens: Sequence[int], features: Tensor | None) -> None:
        num_true = num_common(self._ahead, tokens)
        if num_true < len(self._ahead):
            self._take_back(len(self._ahead) - num_true)
        self._ahead = []
        self._drafter.extend(list(tokens[num_true:]), features)

    def _go_ahead(self, tokens: list[int], features: Tensor | None) -> None:
        self._ahead = tokens
        self._drafter.extend(tokens, features)

    def _take_back(self, num_tokens: int) -> None:
        drafter = self._drafter
        drafter._row_of = None  # its rows lie behind tokens that are gone
        del drafter._text[-num_tokens:]
        # The last token of the text is read anew by the next draft, which needs its logits and
        # drops what lies behind the cached tokens.
        drafter._num_cached = min(drafter._num_cached, len(drafter._text) - 1)


class Eagle3LookAhead(LookAhead):
    """Takes all tokens ahead back: their features are not those that commitment brings."""

    _drafter: Any  # an `Eagle3Drafter`, seen from inside

    def __init__(self, drafter: Eagle3Drafter) -> None:
        super().__init__(drafter)
        self._committed: tuple[int, int, Tensor | None] | None = None

    def extend(self, tokens: Sequence[int], features: Tensor | None) -> None:
        if self._committed is not None:
            state = self._drafter._started
            # Keys and values behind `_num_pairs` are never read, only overwritten.
            state._num_pairs, state.root, state.last_hidden = self._committed
            self._committed = None
        self._drafter.extend(list(tokens), features)

    def _go_ahead(self, tokens: list[int], features: Tensor | None) -> None:
        state = self._drafter._started
        self._committed = (state._num_pairs, state.root, state.last_hidden)
        self._drafter.extend(tokens, features)


def look_ahead(drafter: Drafter) -> LookAhead:
    """The wrapper that fits `drafter`; raises `DrafterError` where there is none."""
    if isinstance(drafter, AssistantDrafter):
        return AssistantLookAhead(drafter)
    if isinstance(drafter, Eagle3Drafter):
        return Eagle3LookAhead(drafter)
    raise DrafterError(
        f"the drafter {drafter.name!r} cannot be taken back; use an assistant or an EAGLE-3 head"
    )


def num_common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
