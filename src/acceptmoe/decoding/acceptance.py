"""Which drafted tokens the target's logits accept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from acceptmoe.tree import DraftTree


@dataclass(frozen=True)
class AcceptedPath:
    """The outcome of one verification block.

    `nodes` are the committed rows: the root, then every accepted node whose successor was emitted
    too. `tokens[i]` is the token emitted after `nodes[i]`, so both have the same length; the last
    token is not in the cache yet and becomes the next root. `is_finished` says that the last token
    ended the generation, `is_cut` that the next node was drafted but not trusted.
    """

    nodes: tuple[int, ...]
    tokens: tuple[int, ...]
    is_finished: bool
    is_cut: bool = False


def accept_greedy(
    tree: DraftTree,
    next_token: Callable[[int], int],
    emit: Callable[[int], bool],
    is_trusted: Sequence[bool] | None = None,
) -> AcceptedPath:
    """Walk down from the root for as long as the target's own next token was drafted.

    `next_token(node)` is the target's choice after a node, asked for along the path only and in
    order (logits processors see the text so far). `emit(token)` passes it on and returns True when
    the generation ends with it, which may be in the middle of the tree.

    Where `is_trusted` is False for a node the walk ends before it. Its token is right, its parent's
    logits say so, and is emitted; what follows it is left to the next block, whose root it is.
    """
    children = tree.shape.children
    node, nodes, tokens = 0, [0], []
    while True:
        token = next_token(node)
        tokens.append(token)
        if emit(token):
            return AcceptedPath(tuple(nodes), tuple(tokens), is_finished=True)
        drafted = [child for child in children[node] if tree.tokens[child] == token]
        if not drafted:
            return AcceptedPath(tuple(nodes), tuple(tokens), is_finished=False)
        node = drafted[0]
        if is_trusted is not None and not is_trusted[node]:
            return AcceptedPath(tuple(nodes), tuple(tokens), is_finished=False, is_cut=True)
        nodes.append(node)
