"""The forward of every family compiles as one graph, once, and gives plain greedy text."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

import acceptmoe
from acceptmoe.decoding.backend import PassBackend
from drafters import OracleDrafter
from passes import greedy, wrap_with_passes
from tiny_models import VOCAB_SIZE, is_available, make_model

# One of each family, with a sliding window where it has one.
FAMILIES = (
    "axk1",
    "deepseek_v3",
    "dots1_sliding",
    "exaone_moe",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_oss",
    "mimo_v2_flash",
    "mixtral_sliding",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
    "solar_open",
)
SIZE = 8


def prompt_of(length: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE, (1, length), generator=generator)


@pytest.mark.parametrize("name", FAMILIES)
def test_natural_text_is_greedy_and_a_pass_is_compiled_once(name: str) -> None:
    if not is_available(name):
        pytest.skip(f"this Transformers version has no {name}")
    check_family(name, "aot_eager")


def test_inductor_gives_the_same_text() -> None:
    check_family("qwen3_moe", "inductor")


def check_family(name: str, backend: str) -> None:
    model = make_model(name)
    prompts = [prompt_of(length, seed) for seed, length in enumerate((5, 17))]
    # A few tokens more than are compared: the oracle drafts beyond the end.
    futures = [greedy(model, prompt, max_new_tokens=24) for prompt in prompts]
    counter = PassBackend(backend)
    counters.clear()
    wrap_with_passes(model, (SIZE,), backend=counter, policy="natural", num_nodes=SIZE, max_depth=3)
    for prompt, future in zip(prompts, futures, strict=True):
        model.acceptmoe.drafter = OracleDrafter(future, VOCAB_SIZE)
        start = prompt.shape[1]
        # EOS inside a block, so that no block is the root alone: that would be another pass.
        new = future[start:]
        end = max(i for i, token in enumerate(new[:16]) if new.index(token) == i)
        assert greedy(model, prompt, eos_token_id=new[end]) == future[: start + end + 1]
    report = model.acceptmoe.report()
    assert report["compiled"]["num_compilations"] == 1
    assert report["compiled"]["num_compiled_passes"] == report["num_verifications"]
    assert report["compiled"]["num_uncompiled_passes"] == report["num_plain_steps"] == 0
    assert report["compiled"]["num_padded_rows"] > 0
    assert report["accepted_length"] > 1.5
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    acceptmoe.unwrap(model)
