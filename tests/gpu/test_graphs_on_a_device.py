"""Verification passes captured as CUDA graphs against the same passes run as they come."""

from __future__ import annotations

import pytest
import torch

import acceptmoe
from acceptmoe.decoding.cuda_graphs import CudaGraphs
from acceptmoe.decoding.graph_shapes import load_graph_shapes
from drafters import OracleDrafter
from passes import Uncompiled, greedy, wrap_with_passes
from tiny_models import VOCAB_SIZE, is_available, make_model

pytestmark = pytest.mark.gpu
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
SIZES = tuple(shape.padded_nodes for shape in load_graph_shapes() if shape.padded_nodes > 1)


def check_replays(family: str, size: int, **keywords: object) -> None:
    """Texts by captured passes of one size are those of plain greedy decoding."""
    model = make_model(family).cuda()
    generator = torch.Generator().manual_seed(size)
    prompts = [
        torch.randint(VOCAB_SIZE, (1, length), generator=generator).cuda() for length in (5, 17)
    ]
    texts = [greedy(model, prompt, max_new_tokens=32) for prompt in prompts]
    wrap_with_passes(
        model,
        (size,),
        backend=Uncompiled(),
        graphs=CudaGraphs(model.device),
        policy="natural",
        num_nodes=size,
        max_depth=3,
        **keywords,
    )
    for prompt, text in zip(prompts, texts, strict=True):
        model.acceptmoe.drafter = OracleDrafter(text, VOCAB_SIZE)
        assert greedy(model, prompt, max_new_tokens=20) == text[: prompt.shape[1] + 20]
    report = model.acceptmoe.report()
    assert report["compiled"]["num_compiled_passes"] > 0
    assert report["compiled"]["num_compilations"] <= 2  # the blocks, and the root alone
    acceptmoe.unwrap(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_passes_of_every_family_give_greedy_text(family: str) -> None:
    if not is_available(family):
        pytest.skip(f"this Transformers version has no {family}")
    check_replays(family, 8)


@pytest.mark.parametrize("size", SIZES)
def test_replayed_passes_of_every_shape_give_greedy_text(size: int) -> None:
    check_replays("qwen3_moe", size)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_our_experts_replay_too(family: str) -> None:
    check_replays(family, 8, experts="acceptmoe")


def test_inductor_passes_replay_too() -> None:
    model = make_model("qwen3_moe").cuda()
    prompt = torch.randint(VOCAB_SIZE, (1, 9), generator=torch.Generator().manual_seed(0)).cuda()
    expected = greedy(model, prompt)
    acceptmoe.wrap(model, policy="natural", num_nodes=8, max_depth=3, compile=True)
    assert greedy(model, prompt) == expected
