"""`evict` and `utility`, and the guard on top: greedy text equals plain `generate` in every family.

A clock of the test's own makes them verify parts of drafts, whole drafts and no drafts in turn.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import acceptmoe
from acceptmoe.drafting import AssistantDrafter
from fake_clock import FakeClock
from tiny_models import CONFIGS, VOCAB_SIZE, is_available, make_model

NUM_TOKENS = 40
NUM_NODES, MAX_DEPTH = 10, 3
PROMPT = torch.randint(VOCAB_SIZE, (1, 6), generator=torch.Generator().manual_seed(5))


def generate(model: PreTrainedModel, prompt: Tensor = PROMPT, **keywords) -> list[int]:
    output = model.generate(
        prompt,
        attention_mask=keywords.pop("attention_mask", torch.ones_like(prompt)),
        do_sample=False,
        pad_token_id=0,
        max_new_tokens=NUM_TOKENS,
        **keywords,
    )
    return output[0, prompt.shape[1] :].tolist()


@torch.no_grad()
def perturbed(model: PreTrainedModel) -> PreTrainedModel:
    """A drafter that is right about half of the time."""
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(6)
    for weight in model.parameters():
        weight.add_(0.1 * weight.std() * torch.randn(weight.shape, generator=generator))
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_they_emit_what_plain_generate_emits(name: str) -> None:
    if not is_available(name):
        pytest.skip(f"this Transformers version has no {name}")
    model = make_model(name)
    text = generate(model)
    drafter = AssistantDrafter(perturbed(model), num_children=3, frontier=2)
    for policy, guard in (("evict", True), ("utility", False)):
        acceptmoe.wrap(
            model,
            policy=policy,
            drafter=drafter,
            num_nodes=NUM_NODES,
            max_depth=MAX_DEPTH,
            guard=guard,
        )
        sizes = set()
        model.acceptmoe.observers.append(lambda tree, _, sizes=sizes: sizes.add(tree.num_nodes))
        # Rows cost little, so that drafting pays now and then, and not always.
        FakeClock(lambda num_rows: 1.0 + 0.1 * num_rows).drive(model)
        assert generate(model) == text
        assert 1 in sizes
        assert len(sizes) >= 3
        acceptmoe.unwrap(model)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral_sliding", "gpt_oss", "deepseek_v3"])
def test_plain_steps_of_a_padded_prompt_are_exact(name: str, cache: str) -> None:
    """Root-only passes use the model's own mask, which has to know the padding."""
    model = make_model(name)
    padded = torch.nn.functional.pad(PROMPT, (3, 0), value=0)
    mask = torch.nn.functional.pad(torch.ones_like(PROMPT), (3, 0), value=0)
    text = generate(model, padded, attention_mask=mask)
    assert text == generate(model)
    acceptmoe.wrap(model, policy="natural", num_nodes=1)
    assert generate(model, padded, attention_mask=mask, cache_implementation=cache) == text
    assert model.acceptmoe.report()["num_plain_steps"] == NUM_TOKENS - 1
