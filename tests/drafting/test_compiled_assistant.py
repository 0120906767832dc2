"""An assistant's compiled forward drafts what the model as it is drafts."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from test_assistant import VOCAB, build, llama
from transformers import (
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

import acceptmoe
from acceptmoe.drafting import AssistantDrafter
from acceptmoe.drafting.compiled_assistant import CompiledAssistantForward, is_compilable
from tiny_models import make_model

BACKEND = "aot_eager"  # traces as Inductor does, and compiles in no time


def compiled_drafter(model: PreTrainedModel, backend: str = BACKEND, **options) -> AssistantDrafter:
    drafter = AssistantDrafter(model, **{"min_reach": 0.0, **options})
    drafter.use_kernels(is_wanted=False, backend=backend)
    return drafter


def mistral(window: int) -> PreTrainedModel:
    config = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": window,
    }
    return build(MistralForCausalLM, MistralConfig(**config))


def assert_same_drafts(
    drafter: AssistantDrafter,
    model: PreTrainedModel,
    *,
    num_steps: int = 8,
    prompt: int = 9,
    **options,
) -> None:
    """Proposals and commitments in turn, beside the same drafter uncompiled."""
    plain = AssistantDrafter(model, **{"min_reach": 0.0, **options})
    generator = torch.Generator().manual_seed(prompt)
    text = torch.randint(0, VOCAB, (prompt,), generator=generator)
    for each in (drafter, plain):
        each.start(text, 3, None)
    for step in range(num_steps):
        found, expected = drafter.propose(12, 4), plain.propose(12, 4)
        assert found.parents == expected.parents
        assert found.tokens == expected.tokens
        torch.testing.assert_close(
            torch.tensor(found.path_probabilities), torch.tensor(expected.path_probabilities)
        )
        # Nothing, a part of a path, a whole path, another token; or a second draft first.
        deepest = max(range(found.num_nodes), key=lambda node: found.shape.depths[node])
        path = [found.tokens[node] for node in found.shape.path(deepest)[1:]]
        committed = [*path[: step % 4], int(torch.randint(0, VOCAB, (1,), generator=generator))]
        if step == 5:
            committed += [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]  # steps without a draft
        for each in (drafter, plain):
            if step % 3 == 2:
                each.propose(12, 4)
            each.extend(committed, None)


@pytest.mark.parametrize("frontier", [1, 4])
def test_drafts_are_those_of_the_uncompiled_model(frontier: int) -> None:
    model = llama()
    drafter = compiled_drafter(model, frontier=frontier)
    assert_same_drafts(drafter, model, frontier=frontier)
    assert isinstance(drafter._forward, CompiledAssistantForward)
    assert drafter._forward.backend.num_graphs == 1


@pytest.mark.parametrize("window", [3, 6])
def test_sliding_windows_are_kept(window: int) -> None:
    model = mistral(window)
    assert_same_drafts(compiled_drafter(model), model)


def test_a_text_that_outgrows_its_cache_goes_on_in_a_larger_one() -> None:
    model = llama(max_position_embeddings=1024)
    drafter = compiled_drafter(model)
    assert_same_drafts(drafter, model, prompt=175, num_steps=30)
    assert sorted(drafter._forward._compiled) == [256, 512]
    assert_same_drafts(drafter, model, prompt=20)
    assert drafter._forward.backend.num_graphs == 2  # nothing compiled anew for the second text


def test_weights_changed_in_place_count_and_moved_ones_compile_anew() -> None:
    model = llama()
    drafter = compiled_drafter(model)
    assert_same_drafts(drafter, model)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(-1)
    assert_same_drafts(drafter, model)
    assert drafter._forward.backend.num_graphs == 1
    model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(
        -model.model.layers[0].mlp.up_proj.weight.detach()
    )
    assert_same_drafts(drafter, model)
    assert drafter._forward.backend.num_graphs == 2


def test_rounded_weights_compile_too() -> None:
    model = llama()
    assert_same_drafts(compiled_drafter(model, weights="int8"), model, weights="int8")


def test_a_copy_drafts_for_itself() -> None:
    model = llama()
    drafter = compiled_drafter(model)
    assert_same_drafts(drafter, model)
    copied = copy.deepcopy(drafter)
    assert_same_drafts(copied, model)
    assert_same_drafts(drafter, model)


@pytest.mark.parametrize("weights", [None, "int8"])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_copy_made_in_the_middle_of_a_text_goes_on_with_it(
    weights: str | None, is_compiled: bool
) -> None:
    drafter = AssistantDrafter(llama(), min_reach=0.0, weights=weights)
    drafter.use_kernels(is_wanted=False, backend=BACKEND if is_compiled else None)
    drafter.start(torch.arange(9), 3, None)
    committed = drafter.propose(12, 4).tokens[1]
    drafter.extend([committed, 5], None)
    copied, unpickled = copy.deepcopy(drafter), pickle.loads(pickle.dumps(drafter))
    tokens = drafter.propose(12, 4).tokens
    assert copied.propose(12, 4).tokens == tokens
    assert unpickled.propose(12, 4).tokens == tokens


def test_what_cannot_be_traced_drafts_uncompiled_and_says_so() -> None:
    model = llama()

    class Branching(LlamaForCausalLM):
        def forward(self, input_ids=None, cache=None, position_ids=None, **keywords):
            keywords |= {"cache": cache, "position_ids": position_ids}
            output = super().forward(input_ids, **keywords)
            if output.logits.sum() > 1e9:  # a value that only the run knows
                return None
            return output

    model.__class__ = Branching
    drafter = compiled_drafter(model)
    drafter.start(torch.arange(5), 3, None)
    with pytest.warns(UserWarning, match="Branching cannot be compiled as one graph"):
        drafter.propose(8, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_drafts(drafter, model, prompt=6)


def test_sparse_assistants_stay_uncompiled() -> None:
    assert not is_compilable(make_model("qwen3_moe"))
    assert not is_compilable(make_model("gpt_oss"))
    assert is_compilable(llama())


def test_a_compiled_wrap_compiles_its_assistant_and_keeps_the_text() -> None:
    target = make_model("qwen3_moe")
    target.set_experts_implementation("grouped_mm")
    assistant = llama(vocab_size=target.config.vocab_size)
    ids = torch.randint(3, target.config.vocab_size, (1, 7))
    plain = target.generate(ids, max_new_tokens=24, do_sample=False)
    drafter = AssistantDrafter(assistant, min_reach=0.0)
    acceptmoe.wrap(target, drafter=drafter, policy="natural", num_nodes=8, compile=BACKEND)
    assert torch.equal(target.generate(ids, max_new_tokens=24, do_sample=False), plain)
    assert isinstance(drafter._forward, CompiledAssistantForward)
    assert target.acceptmoe.report()["compiled"]["num_draft_compilations"] == 1
    acceptmoe.unwrap(target)
    acceptmoe.wrap(target, drafter=drafter, policy="natural", num_nodes=8)
    assert torch.equal(target.generate(ids, max_new_tokens=24, do_sample=False), plain)
    assert not isinstance(drafter._forward, CompiledAssistantForward)
