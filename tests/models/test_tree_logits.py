"""One pass over a tree gives every path the logits that it has by itself, in every family."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from acceptmoe.decoding.verify import Prefix, Verifier
from acceptmoe.models.adapter import MoEAdapter
from acceptmoe.models.features import FeatureTap
from acceptmoe.models.kv import keep_path, make_cache
from acceptmoe.models.patching import RoutingPatch
from acceptmoe.policies import NaturalPolicy
from acceptmoe.tree import DraftTree, TreeShape
from tiny_models import CONFIGS, VOCAB_SIZE, is_available, make_model

# fp32 sums in another order (attention over another number of slots, experts over other rows);
# logits here are of order 1 and the largest difference seen is below 1e-5.
TOLERANCE = 2e-5
EAGER_ONLY = ("gpt_oss", "mimo_v2_flash")
NUM_PROMPT = 20  # beyond every sliding window
# Siblings in one slot order, a chain, and leaves at depths 2 to 5.
SHAPE = TreeShape((-1, 0, 0, 0, 1, 1, 2, 3, 4, 6, 6, 9, 11))

CASES = [
    (name, attention, cache, {})
    for name in CONFIGS
    for attention in (("eager",) if name in EAGER_ONLY else ("sdpa", "eager"))
    for cache in ("dynamic", "static")
] + [
    # A window that ends inside the tree: a node's own ancestors leave it, by position, not by slot.
    (name, "eager", "dynamic", {"sliding_window": 3})
    for name in ("mixtral_sliding", "gpt_oss", "dots1_sliding")
]


def random_tree(generator: torch.Generator) -> DraftTree:
    tokens = torch.randperm(VOCAB_SIZE, generator=generator)[: SHAPE.num_nodes].tolist()
    probabilities = tuple(0.5**depth for depth in SHAPE.depths)
    return DraftTree(tuple(tokens), SHAPE.parents, probabilities)


def make_verifier(model: PreTrainedModel) -> tuple[Verifier, RoutingPatch]:
    adapter = MoEAdapter(model)
    patch = RoutingPatch(adapter, NaturalPolicy())
    return Verifier(model, adapter, patch, FeatureTap(model, ()), None), patch


def prefill(model: PreTrainedModel, prompt: Tensor, cache: Cache, mask: Tensor | None) -> None:
    keyword = MoEAdapter(model).cache_keyword
    positions = None if mask is None else (mask.cumsum(-1) - 1).clamp_min(0)
    model(prompt, attention_mask=mask, position_ids=positions, use_cache=True, **{keyword: cache})


@pytest.mark.parametrize(("name", "attention", "cache_kind", "changes"), CASES)
@torch.no_grad()
def test_every_path_has_its_sequential_logits(
    name: str, attention: str, cache_kind: str, changes: dict[str, int]
) -> None:
    if not is_available(name):
        pytest.skip(f"this Transformers version has no {name}")
    model = make_model(name, attention=attention, **changes)
    generator = torch.Generator().manual_seed(3)
    prompt = torch.randint(VOCAB_SIZE, (1, NUM_PROMPT), generator=generator)
    tree = random_tree(generator)
    # An odd number of slots to spare: nothing may depend on the cache being full.
    cache = make_cache(cache_kind, model.config, NUM_PROMPT + SHAPE.num_nodes + 7)
    verifier, patch = make_verifier(model)
    patch.attach()
    prefill(model, prompt, cache, None)
    prefix = Prefix(torch.ones(NUM_PROMPT, dtype=torch.bool), NUM_PROMPT)
    block = verifier.verify(tree, cache, prefix)

    for leaf in SHAPE.leaves:
        nodes = list(SHAPE.path(leaf))
        text = torch.cat([prompt, torch.tensor([[tree.tokens[n] for n in nodes]])], dim=-1)
        alone = model(text).logits[0, NUM_PROMPT:]
        torch.testing.assert_close(block.logits[nodes], alone, rtol=0, atol=TOLERANCE)

    accepted = SHAPE.path(SHAPE.leaves[-1])[:-1]  # not in place, and its leaf is rejected
    keep_path(cache, NUM_PROMPT, accepted)
    next_token = 5
    text = [*prompt[0].tolist(), *(tree.tokens[n] for n in accepted), next_token]
    after = verifier.verify(DraftTree.root_only(next_token), cache, prefix.extended(len(accepted)))
    alone = model(torch.tensor([text])).logits[0, -1:]
    torch.testing.assert_close(after.logits, alone, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral_sliding", "gpt_oss", "deepseek_v3"])
@torch.no_grad()
def test_padding_in_the_prefix_changes_nothing(name: str) -> None:
    model = make_model(name)
    generator = torch.Generator().manual_seed(4)
    prompt = torch.randint(VOCAB_SIZE, (1, NUM_PROMPT), generator=generator)
    num_padding = 3
    padded = torch.nn.functional.pad(prompt, (num_padding, 0), value=9)
    mask = torch.ones_like(padded)
    mask[:, :num_padding] = 0
    tree = random_tree(generator)
    cache = make_cache(None, model.config, 0)
    verifier, _ = make_verifier(model)
    prefill(model, padded, cache, mask)
    block = verifier.verify(tree, cache, Prefix(mask[0].bool(), NUM_PROMPT))
    nodes = list(SHAPE.path(SHAPE.leaves[-1]))
    text = torch.cat([prompt, torch.tensor([[tree.tokens[n] for n in nodes]])], dim=-1)
    alone = model(text).logits[0, NUM_PROMPT:]
    torch.testing.assert_close(block.logits[nodes], alone, rtol=0, atol=TOLERANCE)


@torch.no_grad()
def test_a_window_in_a_configuration_that_the_decoder_ignores_is_ignored() -> None:
    # OLMoE's decoder makes a full mask whatever its configuration says.
    model = make_model("olmoe")
    model.config.sliding_window = 3
    shape, is_valid = TreeShape.chain(2), torch.ones(11, dtype=torch.bool)
    masks = MoEAdapter(model).tree_masks(
        shape.ancestry, torch.tensor(shape.depths), torch.tensor(9), is_valid, torch.float32
    )
    assert masks[0, 0, 1].tolist() == [0.0] * 11
