"""A Qwen3-MoE target of Transformers as a GGUF file that llama.cpp reads.

Names and metadata are those of llama.cpp's architecture `qwen3moe`. Matrices stay bfloat16; norms
and routers become float32, as in llama.cpp's own conversions. The file has no tokenizer (its kind
is "none"): prompts are given as token ids.

Axes: V vocabulary, H hidden, E experts, I inner.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ARCHITECTURE = "qwen3moe"
MODEL_TENSORS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_TENSORS = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
}
STACKED = "mlp.experts.gate_up_proj"  # [E, gate then up, H]; llama.cpp has one tensor for each
IN_FLOAT32 = ("_norm.weight", "ffn_gate_inp.weight")


def gguf_metadata(config: Any) -> dict[str, str | int | float]:
    """What llama.cpp must know of a `Qwen3MoeConfig`, by GGUF key.

    Raises `ValueError` for a configuration that llama.cpp would compute otherwise.
    """
    if config.model_type != "qwen3_moe":
        raise ValueError(f"the target is a {config.model_type}; it must be a qwen3_moe")
    rope = config.rope_parameters
    if rope["rope_type"] != "default" or not config.norm_topk_prob or config.mlp_only_layers:
        raise ValueError(
            "llama.cpp's qwen3moe has plain rotary positions, normalised routing weights and "
            "sparse layers only; this target has something else"
        )
    sizes = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(rope["rope_theta"]),
        "expert_count": config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
        "vocab_size": config.vocab_size,
    }
    return {"tokenizer.ggml.model": "none"} | {
        f"{ARCHITECTURE}.{name}": value for name, value in sizes.items()
    }


def gguf_tensors(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of everything in the `state_dict` of a Qwen3-MoE model, as llama.cpp has it.

    Raises `ValueError` for a tensor that such a model does not have.
    """
    for name, tensor in state.items():
        if name in MODEL_TENSORS:
            yield _converted(MODEL_TENSORS[name], tensor)
            continue
        prefix, _, rest = name.removeprefix("model.layers.").partition(".")
        if not prefix.isdigit() or (rest not in LAYER_TENSORS and rest != STACKED):
            raise ValueError(f"{name} is no tensor of a Qwen3-MoE model")
        if rest == STACKED:
            for part, half in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
                yield _converted(f"blk.{prefix}.ffn_{part}_exps.weight", half)
        else:
            yield _converted(f"blk.{prefix}.{LAYER_TENSORS[rest]}", tensor)


def _converted(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    tensor = tensor.detach()
    return name, tensor.float() if name.endswith(IN_FLOAT32) else tensor.bfloat16().contiguous()


def write_gguf(path: Path, config: Any, state: Mapping[str, Tensor]) -> None:
    """Write the file; needs the package `gguf`."""
    import gguf  # here, so that names and metadata can be had without it

    writer = gguf.GGUFWriter(str(path), ARCHITECTURE)
    for key, value in gguf_metadata(config).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    for name, tensor in gguf_tensors(state):
        if tensor.dtype == torch.float32:
            writer.add_tensor(name, tensor.numpy())
        else:  # numpy has no bfloat16: bytes, of which GGUF makes the shape in numbers
            number_bytes = tensor.view(torch.uint8).numpy()
            writer.add_tensor(name, number_bytes, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
