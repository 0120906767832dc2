"""Drafts with weights of 8 bits: other drafts at most, never another lossless text."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from eagle3_fixtures import random_head, small_target

import acceptmoe
from acceptmoe.bench.chains import chain_drafter
from acceptmoe.bench.setups import load_setup
from acceptmoe.bench.workloads import TUNING_SPLIT, encode, end_token_ids, mixed_problems
from acceptmoe.drafting import AssistantDrafter, Eagle3Drafter
from acceptmoe.drafting.draft_weights import Int8Product
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
    assert isinstance(rounded.head.product, Int8Product)
    assert exact.head.product is F.linear


def test_a_weight_is_rounded_once_and_again_when_it_has_changed() -> None:
    product, weight, states = Int8Product(), torch.randn(5, 16), torch.randn(2, 16)
    first = product(states, weight)
    assert product.rounded(weight) is product.rounded(weight)
    weight.mul_(2)
    torch.testing.assert_close(product(states, weight), 2 * first)
    weight.data = weight / 2  # another place, and autograd does not count it
    torch.testing.assert_close(product(states, weight), first)


def test_a_rounded_weight_lives_no_longer_than_the_weight_nor_than_the_product() -> None:
    product, kept, dropped = Int8Product(), torch.randn(5, 16), torch.randn(5, 16)
    values = [weakref.ref(product.rounded(weight).values) for weight in (kept, dropped)]
    del dropped
    gc.collect()
    assert [each() is None for each in values] == [False, True]
    del product
    gc.collect()
    assert values[0]() is None


def test_an_assistant_drafts_with_its_weights_as_they_are_now() -> None:
    model = make_model("qwen3_moe")
    drafter = AssistantDrafter(model, weights="int8", min_reach=0.0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(torch.randn_like(parameter).sign())
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().flip(0))
    fresh = AssistantDrafter(model, weights="int8", min_reach=0.0)
    for each in (drafter, fresh):
        each.start(torch.arange(3, 9), 4, None)
    assert drafter.propose(12, 4) == fresh.propose(12, 4)


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


def test_a_dtype_without_kernels_is_refused() -> None:
    model = make_model("qwen3_moe")
    drafter = AssistantDrafter(model, weights="int8")
    model.double()
    with pytest.raises(DrafterError, match=r"would run on cpu in torch\.float64"):
        drafter.check_target(model)
    with pytest.raises(DrafterError, match=r"would run on cpu in torch\.float64"):
        AssistantDrafter(model, weights="int8")


def test_another_device_is_refused() -> None:
    model = make_model("qwen3_moe").to("meta")
    with pytest.raises(DrafterError, match=r"weights='int8' and would run on meta"):
        AssistantDrafter(model, weights="int8")
