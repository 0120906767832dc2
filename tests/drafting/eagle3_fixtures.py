"""Small random heads and the small target that they are made for."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from acceptmoe.drafting.eagle3_head import Eagle3Config, Eagle3Head

PLAIN = Eagle3Config(  # sizes that no power of two divides
    vocab_size=61,
    draft_vocab_size=37,
    hidden_size=20,
    target_hidden_size=20,
    intermediate_size=26,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    boundaries=(2, 3, 4),
)

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one vocabulary, target's output matrix": {"draft_vocab_size": 61, "owns_lm_head": False},
    "one vocabulary, own output matrix": {"draft_vocab_size": 61},
    "own embedding, other hidden size": {"hidden_size": 14, "owns_embedding": True},
    "biases": {"fc_bias": True, "attention_bias": True},
    "norm of each state": {"fc_norm": True},
    "norm before fusion": {"norm_before_fc": True},
    "both norms": {"fc_norm": True, "norm_before_fc": True},
    "normalised residual": {"norm_before_residual": True},
    "normalised recurrence": {"norm_output": True},
    "query and key norms": {"qk_norm": True, "rms_norm_eps": 1e-5},
    "four states": {"num_aux": 4, "boundaries": (2, 3, 4, 5)},
    "one key-value head": {"num_kv_heads": 1, "head_dim": 10},
    "linear positions": {"rope": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0}},
    "llama3 positions": {"rope": LLAMA3},
    "yarn positions": {"rope": YARN, "max_position_embeddings": 64},
}


def small_target(seed: int = 0, **changes: Any) -> Qwen3MoeForCausalLM:
    """A random Qwen3-MoE of five layers that `PLAIN` heads fit."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": 61,
        "hidden_size": 20,
        "num_hidden_layers": 5,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 10,
        "moe_intermediate_size": 12,
        "intermediate_size": 12,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "initializer_range": 0.3,
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**sizes, **changes})).eval()


def random_head(seed: int = 0, **changes: Any) -> Eagle3Head:
    """A head whose every weight matters; large weights make its distributions uneven."""
    config = dataclasses.replace(PLAIN, **changes)
    generator = torch.Generator().manual_seed(seed)
    token_ids = None
    if config.draft_vocab_size < config.vocab_size:
        order = torch.randperm(config.vocab_size, generator=generator)
        token_ids = order[: config.draft_vocab_size].sort().values
    head = Eagle3Head(config, token_ids)
    for name, parameter in head.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        is_norm = "norm" in name
        parameter.data.copy_(1 + 0.3 * noise if is_norm else 0.35 * noise)
    return head.requires_grad_(False).eval()
