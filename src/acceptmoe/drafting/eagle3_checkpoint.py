"""EAGLE-3 heads on disk: load from the published layouts, save into any of them.

A head is a folder with `config.json` and `model.safetensors`, or `pytorch_model.bin` holding
nothing but tensors. Every fault of the files has its own `DrafterError`.
"""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from acceptmoe.drafting.eagle3_head import Eagle3Config, Eagle3Head
from acceptmoe.drafting.eagle3_layouts import (
    LAYOUTS,
    Layout,
    describes_eagle3,
    read_config,
    write_config,
)
from acceptmoe.errors import DrafterError

CONFIG_FILE = "config.json"
SAFETENSORS_FILE = "model.safetensors"
PICKLE_FILE = "pytorch_model.bin"

WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INDEX_DTYPES = (torch.int64, torch.int32)

# Written by training code and without a say in drafting: rotary tables, the target's own weights.
IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "verifier_lm_head.weight", "verifier_norm.weight")
OLD_NAMES = {
    "aux_norm_low.weight": "fc_norm.0.weight",
    "aux_norm_mid.weight": "fc_norm.1.weight",
    "aux_norm_high.weight": "fc_norm.2.weight",
}


def is_eagle3_checkpoint(path: str | Path) -> bool:
    """Whether `path` is a folder whose config describes an EAGLE-3 head; raises nothing."""
    try:
        raw = json.loads((Path(path) / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(raw, dict) and describes_eagle3(raw)


def load_head(path: str | Path, *, boundaries: tuple[int, ...] | None = None) -> Eagle3Head:
    """The head in folder `path`, on the CPU, in the dtype it was stored in.

    The layout (SafeAILab, SpecForge, `speculators`) is recognised by its config and key names.
    `boundaries` overrides the feature layers that the config names. Raises `DrafterError` for a
    missing, unreadable or truncated file, a pickle of anything but tensors, a missing or
    unexpected tensor, a wrong dtype or shape, an impossible draft vocabulary, several layers, and
    MLA attention.
    """
    folder = Path(path)
    raw = _read_config_file(folder)
    file, tensors = _read_tensors(folder)
    try:
        tensors = _canonical_names(tensors)
        _refuse_other_layers(tensors)
        config = read_config(
            raw,
            owns_embedding="embed_tokens.weight" in tensors,
            owns_lm_head="lm_head.weight" in tensors,
            boundaries=boundaries,
        )
        _check_tensors(tensors, config)
        token_ids = _read_token_ids(tensors, config)
    except DrafterError as error:
        raise DrafterError(f"{file}: {error}") from None
    return _build(config, tensors, token_ids)


def save_head(
    head: Eagle3Head,
    path: str | Path,
    *,
    layout: Layout = "specforge",
    dtype: torch.dtype | None = None,
) -> None:
    """Write `head` into folder `path` as `config.json` and `model.safetensors`.

    `dtype` is that of the stored weights, the head's own by default. Raises `DrafterError` for an
    unknown layout, and for feature layers that a flat layout cannot express.
    """
    if layout not in LAYOUTS:
        raise DrafterError(f"layout is {layout!r}; it must be one of {', '.join(LAYOUTS)}")
    dtype = dtype or head.dtype
    raw = write_config(head.config, layout, str(dtype).removeprefix("torch."))
    prefix = "layers.0." if layout == "speculators" else "midlayer."
    tensors = {}
    for name, tensor in _head_tensors(head).items():
        stored = tensor.detach().cpu()
        stored = stored.to(dtype) if stored.is_floating_point() else stored
        tensors[name.replace("midlayer.", prefix)] = stored.contiguous().clone()
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / SAFETENSORS_FILE, metadata={"format": "pt"})
    text = json.dumps(raw, indent=2) + "\n"
    (folder / CONFIG_FILE).write_text(text, encoding="utf-8")


def tensor_shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Name (in the SpecForge layout) and shape of every weight of a head, the maps left out."""
    size, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, config.feature_size),
        "midlayer.input_layernorm.weight": (size,),
        "midlayer.hidden_norm.weight": (size,),
        "midlayer.self_attn.q_proj.weight": (q_size, 2 * size),
        "midlayer.self_attn.k_proj.weight": (kv_size, 2 * size),
        "midlayer.self_attn.v_proj.weight": (kv_size, 2 * size),
        "midlayer.self_attn.o_proj.weight": (size, q_size),
        "midlayer.post_attention_layernorm.weight": (size,),
        "midlayer.mlp.gate_proj.weight": (inner, size),
        "midlayer.mlp.up_proj.weight": (inner, size),
        "midlayer.mlp.down_proj.weight": (size, inner),
        "norm.weight": (size,),
    }
    if config.fc_bias:
        shapes["fc.bias"] = (size,)
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (config.feature_size,)
    if config.fc_norm:
        for i in range(config.num_aux):
            shapes[f"fc_norm.{i}.weight"] = (config.target_hidden_size,)
    if config.attention_bias:
        for name, rows in (("q", q_size), ("k", kv_size), ("v", kv_size), ("o", size)):
            shapes[f"midlayer.self_attn.{name}_proj.bias"] = (rows,)
    if config.qk_norm:
        shapes["midlayer.self_attn.q_norm.weight"] = (head_dim,)
        shapes["midlayer.self_attn.k_norm.weight"] = (head_dim,)
    if config.owns_lm_head:
        shapes["lm_head.weight"] = (config.draft_vocab_size, size)
    if config.owns_embedding:
        shapes["embed_tokens.weight"] = (config.vocab_size, size)
    return shapes


def _read_config_file(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG_FILE
    if not folder.is_dir():
        raise DrafterError(
            f"{folder} is not a folder; give the folder of an EAGLE-3 head (a head on the Hub must "
            "be downloaded first)"
        )
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DrafterError(f"{file} is missing; an EAGLE-3 head must have it") from None
    except ValueError as error:
        raise DrafterError(f"{file} is no JSON ({error}); download the head again") from None
    if not isinstance(raw, dict):
        raise DrafterError(f"{file} holds a {type(raw).__name__}; it must hold an object")
    return raw


def _read_tensors(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """The weight file's path and its tensors by name, safetensors first."""
    file = folder / SAFETENSORS_FILE
    if file.is_file():
        try:
            return file, load_file(file)
        except SafetensorError as error:
            raise DrafterError(
                f"{file} is truncated or damaged ({error}); download the head again"
            ) from None
    file = folder / PICKLE_FILE
    if not file.is_file():
        found = sorted(item.name for item in folder.iterdir())
        raise DrafterError(
            f"{folder} has no weights: it must hold {SAFETENSORS_FILE} or {PICKLE_FILE}, and holds "
            f"{', '.join(found)}"
        )
    with file.open("rb") as stream:
        is_archive = stream.read(2) == b"PK"
    if is_archive and not zipfile.is_zipfile(file):
        raise DrafterError(
            f"{file} is truncated or damaged (the archive has no end); download the head again"
        )
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        # weights_only found code to run, or bytes that are no pickle at all.
        raise DrafterError(
            f"{file} holds something else than tensors and is not opened, because such a file can "
            f"run code; convert it to {SAFETENSORS_FILE}"
        ) from None
    except (RuntimeError, EOFError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise DrafterError(
            f"{file} is truncated or damaged ({reason}); download the head again"
        ) from None
    is_tensors = isinstance(tensors, Mapping) and all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in tensors.items()
    )
    if not is_tensors:
        raise DrafterError(f"{file} must hold a dictionary of tensors by name, and nothing else")
    return file, dict(tensors)


def _canonical_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under their SpecForge names, without those that are never read."""
    renamed: dict[str, Tensor] = {}
    for original, tensor in tensors.items():
        name = original.removeprefix("model.")
        if name.endswith(IGNORED_SUFFIXES):
            continue
        if name.startswith("layers.0."):
            name = "midlayer." + name.removeprefix("layers.0.")
        name = OLD_NAMES.get(name, name)
        if name in renamed:
            raise DrafterError(f"{name} is there twice, the second time as {original}")
        renamed[name] = tensor
    return renamed


def _refuse_other_layers(tensors: Mapping[str, Tensor]) -> None:
    later = sorted(name for name in tensors if name.startswith("layers."))
    if later:
        raise DrafterError(
            f"the head has several layers ({later[0]}); an EAGLE-3 head of one layer is supported "
            "(engines disagree on the norms of later ones)"
        )
    mla = sorted(name for name in tensors if "kv_a_proj" in name or "kv_b_proj" in name)
    if mla:
        raise DrafterError(
            f"the head has multi-head latent attention (MLA: {mla[0]}); only heads with ordinary "
            "attention can be loaded"
        )


def _check_tensors(tensors: Mapping[str, Tensor], config: Eagle3Config) -> None:
    """Raise unless the weights are exactly those that the config calls for."""
    shapes = tensor_shapes(config)
    missing = sorted(shapes.keys() - tensors.keys())
    if missing:
        raise DrafterError(f"{missing[0]} is missing; config.json calls for it")
    # A tensor that is left out silently (a bias, a norm) makes another network of the same shape.
    unexpected = sorted(tensors.keys() - shapes.keys() - {"d2t", "t2d"})
    if unexpected:
        raise DrafterError(
            f"{unexpected[0]} is in the file and nothing in config.json calls for it; the head "
            "would compute something else without it"
        )
    for name, shape in shapes.items():
        tensor = tensors[name]
        if tensor.dtype not in WEIGHT_DTYPES:
            raise DrafterError(
                f"{name} is {_dtype_name(tensor.dtype)}; a weight must be one of "
                f"{', '.join(map(_dtype_name, WEIGHT_DTYPES))} (quantised heads are not supported)"
            )
        if tuple(tensor.shape) != shape:
            raise DrafterError(
                f"{name} has shape {list(tensor.shape)}; by config.json it must be {list(shape)}"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise DrafterError(f"{name} has infinite or undefined values; the file is damaged")


def _read_token_ids(tensors: Mapping[str, Tensor], config: Eagle3Config) -> Tensor | None:
    """Target token of each draft token [D] int64, None where the vocabularies are the same.

    On disk `d2t` holds offsets: target id = i + d2t[i].
    """
    num_draft, num_target = config.draft_vocab_size, config.vocab_size
    t2d = tensors.get("t2d")
    if t2d is not None and tuple(t2d.shape) != (num_target,):
        raise DrafterError(
            f"t2d has shape {list(t2d.shape)}; the target's vocabulary has {num_target} tokens"
        )
    offsets = tensors.get("d2t")
    if offsets is None:
        if num_draft < num_target:
            raise DrafterError(
                f"d2t is missing; a draft vocabulary of {num_draft} out of {num_target} tokens "
                "needs it"
            )
        return None
    if offsets.dtype not in INDEX_DTYPES:
        raise DrafterError(f"d2t is {_dtype_name(offsets.dtype)}; it must be int64")
    if tuple(offsets.shape) != (num_draft,):
        raise DrafterError(
            f"d2t has shape {list(offsets.shape)}; by config.json it must be [{num_draft}]"
        )
    token_ids = torch.arange(num_draft) + offsets.long()
    is_ascending = bool((token_ids[1:] > token_ids[:-1]).all())
    if not is_ascending or int(token_ids[0]) < 0 or int(token_ids[-1]) >= num_target:
        raise DrafterError(
            f"d2t maps the draft vocabulary to tokens {int(token_ids.min())} to "
            f"{int(token_ids.max())}{'' if is_ascending else ', out of order'}; i + d2t[i] must "
            f"ascend within the target's vocabulary of {num_target}"
        )
    if t2d is not None and bool(t2d.any()):
        listed = t2d.bool().nonzero().flatten()
        if not torch.equal(listed, token_ids):
            raise DrafterError(
                "d2t and t2d name different tokens; one of them belongs to another head, or d2t "
                "holds ids instead of offsets"
            )
    return None if num_draft == num_target else token_ids


def _build(
    config: Eagle3Config, tensors: Mapping[str, Tensor], token_ids: Tensor | None
) -> Eagle3Head:
    dtype = tensors["fc.weight"].dtype
    with torch.device("meta"):
        head = Eagle3Head(config)
    head.register_buffer("token_ids", token_ids)
    state = {name: tensor.to(dtype) for name, tensor in _to_state(tensors, config).items()}
    if token_ids is not None:
        state["token_ids"] = token_ids
    head.load_state_dict(state, assign=True)
    return head.requires_grad_(False).eval()


def _to_state(tensors: Mapping[str, Tensor], config: Eagle3Config) -> dict[str, Tensor]:
    """Module parameters from tensors in the SpecForge layout; `_head_tensors` is the inverse."""
    attention, mlp = "midlayer.self_attn.", "midlayer.mlp."
    kinds = ("weight", "bias") if config.attention_bias else ("weight",)
    state = {
        "fc.weight": tensors["fc.weight"],
        "input_layernorm": tensors["midlayer.input_layernorm.weight"],
        "hidden_norm": tensors["midlayer.hidden_norm.weight"],
        "post_attention_layernorm": tensors["midlayer.post_attention_layernorm.weight"],
        "gate_up_proj.weight": torch.cat(
            [tensors[f"{mlp}gate_proj.weight"], tensors[f"{mlp}up_proj.weight"]]
        ),
        "down_proj.weight": tensors[f"{mlp}down_proj.weight"],
        "norm": tensors["norm.weight"],
    }
    for kind in kinds:
        qkv = [tensors[f"{attention}{name}_proj.{kind}"] for name in ("q", "k", "v")]
        state[f"qkv_proj.{kind}"] = torch.cat(qkv)
        state[f"o_proj.{kind}"] = tensors[f"{attention}o_proj.{kind}"]
    if config.fc_bias:
        state["fc.bias"] = tensors["fc.bias"]
    if config.norm_before_fc:
        state["input_norm"] = tensors["input_norm.weight"]
    if config.fc_norm:
        norms = [tensors[f"fc_norm.{i}.weight"] for i in range(config.num_aux)]
        state["fc_norm"] = torch.stack(norms)
    if config.qk_norm:
        state["q_norm"] = tensors[f"{attention}q_norm.weight"]
        state["k_norm"] = tensors[f"{attention}k_norm.weight"]
    if config.owns_lm_head:
        state["lm_head.weight"] = tensors["lm_head.weight"]
    if config.owns_embedding:
        state["embed_tokens.weight"] = tensors["embed_tokens.weight"]
    return state


def _head_tensors(head: Eagle3Head) -> dict[str, Tensor]:
    """The head's tensors in the SpecForge layout, `d2t` and `t2d` included."""
    config, state = head.config, head.state_dict()
    attention, mlp = "midlayer.self_attn.", "midlayer.mlp."
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    gate, up = state["gate_up_proj.weight"].chunk(2)
    tensors = {
        "fc.weight": state["fc.weight"],
        "midlayer.input_layernorm.weight": state["input_layernorm"],
        "midlayer.hidden_norm.weight": state["hidden_norm"],
        "midlayer.post_attention_layernorm.weight": state["post_attention_layernorm"],
        f"{mlp}gate_proj.weight": gate,
        f"{mlp}up_proj.weight": up,
        f"{mlp}down_proj.weight": state["down_proj.weight"],
        "norm.weight": state["norm"],
    }
    for kind in ("weight", "bias") if config.attention_bias else ("weight",):
        parts = state[f"qkv_proj.{kind}"].split((q_size, kv_size, kv_size))
        for name, part in zip(("q", "k", "v"), parts, strict=True):
            tensors[f"{attention}{name}_proj.{kind}"] = part
        tensors[f"{attention}o_proj.{kind}"] = state[f"o_proj.{kind}"]
    if config.fc_bias:
        tensors["fc.bias"] = state["fc.bias"]
    if config.norm_before_fc:
        tensors["input_norm.weight"] = state["input_norm"]
    if config.fc_norm:
        for i, weight in enumerate(state["fc_norm"]):
            tensors[f"fc_norm.{i}.weight"] = weight
    if config.qk_norm:
        tensors[f"{attention}q_norm.weight"] = state["q_norm"]
        tensors[f"{attention}k_norm.weight"] = state["k_norm"]
    for name in ("lm_head.weight", "embed_tokens.weight"):
        if name in state:
            tensors[name] = state[name]
    token_ids = head.token_ids
    if token_ids is None:
        token_ids = torch.arange(config.draft_vocab_size)
    tensors["d2t"] = token_ids - torch.arange(config.draft_vocab_size, device=token_ids.device)
    tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(
        0, token_ids.cpu(), True
    )
    return tensors


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
