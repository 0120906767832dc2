"""Tiny random models of every supported family, from configurations; nothing is downloaded.

A name is a family, or a family and a variant of its configuration ("mixtral_sliding"). Weights are
drawn with a spread at which greedy text of such a model is neither a loop nor noise, so that drafts
from its own past are accepted in places and rejected in others.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCAB_SIZE = 128
NUM_LAYERS = 2
WINDOW = 8  # of sliding layers: prompts and texts of the tests are longer

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_QWEN = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
_ROUTED = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
}
_GROUPED = {
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}
_ALTERNATING = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", {**_QWEN, "norm_topk_prob": True, "head_dim": 16}),
    "qwen3_moe_sliding": (
        "Qwen3Moe",
        {**_QWEN, "head_dim": 16, "use_sliding_window": True, "sliding_window": WINDOW},
    ),
    "qwen2_moe": ("Qwen2Moe", {**_QWEN, "shared_expert_intermediate_size": 32}),
    "qwen2_moe_sliding": (
        "Qwen2Moe",
        {
            **_QWEN,
            **_ALTERNATING,
            "shared_expert_intermediate_size": 32,
            "use_sliding_window": True,
        },
    ),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 2}),
    "mixtral": ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "mixtral_sliding": (
        "Mixtral",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    ),
    "gpt_oss": (
        "GptOss",
        {**_ALTERNATING, "num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {**_ROUTED, **_GROUPED, **_LATENT, "first_k_dense_replace": 1, "num_mtp_layers": 0},
    ),
    "glm4_moe": ("Glm4Moe", {**_ROUTED, "first_k_dense_replace": 1, "head_dim": 16}),
    "dots1": ("Dots1", {**_ROUTED, "norm_topk_prob": True, "first_k_dense_replace": 1}),
    "dots1_sliding": ("Dots1", {**_ROUTED, **_ALTERNATING, "first_k_dense_replace": 0}),
    "axk1": ("AXK1", {**_ROUTED, **_GROUPED, **_LATENT}),
    "exaone_moe": (
        "ExaoneMoe",
        {
            **_ALTERNATING,
            "moe_intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "num_shared_experts": 1,
            "head_dim": 16,
        },
    ),
    "glm4_moe_lite": ("Glm4MoeLite", {**_ROUTED, **_LATENT}),
    "mimo_v2_flash": (
        "MiMoV2Flash",
        {
            **{name: value for name, value in _ROUTED.items() if name != "n_shared_experts"},
            **_ALTERNATING,
            "head_dim": 24,
            "v_head_dim": 16,
            "mlp_layer_types": ["dense", "sparse"],
        },
    ),
    "solar_open": ("SolarOpen", {**_ROUTED, "head_dim": 16}),
}
# Standard deviation of the weights; less gives texts that repeat themselves sooner.
SPREAD = {
    "default": 0.1,
    "dots1_sliding": 0.04,
    "exaone_moe": 0.04,
    "gpt_oss": 0.08,
    "mixtral_sliding": 0.05,
}


def is_available(name: str) -> bool:
    """Whether the installed Transformers has this family."""
    return hasattr(transformers, f"{CONFIGS[name][0]}ForCausalLM")


def make_model(
    name: str, *, seed: int = 0, attention: str | None = None, **changes: Any
) -> PreTrainedModel:
    """A random fp32 model in evaluation mode; `changes` go into its configuration."""
    stem, settings = CONFIGS[name]
    spread = SPREAD.get(name, SPREAD["default"])
    settings = {**_SIZES, "initializer_range": spread, **settings, **changes}
    config = getattr(transformers, f"{stem}Config")(**settings)
    if attention is not None:
        config._attn_implementation = attention
    torch.manual_seed(seed)
    model = getattr(transformers, f"{stem}ForCausalLM")(config).eval()
    randomize_constants(model, seed)
    return model


@torch.no_grad()
def randomize_constants(model: PreTrainedModel, seed: int) -> None:
    """Give biases and attention sinks random values: at zero they could be left out unnoticed."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("bias", "sinks")):
            tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
