"""Key-value caches: which kinds we handle, and dropping slots from them.

Axes: C cache slots, keys and values are [batch, heads, C, head size].
"""

from __future__ import annotations

from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from acceptmoe.errors import UnsupportedModelError


def compact_dynamic_cache(cache: DynamicCache, keep: Tensor, *, num_prefix: int = 0) -> None:
    """Keep slots 0..num_prefix-1 and then the slots `keep` ([n] int64, ascending); drop the rest.

    The prefix is not copied: the kept slots, all at `num_prefix` or later, move down behind it in
    place and the end is cut off. Every layer must be exactly a `DynamicLayer`, whose whole state
    is its keys and values; subclasses hold more for each token (windows, indexers, codes), so a
    cache with another layer raises `UnsupportedModelError` and stays as it was.
    """
    for number, layer in enumerate(cache.layers):
        if type(layer) is not DynamicLayer:
            raise UnsupportedModelError(
                f"cache layer {number} is a {type(layer).__name__}; dropping draft tokens is "
                "supported for DynamicLayer only; pass a plain DynamicCache()"
            )
    num_kept = num_prefix + keep.shape[0]
    for layer in cache.layers:
        for states in (layer.keys, layer.values):
            if states is not None:
                kept = states.index_select(-2, keep.to(states.device))
                states[..., num_prefix:num_kept, :] = kept
        if layer.keys is not None:
            layer.keys = layer.keys[..., :num_kept, :]
            layer.values = layer.values[..., :num_kept, :]
