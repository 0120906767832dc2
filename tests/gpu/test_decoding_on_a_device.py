"""Whole models on a device: exact where decoding is, close where the experts are ours."""

from __future__ import annotations

import pytest
import torch

import acceptmoe
from tiny_models import VOCAB_SIZE, make_model

pytestmark = pytest.mark.gpu
FAMILIES = ("qwen3_moe", "olmoe", "gpt_oss", "mixtral", "deepseek_v3")
NUM_TOKENS = 48


def prompt(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE, (1, 12), generator=generator).cuda()


def generate(model: torch.nn.Module, seed: int) -> list[int]:
    text = model.generate(prompt(seed), max_new_tokens=NUM_TOKENS, do_sample=False)
    return text[0].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_natural_text_equals_plain_generate(family: str) -> None:
    model = make_model(family).cuda()
    expected = [generate(model, seed) for seed in range(3)]
    acceptmoe.wrap(model, policy="natural", num_nodes=8, max_depth=3)
    assert [generate(model, seed) for seed in range(3)] == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_with_our_experts_are_those_of_the_model(family: str) -> None:
    model = make_model(family).cuda()
    ids = prompt(0)
    with torch.no_grad():
        expected = model(ids).logits
        acceptmoe.wrap(model, policy="natural", experts="acceptmoe")
        torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=1e-4)
        acceptmoe.unwrap(model)
        assert torch.equal(model(ids).logits, expected)
