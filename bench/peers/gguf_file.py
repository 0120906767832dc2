"""A Qwen3-MoE target or a dense Qwen3 drafter of Transformers as a GGUF file for llama.cpp.

Names and metadata are those of llama.cpp's architectures `qwen3moe` and `qwen3`. Matrices stay
bfloat16, or are rounded to llama.cpp's Q8_0 (whole numbers of 8 bits and a scale for each 32 of
them); norms and routers become float32, as in llama.cpp's own conversions. The file has no
tokenizer (its kind is "none"): prompts are given as token ids.

Axes: V vocabulary, H hidden, E experts, I inner.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ARCHITECTURES = {"qwen3_moe": "qwen3moe", "qwen3": "qwen3"}  # by Transformers' model type
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
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
STACKED = "mlp.experts.gate_up_proj"  # [E, gate then up, H]; llama.cpp has one tensor for each
IN_FLOAT32 = ("_norm.weight", "ffn_gate_inp.weight")
Q8_0_GROUP = 32  # numbers of a row that share a scale


def gguf_metadata(config: Any) -> dict[str, str | int | float]:
    """What llama.cpp must know of a `Qwen3MoeConfig` or a `Qwen3Config`, by GGUF key.

    Raises `ValueError` for a configuration that llama.cpp would compute otherwise.
    """
    if config.model_type not in ARCHITECTURES:
        raise ValueError(
            f"the model is a {config.model_type}; it must be one of {', '.join(ARCHITECTURES)}"
        )
    rope = config.rope_parameters
    if rope["rope_type"] != "default":
        raise ValueError(f"positions are {rope['rope_type']}; they must be plainly rotary")
    sizes = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(rope["rope_theta"]),
        "vocab_size": config.vocab_size,
    }
    if config.model_type == "qwen3_moe":
        sizes |= _expert_sizes(config)
    architecture = ARCHITECTURES[config.model_type]
    return {"tokenizer.ggml.model": "none"} | {
        f"{architecture}.{name}": value for name, value in sizes.items()
    }


def _expert_sizes(config: Any) -> dict[str, int]:
    if not config.norm_topk_prob or config.mlp_only_layers or config.decoder_sparse_step != 1:
        raise ValueError(
            "llama.cpp's qwen3moe has normalised routing weights and sparse layers only; this "
            "target has something else"
        )
    return {
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_count": config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
    }


def gguf_tensors(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor, as llama.cpp has it, of everything in the `state_dict` of a Qwen3 model.

    Raises `ValueError` for a tensor that such a model, with or without experts, does not have.
    """
    for name, tensor in state.items():
        if name in MODEL_TENSORS:
            yield _converted(MODEL_TENSORS[name], tensor)
            continue
        prefix, _, rest = name.removeprefix("model.layers.").partition(".")
        if not prefix.isdigit() or (rest not in LAYER_TENSORS and rest != STACKED):
            raise ValueError(f"{name} is no tensor of a Qwen3 model")
        if rest == STACKED:
            for part, half in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
                yield _converted(f"blk.{prefix}.ffn_{part}_exps.weight", half)
        else:
            yield _converted(f"blk.{prefix}.{LAYER_TENSORS[rest]}", tensor)


def _converted(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    tensor = tensor.detach()
    return name, tensor.float() if name.endswith(IN_FLOAT32) else tensor.bfloat16().contiguous()


def suits_q8_0(tensor: Tensor) -> bool:
    """Whether a tensor of `gguf_tensors` is a matrix that Q8_0 can hold."""
    is_matrix = tensor.dim() == 2 and tensor.dtype == torch.bfloat16
    return is_matrix and tensor.shape[1] % Q8_0_GROUP == 0


def write_gguf(
    path: Path, config: Any, state: Mapping[str, Tensor], *, is_rounded: bool = False
) -> None:
    """Write the file, with matrices in Q8_0 if `is_rounded`; needs the package `gguf`."""
    import gguf  # here, so that names and metadata can be had without it

    q8_0 = gguf.GGMLQuantizationType.Q8_0
    writer = gguf.GGUFWriter(str(path), ARCHITECTURES[config.model_type])
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
        elif is_rounded and suits_q8_0(tensor):
            rounded = gguf.quants.quantize(tensor.float().numpy(), q8_0)
            writer.add_tensor(name, rounded, raw_dtype=q8_0)
        else:  # numpy has no bfloat16: bytes, of which GGUF makes the shape in numbers
            number_bytes = tensor.view(torch.uint8).numpy()
            writer.add_tensor(name, number_bytes, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
