"""With policy "natural", greedy text equals plain `generate` token for token, in every family.

Exactness is in fp32. The tests look into the verification blocks too: without drafts that are
accepted, rejected, accepted off the first branch, and cut short by EOS they would prove little.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import acceptmoe
from acceptmoe.drafting import AssistantDrafter, Drafter
from acceptmoe.tree import DraftTree
from tiny_models import VOCAB_SIZE, is_available, make_model

FAMILIES = (
    "axk1",
    "deepseek_v3",
    "dots1_sliding",
    "exaone_moe",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_oss",
    "mimo_v2_flash",
    "mixtral",
    "mixtral_sliding",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
    "solar_open",
)
NUM_PROMPTS = 20
NUM_TOKENS = 64
NUM_NODES, MAX_DEPTH = 10, 3
DRAFTERS = ("ngram", "assistant")


@dataclass(frozen=True)
class Target:
    """An unwrapped model, prompts of several lengths, and what it says to them by itself."""

    model: PreTrainedModel
    prompts: list[Tensor]
    texts: list[list[int]]  # new tokens only


@dataclass
class Blocks:
    """What a wrapped model's verification blocks did; an observer."""

    blocks: list[tuple[DraftTree, tuple[int, ...]]] = field(default_factory=list)

    def __call__(self, tree: DraftTree, nodes: tuple[int, ...]) -> None:
        self.blocks.append((tree, nodes))

    def num_rejections(self) -> int:
        """Blocks that ended at a node whose drafted children all were wrong."""
        return sum(bool(tree.shape.children[nodes[-1]]) for tree, nodes in self.blocks)

    def num_off_first_branch(self) -> int:
        """Committed nodes that are not the first child of their parent."""
        return sum(
            tree.shape.children[parent][0] != node
            for tree, nodes in self.blocks
            for parent, node in pairwise(nodes)
        )

    def indices_inside_blocks(self) -> set[int]:
        """Indices of new tokens that were drafted, accepted, and followed by more of the block."""
        inside: set[int] = set()
        index = 1  # token 0 comes from the prefill
        for _, nodes in self.blocks:
            inside |= set(range(index, index + len(nodes) - 1))
            index += len(nodes)
        return inside


def plain_generate(model: PreTrainedModel, prompts: Tensor, **keywords) -> Tensor:
    """New tokens of the greedy `generate` of `model`, wrapped or not."""
    sequences = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=False,
        pad_token_id=0,
        **{"max_new_tokens": NUM_TOKENS, **keywords},
    )
    return sequences[:, prompts.shape[1] :]


@pytest.fixture(scope="module", params=FAMILIES)
def target(request) -> Target:
    """A family's model, with prompts of four lengths.

    A prompt is a random start and the model's own continuation of it. A random model does not take
    up a random text, so only this way do its new tokens repeat what an n-gram drafter has seen.
    """
    if not is_available(request.param):
        pytest.skip(f"this Transformers version has no {request.param}")
    model = make_model(request.param)
    generator = torch.Generator().manual_seed(1)
    prompts: list[Tensor] = []
    texts: list[list[int]] = []
    for length in (1, 4, 7, 12):
        # A batch of one length has no padding, so every row is what it would be alone.
        starts = torch.randint(VOCAB_SIZE, (NUM_PROMPTS // 4, length), generator=generator)
        batch = torch.cat([starts, plain_generate(model, starts, max_new_tokens=14)], dim=-1)
        prompts += batch.split(1)
        texts += plain_generate(model, batch).tolist()
    return Target(model, prompts, texts)


def make_drafter(name: str, model: PreTrainedModel) -> str | Drafter:
    if name == "ngram":
        return name
    return AssistantDrafter(perturbed(model), num_children=3, frontier=2, min_reach=0.0)


@torch.no_grad()
def perturbed(model: PreTrainedModel, relative_noise: float = 0.1) -> PreTrainedModel:
    """A copy that mostly agrees with `model`: each weight is off by a tenth of its own spread."""
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.add_(relative_noise * parameter.std() * noise)
    return model


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_natural_policy_equals_greedy_generate(target: Target, drafter: str) -> None:
    model = acceptmoe.wrap(
        target.model,
        policy="natural",
        drafter=make_drafter(drafter, target.model),
        num_nodes=NUM_NODES,
        max_depth=MAX_DEPTH,
    )
    try:
        observers = []
        for prompt, text in zip(target.prompts, target.texts, strict=True):
            blocks = Blocks()
            model.acceptmoe.observers[:] = [blocks]
            assert plain_generate(model, prompt)[0].tolist() == text
            observers.append(blocks)
        assert model.acceptmoe.report()["accepted_length"] >= 1.5
        assert sum(blocks.num_rejections() for blocks in observers) >= 10
        assert sum(blocks.num_off_first_branch() for blocks in observers) >= 5

        num_inside_blocks = 0
        for prompt, text, blocks in zip(target.prompts, target.texts, observers, strict=True):
            end, is_inside = choose_end(text, blocks)
            found = Blocks()
            model.acceptmoe.observers[:] = [found]
            output = plain_generate(model, prompt, eos_token_id=text[end])
            assert output[0].tolist() == text[: end + 1]
            if is_inside:
                tree, nodes = found.blocks[-1]
                drafted = [tree.tokens[child] for child in tree.shape.children[nodes[-1]]]
                assert text[end] in drafted
                num_inside_blocks += 1
        # Few for the n-gram drafter: the token must come from the prompt and be new in the text.
        assert num_inside_blocks >= 2
    finally:
        acceptmoe.unwrap(model)


def choose_end(text: list[int], blocks: Blocks) -> tuple[int, bool]:
    """Where to end `text` by making that token EOS, and whether this is inside a block.

    The token must not have come before. Best is the one inside a block next to index 16.
    """
    first_occurrences = {token: index for index, token in reversed(list(enumerate(text)))}
    inside = blocks.indices_inside_blocks()
    return min(
        ((index, index in inside) for index in first_occurrences.values()),
        key=lambda end: (not end[1], abs(end[0] - 16)),
    )


def test_plain_generate_ends_where_its_text_has_eos(target: Target) -> None:
    # The reference texts with EOS above are those without, cut off; this is the proof for a few.
    for prompt, text in list(zip(target.prompts, target.texts, strict=True))[::9]:
        end = text.index(text[16])
        output = plain_generate(target.model, prompt, eos_token_id=text[end])
        assert output[0].tolist() == text[: end + 1]
