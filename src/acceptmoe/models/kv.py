"""Key-value caches that hold a draft tree: made with room for it, compacted to one path."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, StaticLayer

from acceptmoe.errors import UnsupportedGenerateError
from acceptmoe.models.block_cache import BlockCache

# Exact types only: a subclass may keep more per token (indexer keys) or move what lies in a slot.
COMPACTABLE_LAYERS = (DynamicLayer, StaticLayer)
CACHE_IMPLEMENTATIONS = (None, "dynamic", "static")


def find_cache_keyword(model: PreTrainedModel) -> str | None:
    """The name under which the model's forward takes its cache, or None; it differs by version."""
    parameters = inspect.signature(type(model).forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in parameters), None)


def make_cache(implementation: str | None, config: PretrainedConfig, num_slots: int) -> Cache:
    """A cache in which every layer keeps every token, also those with a sliding window.

    A sliding layer drops what left its window as soon as it is written; draft nodes that are
    rejected later would have pushed out context for good. The window is in the tree mask instead.
    """
    if implementation not in CACHE_IMPLEMENTATIONS:
        raise UnsupportedGenerateError(
            f"cache_implementation is {implementation!r}; a draft tree can be compacted in "
            "'dynamic' (the default) and 'static' caches only"
        )
    if implementation == "static":
        num_layers = config.get_text_config(decoder=True).num_hidden_layers
        return Cache(layers=[StaticLayer(max_cache_len=num_slots) for _ in range(num_layers)])
    return DynamicCache()


def check_cache(cache: Cache) -> None:
    """Raise `UnsupportedGenerateError` unless every layer can be compacted."""
    for layer in cache.layers:
        if type(layer) not in COMPACTABLE_LAYERS:
            raise UnsupportedGenerateError(
                f"the cache has a {type(layer).__name__}; a draft tree can be compacted in "
                f"{' and '.join(kind.__name__ for kind in COMPACTABLE_LAYERS)} only. Pass "
                "DynamicCache() without a config, or no cache"
            )


def cache_capacity(cache: Cache) -> int | None:
    """Slots of a static cache; None where the cache grows."""
    if isinstance(cache, BlockCache):
        return cache.num_slots
    sizes = [layer.max_cache_len for layer in cache.layers if type(layer) is StaticLayer]
    return min(sizes) if sizes else None


def num_cached_tokens(cache: Cache) -> int:
    """Tokens in the cache, read to the host at once: a static cache returns its live counter."""
    return int(cache.get_seq_length())


def keep_path(cache: Cache, prefix_length: int, nodes: Sequence[int]) -> None:
    """Keep the first `prefix_length` slots and the tree's `nodes`, in that order; drop the rest.

    `nodes` are node ids of one path (ascending); node t lies in slot `prefix_length + t`.
    """
    if isinstance(cache, BlockCache):
        cache.keep(prefix_length, nodes)
        return
    kept = prefix_length + len(nodes)
    is_in_place = tuple(nodes) == tuple(range(len(nodes)))
    for layer in cache.layers:
        if not layer.is_initialized:
            continue  # one more than the model has layers
        if not is_in_place:
            source = torch.tensor(nodes, device=layer.keys.device) + prefix_length
            for states in (layer.keys, layer.values):
                states[:, :, prefix_length:kept] = states.index_select(2, source)
        if type(layer) is StaticLayer:
            layer.cumulative_length.fill_(kept)  # in place: its address may be captured
        else:
            layer.keys = _narrow(layer.keys, kept)
            layer.values = _narrow(layer.values, kept)


@contextmanager
def rolled_back_on_error(cache: Cache, prefix_length: int) -> Iterator[None]:
    """Drop what was appended behind the first `prefix_length` slots when the body raises.

    The cache may be the caller's own; it must not keep the rows of a tree that was never accepted.
    """
    try:
        yield
    except BaseException:  # KeyboardInterrupt too
        keep_path(cache, prefix_length, ())
        raise


def _narrow(states: Tensor, length: int) -> Tensor:
    return states if states.shape[2] == length else states[:, :, :length]
