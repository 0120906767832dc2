"""The shapes of the bundled models: plain Transformers configurations."""

from typing import Any

from transformers import (
    GptOssConfig,
    OlmoeConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)

_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}


def _common(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 5,
        "max_position_embeddings": 1024,
        "rope_parameters": _ROPE,
        "initializer_range": 0.05,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
    }


def config_of(name: str, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
    """Return the configuration of a bundled model."""
    common = _common(tokenizer)
    if name == "tiny-qwen3-moe":
        return Qwen3MoeConfig(
            **common,
            head_dim=32,
            num_experts=64,
            num_experts_per_tok=8,
            moe_intermediate_size=32,
            intermediate_size=128,
            norm_topk_prob=True,
        )
    if name == "tiny-olmoe":
        return OlmoeConfig(
            **common,
            num_experts=64,
            num_experts_per_tok=8,
            intermediate_size=32,
            norm_topk_prob=False,
        )
    if name == "tiny-gpt-oss":
        return GptOssConfig(
            **common,
            head_dim=32,
            num_local_experts=32,
            num_experts_per_tok=4,
            intermediate_size=64,
            sliding_window=64,
        )
    if name == "assistant":
        return Qwen3Config(
            **{
                **common,
                "num_hidden_layers": 2,
                "hidden_size": 96,
                "num_attention_heads": 3,
                "num_key_value_heads": 3,
            },
            head_dim=32,
            intermediate_size=256,
        )
    raise SystemExit(f"--model is {name!r}; known: {', '.join(NAMES)}")


NAMES = ("tiny-qwen3-moe", "tiny-olmoe", "tiny-gpt-oss", "assistant")
