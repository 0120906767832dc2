"""Drafts without weights: what followed the same words earlier in the committed text.

Words of this file: a *context* is an n-gram of the text, a *follower* the token after one
occurrence of it; the text is the prompt and all emitted tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush

from torch import Tensor
from transformers import PreTrainedModel

from acceptmoe.errors import DrafterError, InvalidArgumentError
from acceptmoe.tree import ROOT_PARENT, DraftTree

MAX_NGRAM = 64  # every length costs one index entry for each token of the text
# Bounds the work of one proposal on long texts, where a comma has thousands of followers. Replaying
# source code and prose, the accepted length was the same (2.25) with 16, 32 and 64.
MAX_OCCURRENCES = 64


class NgramDrafter:
    """Prompt lookup as a tree: the distinct continuations of the end of the committed text.

    The followers of a node are looked up in a chain of contexts, longest first:

    1. the context in which the node itself was found, with its token appended (the root has none);
    2. the last n tokens of the text plus the path to the node, for every n below the length of that
       first context and from `max_ngram` down to `min_ngram`.

    A context belongs to the chain when it has followers; its most recent `MAX_OCCURRENCES` count
    (of an inherited context, those that its parent counted). The context of a continuation is the
    first of the chain in which it is a follower, and a path probability is the product along the
    path of

        count of the continuation after its context / count of its context.

    Nodes are added best-first: by the number of contexts passed over on the whole path, then by
    path probability. So the longest contexts fill the tree and shorter ones only take the places
    left over. Because of them the probabilities of siblings can add up to more than 1.

    The index grows with every committed token; a proposal never scans the text.

    >>> import torch
    >>> drafter = NgramDrafter(max_ngram=2, min_ngram=2)
    >>> drafter.start(torch.tensor([5, 6, 1, 9, 5, 6, 2, 9, 5]), 6, None)
    >>> drafter.propose(4, 2)
    DraftTree(tokens=(6, 2, 1, 9), parents=(-1, 0, 0, 1), path_probabilities=(1.0, 0.5, 0.5, 0.5))
    """

    name = "ngram"
    feature_boundaries: tuple[int, ...] = ()

    def __init__(self, max_ngram: int = 4, min_ngram: int = 1) -> None:
        """Use contexts of `min_ngram` to `max_ngram` tokens; `InvalidArgumentError` if absurd."""
        _check_ngram_length("min_ngram", min_ngram, 1, MAX_NGRAM, "one token is the shortest")
        _check_ngram_length("max_ngram", max_ngram, min_ngram, MAX_NGRAM, "min_ngram is the lowest")
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram
        self._index = _FollowerIndex(min_ngram, max_ngram)

    def check_target(self, model: PreTrainedModel) -> None:
        """Every target will do: the drafter reads token ids only."""

    def start(self, prompt: Tensor, first_token: int, features: Tensor | None) -> None:
        """Forget everything and index `prompt` ([P] int64) followed by `first_token`."""
        self._index = _FollowerIndex(self.min_ngram, self.max_ngram)
        self.extend([*prompt.tolist(), first_token], features)

    def extend(self, tokens: list[int], features: Tensor | None) -> None:
        """Index newly committed tokens; features are not read."""
        for token in tokens:
            self._index.append(int(token))

    def propose(self, num_nodes: int, max_depth: int) -> DraftTree:
        """The best continuations: at most `num_nodes` nodes (root included), `max_depth` deep.

        The tree is root-only when nothing in the text matches. Raises `DrafterError` before
        `start`.
        """
        if not self._index.text:
            raise DrafterError(
                "the n-gram drafter has no text to continue; call start(prompt, first_token) first"
            )
        tree = _GrowingTree(self._index, max_depth)
        while len(tree.nodes) < num_nodes and tree.grow():
            pass
        return DraftTree(
            tuple(node.token for node in tree.nodes),
            tuple(node.parent for node in tree.nodes),
            tuple(node.probability for node in tree.nodes),
        )


def _check_ngram_length(name: str, value: int, lowest: int, highest: int, why: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
        raise InvalidArgumentError(
            f"{name} is {value!r}; it must be a whole number from {lowest} to {highest} ({why})"
        )


class _FollowerIndex:
    """The positions of all followers of every n-gram of a growing text."""

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self.min_ngram = min_ngram
        self.max_ngram = max_ngram
        self.text: list[int] = []
        self._positions: dict[tuple[int, ...], list[int]] = {}

    def append(self, token: int) -> None:
        """Add one token: it follows the n-grams that end just before it."""
        tail = self.tail()
        for length in range(self.min_ngram, len(tail) + 1):
            self._positions.setdefault(tail[-length:], []).append(len(self.text))
        self.text.append(token)

    def tail(self) -> tuple[int, ...]:
        """The last tokens of the text, as many as the longest context has."""
        return tuple(self.text[-self.max_ngram :])

    def followers(self, context: tuple[int, ...]) -> list[int]:
        """Positions of the tokens that followed `context`, the most recent first."""
        return self._positions.get(context, [])[: -MAX_OCCURRENCES - 1 : -1]


@dataclass
class _Node:
    token: int
    parent: int
    probability: float
    path: tuple[int, ...]  # the tokens after the root, this node's included
    contexts: Iterator[tuple[int, list[int]]]  # length and followers, down the chain
    offered: set[int] = field(default_factory=set)  # tokens already found in a longer context


class _GrowingTree:
    """The nodes in best-first order, and a heap of what may come next.

    An entry of the heap adds one node or opens the next context of one. No child is worth more
    than its node, so a context opened only when its turn comes gives the same order as all of them
    opened at once.
    """

    def __init__(self, index: _FollowerIndex, max_depth: int) -> None:
        self.nodes: list[_Node] = []
        self._index = index
        self._max_depth = max_depth
        self._tail = index.tail()
        # Number of contexts passed over, -path probability, order of discovery, what to do.
        self._heap: list[tuple[int, float, int, Callable[[], None]]] = []
        self._num_scheduled = 0
        self._add_node(ROOT_PARENT, self._tail[-1], 1.0, (), 0, index.max_ngram + 1, [])

    def grow(self) -> bool:
        """Do the most promising thing; False when nothing is left."""
        if not self._heap:
            return False
        *_, action = heappop(self._heap)
        action()
        return True

    def _schedule(self, num_backoffs: int, probability: float, action: Callable[[], None]) -> None:
        # The order of discovery makes equals come first in, first out, and actions never compare.
        heappush(self._heap, (num_backoffs, -probability, self._num_scheduled, action))
        self._num_scheduled += 1

    def _add_node(
        self,
        parent: int,
        token: int,
        probability: float,
        path: tuple[int, ...],
        num_backoffs: int,
        context_length: int,
        followers: list[int],
    ) -> None:
        contexts = self._contexts(path, context_length, followers)
        self.nodes.append(_Node(token, parent, probability, path, contexts))
        if len(path) < self._max_depth:
            self._open_context(len(self.nodes) - 1, num_backoffs)

    def _open_context(self, node_id: int, num_backoffs: int) -> None:
        """Offer the followers of the node's next context that no longer context has offered."""
        node = self.nodes[node_id]
        length, followers = next(node.contexts, (0, []))
        if not followers:
            return
        text = self._index.text
        positions: dict[int, list[int]] = {}
        for position in followers:
            positions.setdefault(text[position], []).append(position)
        for token, found in positions.items():
            if token in node.offered:
                continue
            node.offered.add(token)
            probability = node.probability * len(found) / len(followers)
            next_followers = [position + 1 for position in found if position + 1 < len(text)]
            add = partial(
                self._add_node,
                node_id,
                token,
                probability,
                (*node.path, token),
                num_backoffs,
                length + 1,
                next_followers,
            )
            self._schedule(num_backoffs, probability, add)
        back_off = partial(self._open_context, node_id, num_backoffs + 1)
        self._schedule(num_backoffs + 1, node.probability, back_off)

    def _contexts(
        self, path: tuple[int, ...], length: int, followers: list[int]
    ) -> Iterator[tuple[int, list[int]]]:
        """The chain of contexts of a node, longest first: their lengths and their followers."""
        if followers:
            yield length, followers
        words = self._tail + path
        longest = min(length - 1, self._index.max_ngram, len(words))
        for shorter in range(longest, self._index.min_ngram - 1, -1):
            followers = self._index.followers(words[-shorter:])
            if followers:
                yield shorter, followers
