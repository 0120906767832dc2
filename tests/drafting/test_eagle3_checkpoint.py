"""Heads on disk: round trips, the published key names, and one error for each fault."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle3_fixtures import VARIANTS, random_head
from safetensors.torch import load_file, save_file
from torch import Tensor

from acceptmoe.drafting.eagle3_checkpoint import is_eagle3_checkpoint, load_head, save_head
from acceptmoe.drafting.eagle3_layouts import LAYOUTS, Layout
from acceptmoe.errors import DrafterError

Tensors = dict[str, Tensor]


def stored(folder: Path) -> Tensors:
    return load_file(folder / "model.safetensors")


def store(folder: Path, tensors: Tensors) -> None:
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors")


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_saved_head_loads_unchanged(variant: str, layout: Layout, tmp_path: Path) -> None:
    head = random_head(**VARIANTS[variant])
    save_head(head, tmp_path, layout=layout)
    loaded = load_head(tmp_path)
    assert loaded.config == head.config
    assert is_eagle3_checkpoint(tmp_path)
    state, expected = loaded.state_dict(), head.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in state)


def test_a_head_can_be_stored_in_bfloat16(tmp_path: Path) -> None:
    head = random_head()
    save_head(head, tmp_path, dtype=torch.bfloat16)
    tensors = stored(tmp_path)
    assert tensors["fc.weight"].dtype == torch.bfloat16
    assert tensors["d2t"].dtype == torch.int64
    assert torch.equal(load_head(tmp_path).fc.weight, head.fc.weight.bfloat16())


def test_stored_names_are_those_of_the_layouts(tmp_path: Path) -> None:
    save_head(random_head(), tmp_path / "flat")
    save_head(random_head(), tmp_path / "nested", layout="speculators")
    common = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    inner = {f"self_attn.{name}_proj.weight" for name in "qkvo"}
    inner |= {f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    inner |= {f"{name}.weight" for name in ("input_layernorm", "hidden_norm")}
    inner |= {"post_attention_layernorm.weight"}
    assert stored(tmp_path / "flat").keys() == common | {f"midlayer.{name}" for name in inner}
    assert stored(tmp_path / "nested").keys() == common | {f"layers.0.{name}" for name in inner}


def test_d2t_holds_offsets_and_t2d_marks_the_same_tokens(tmp_path: Path) -> None:
    head = random_head()
    save_head(head, tmp_path)
    tensors = stored(tmp_path)
    token_ids = torch.arange(37) + tensors["d2t"]
    assert torch.equal(token_ids, head.token_ids)
    assert torch.equal(tensors["t2d"].nonzero().flatten(), token_ids)


def older_names(tensors: Tensors) -> Tensors:
    names = {f"fc_norm.{i}.weight": f"aux_norm_{n}.weight" for i, n in enumerate(("low", "mid"))}
    names["fc_norm.2.weight"] = "aux_norm_high.weight"
    return {names.get(name, name): tensor for name, tensor in tensors.items()}


def training_leftovers(tensors: Tensors) -> Tensors:
    extra = {
        "midlayer.self_attn.rotary_emb.inv_freq": torch.ones(3),
        "verifier_lm_head.weight": torch.ones(61, 20),
        "verifier_norm.weight": torch.ones(20),
    }
    return {**tensors, **extra}


@pytest.mark.parametrize(
    "rename",
    [
        lambda tensors: {f"model.{name}": tensor for name, tensor in tensors.items()},
        lambda tensors: {n.replace("midlayer.", "layers.0."): t for n, t in tensors.items()},
        lambda tensors: {n: t for n, t in tensors.items() if n != "t2d"},
        older_names,
        training_leftovers,
    ],
    ids=["model prefix", "layers.0 prefix", "no t2d", "older norm names", "training leftovers"],
)
def test_other_published_names_load(rename: Callable[[Tensors], Tensors], tmp_path: Path) -> None:
    head = random_head(fc_norm=True)
    save_head(head, tmp_path)
    store(tmp_path, rename(stored(tmp_path)))
    state = load_head(tmp_path).state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in head.state_dict().items())


@pytest.mark.parametrize("zeros", [True, False])
def test_maps_may_be_zero_or_missing_with_one_vocabulary(zeros: bool, tmp_path: Path) -> None:
    save_head(random_head(draft_vocab_size=61), tmp_path)
    tensors = stored(tmp_path)
    maps = {"d2t": torch.zeros(61, dtype=torch.int64), "t2d": torch.zeros(61, dtype=torch.bool)}
    weights = {name: tensor for name, tensor in tensors.items() if name not in maps}
    store(tmp_path, {**weights, **maps} if zeros else weights)
    assert load_head(tmp_path).token_ids is None


def test_a_pickle_of_tensors_loads(tmp_path: Path) -> None:
    head = random_head()
    save_head(head, tmp_path)
    torch.save(stored(tmp_path), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    assert torch.equal(load_head(tmp_path).fc.weight, head.fc.weight)


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return (open, ("harm-was-done", "w"))


@pytest.mark.parametrize("use_torch", [True, False])
def test_a_pickle_of_anything_else_is_refused_unopened(
    use_torch: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_head(random_head(), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    file = tmp_path / "pytorch_model.bin"
    if use_torch:
        torch.save({"fc.weight": Harmful()}, file)
    else:
        file.write_bytes(pickle.dumps({"fc.weight": Harmful()}, protocol=2))
    with pytest.raises(DrafterError, match=r"can run code; convert it to model\.safetensors"):
        load_head(tmp_path)
    assert not (tmp_path / "harm-was-done").exists()


@pytest.mark.parametrize("content", [[torch.zeros(1)], {"fc.weight": 1.5}, {3: torch.zeros(1)}])
def test_a_pickle_must_hold_named_tensors(content: Any, tmp_path: Path) -> None:
    save_head(random_head(), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(DrafterError, match="must hold a dictionary of tensors by name"):
        load_head(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("kept", [0, 7, 0.5, 0.99])
def test_a_truncated_file_is_refused(name: str, kept: float, tmp_path: Path) -> None:
    save_head(random_head(), tmp_path)
    file = tmp_path / name
    if name == "pytorch_model.bin":
        torch.save(stored(tmp_path), file)
        (tmp_path / "model.safetensors").unlink()
    content = file.read_bytes()
    file.write_bytes(content[: int(kept if kept > 1 else kept * len(content))])
    with pytest.raises(DrafterError, match=r"is truncated or damaged"):
        load_head(tmp_path)


FC, Q_PROJ = "fc.weight", "midlayer.self_attn.q_proj.weight"
CHANGED_TENSORS: dict[str, tuple[Tensors, str]] = {
    "bias": ({"fc.bias": torch.zeros(20)}, "fc.bias is in the file and nothing in config.json"),
    "norm": ({"input_norm.weight": torch.ones(60)}, "input_norm.weight is in the file"),
    "second layer": ({"layers.1.mlp.up_proj.weight": torch.ones(2, 2)}, "has several layers"),
    "both spellings": ({"layers.0.hidden_norm.weight": torch.ones(20)}, "is there twice"),
    "latent": ({"midlayer.self_attn.kv_a_proj_with_mqa.weight": torch.ones(2, 2)}, "MLA"),
    "quantised": ({FC: torch.ones(20, 60).to(torch.int8)}, "fc.weight is int8; a weight must"),
    "float8": ({FC: torch.ones(20, 60).to(torch.float8_e4m3fn)}, "fc.weight is float8_e4m3fn"),
    "eagle-2 width": ({Q_PROJ: torch.ones(24, 20)}, r"q_proj.weight has shape \[24, 20\]; by con"),
    "two states": ({FC: torch.ones(20, 40)}, r"shape \[20, 40\]; by config.json it must be \[20"),
    "not finite": ({FC: torch.full((20, 60), float("nan"))}, "infinite or undefined values"),
    "float map": ({"d2t": torch.zeros(37)}, "d2t is float32; it must be int64"),
    "short map": ({"d2t": torch.zeros(36, dtype=torch.int64)}, r"d2t has shape \[36\]; by config"),
    "map too far": ({"d2t": torch.full((37,), 25)}, "tokens 25 to 61; i"),
    "map below 0": ({"d2t": torch.full((37,), -1)}, "tokens -1 to 35; i"),
    "map out of order": ({"d2t": -torch.arange(37)}, "tokens 0 to 0, out of order"),
    "other vocabulary": ({"t2d": torch.ones(60, dtype=torch.bool)}, r"t2d has shape \[60\]"),
    "other tokens": ({"t2d": torch.arange(61) < 37}, "d2t and t2d name different tokens"),
}


@pytest.mark.parametrize("fault", CHANGED_TENSORS)
def test_a_changed_or_additional_tensor_is_refused(fault: str, tmp_path: Path) -> None:
    changes, message = CHANGED_TENSORS[fault]
    save_head(random_head(), tmp_path)
    store(tmp_path, {**stored(tmp_path), **changes})
    with pytest.raises(DrafterError, match=rf"model.safetensors: .*{message}"):
        load_head(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (FC, "fc.weight is missing; config.json calls for it"),
        (Q_PROJ, "q_proj.weight is missing"),
        ("d2t", "d2t is missing; a draft vocabulary of 37 out of 61"),
        ("lm_head.weight", "lm_head.weight is missing and the target's cannot stand in"),
    ],
)
def test_a_missing_tensor_is_refused(name: str, message: str, tmp_path: Path) -> None:
    save_head(random_head(), tmp_path)
    tensors = stored(tmp_path)
    del tensors[name]
    store(tmp_path, tensors)
    with pytest.raises(DrafterError, match=message):
        load_head(tmp_path)


def test_a_missing_embedding_of_another_size_is_refused(tmp_path: Path) -> None:
    save_head(random_head(hidden_size=14, owns_embedding=True), tmp_path)
    tensors = stored(tmp_path)
    del tensors["embed_tokens.weight"]
    store(tmp_path, tensors)
    with pytest.raises(DrafterError, match=r"embed_tokens.weight is missing .* 14, .* 20"):
        load_head(tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DrafterError, match="is not a folder"):
        load_head(tmp_path / "nowhere")
    with pytest.raises(DrafterError, match=r"config\.json is missing"):
        load_head(tmp_path)
    (tmp_path / "config.json").write_text('{"hidden_size":')
    with pytest.raises(DrafterError, match="is no JSON"):
        load_head(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(DrafterError, match="holds a list"):
        load_head(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DrafterError, match=r"no weights: it must hold model\.safetensors or"):
        load_head(tmp_path)


def test_an_unknown_layout_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(DrafterError, match="layout is 'onnx'; it must be one of safeailab"):
        save_head(random_head(), tmp_path, layout="onnx")  # type: ignore[arg-type]


def test_the_dispatch_question_is_answered_without_raising(tmp_path: Path) -> None:
    save_head(random_head(), tmp_path / "head")
    assert is_eagle3_checkpoint(tmp_path / "head")
    assert not is_eagle3_checkpoint(tmp_path / "nowhere")
    assert not is_eagle3_checkpoint("Qwen/Qwen3-30B-A3B")
    for content in ("{", "[]", '{"architectures": ["LlamaForCausalLM"]}'):
        (tmp_path / "config.json").write_text(content)
        assert not is_eagle3_checkpoint(tmp_path)


def test_an_override_of_the_feature_layers_reaches_the_head(tmp_path: Path) -> None:
    save_head(random_head(), tmp_path)
    assert load_head(tmp_path).config.boundary_rule == "layer outputs"
    config = load_head(tmp_path, boundaries=(1, 2, 5)).config
    assert (config.boundaries, config.boundary_rule) == ((1, 2, 5), "override")
    change_config(tmp_path, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 2]})
    with pytest.raises(DrafterError, match="Say which is meant with `boundaries`"):
        load_head(tmp_path)
    assert load_head(tmp_path, boundaries=(0, 1, 2)).config.boundaries == (0, 1, 2)
