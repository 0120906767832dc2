"""The bundled targets load by name, stay plain Transformers checkpoints, and know their limits."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from acceptmoe.errors import TargetError
from acceptmoe.targets import (
    assistant_folder,
    load_assistant,
    load_target,
    target_folder,
    target_names,
)
from acceptmoe.targets.tasks import check_all, problems

TEXTS = [
    "Problem: Mia has 12 apples.\nSteps:\n",
    "def f(xs):\n    return [x for x in xs if x > 3]",
    "Grüße, 你好 \N{GRINNING FACE}\t\r\n  two  spaces ",
    "\x00\x7f",
]


def test_the_main_target_is_bundled() -> None:
    assert "tiny-qwen3-moe" in target_names()


def test_everything_bundled_is_below_forty_megabytes() -> None:
    weights = target_folder("tiny-qwen3-moe").parent
    assert sum(path.stat().st_size for path in weights.rglob("*") if path.is_file()) < 40e6


@pytest.mark.parametrize("name", target_names())
def test_plain_transformers_opens_a_target(name: str) -> None:
    folder = target_folder(name)
    stored = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert stored.dtype == torch.bfloat16
    assert stored.config.num_hidden_layers >= 5
    assert len(AutoTokenizer.from_pretrained(folder)) == stored.config.vocab_size
    model, tokenizer = load_target(name)
    assert model.dtype == torch.float32
    assert not model.training
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


@pytest.mark.parametrize("name", target_names())
def test_the_assistant_has_the_vocabulary_of_its_target(name: str) -> None:
    assistant, (_, tokenizer) = load_assistant(name), load_target(name)
    assert assistant.config.vocab_size == len(tokenizer)
    folder = assistant_folder(name)
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == tokenizer.get_vocab()


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_survives_the_tokenizer(text: str) -> None:
    _, tokenizer = load_target("tiny-qwen3-moe")
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_every_digit_is_a_token_of_its_own() -> None:
    _, tokenizer = load_target("tiny-qwen3-moe")
    tokens = tokenizer.tokenize("1234567890+42")
    assert tokens == ["1", "2", "3", "4", "5", "6", "7", "8", "9", "0", "+", "4", "2"]


@pytest.mark.parametrize("name", target_names())
def test_a_target_solves_most_algebra(name: str) -> None:
    model, tokenizer = load_target(name)
    asked = problems("algebra", "test", 6)
    texts, ended = [], []
    for problem in asked:
        ids = tokenizer(problem.prompt, return_tensors="pt")["input_ids"]
        out = model.generate(ids, max_new_tokens=256, do_sample=False)[0, ids.shape[1] :]
        ended.append(bool(out[-1] == tokenizer.eos_token_id))
        texts.append(tokenizer.decode(out, skip_special_tokens=True))
    # The exact accuracy over 200 prompts is in bench/results/targets.json; this guards the files.
    assert sum(check_all(asked, texts, ended)) > 3


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(TargetError, match="target is 'gpt-9'; bundled targets: tiny-qwen3-moe"):
        load_target("gpt-9")
    with pytest.raises(TargetError, match="target is 'gpt-9'"):
        load_assistant("gpt-9")


def test_a_path_is_no_target_name(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="load it with transformers"):
        load_target(str(tmp_path))


def test_an_integer_dtype_is_refused() -> None:
    with pytest.raises(TargetError, match=r"dtype is torch.int8; it must be a floating point type"):
        load_target("tiny-qwen3-moe", dtype=torch.int8)
