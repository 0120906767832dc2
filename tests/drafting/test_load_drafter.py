"""What may be passed as a drafter, and what is refused."""

import doctest
import json
import re
from pathlib import Path

import pytest
import torch
from eagle3_fixtures import random_head
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from acceptmoe import drafting
from acceptmoe.drafting import AssistantDrafter, Eagle3Drafter, NgramDrafter, load_drafter
from acceptmoe.drafting.eagle3_checkpoint import save_head
from acceptmoe.drafting.eagle3_layouts import LAYOUTS, Layout
from acceptmoe.errors import DrafterError, InvalidArgumentError

ALLOWED = "allowed: 'ngram', the folder of a checkpoint, a transformers causal language model, or a"


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def folder(model: LlamaForCausalLM, tmp_path: Path) -> Path:
    model.save_pretrained(tmp_path)
    return tmp_path


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_name_of_a_drafter() -> None:
    assert isinstance(load_drafter("ngram"), NgramDrafter)


def test_model_becomes_an_assistant(model: LlamaForCausalLM) -> None:
    drafter = load_drafter(model)
    assert isinstance(drafter, AssistantDrafter)
    assert drafter.model is model


@pytest.mark.parametrize("layout", LAYOUTS)
def test_folder_of_a_draft_head_becomes_its_drafter(layout: Layout, tmp_path: Path) -> None:
    save_head(random_head(), tmp_path, layout=layout)
    assert isinstance(load_drafter(tmp_path), Eagle3Drafter)


def test_drafter_is_taken_as_it_is() -> None:
    drafter = NgramDrafter(max_ngram=2)
    assert load_drafter(drafter) is drafter


@pytest.mark.parametrize("form", [str, Path])
def test_folder_of_a_causal_model_becomes_an_assistant(
    model: LlamaForCausalLM, folder: Path, form: type
) -> None:
    drafter = load_drafter(form(folder))
    assert isinstance(drafter, AssistantDrafter)
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(drafter.model(ids).logits, model(ids).logits)


@pytest.mark.parametrize("spec", [None, 3, ["ngram"]])
def test_other_types_are_refused(spec: object) -> None:
    message = re.escape(f"drafter is {spec!r} ({type(spec).__name__}); {ALLOWED}")
    with pytest.raises(InvalidArgumentError, match=message):
        load_drafter(spec)  # type: ignore[arg-type]


def test_unknown_name_is_refused() -> None:
    message = "drafter is 'n-gram', which is no drafter's name and no folder; " + ALLOWED
    with pytest.raises(InvalidArgumentError, match=message):
        load_drafter("n-gram")


def test_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DrafterError, match=r"has no config.json; a drafter's folder must hold one"):
        load_drafter(tmp_path)


@pytest.mark.parametrize("text", [b'{"architectures": [', b"\xff\xfe\x00"])
def test_damaged_config_is_refused(folder: Path, text: bytes) -> None:
    (folder / "config.json").write_bytes(text)
    with pytest.raises(DrafterError, match=r"config.json is not JSON \(.*; copy the file again"):
        load_drafter(folder)


def test_config_that_is_no_object_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text("[1]")
    with pytest.raises(DrafterError, match=r"config.json holds a list; it must be a JSON object"):
        load_drafter(folder)


@pytest.mark.parametrize("architectures", [["LlamaForCausalLMWithExtras"], None, "Llama", []])
def test_architecture_that_transformers_lacks_is_refused(
    folder: Path, architectures: object
) -> None:
    change_config(folder, architectures=architectures)
    message = re.escape(f"has architectures {architectures!r}; a drafter must be a causal language")
    with pytest.raises(DrafterError, match=message):
        load_drafter(folder)


def test_checkpoint_with_missing_weights_is_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    del weights["model.norm.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    message = "lacks 1 weights of LlamaForCausalLM, model.norm.weight among them; it must hold all"
    with pytest.raises(DrafterError, match=message):
        load_drafter(folder)


def test_truncated_weights_are_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DrafterError, match=r"cannot be loaded \(.*; it must be complete"):
        load_drafter(folder)


def test_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(DrafterError, match=r"cannot be loaded \("):
        load_drafter(folder)


def test_config_that_does_not_fit_the_weights_is_refused(folder: Path) -> None:
    change_config(folder, hidden_size=32)
    with pytest.raises(DrafterError, match=r"cannot be loaded \("):
        load_drafter(folder)


def test_weights_go_to_a_model(model: LlamaForCausalLM) -> None:
    drafter = load_drafter(model, weights="int8")
    assert isinstance(drafter, AssistantDrafter)
    assert (drafter.model, drafter.weights) == (model, "int8")


def test_weights_go_to_the_model_of_a_folder(folder: Path) -> None:
    drafter = load_drafter(folder, weights="int8")
    assert isinstance(drafter, AssistantDrafter)
    assert drafter.weights == "int8"


def test_weights_go_to_the_head_of_a_folder(tmp_path: Path) -> None:
    save_head(random_head(), tmp_path)
    drafter = load_drafter(tmp_path, weights="int8")
    assert isinstance(drafter, Eagle3Drafter)
    assert drafter.weights == "int8"


def test_weights_of_a_drafter_without_any_are_refused() -> None:
    message = "weights is 'int8' and the drafter 'ngram' has no weights; leave it out"
    with pytest.raises(InvalidArgumentError, match=message):
        load_drafter("ngram", weights="int8")


def test_weights_of_a_drafter_that_is_made_already_are_refused(model: LlamaForCausalLM) -> None:
    message = "the drafter 'assistant' is made already; give weights= where the drafter is made"
    # The same precision is refused too: it would be given in two places.
    for drafter in (AssistantDrafter(model), AssistantDrafter(model, weights="int8")):
        with pytest.raises(InvalidArgumentError, match=message):
            load_drafter(drafter, weights="int8")


@pytest.mark.parametrize("spec", ["ngram", NgramDrafter()])
def test_another_precision_is_refused_for_every_drafter(spec: object) -> None:
    with pytest.raises(InvalidArgumentError, match=r"weights is 'int4'; it must be None.*'int8'"):
        load_drafter(spec, weights="int4")  # type: ignore[arg-type]


def test_examples_of_the_docstrings() -> None:
    assert doctest.testmod(drafting).failed == 0
