"""Models that cannot be verified as a tree, and why; what the reader can do is in the texts."""

from __future__ import annotations

from typing import Any

from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from acceptmoe.errors import UnsupportedModelError

ADD_A_MODEL = 'See CONTRIBUTING.md, "Add a model"'

_RECURRENT = (
    "has recurrent or convolutional layers; their single running state would mix the branches of a "
    "draft tree. Only models whose layers all are attention can be wrapped"
)
_INDEXED = (
    "picks the keys of its sparse attention with an indexer, whose own keys and positions in the "
    "cache cannot be compacted to an accepted path yet"
)
_MULTIMODAL = (
    "takes images and has positions on several axes, which draft trees do not carry; only text "
    "models can be wrapped"
)

# By model_type: those that share a router with a supported family, or are asked for often.
REASONS: dict[str, str] = {
    "bailing_hybrid": _RECURRENT,
    "jamba": _RECURRENT,
    "kimi_linear": _RECURRENT,
    "lfm2_moe": _RECURRENT,
    "minimax": _RECURRENT,
    "nemotron_h": _RECURRENT,
    "qwen3_5_moe": _RECURRENT,
    "qwen3_next": _RECURRENT,
    "deepseek_v32": _INDEXED,
    "dots3_note": _INDEXED,
    "glm_moe_dsa": _INDEXED,
    "hy_v4": _INDEXED,
    "glm4v_moe": _MULTIMODAL,
    "glm5_next": f"{_MULTIMODAL}. It also {_RECURRENT.partition(';')[0]}",
    "hy_v4_vl": f"{_MULTIMODAL}. It also {_INDEXED.partition(',')[0]}",
    "jetmoe": (
        "routes inside its attention too, so that keys and values depend on the chosen experts"
    ),
    "llama4": "runs every expert on every token, so that restricting its routing saves nothing",
    "llama4_text": (
        "runs every expert on every token, so that restricting its routing saves nothing"
    ),
}


def check_kind(model: Any, supported: tuple[str, ...]) -> None:
    """Raise `UnsupportedModelError`, with the reason, for a model that has no adapter."""
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(
            f"got a {type(model).__name__}; wrap takes a Transformers causal language model, "
            "for instance from AutoModelForCausalLM.from_pretrained"
        )
    model_type = model.config.model_type
    if model_type in supported:
        check_not_recurrent(model)
        return
    name = type(model).__name__
    reason = REASONS.get(model_type) or REASONS.get(model_type.removesuffix("_text"))
    if reason is not None:
        raise UnsupportedModelError(f"{name} {reason}. Supported: {', '.join(supported)}")
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{name} is an encoder-decoder model; only decoders can be wrapped. "
            f"Supported: {', '.join(supported)}"
        )
    check_not_recurrent(model)
    if not _has_experts(model):
        raise UnsupportedModelError(
            f"{name} is a dense model, it has no experts to restrict. "
            f"Supported: {', '.join(supported)}"
        )
    raise UnsupportedModelError(
        f"no adapter for model_type {model_type!r} ({name}); supported: {', '.join(supported)}. "
        f"{ADD_A_MODEL}"
    )


def check_not_recurrent(model: PreTrainedModel) -> None:
    """Raise `UnsupportedModelError` for models whose state cannot hold several branches at once."""
    # The flag alone misses models that combine both kinds of layers, the cache alone those that
    # bring a cache of their own.
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    is_recurrent = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers)
    if is_recurrent or getattr(model, "_is_stateful", False):
        raise UnsupportedModelError(f"{type(model).__name__} {_RECURRENT}")


def _has_experts(model: PreTrainedModel) -> bool:
    return any(name.rpartition(".")[2] == "experts" for name, _ in model.named_modules())
