"""A model with weights of 8 bits, beside the model as it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from acceptmoe.errors import InvalidArgumentError
from acceptmoe.models.rounded import Int8Linear, round_again, rounded_copy
from tiny_models import make_model


@torch.no_grad()
def test_the_copy_multiplies_with_rounded_weights_and_the_model_stays() -> None:
    model = make_model("qwen3_moe")
    ids = torch.randint(0, model.config.vocab_size, (1, 12))
    before = model(ids).logits
    copied = rounded_copy(model)
    rounded = copied(ids).logits
    assert torch.equal(model(ids).logits, before)
    assert not any(isinstance(module, Int8Linear) for module in model.modules())
    assert not torch.equal(rounded, before)
    # Close, on a random model whose routers may pick other experts: the likeliest tokens are alike.
    same = (rounded.argmax(-1) == before.argmax(-1)).float().mean()
    assert same > 0.7


def test_all_but_the_rounded_weights_is_shared() -> None:
    model = make_model("qwen3_moe")
    copied = rounded_copy(model)
    known = {tensor.data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    new = [t for t in [*copied.parameters(), *copied.buffers()] if t.data_ptr() not in known]
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    assert len(new) == 2 * len(linears)  # values and scales
    assert {tensor.dtype for tensor in new} == {torch.uint8, torch.float32}
    assert copied.config is model.config
    assert copied.get_output_embeddings().weight is model.get_output_embeddings().weight


def test_biases_are_kept() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))
    nn.init.constant_(model[2].bias, 5.0)
    states = torch.randn(4, 8)
    torch.testing.assert_close(rounded_copy(model)(states), model(states), atol=0.05, rtol=0.05)


def test_a_model_without_linear_layers_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"Sequential has no torch\.nn\.Linear layer"):
        rounded_copy(nn.Sequential(nn.GELU()))


def test_a_replaced_forward_is_refused() -> None:
    # A copy of such a module would run the original, unrounded, and nobody would notice.
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    model[1].forward = model[1].forward
    with pytest.raises(InvalidArgumentError, match=r"the forward of 1 \(Sequential\) was replaced"):
        rounded_copy(model)


class Counting(nn.Module):
    """Replaces a buffer in its forward, as rotary embeddings that scale with the text do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        self.register_buffer("count", self.count + 1)
        return states


def test_buffers_that_a_forward_replaces_are_replaced_in_the_copy_alone() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Counting())
    copied = rounded_copy(model)
    copied(torch.ones(1, 8))
    assert (float(model[1].count), float(copied[1].count)) == (0, 1)


def test_changed_and_replaced_weights_are_rounded_again() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
    copied, states = rounded_copy(model), torch.ones(1, 8)
    values = copied[0].values
    nn.init.normal_(model[1].weight)
    model[1].bias = nn.Parameter(torch.ones(3))
    round_again(copied)
    assert torch.equal(copied(states), rounded_copy(model)(states))
    assert copied[0].values is values  # as it was
    model[1].weight = nn.Parameter(torch.randn(5, 8))
    model[1].bias = None
    round_again(copied)
    assert torch.equal(copied(states), rounded_copy(model)(states))
