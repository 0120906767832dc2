"""The `config.json` of a published EAGLE-3 head, read into and written from `Eagle3Config`.

Flat configs come from SafeAILab/EAGLE and SpecForge (SGLang), nested ones from `speculators`
(vLLM). They disagree on how feature layers are numbered; `read_boundaries` settles that.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal

from acceptmoe.drafting.eagle3_head import BoundaryRule, Eagle3Config
from acceptmoe.errors import DrafterError

Layout = Literal["safeailab", "specforge", "speculators"]
LAYOUTS: tuple[Layout, ...] = ("safeailab", "specforge", "speculators")

ConfigDict = Mapping[str, Any]


def is_nested(raw: ConfigDict) -> bool:
    """Whether this is a config of the `speculators` layout."""
    return "speculators_model_type" in raw or "transformer_layer_config" in raw


def describes_eagle3(raw: ConfigDict) -> bool:
    """Whether the config alone shows that the folder holds an EAGLE-3 head."""
    if is_nested(raw):
        return raw.get("speculators_model_type") == "eagle3"
    return (
        "eagle3" in str(raw.get("architectures")).lower()
        or "draft_vocab_size" in raw
        or "eagle_config" in raw
    )


def read_config(
    raw: ConfigDict,
    *,
    owns_embedding: bool,
    owns_lm_head: bool,
    boundaries: tuple[int, ...] | None = None,
) -> Eagle3Config:
    """The head that `raw` describes; what only the weights can tell is passed by name.

    `boundaries` overrides the file's feature layers. Raises `DrafterError` naming the key at fault.
    """
    nested = is_nested(raw)
    if nested and raw.get("speculators_model_type", "eagle3") != "eagle3":
        raise DrafterError(
            f"speculators_model_type is {raw['speculators_model_type']!r}; only 'eagle3' heads can "
            "be loaded"
        )
    layer = raw.get("transformer_layer_config") if nested else raw
    if not isinstance(layer, Mapping):
        raise DrafterError("transformer_layer_config is missing; a speculators config must have it")
    _refuse_other_architectures(raw, layer)
    eagle = raw.get("eagle_config") or {}
    hidden_size = _count(layer, "hidden_size")
    num_heads = _count(layer, "num_attention_heads")
    vocab_size = _count(layer, "vocab_size")
    ids = raw.get("eagle_aux_hidden_state_layer_ids")
    ids = eagle.get("eagle_aux_hidden_state_layer_ids") if ids is None else ids
    rule: BoundaryRule = "override"
    if boundaries is None:
        boundaries, rule = read_boundaries(ids, ids_are_boundaries=nested)
    num_aux = 3 if boundaries is None else len(boundaries)
    return Eagle3Config(
        vocab_size=vocab_size,
        draft_vocab_size=_count(raw, "draft_vocab_size", vocab_size),
        hidden_size=hidden_size,
        target_hidden_size=_count(raw, "target_hidden_size", hidden_size),
        intermediate_size=_count(layer, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=_count(layer, "num_key_value_heads", num_heads),
        head_dim=_count(layer, "head_dim", max(hidden_size // num_heads, 1)),
        num_aux=_count(raw, "num_aux_hidden_states", num_aux),
        boundaries=boundaries,
        boundary_rule=rule,
        rms_norm_eps=float(layer.get("rms_norm_eps", 1e-6)),
        rope=_read_rope(layer),
        max_position_embeddings=_count(layer, "max_position_embeddings", 2048),
        attention_bias=bool(layer.get("attention_bias", False)),
        qk_norm=layer.get("model_type") == "qwen3",
        fc_bias=bool(raw.get("bias", False)),
        fc_norm=bool(raw.get("fc_norm") or raw.get("use_aux_norm")),
        norm_before_fc=bool(raw.get("norm_before_fc") or eagle.get("norm_before_fc")),
        # Nested configs without the key: every server reads True, so a head that works has True.
        norm_before_residual=bool(raw.get("norm_before_residual", nested)),
        norm_output=bool(raw.get("norm_output", False)),
        owns_embedding=owns_embedding,
        owns_lm_head=owns_lm_head,
    )


def read_boundaries(
    ids: object, *, ids_are_boundaries: bool
) -> tuple[tuple[int, ...] | None, BoundaryRule]:
    """Boundaries (b = residual stream entering layer b) from a config's feature-layer ids.

    Two conventions are in use. A nested config, and a flat one whose first id is 2 or more, counts
    boundaries; a flat one that starts at 1 counts layer *outputs*, one less. Reading the wrong one
    feeds the head states one layer off, which costs acceptance and raises nothing. None: no ids.
    The second result says which reading was chosen.
    """
    if ids is None or ids == []:
        return None, "default"
    if not isinstance(ids, (list, tuple)) or not all(type(i) is int and i >= 0 for i in ids):
        raise DrafterError(
            f"eagle_aux_hidden_state_layer_ids is {ids!r}; it must be a list of layer numbers, "
            "0 or larger"
        )
    if any(later <= earlier for earlier, later in pairwise(ids)):
        raise DrafterError(
            f"eagle_aux_hidden_state_layer_ids is {list(ids)}; the ids must ascend without "
            "repetition, as the states are fused in the order of the layers"
        )
    if ids_are_boundaries or ids[0] >= 2:
        return tuple(ids), "boundaries"
    if ids[0] == 1:
        return tuple(i + 1 for i in ids), "layer outputs"
    raise DrafterError(
        f"eagle_aux_hidden_state_layer_ids is {list(ids)} in a flat config; it must start at 1 "
        "(outputs of layers) or later (boundaries). Say which is meant with `boundaries`"
    )


def default_boundaries(num_layers: int) -> tuple[int, ...]:
    """Boundaries 2, L // 2 and L - 3: what every engine uses for a head without ids."""
    return (2, num_layers // 2, num_layers - 3)


def write_config(config: Eagle3Config, layout: Layout, dtype: str) -> dict[str, Any]:
    """The `config.json` that `read_config` turns back into `config`.

    Raises `DrafterError` where a flat layout cannot express the feature layers.
    """
    layer: dict[str, Any] = {
        "model_type": "qwen3" if config.qk_norm else "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "attention_bias": config.attention_bias,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
    options: dict[str, Any] = {
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "bias": config.fc_bias,
        "num_aux_hidden_states": config.num_aux,
        "torch_dtype": dtype,
    }
    if layout == "speculators":
        return {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            **options,
            "eagle_aux_hidden_state_layer_ids": _list_or_none(config.boundaries),
            "transformer_layer_config": {**layer, "rope_parameters": dict(config.rope)},
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
                "verifier": {"name_or_path": None, "architectures": []},
            },
        }
    rope = dict(config.rope)
    theta = rope.pop("rope_theta")
    scaling = None if rope == {"rope_type": "default"} else rope
    is_safeailab = layout == "safeailab"
    flat = {
        "architectures": ["LlamaForCausalLM" if is_safeailab else "LlamaForCausalLMEagle3"],
        **layer,
        **options,
        "rope_theta": theta,
        "rope_scaling": scaling,
    }
    if config.boundaries is not None:
        flat["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": _flat_ids(config.boundaries),
            "use_aux_hidden_state": True,
            "norm_before_fc": config.norm_before_fc,
        }
    return flat


def _flat_ids(boundaries: tuple[int, ...]) -> list[int]:
    """Ids that every reader of a flat config takes for these boundaries, or at least this one."""
    if boundaries[0] == 2:
        return [boundary - 1 for boundary in boundaries]  # the SpecForge way: layer outputs
    if boundaries[0] > 2:
        return list(boundaries)
    raise DrafterError(
        f"boundaries {list(boundaries)} cannot be written into a flat config, whose first feature "
        "layer must be boundary 2 or later; save the head with layout='speculators'"
    )


def _refuse_other_architectures(raw: ConfigDict, layer: ConfigDict) -> None:
    """Raise for heads whose weights would load, or nearly, and then mean something else."""
    is_mla = any(layer.get(key) for key in ("kv_lora_rank", "q_lora_rank"))
    if is_mla or "MLA" in str(raw.get("architectures")).upper():
        raise DrafterError(
            "the head has multi-head latent attention (MLA); only heads with ordinary attention "
            "can be loaded"
        )
    num_layers = layer.get("num_hidden_layers", 1)
    if num_layers != 1:
        raise DrafterError(
            f"num_hidden_layers is {num_layers}; an EAGLE-3 head of one layer is supported "
            "(engines disagree on the norms of later ones)"
        )
    if (raw.get("eagle_config") or {}).get("use_aux_hidden_state") is False:
        raise DrafterError(
            "use_aux_hidden_state is false: this head reads the last state only (EAGLE-1 or 2); "
            "EAGLE-3 heads fuse several"
        )
    window = layer.get("sliding_window")
    if window and layer.get("use_sliding_window") is not False:
        raise DrafterError(
            f"sliding_window is {window}; an EAGLE-3 head must attend to its whole context"
        )
    allowed: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu", "swish", None),
        "mlp_bias": (False, None),
        "partial_rotary_factor": (1, None),
        "model_type": ("llama", "qwen3", None),
    }
    for key, values in allowed.items():
        if layer.get(key) not in values:
            raise DrafterError(
                f"{key} is {layer[key]!r}; an EAGLE-3 head must have {_one_of(values)}"
            )


def _read_rope(layer: ConfigDict) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, or the newer `rope_parameters`, as the latter."""
    rope = dict(layer.get("rope_parameters") or layer.get("rope_scaling") or {})
    legacy = rope.pop("type", None)
    rope.setdefault("rope_type", legacy or "default")
    rope.setdefault("rope_theta", layer.get("rope_theta", 10000.0))
    rope["rope_theta"] = float(rope["rope_theta"])
    return rope


def _count(raw: ConfigDict, key: str, default: int | None = None) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if value is None:
        raise DrafterError(f"{key} is missing from config.json; an EAGLE-3 head must have it")
    if type(value) is not int or value < 1:
        raise DrafterError(f"{key} is {value!r} in config.json; it must be a whole number above 0")
    return value


def _list_or_none(values: tuple[int, ...] | None) -> list[int] | None:
    return None if values is None else list(values)


def _one_of(values: tuple[Any, ...]) -> str:
    return " or ".join(repr(value) for value in values if value is not None)
