"""One drafter object under several wrapped models: each gets the drafts that it gets alone."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from eagle3_fixtures import PLAIN
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

import acceptmoe
from acceptmoe.calibrate import calibrate
from acceptmoe.drafting import AssistantDrafter, Drafter, Eagle3Drafter, NgramDrafter
from acceptmoe.drafting.eagle3_head import Eagle3Head
from acceptmoe.errors import WrapStateError
from acceptmoe.models.dense import own_product
from tiny_models import VOCAB_SIZE, make_model

NUM_TOKENS = 24
PROMPT = torch.randint(VOCAB_SIZE, (1, 8), generator=torch.Generator().manual_seed(2))


def generate(model: PreTrainedModel, **keywords) -> list[int]:
    output = model.generate(
        PROMPT,
        attention_mask=torch.ones_like(PROMPT),
        do_sample=False,
        pad_token_id=0,
        max_new_tokens=NUM_TOKENS,
        **keywords,
    )
    return output[0, PROMPT.shape[1] :].tolist()


def eagle3() -> Drafter:
    """A random head without weights for tokens of its own: it reads those of its target."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB_SIZE, "draft_vocab_size": VOCAB_SIZE, "owns_lm_head": False}
    config = dataclasses.replace(
        PLAIN, **sizes, hidden_size=48, target_hidden_size=48, boundaries=(0, 1, 2)
    )
    head = Eagle3Head(config)
    for weight in head.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.3)
    return Eagle3Drafter(head, topk=3)


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "eagle3": eagle3,
    "assistant": lambda: AssistantDrafter(make_model("olmoe"), num_children=3, frontier=2),
    "ngram": NgramDrafter,
}


def wrap(seed: int, drafter: Drafter, **keywords) -> PreTrainedModel:
    model = make_model("qwen3_moe", seed=seed).to(keywords.pop("dtype", torch.float32))
    return acceptmoe.wrap(
        model, policy="natural", drafter=drafter, num_nodes=6, max_depth=3, **keywords
    )


def trees_of(model: PreTrainedModel) -> list:
    """What the model verifies from here on."""
    trees: list = []
    model.acceptmoe.observers.append(lambda tree, _: trees.append(tree))
    return trees


@pytest.mark.parametrize("name", DRAFTERS)
def test_models_that_take_turns_get_the_drafts_that_they_get_alone(name: str) -> None:
    alone = []
    for seed in (0, 1):
        model = wrap(seed, DRAFTERS[name]())
        trees = trees_of(model)
        alone.append((generate(model), trees))
    drafter = DRAFTERS[name]()
    models = [wrap(seed, drafter) for seed in (0, 1)]
    for seed in (0, 1, 0):
        trees = trees_of(models[seed])
        assert (generate(models[seed]), trees) == alone[seed]


@pytest.mark.parametrize("name", DRAFTERS)
def test_threads_get_the_drafts_that_they_get_alone(name: str) -> None:
    drafter = DRAFTERS[name]()
    models = [wrap(seed, drafter) for seed in (0, 1)]
    trees = [trees_of(model) for model in models]
    alone = [(generate(model), list(drafts)) for model, drafts in zip(models, trees, strict=True)]
    found: dict[int, list] = {0: [], 1: []}

    def work(number: int) -> None:
        for _ in range(2):
            trees[number].clear()
            found[number].append((generate(models[number]), list(trees[number])))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # seconds; the threads take turns in the middle of everything
    try:
        threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert found == {number: [alone[number]] * 2 for number in (0, 1)}


def test_a_head_uses_our_kernels_for_the_model_that_asked_for_them(monkeypatch) -> None:
    monkeypatch.setattr("acceptmoe.drafting.eagle3.is_faster_than_stock", lambda weight: True)
    drafter = eagle3()
    models = {
        experts: wrap(0, drafter, experts=experts, dtype=torch.bfloat16)
        for experts in ("acceptmoe", None)
    }
    for experts in ("acceptmoe", None, "acceptmoe"):
        generate(models[experts])
        assert (drafter.head.product is own_product) == (experts is not None)


def test_a_head_follows_the_dtype_of_the_model_that_it_drafts_for() -> None:
    drafter = eagle3()
    models = [wrap(0, drafter, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    for model in (*models, models[0]):
        assert len(generate(model)) == NUM_TOKENS


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("generate", lambda other, drafter: generate(other)),
        ("wrap", lambda other, drafter: wrap(2, drafter)),
        (
            "calibrate",
            lambda other, drafter: calibrate(
                make_model("olmoe"), drafter, [PROMPT[0, :4], PROMPT[0, 4:]]
            ),
        ),
    ],
)
def test_another_text_in_the_middle_of_one_is_refused(name: str, call: Callable) -> None:
    drafter = NgramDrafter()
    model, other = wrap(0, drafter), wrap(1, drafter)
    text = generate(model)

    class CallsBack(BaseStreamer):
        def put(self, value: Tensor) -> None:
            call(other, drafter)

        def end(self) -> None:
            pass

    refusal = f"{name} was called from inside a running generate of another model with the same dr"
    with pytest.raises(WrapStateError, match=refusal):
        generate(model, streamer=CallsBack())
    assert generate(model) == text


def test_a_text_of_a_model_with_its_own_drafter_is_let_in() -> None:
    model, other = wrap(0, NgramDrafter()), wrap(1, NgramDrafter())
    texts, found = [generate(model), generate(other)], []

    class CallsBack(BaseStreamer):
        def put(self, value: Tensor) -> None:
            if not found:
                found.append(generate(other))

        def end(self) -> None:
            pass

    assert generate(model, streamer=CallsBack()) == texts[0]
    assert found == texts[1:]
