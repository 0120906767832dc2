"""Attention on repeated keys and values is folded where it should be, and only there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.sdpa_attention import repeat_kv

from acceptmoe.models.backend import PassBackend

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, NUM_SLOTS = 6, 2, 8, 11


def inputs(num_rows: int, dtype: torch.dtype) -> list[Tensor]:
    """Queries, the cache's keys and values, new ones for its last slots, and an additive mask."""
    generator = torch.Generator().manual_seed(num_rows)
    shapes = [(NUM_HEADS, num_rows), (NUM_KV_HEADS, NUM_SLOTS), (NUM_KV_HEADS, NUM_SLOTS)]
    shapes += [(NUM_KV_HEADS, 1), (NUM_KV_HEADS, 1)]
    tensors = [torch.randn(1, *s, HEAD_DIM, generator=generator).to(dtype) for s in shapes]
    is_hidden = torch.rand(1, 1, num_rows, NUM_SLOTS, generator=generator) < 0.4
    is_hidden[..., 0] = False
    return [*tensors, torch.zeros(is_hidden.shape).masked_fill(is_hidden, -1e9).to(dtype)]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **keywords: object) -> Tensor:
    groups = NUM_HEADS // NUM_KV_HEADS
    return F.scaled_dot_product_attention(
        q, repeat_kv(k, groups), repeat_kv(v, groups), attn_mask=mask, **keywords
    )


def two_layers(
    q: Tensor, k: Tensor, v: Tensor, new_k: Tensor, new_v: Tensor, mask: Tensor
) -> Tensor:
    """As models do it: the cache is written in place before it is read."""
    slot = torch.tensor([NUM_SLOTS - 1])
    k.index_copy_(2, slot, new_k)
    v.index_copy_(2, slot, new_v)
    first = attend(q, k, v, mask, scale=0.3, is_causal=False, dropout_p=0.0)
    return attend(first, k, v, mask, scale=0.2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_gives_the_same_for_every_number_of_rows(dtype: torch.dtype) -> None:
    backend = PassBackend("eager")
    compiled = backend.compile(two_layers)
    for num_rows in (5, 2, 9):
        given = inputs(num_rows, dtype)
        for tensor in (given[0], given[-1]):
            torch._dynamo.mark_dynamic(tensor, 2)
        expected = [tensor.clone() for tensor in given]
        result = compiled(*given)
        torch.testing.assert_close(result, two_layers(*expected), rtol=1e-6, atol=1e-6)
        for got, wanted in zip(given[1:3], expected[1:3], strict=True):
            assert torch.equal(got, wanted)
    assert backend.num_graphs == 1
    assert backend.num_attentions_folded == 2


def per_head_mask(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Tensor:
    return attend(q, k, v, rest[-1].expand(1, NUM_HEADS, -1, -1))


def without_a_mask(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Tensor:
    return attend(q, k, v, None)


def repeated_otherwise(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Tensor:
    groups = NUM_HEADS // NUM_KV_HEADS
    return F.scaled_dot_product_attention(
        q, k.repeat(1, groups, 1, 1), v.repeat(1, groups, 1, 1), attn_mask=rest[-1]
    )


@pytest.mark.parametrize("function", [per_head_mask, without_a_mask, repeated_otherwise])
def test_others_stay_as_they_are(function: Callable[..., Tensor]) -> None:
    backend = PassBackend("eager")
    given = inputs(4, torch.float32)
    assert torch.equal(backend.compile(function)(*given), function(*given))
    assert backend.num_attentions_folded == 0
