"""Dense layers of uncompiled passes through our own op."""

from __future__ import annotations

import torch
from torch import nn

from acceptmoe.models.dense import CompiledLinears, linears_for


def make_layer(dtype: torch.dtype, *, bias: bool = True) -> tuple[nn.Linear, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Linear(24, 10, bias=bias, dtype=dtype), torch.randn(2, 3, 24).to(dtype)


@torch.no_grad()
def test_low_precision_layers_keep_their_shape_and_agree_with_the_exact_product():
    for bias in (True, False):
        layer, states = make_layer(torch.bfloat16, bias=bias)
        exact = layer.double()(states.double())
        layer.bfloat16()
        with CompiledLinears():
            own = layer(states)
        assert own.dtype == torch.bfloat16
        # One rounding of the sum to bfloat16: half a unit in the last of 8 bits.
        torch.testing.assert_close(own.double(), exact, rtol=2**-8, atol=2**-8)


@torch.no_grad()
def test_fp32_layers_and_everything_outside_stay_torch_bit_for_bit():
    layer, states = make_layer(torch.float32)
    stock = layer(states)
    with CompiledLinears():
        assert torch.equal(layer(states), stock)
    layer, states = make_layer(torch.bfloat16)
    stock = layer(states)
    with CompiledLinears():
        layer(states)
    assert torch.equal(layer(states), stock)


@torch.no_grad()
def test_views_of_weights_that_cannot_be_read_in_place_are_left_to_torch():
    layer, states = make_layer(torch.bfloat16)
    weight = layer.weight.t().contiguous().t()
    stock = nn.functional.linear(states, weight)
    with CompiledLinears():
        assert torch.equal(nn.functional.linear(states, weight), stock)


def test_the_mode_is_off_where_it_is_not_wanted_and_in_fp32():
    half, single = torch.zeros(2, 2, dtype=torch.bfloat16), torch.zeros(2, 2)
    assert linears_for(half, is_wanted=False) is not CompiledLinears
    assert linears_for(single, is_wanted=True) is not CompiledLinears
