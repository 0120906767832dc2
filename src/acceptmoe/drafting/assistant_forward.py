"""The forwards of an assistant: over committed tokens, and over one level of a draft tree.

Axes: F rows of one level, V vocabulary, C cache slots, S slots that drafted rows take behind the
committed ones. Row r of a draft, the root being row 0, lies r slots behind the root.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer

from acceptmoe.models.dense import LinearsMode
from acceptmoe.models.kv import find_cache_keyword, keep_path

FULL, SLIDING = "full_attention", "sliding_attention"  # layer types, as configs name them

Masks = Tensor | dict[str, Tensor]
"""What the model's forward takes: one mask [1, 1, F, C], or one for each of its layer types."""


class AssistantForward:
    """Calls the model, with the keywords of its version and the masks of its attention layers.

    Keys and values lie in a cache of its own, which grows.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        parameters = inspect.signature(type(model).forward).parameters
        self.model = model
        self.linears: LinearsMode = nullcontext
        self.cache_keyword = find_cache_keyword(model) or "past_key_values"
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self._window = attention_window(model)
        self._layer_types = layer_types(model)
        # Embeddings that accelerate keeps off the device are fetched by its hooks, from any device.
        device = model.get_input_embeddings().weight.device
        self.device = torch.device("cpu") if device.type == "meta" else device
        self.forget()

    def forget(self) -> None:
        """Begin anew, with an empty cache."""
        # Without a config every layer keeps all tokens, also where the model's attention has a
        # window: a sliding layer would let rejected drafts push context out.
        self.cache = DynamicCache()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "cache": DynamicCache()}  # a copy begins with nothing cached

    def keep(self, num_cached: int, rows: Sequence[int]) -> None:
        """Keep the first `num_cached` slots and behind them those of `rows`, ascending."""
        # Rows took their slots in order, the root's first, right behind the committed text.
        keep_path(self.cache, num_cached, rows)

    def drop_drafted(self, num_cached: int) -> None:
        """Keep the first `num_cached` slots alone, whatever was drafted or cut short since."""
        if self.cache.get_seq_length() != num_cached:
            keep_path(self.cache, num_cached, ())

    def read(self, tokens: list[int], num_cached: int) -> Tensor:
        """[1, V] fp32: the logits after a chain of committed tokens that follow the cached ones."""
        token_ids = torch.tensor([tokens], device=self.device)
        positions = torch.arange(num_cached, num_cached + len(tokens), device=self.device)
        # The model's own masks are right for a chain, and cheap for a long prompt.
        return self._logits(token_ids, positions[None], None, **self._last_only)[-1:]

    def expand(
        self, tokens: Tensor, sees: Tensor, num_committed: int, level_starts: list[int]
    ) -> Tensor:
        """[F, V] fp32: the logits after the rows of one level, `tokens` [F].

        `sees` [F, S] bool says which drafted rows, from row 1 on, are ancestors of a row or itself;
        `level_starts` is the first row of every depth down to this one. The root lies in the last
        of `num_committed` slots.
        """
        masks = self.level_masks(sees, num_committed, level_starts, num_committed + sees.shape[1])
        position = num_committed + len(level_starts) - 2
        positions = torch.full((1, len(tokens)), position, device=self.device)
        return self._logits(tokens[None], positions, masks)

    def level_masks(
        self, sees: Tensor, num_committed: int, level_starts: list[int], num_slots: int
    ) -> Masks:
        """The masks of a level over `num_slots` slots; see `expand`."""
        root = num_committed - 1
        allowed = torch.zeros(len(sees), num_slots, dtype=torch.bool, device=sees.device)
        allowed[:, :num_committed] = True
        allowed[:, num_committed : num_committed + sees.shape[1]] = sees
        if self._window is None:
            return self.as_masks(allowed, allowed)
        # The window counts positions: a level is one position but as many slots as rows.
        first_visible = max(0, root + len(level_starts) - self._window)
        if first_visible > root:
            first_visible = root + level_starts[first_visible - root]
        windowed = allowed.clone()
        windowed[:, :first_visible] = False
        return self.as_masks(allowed, windowed)

    def chain_masks(self, num_rows: int, num_cached: int, num_slots: int) -> Masks:
        """The masks of `num_rows` committed tokens behind `num_cached` slots."""
        slots = torch.arange(num_slots, device=self.device)
        positions = torch.arange(num_cached, num_cached + num_rows, device=self.device)[:, None]
        allowed = slots <= positions
        windowed = allowed if self._window is None else allowed & (slots > positions - self._window)
        return self.as_masks(allowed, windowed)

    def as_masks(self, allowed: Tensor, windowed: Tensor) -> Masks:
        """The additive masks for [F, C] bool, of full and of sliding layers."""
        dtype = self.model.dtype
        lowest = torch.finfo(dtype).min

        def additive(allowed: Tensor) -> Tensor:
            mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
            return mask.masked_fill_(~allowed, lowest)[None, None]

        if len(self._layer_types) > 1:
            of_type = {FULL: allowed, SLIDING: windowed}
            return {layer_type: additive(of_type[layer_type]) for layer_type in self._layer_types}
        return additive(allowed if self._window is None else windowed)

    def _logits(
        self, token_ids: Tensor, positions: Tensor, masks: Masks | None, **keywords: Any
    ) -> Tensor:
        with self.linears():
            output = self.model(
                input_ids=token_ids,
                attention_mask=masks,
                position_ids=positions,
                use_cache=True,
                **{self.cache_keyword: self.cache},
                **keywords,
            )
        logits: Tensor = output.logits[0]
        return logits.to(self.device, torch.float32)


def layer_types(model: PreTrainedModel) -> set[str]:
    """The kinds of attention that the config names; empty when it leaves them to the window."""
    config = text_config(model)
    types = getattr(config, "layer_types", None)
    if types is None and getattr(config, "attention_chunk_size", None) is not None:
        types = ["chunked_attention"]
    return set(types or ())


def attention_window(model: PreTrainedModel) -> int | None:
    """The window of the sliding layers in tokens, None without such layers."""
    for layer in DynamicCache(config=model.config).layers:
        if type(layer) is DynamicSlidingWindowLayer:
            return int(layer.sliding_window)
    return None


def text_config(model: PreTrainedModel) -> Any:
    """The part of the config that describes the decoder."""
    return model.config.get_text_config(decoder=True)
