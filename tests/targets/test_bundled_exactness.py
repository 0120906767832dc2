"""Every bundled target with every drafter: natural trees give the text of plain decoding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

import acceptmoe
from acceptmoe.drafting import Drafter, load_drafter
from acceptmoe.targets import assistant_folder, eagle3_folder, load_target, target_names
from acceptmoe.targets.tasks import TASKS, problems
from acceptmoe.targets.widen import widen, widen_eagle3_head

DRAFTERS = ("ngram", "assistant", "eagle3")
FACTOR = 2


def make_drafter(kind: str, target: str, folder: Path, *, is_widened: bool) -> Drafter:
    if kind == "ngram":
        return load_drafter("ngram")
    if kind == "assistant":
        return load_drafter(assistant_folder(target))
    head = eagle3_folder(target)
    if is_widened:
        config = json.loads((head / "config.json").read_text())
        state = load_file(head / "model.safetensors")
        state, config = widen_eagle3_head(state, config, FACTOR, FACTOR)
        save_file(
            {name: value.contiguous() for name, value in state.items()},
            folder / "model.safetensors",
        )
        (folder / "config.json").write_text(json.dumps(config))
        head = folder
    return load_drafter(head)


@pytest.fixture(scope="module", params=[*target_names()])
def decoded(request):
    """A target, two prompts, and the plain greedy continuations."""
    model, tokenizer = load_target(request.param)
    prompts = [
        tokenizer(problems(task, "test", 1)[0].prompt, return_tensors="pt")["input_ids"]
        for task in (TASKS[0], TASKS[3])
    ]
    return request.param, model, prompts, [plain(model, prompt) for prompt in prompts]


def plain(model: PreTrainedModel, prompt: torch.Tensor) -> torch.Tensor:
    return model.generate(prompt, max_new_tokens=96)


@pytest.mark.parametrize("is_widened", [False, True], ids=["own-size", "widened"])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_natural_trees_give_the_plain_text(decoded, kind, is_widened, tmp_path):
    target, model, prompts, texts = decoded
    if is_widened:
        model = widen(model, FACTOR, FACTOR)
    drafter = make_drafter(kind, target, tmp_path, is_widened=is_widened)
    acceptmoe.wrap(model, policy="natural", drafter=drafter)
    try:
        for prompt, text in zip(prompts, texts, strict=True):
            assert torch.equal(plain(model, prompt), text)
        if kind != "ngram":  # these drafters were trained for the target
            assert model.acceptmoe.report()["accepted_length"] > 2
    finally:
        acceptmoe.unwrap(model)
