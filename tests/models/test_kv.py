"""Dropping slots from caches."""

import pytest
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from acceptmoe.errors import UnsupportedModelError
from acceptmoe.models.kv import compact_dynamic_cache


def filled_cache(num_slots: int) -> DynamicCache:
    cache = DynamicCache()
    for layer in range(2):
        states = torch.arange(2 * 3 * num_slots * 4.0).reshape(2, 3, num_slots, 4) + 1000 * layer
        cache.update(states, -states, layer)
    return cache


@pytest.mark.parametrize(
    ("num_prefix", "keep"),
    [(0, []), (0, [0, 3, 6]), (3, []), (3, [3]), (3, [4, 6]), (2, [2, 3, 4, 5, 6]), (7, [])],
)
def test_compaction_equals_selecting_the_kept_slots(num_prefix: int, keep: list[int]) -> None:
    cache, reference = filled_cache(7), filled_cache(7)
    compact_dynamic_cache(cache, torch.tensor(keep, dtype=torch.int64), num_prefix=num_prefix)
    slots = torch.tensor([*range(num_prefix), *keep], dtype=torch.int64)
    assert cache.get_seq_length() == len(slots)
    for layer, expected in zip(cache.layers, reference.layers, strict=True):
        assert torch.equal(layer.keys, expected.keys[:, :, slots])
        assert torch.equal(layer.values, expected.values[:, :, slots])


def test_compacted_cache_grows_again() -> None:
    cache = filled_cache(4)
    compact_dynamic_cache(cache, torch.tensor([3]), num_prefix=1)
    keys, _ = cache.update(torch.full((2, 3, 1, 4), 7.0), torch.full((2, 3, 1, 4), 8.0), 0)
    assert keys.shape[-2] == 3
    assert (keys[:, :, 2] == 7).all()


def test_empty_cache_stays_empty() -> None:
    cache = DynamicCache()
    compact_dynamic_cache(cache, torch.tensor([], dtype=torch.int64))
    assert cache.get_seq_length() == 0


def test_layers_that_hold_more_than_keys_and_values_are_refused_untouched() -> None:
    cache = filled_cache(4)
    cache.layers.append(DynamicSlidingWindowLayer(sliding_window=8))
    message = "cache layer 2 is a DynamicSlidingWindowLayer; dropping draft tokens is supported for"
    with pytest.raises(UnsupportedModelError, match=message):
        compact_dynamic_cache(cache, torch.tensor([0]))
    assert type(cache.layers[0]) is DynamicLayer
    assert cache.layers[0].keys.shape[-2] == 4
