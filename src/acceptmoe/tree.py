"""Draft trees: their shape, their tokens, the attention mask that verifies them in one pass.

Axes: T nodes of the tree (the root included), P tokens already in the cache, C cache slots.
Node 0 is the root, the last committed token; depth counts edges, so the root has depth 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from acceptmoe.errors import TreeError

MAX_NODES = 4096  # far above any useful tree; an absurd number is a caller's slip
ROOT_PARENT = -1


@dataclass(frozen=True)
class TreeShape:
    """The parent of every node of a tree, parents before children; hashable.

    `parents[0]` is -1 (the root) and `0 <= parents[t] < t` for every other node.

    >>> TreeShape((-1, 0, 0, 1)).depths
    (0, 1, 1, 2)
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "parents", tuple(int(parent) for parent in self.parents))
        if not 1 <= len(self.parents) <= MAX_NODES:
            raise TreeError(
                f"the tree has {len(self.parents)} nodes; it must have 1 to {MAX_NODES}, "
                "the root included"
            )
        if self.parents[0] != ROOT_PARENT:
            raise TreeError(
                f"parents[0] is {self.parents[0]}; node 0 is the root and its parent must be -1"
            )
        for node, parent in enumerate(self.parents[1:], start=1):
            if not 0 <= parent < node:
                raise TreeError(
                    f"parents[{node}] is {parent}; it must be a node before it "
                    f"(0 to {node - 1}), so that there is one root and no cycle"
                )

    @classmethod
    def chain(cls, num_nodes: int) -> TreeShape:
        """A tree without branches: the root and `num_nodes - 1` descendants in a row."""
        return cls(tuple(range(-1, num_nodes - 1)))

    @property
    def num_nodes(self) -> int:
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Edges between the root and each node."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def max_depth(self) -> int:
        return max(self.depths)

    def path(self, node: int) -> tuple[int, ...]:
        """Node ids from the root to `node`, both included."""
        reverse = [node]
        while reverse[-1] != 0:
            reverse.append(self.parents[reverse[-1]])
        return tuple(reversed(reverse))

    @cached_property
    def leaves(self) -> tuple[int, ...]:
        """Nodes without children, in node order."""
        inner = set(self.parents)
        return tuple(node for node in range(self.num_nodes) if node not in inner)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children of each node, in node order."""
        lists: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], start=1):
            lists[parent].append(node)
        return tuple(tuple(nodes) for nodes in lists)

    @cached_property
    def ancestry(self) -> Tensor:
        """[T, T] bool on the CPU: `ancestry[t, s]` says that s is t or an ancestor of t."""
        # In NumPy: a torch operation for every node would take longer than a small model's layer.
        ancestry = np.eye(self.num_nodes, dtype=np.bool_)
        for node, parent in enumerate(self.parents[1:], start=1):
            ancestry[node] |= ancestry[parent]
        return torch.from_numpy(ancestry)


@dataclass(frozen=True)
class DraftTree:
    """A drafter's proposal for one verification block.

    `tokens[0]` is the last committed token (the root). `path_probabilities[t]` is the drafter's
    probability of the whole path from the root to t, 1 for the root; a child never has more than
    its parent.

    Raises `TreeError` when the three do not describe one tree with finite probabilities.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    path_probabilities: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", tuple(int(token) for token in self.tokens))
        object.__setattr__(self, "parents", self.shape.parents)
        probabilities = tuple(float(p) for p in self.path_probabilities)
        object.__setattr__(self, "path_probabilities", probabilities)
        if not len(self.tokens) == len(self.parents) == len(probabilities):
            raise TreeError(
                f"{len(self.tokens)} tokens, {len(self.parents)} parents and "
                f"{len(probabilities)} path probabilities; a tree has one of each for every node"
            )
        if min(self.tokens) < 0:
            raise TreeError(f"token {min(self.tokens)} in the tree; token ids are 0 or larger")
        if probabilities[0] != 1.0:
            raise TreeError(f"the root's path probability is {probabilities[0]}; it must be 1")
        for node, probability in enumerate(probabilities):
            if not 0.0 <= probability <= 1.0:
                raise TreeError(
                    f"path_probabilities[{node}] is {probability}; it must lie in [0, 1]"
                )
            # One part in a thousand covers the rounding of products taken in low precision.
            if node and probability > 1.001 * probabilities[self.parents[node]]:
                raise TreeError(
                    f"path_probabilities[{node}] is {probability}, more than its parent's "
                    f"{probabilities[self.parents[node]]}; a path cannot be likelier than its start"
                )

    @cached_property
    def shape(self) -> TreeShape:
        return TreeShape(self.parents)

    @classmethod
    def root_only(cls, token: int) -> DraftTree:
        """No proposal: the block is one ordinary decoding step."""
        return cls((token,), (ROOT_PARENT,), (1.0,))

    @property
    def num_nodes(self) -> int:
        return len(self.tokens)


def sibling_tokens_are_distinct(tree: DraftTree) -> bool:
    """Whether no node has two children with the same token (a second one could never be taken)."""
    pairs = list(zip(tree.parents[1:], tree.tokens[1:], strict=True))
    return len(set(pairs)) == len(pairs)


def tree_attention_mask(
    shape: TreeShape,
    prefix_is_valid: Tensor,
    num_slots: int,
    dtype: torch.dtype,
    *,
    window: int | None = None,
) -> Tensor:
    """Additive mask [1, 1, T, num_slots] with which one forward verifies the whole tree.

    Cache slots 0..P-1 hold the prefix, P..P+T-1 the tree's rows, the rest (a static cache's spare
    room) is masked. `prefix_is_valid` [P] bool leaves out padding. `block_attention_mask` says what
    a row sees.
    """
    device = prefix_is_valid.device
    num_nodes, num_prefix = shape.num_nodes, prefix_is_valid.shape[0]
    if num_slots < num_prefix + num_nodes:
        raise TreeError(
            f"{num_slots} cache slots cannot hold {num_prefix} tokens and a tree of {num_nodes}"
        )
    slot_is_valid = torch.ones(num_slots, dtype=torch.bool, device=device)
    slot_is_valid[:num_prefix] = prefix_is_valid
    return block_attention_mask(
        shape.ancestry.to(device),
        torch.tensor(shape.depths, device=device),
        torch.tensor(num_prefix, device=device),
        slot_is_valid,
        dtype,
        window=window,
    )


def block_attention_mask(
    ancestry: Tensor,
    depths: Tensor,
    num_prefix: Tensor,
    slot_is_valid: Tensor,
    dtype: torch.dtype,
    *,
    window: int | None = None,
) -> Tensor:
    """Additive mask [1, 1, T, C] of a block whose tree changes while its shapes do not.

    `ancestry` [T, T] bool says which rows are a row's ancestors or itself, `depths` [T] int64;
    `num_prefix` is P as a tensor of one number, so that nothing here depends on its value;
    `slot_is_valid` [C] bool leaves out padding in the prefix. A row sees the valid prefix and its
    own ancestors. The mask is additive, 0 or the dtype's minimum: eager attention would *add* a
    boolean mask.

    With `window` a row sees only keys less than `window` tokens back on its own path, where a node
    of depth d counts as token P + d: siblings lie in different slots but are the same token away.
    """
    num_rows, num_slots = ancestry.shape[0], slot_is_valid.shape[0]
    slots = torch.arange(num_slots, device=ancestry.device)
    row_of_slot = slots - num_prefix
    is_tree = (row_of_slot >= 0) & (row_of_slot < num_rows)
    row_of_slot = row_of_slot.clamp(0, num_rows - 1)
    in_prefix = slot_is_valid & (slots < num_prefix)
    is_visible = torch.where(is_tree, ancestry[:, row_of_slot], in_prefix)
    if window is not None:
        slot_order = torch.where(is_tree, num_prefix + depths[row_of_slot], slots)
        is_visible = is_visible & ((num_prefix + depths)[:, None] - slot_order < window)
    hidden = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=ancestry.device)
    return torch.where(is_visible, torch.zeros_like(hidden), hidden)[None, None]


def best_first_nodes(path_probabilities: Sequence[float], num_nodes: int) -> list[int]:
    """The `num_nodes` likeliest candidates, in their original order; the earlier one wins a tie.

    With candidates listed parents first and no child likelier than its parent, the chosen nodes
    are closed under `parent`, so they form a tree.
    """
    # Sorting is stable, in reverse too, so the first of equals stays first. Drafters have hundreds
    # of candidates at every step: with a key written in Python it took four times as long.
    candidates = range(len(path_probabilities))
    order = sorted(candidates, key=path_probabilities.__getitem__, reverse=True)
    return sorted(order[:num_nodes])
