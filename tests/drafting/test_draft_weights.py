"""Drafts with weights of 8 bits: other drafts at most, never another lossless text."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from eagle3_fixtures import random_head, small_target

import acceptmoe
from acceptmoe.bench.chains import chain_drafter
from acceptmoe.bench.setups import load_setup
from acceptmoe.bench.workloads import TUNING_SPLIT, encode, end_token_ids, mixed_problems
from acceptmoe.drafting import AssistantDrafter, Eagle3Drafter, draft_weights
from acceptmoe.drafting.draft_weights import int8_product
from acceptmoe.drafting.eagle3_checkpoint import save_head
from acceptmoe.errors import DrafterError, InvalidArgumentError
from tiny_models import make_model

BOUNDARIES = (2, 4, 5)


@pytest.mark.parametrize("drafter", ["assistant", "eagle3"])
def test_a_natural_text_stays_plain_and_is_accepted_as_fast(drafter: str) -> None:
    lengths = {}
    for weights in (None, "int8"):
        setup = load_setup("tiny-qwen3-moe", drafter, draft_weights=weights)
        problem = mixed_problems(TUNING_SPLIT, 1)[0]
        prompt = encode(setup.tokenizer, problem.prompt, setup.model.device)
        options = {
            "max_new_tokens": 48,
            "do_sample": False,
            "eos_token_id": end_token_ids(setup.model, setup.tokenizer),
            "pad_token_id": 0,
        }
        plain = setup.model.generate(prompt, **options)
        acceptmoe.wrap(setup.model, drafter=setup.drafter, policy="natural")
        assert torch.equal(setup.model.generate(prompt, **options), plain)
        lengths[weights] = setup.model.acceptmoe.report()["accepted_length"]
    assert lengths["int8"] >= 0.9 * lengths[None]


def test_chains_keep_the_precision() -> None:
    setup = load_setup("tiny-qwen3-moe", "assistant", draft_weights="int8")
    assert chain_drafter(setup.drafter).weights == "int8"


def test_a_head_multiplies_with_rounded_weights_only_in_its_own_drafter(tmp_path: Path) -> None:
    save_head(random_head(draft_vocab_size=61, boundaries=BOUNDARIES), tmp_path)
    model = small_target()
    rounded = Eagle3Drafter.from_pretrained(tmp_path, model, weights="int8")
    exact = Eagle3Drafter.from_pretrained(tmp_path, model)
    rounded.use_kernels(is_wanted=True)
    assert rounded.head.product is int8_product
    assert exact.head.product is F.linear


def test_a_weight_is_rounded_once_and_again_when_it_has_changed() -> None:
    weight, states = torch.randn(5, 16), torch.randn(2, 16)
    first = int8_product(states, weight)
    kept = draft_weights.rounded_weight(weight)
    assert draft_weights.rounded_weight(weight) is kept
    weight.mul_(2)
    torch.testing.assert_close(int8_product(states, weight), 2 * first)
    num_known = len(draft_weights._rounded_weights)
    del weight, kept
    gc.collect()
    assert len(draft_weights._rounded_weights) == num_known - 1


@pytest.mark.parametrize("weights", ["int4", 8, True])
def test_another_precision_is_refused(weights: object) -> None:
    model = make_model("qwen3_moe")
    with pytest.raises(InvalidArgumentError, match=r"weights is .*; it must be None.*'int8'"):
        AssistantDrafter(model, weights=weights)
    with pytest.raises(InvalidArgumentError, match="weights is"):
        Eagle3Drafter(random_head(boundaries=BOUNDARIES), weights=weights)


def test_a_bundled_drafter_without_weights_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="the drafter 'ngram' has no weights"):
        load_setup("tiny-qwen3-moe", "ngram", draft_weights="int8")


def test_another_device_is_refused() -> None:
    model = make_model("qwen3_moe").to("meta")
    with pytest.raises(DrafterError, match=r"weights='int8' and would run on meta"):
        AssistantDrafter(model, weights="int8")
