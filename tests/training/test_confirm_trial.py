"""The confirming verifier emits plain greedy text, however wrong its constrained passes are."""

from __future__ import annotations

import copy

import pytest
import torch
from eagle3_fixtures import random_head, small_target
from test_assistant import llama
from transformers import PreTrainedModel

import acceptmoe
from acceptmoe.bench.setups import load_setup
from acceptmoe.bench.workloads import encode
from acceptmoe.drafting import AssistantDrafter, Drafter, Eagle3Drafter, NgramDrafter
from acceptmoe.errors import DrafterError
from acceptmoe.targets.tasks import problems
from confirm_decoding import ConfirmCounts, GuessedChain, chain_of, generate_confirming, is_chain
from look_ahead import LookAhead, look_ahead, num_common
from tiny_models import VOCAB_SIZE, make_model

NUM_TOKENS = 45
PROMPT = torch.randint(VOCAB_SIZE, (1, 7), generator=torch.Generator().manual_seed(5))
# The fewest experts that rows can be routed to: its passes are wrong often.


@torch.no_grad()
def perturbed(model: PreTrainedModel) -> PreTrainedModel:
    """A drafter that is right about half of the time."""
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(6)
    for weight in model.parameters():
        weight.add_(0.1 * weight.std() * torch.randn(weight.shape, generator=generator))
    return model


def plain(model: PreTrainedModel, prompt: torch.Tensor, **settings) -> list[int]:
    settings = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "pad_token_id": 0, **settings}
    output = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
    return output[0, prompt.shape[1] :].tolist()


def wrapped(model: PreTrainedModel, drafter: Drafter, **keywords) -> PreTrainedModel:
    harsh = f"moe-spec:budget={model.config.num_experts_per_tok}"
    settings = {"policy": harsh, "num_nodes": 11, "max_depth": 4, **keywords}
    return acceptmoe.wrap(model, drafter=drafter, **settings)


@pytest.mark.parametrize("name", ["qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3"])
def test_the_text_equals_plain_generate(name: str) -> None:
    model = make_model(name)
    text = plain(model, PROMPT)
    drafter = AssistantDrafter(perturbed(model), num_children=3, frontier=2)
    counts = ConfirmCounts()
    confirmed = generate_confirming(
        wrapped(model, drafter), PROMPT, counts, max_new_tokens=NUM_TOKENS
    )
    assert confirmed.token_ids == text
    # Otherwise nothing was put to the test: guesses that hold and guesses that do not.
    assert 0 < counts.num_guessed_true < counts.num_guessed
    assert counts.num_drafted > 0
    assert counts.num_tokens == NUM_TOKENS - 1  # the prefill gives the first


def test_a_bundled_target_with_its_head_emits_its_own_text() -> None:
    setup = load_setup("tiny-qwen3-moe", "eagle3")
    prompt = encode(
        setup.tokenizer, problems("algebra", "tuning", 1)[0].prompt, torch.device("cpu")
    )
    text = plain(setup.model, prompt)
    model = wrapped(setup.model, setup.drafter, policy="moe-spec:budget=10")
    counts = ConfirmCounts()
    ends = [setup.model.generation_config.eos_token_id]
    confirmed = generate_confirming(model, prompt, counts, max_new_tokens=NUM_TOKENS, end_ids=ends)
    assert confirmed.token_ids == text
    assert 0 < counts.num_guessed_true < counts.num_guessed
    assert 0 < counts.num_drafted_true < counts.num_drafted


@pytest.mark.parametrize("kind", ["assistant", "compiled assistant", "eagle3"])
def test_drafts_do_not_depend_on_what_was_looked_at_ahead(kind: str) -> None:
    target = small_target().requires_grad_(False)
    generator = torch.Generator().manual_seed(3)

    def features(count: int) -> torch.Tensor | None:
        if kind != "eagle3":
            return None
        return torch.randn(count, 60, generator=generator)

    def make() -> Drafter:
        if kind == "assistant":
            return AssistantDrafter(target, num_children=3, frontier=3)
        if kind == "compiled assistant":
            assistant = AssistantDrafter(llama(), num_children=3, frontier=3)
            assistant.use_kernels(is_wanted=False, backend="aot_eager")
            return assistant
        drafter = Eagle3Drafter(random_head(), topk=3)
        drafter.check_target(target)
        return drafter

    straight, ahead = make(), look_ahead(make())
    prompt = PROMPT[0] % 37
    start = features(len(prompt))
    for drafter in (straight, ahead):
        drafter.start(prompt, 4, start)
    for tokens in ([8], [9, 3], [5, 1, 2, 7]):
        check_same_draft(straight, ahead)
        # Looks behind two tokens: both wrong, the first true, then both.
        ahead.continuation([9, 1] if len(tokens) < 3 else [5, 1], features(2), 2)
        committed = features(len(tokens))
        straight.extend(tokens, committed)
        ahead.extend(tokens, committed)
    check_same_draft(straight, ahead)


def check_same_draft(straight: Drafter, ahead: LookAhead) -> None:
    first, second = straight.propose(9, 3), ahead.propose(9, 3)
    assert (first.tokens, first.parents) == (second.tokens, second.parents)
    # The assistant reads the same tokens in runs of other lengths, so it rounds differently.
    assert second.path_probabilities == pytest.approx(first.path_probabilities, rel=1e-4)


def test_an_end_token_in_the_middle_of_a_chain_ends_the_text() -> None:
    model = make_model("qwen3_moe")
    end = plain(model, PROMPT)[17]
    text = plain(model, PROMPT, eos_token_id=end)
    drafter = AssistantDrafter(copy.deepcopy(model), num_children=3, frontier=2)
    confirmed = generate_confirming(
        wrapped(model, drafter), PROMPT, ConfirmCounts(), max_new_tokens=NUM_TOKENS, end_ids=[end]
    )
    assert text[-1] == end
    assert confirmed.token_ids == text


def test_a_natural_first_pass_is_confirmed_entirely() -> None:
    model = make_model("qwen3_moe")
    drafter = AssistantDrafter(perturbed(model), num_children=3, frontier=2)
    counts = ConfirmCounts()
    model = wrapped(model, drafter, policy="natural")
    generate_confirming(model, PROMPT, counts, max_new_tokens=NUM_TOKENS)
    assert counts.num_guessed_true == counts.num_guessed > 0


def test_counts_tell_guesses_from_drafts() -> None:
    counts = ConfirmCounts()
    counts.count_block(GuessedChain(chain_of([5, 6, 7, 8]), num_guessed=2), num_tokens=4)
    counts.count_block(GuessedChain(chain_of([5, 6, 7, 8]), num_guessed=2), num_tokens=2)
    assert (counts.num_guessed, counts.num_guessed_true) == (4, 3)
    assert (counts.num_drafted, counts.num_drafted_true) == (2, 1)
    assert is_chain(chain_of([1, 1, 1]))


def test_only_drafters_that_can_be_taken_back_are_let_in() -> None:
    with pytest.raises(DrafterError, match="'ngram' cannot be taken back"):
        look_ahead(NgramDrafter())
    assert num_common([1, 2, 3], [1, 2]) == 2
    assert num_common([1, 2], [3]) == 0
