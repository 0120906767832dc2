"""The verification pass: one forward of the target over all rows of a draft tree."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from acceptmoe.decoding.buffers import BlockBuffers
from acceptmoe.decoding.forward import BlockForward, BlockOutput, PassKind
from acceptmoe.models.adapter import MoEAdapter
from acceptmoe.models.block_cache import BlockCache
from acceptmoe.models.counters import RoutedLayer
from acceptmoe.models.dense import LinearsMode
from acceptmoe.models.features import FeatureTap
from acceptmoe.models.kv import cache_capacity
from acceptmoe.models.patching import RoutingPatch
from acceptmoe.selection import BlockRows
from acceptmoe.table import CommitmentTable
from acceptmoe.tree import DraftTree


class Prefix:
    """What lies in the cache: P tokens, which of them are no padding, the next token's position.

    `is_valid` [P'] bool covers the prompt, P' <= P; all later tokens are valid.
    """

    def __init__(self, is_valid: Tensor, next_position: int, length: int | None = None) -> None:
        self.is_valid = is_valid
        self.next_position = next_position
        self.length = is_valid.shape[0] if length is None else length

    def extended(self, num_tokens: int) -> Prefix:
        """The prefix after `num_tokens` more tokens."""
        return Prefix(self.is_valid, self.next_position + num_tokens, self.length + num_tokens)

    def slot_is_valid(self, num_slots: int) -> Tensor:
        """[num_slots] bool: False at the prompt's padding."""
        is_valid = self.is_valid.new_ones(num_slots)
        is_valid[: self.is_valid.shape[0]] = self.is_valid
        return is_valid


@dataclass(frozen=True)
class VerifiedBlock:
    """Logits [T, V] after each node, and features [T, F] where the drafter feeds on them.

    `rows` and `layers` are how the block was routed; a root alone has none. `is_trusted`
    [T] bool says which rows may be accepted, None that all may.
    """

    logits: Tensor
    features: Tensor | None
    rows: BlockRows | None = None
    layers: list[RoutedLayer] = field(default_factory=list)
    is_trusted: Tensor | None = None


class PassPool(Protocol):
    """Where compiled passes come from: see `CompiledPasses`."""

    def run(
        self,
        forward: BlockForward,
        kind: PassKind,
        tree: DraftTree,
        cache: BlockCache,
        prefix: Prefix,
        table: CommitmentTable | None,
    ) -> BlockOutput | None:
        """The pass over `tree`, or None where no compiled one is large enough."""


class Verifier:
    """Runs verification passes of one model under its routing patch."""

    def __init__(
        self,
        model: PreTrainedModel,
        adapter: MoEAdapter,
        patch: RoutingPatch,
        tap: FeatureTap,
        table: CommitmentTable | None,
        pool: PassPool | None = None,
        linears: LinearsMode = nullcontext,
    ) -> None:
        self._model, self._adapter, self._patch, self._table = model, adapter, patch, table
        self._tap = tap
        self._forward = BlockForward(model, adapter, patch, tap)
        self._pool = pool
        self._linears = linears
        self._buffers: dict[int, BlockBuffers] = {}  # by rows
        self._has_padding: bool | None = None  # read once, when it is first asked for

    def verify(
        self,
        tree: DraftTree,
        cache: Cache,
        prefix: Prefix,
        *,
        is_natural: bool = False,
        is_counted: bool = True,
    ) -> VerifiedBlock:
        """One forward over the tree's rows; their keys and values are appended to `cache`.

        A tree that is its root alone is an ordinary decoding step and routes naturally; with
        `is_natural` every tree does. The routing counters get it unless `is_counted` is False. In a
        `BlockCache` the pass is a compiled one, if there is one large enough.
        """
        kind = PassKind.of(tree, is_natural=is_natural)
        output = None
        if self._pool is not None and isinstance(cache, BlockCache):
            output = self._pool.run(self._forward, kind, tree, cache, prefix, self._table)
        if output is None:
            with self._linears():
                output = self._run_eagerly(kind, tree, cache, prefix)
        if is_counted and output.counts:
            self._patch.counters.add(output.counts, len(self._adapter.layers))
        return VerifiedBlock(
            output.logits[: tree.num_nodes],
            None if output.features is None else output.features[: tree.num_nodes],
            output.rows,
            output.layers,
            None if output.is_trusted is None else output.is_trusted[: tree.num_nodes],
        )

    def _run_eagerly(
        self, kind: PassKind, tree: DraftTree, cache: Cache, prefix: Prefix
    ) -> BlockOutput:
        """The pass without padding, by the model as it is."""
        num_rows = tree.num_nodes
        if kind is PassKind.STEP and not isinstance(cache, BlockCache):
            return self._plain_step(tree.tokens[0], cache, prefix)
        if num_rows not in self._buffers:
            self._buffers[num_rows] = BlockBuffers(num_rows, 0, self._model.device)
        moves = cache.take_moves(0) if isinstance(cache, BlockCache) else ((), ())
        num_slots = cache_capacity(cache) or prefix.length + num_rows
        inputs = self._buffers[num_rows].fill(
            tree, prefix.length, prefix.next_position, self._table, moves
        )
        is_valid = prefix.slot_is_valid(num_slots)
        return self._forward(inputs, cache, is_valid, kind, has_padding=False)

    def _plain_step(self, token: int, cache: Cache, prefix: Prefix) -> BlockOutput:
        """An ordinary decoding step, with the model's own mask: none at all where it needs none.

        An additive mask would make attention repeat keys and values for every query head.
        """
        if self._has_padding is None:
            self._has_padding = not bool(prefix.is_valid.all())  # what comes later is no padding
        mask = prefix.slot_is_valid(prefix.length + 1)[None] if self._has_padding else None
        device = self._model.device
        inputs = {
            "input_ids": torch.tensor([[token]], device=device),
            "attention_mask": mask,
            "position_ids": torch.tensor([[prefix.next_position]], device=device),
            self._adapter.cache_keyword: cache,
            "use_cache": True,
            "output_router_logits": False,  # its loss cannot read the mask of the whole text
        }
        with self._tap.recording():
            output = self._model(**inputs, return_dict=True)
        return BlockOutput(output.logits[0], self._tap.features)
