"""The verification pass: one forward of the target over all rows of a draft tree."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from acceptmoe.models.adapter import MoEAdapter
from acceptmoe.models.counters import RoutedLayer
from acceptmoe.models.features import FeatureTap
from acceptmoe.models.kv import cache_capacity
from acceptmoe.models.patching import RoutingPatch
from acceptmoe.selection import BlockRows
from acceptmoe.table import CommitmentTable
from acceptmoe.tree import DraftTree


@dataclass(frozen=True)
class Prefix:
    """What lies in the cache: P tokens, which of them are no padding, the next token's position."""

    is_valid: Tensor  # [P] bool
    next_position: int

    @property
    def length(self) -> int:
        return self.is_valid.shape[0]

    def extended(self, num_tokens: int) -> Prefix:
        more = self.is_valid.new_ones(num_tokens)
        return Prefix(torch.cat([self.is_valid, more]), self.next_position + num_tokens)


@dataclass(frozen=True)
class VerifiedBlock:
    """Logits [T, V] after each node, and features [T, F] where the drafter feeds on them.

    `rows` and `layers` are how the block was routed; a root alone has none.
    """

    logits: Tensor
    features: Tensor | None
    rows: BlockRows | None = None
    layers: list[RoutedLayer] = field(default_factory=list)


class Verifier:
    """Runs verification passes of one model under its routing patch."""

    def __init__(
        self,
        model: PreTrainedModel,
        adapter: MoEAdapter,
        patch: RoutingPatch,
        tap: FeatureTap,
        table: CommitmentTable | None,
    ) -> None:
        self._model, self._adapter, self._patch, self._tap = model, adapter, patch, tap
        self._table = table
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
        `is_natural` every tree does. The routing counters get it unless `is_counted` is False.
        """
        if tree.num_nodes == 1:
            return self._plain_step(tree.tokens[0], cache, prefix)
        device = self._model.device
        num_slots = cache_capacity(cache) or prefix.length + tree.num_nodes
        masks = self._adapter.tree_masks(tree.shape, prefix.is_valid, num_slots, self._model.dtype)
        depths = torch.tensor(tree.shape.depths, device=device)
        inputs = {
            "input_ids": torch.tensor([tree.tokens], device=device),
            "attention_mask": masks,
            "position_ids": (prefix.next_position + depths)[None],
            self._adapter.cache_keyword: cache,
            "use_cache": True,
            "output_router_logits": False,  # its loss cannot read a 4-D mask
        }
        rows = self._rows(tree, depths)
        routing = self._patch.verifying(rows, is_natural=is_natural, is_counted=is_counted)
        with self._tap.recording(), routing as layers:
            output = self._model(**inputs, return_dict=True)
        return VerifiedBlock(output.logits[0], self._tap.features, rows, layers)

    def _plain_step(self, token: int, cache: Cache, prefix: Prefix) -> VerifiedBlock:
        """An ordinary decoding step, with the model's own mask: none at all where it needs none.

        An additive mask would make attention repeat keys and values for every query head.
        """
        if self._has_padding is None:
            self._has_padding = not bool(prefix.is_valid.all())  # what comes later is no padding
        device = self._model.device
        inputs = {
            "input_ids": torch.tensor([[token]], device=device),
            "attention_mask": prefix.extended(1).is_valid[None] if self._has_padding else None,
            "position_ids": torch.tensor([[prefix.next_position]], device=device),
            self._adapter.cache_keyword: cache,
            "use_cache": True,
            "output_router_logits": False,  # its loss cannot read the mask of the whole text
        }
        with self._tap.recording():
            output = self._model(**inputs, return_dict=True)
        return VerifiedBlock(output.logits[0], self._tap.features)

    def _rows(self, tree: DraftTree, depths: Tensor) -> BlockRows:
        probabilities = torch.tensor(tree.path_probabilities, device=depths.device)
        is_real = torch.ones_like(depths, dtype=torch.bool)
        if self._table is None:
            return BlockRows(depths, torch.ones_like(probabilities), probabilities, is_real)
        return BlockRows(
            depths=depths,
            depth_commitment=self._table.depth_commitment(depths),
            path_commitment=self._table.path_commitment(probabilities),
            is_real=is_real,
        )
