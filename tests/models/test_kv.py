"""Dropping slots from caches, and the caches that are made or refused."""

import pytest
import torch
from transformers import DynamicCache, GptOssConfig
from transformers.cache_utils import (
    Cache,
    DynamicSlidingWindowLayer,
    StaticLayer,
)

from acceptmoe.errors import UnsupportedGenerateError
from acceptmoe.models.kv import (
    cache_capacity,
    check_cache,
    find_cache_keyword,
    keep_path,
    make_cache,
)


def filled_cache(num_slots: int, *, is_static: bool = False) -> Cache:
    cache = Cache(layers=[StaticLayer(12), StaticLayer(12)]) if is_static else DynamicCache()
    for layer in range(2):
        states = torch.arange(2 * 3 * num_slots * 4.0).reshape(2, 3, num_slots, 4) + 1000 * layer
        cache.update(states, -states, layer)
    return cache


@pytest.mark.parametrize("is_static", [False, True])
@pytest.mark.parametrize(
    ("prefix_length", "nodes"),
    [(0, []), (0, [0, 3, 6]), (3, []), (3, [0]), (3, [1, 3]), (2, [0, 1, 2, 3, 4]), (7, [])],
)
def test_compaction_equals_selecting_the_kept_slots(prefix_length, nodes, is_static):
    cache, reference = filled_cache(7, is_static=is_static), filled_cache(7)
    keep_path(cache, prefix_length, nodes)
    slots = torch.tensor([*range(prefix_length), *(prefix_length + n for n in nodes)]).long()
    assert int(cache.get_seq_length()) == len(slots)
    for layer, expected in zip(cache.layers, reference.layers, strict=True):
        assert torch.equal(layer.keys[:, :, : len(slots)], expected.keys[:, :, slots])
        assert torch.equal(layer.values[:, :, : len(slots)], expected.values[:, :, slots])


@pytest.mark.parametrize("is_static", [False, True])
def test_a_compacted_cache_grows_on_behind_the_kept_slots(is_static):
    cache = filled_cache(4, is_static=is_static)
    keep_path(cache, 1, [2])
    keys, _ = cache.update(torch.full((2, 3, 1, 4), 7.0), torch.full((2, 3, 1, 4), 8.0), 0)
    assert int(cache.layers[0].get_seq_length()) == 3
    assert (keys[:, :, 2] == 7).all()


def test_only_layers_that_hold_keys_and_values_alone_are_accepted():
    check_cache(filled_cache(2))
    check_cache(filled_cache(2, is_static=True))
    cache = filled_cache(4)
    cache.layers.append(DynamicSlidingWindowLayer(sliding_window=8))
    with pytest.raises(UnsupportedGenerateError, match="has a DynamicSlidingWindowLayer; a draft"):
        check_cache(cache)


def test_made_caches_keep_every_token_also_of_sliding_layers():
    config = GptOssConfig(num_hidden_layers=2, sliding_window=4)
    static = make_cache("static", config, 40)
    assert cache_capacity(static) == 40
    assert [type(layer) for layer in static.layers] == [StaticLayer, StaticLayer]
    assert cache_capacity(make_cache(None, config, 40)) is None
    with pytest.raises(UnsupportedGenerateError, match="cache_implementation is 'quantized'"):
        make_cache("quantized", config, 40)


def test_the_cache_keyword_of_each_transformers_version_is_found():
    class Older:
        def forward(self, input_ids, past_key_values=None): ...

    class Newer:
        def forward(self, input_ids, cache=None): ...

    class WithoutCache:
        def forward(self, input_ids): ...

    assert find_cache_keyword(Older()) == "past_key_values"
    assert find_cache_keyword(Newer()) == "cache"
    assert find_cache_keyword(WithoutCache()) is None
