"""A target as llama.cpp reads it: every tensor under its name, every size under its key."""

from __future__ import annotations

import pytest
import torch
from eagle3_fixtures import small_target
from transformers import Qwen3Config, Qwen3ForCausalLM

from peers.gguf_file import gguf_metadata, gguf_tensors, suits_q8_0

NAMES_OF_A_LAYER = {
    *(f"attn_{name}.weight" for name in ("norm", "q", "k", "v", "output", "q_norm", "k_norm")),
    *(f"ffn_{name}.weight" for name in ("norm", "gate_inp", "gate_exps", "up_exps", "down_exps")),
}


def test_tensors_have_the_names_that_llama_cpp_asks_for() -> None:
    tensors = dict(gguf_tensors(small_target().state_dict()))
    layers = {f"blk.{layer}.{name}" for layer in range(5) for name in NAMES_OF_A_LAYER}
    assert set(tensors) == layers | {"token_embd.weight", "output_norm.weight", "output.weight"}


def test_a_dense_drafter_has_other_names_and_sizes() -> None:
    config = Qwen3Config(
        vocab_size=61,
        hidden_size=20,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=10,
    )
    tensors = dict(gguf_tensors(Qwen3ForCausalLM(config).state_dict()))
    assert {name for name in tensors if name.startswith("blk.1.ffn")} == {
        f"blk.1.ffn_{name}.weight" for name in ("norm", "gate", "up", "down")
    }
    metadata = gguf_metadata(config)
    assert metadata["qwen3.feed_forward_length"] == 24
    assert not any("expert" in key for key in metadata)


def test_gates_and_ups_are_split_and_nothing_else_changes() -> None:
    model = small_target().bfloat16()
    tensors = dict(gguf_tensors(model.state_dict()))
    experts = model.model.layers[3].mlp.experts
    gate, up = tensors["blk.3.ffn_gate_exps.weight"], tensors["blk.3.ffn_up_exps.weight"]
    assert gate.shape == up.shape == (6, 12, 20)
    assert torch.equal(torch.cat((gate, up), dim=1), experts.gate_up_proj)
    assert torch.equal(tensors["blk.3.ffn_down_exps.weight"], experts.down_proj)
    assert torch.equal(tensors["output.weight"], model.lm_head.weight)


def test_norms_and_routers_are_float32_and_matrices_bfloat16() -> None:
    for name, tensor in gguf_tensors(small_target().bfloat16().state_dict()):
        is_small = "norm" in name or "gate_inp" in name
        assert tensor.dtype == (torch.float32 if is_small else torch.bfloat16)
        assert tensor.is_contiguous()


def test_metadata_are_the_sizes_of_the_configuration() -> None:
    metadata = gguf_metadata(small_target(norm_topk_prob=True).config)
    assert metadata["tokenizer.ggml.model"] == "none"
    expected = {
        "block_count": 5,
        "embedding_length": 20,
        "expert_feed_forward_length": 12,
        "attention.head_count": 2,
        "attention.head_count_kv": 1,
        "attention.key_length": 10,
        "expert_count": 6,
        "expert_used_count": 2,
        "vocab_size": 61,
    }
    assert (
        expected.items()
        <= {name.removeprefix("qwen3moe."): value for name, value in metadata.items()}.items()
    )
    assert isinstance(metadata["qwen3moe.rope.freq_base"], float)


def test_a_target_that_llama_cpp_computes_otherwise_is_refused() -> None:
    with pytest.raises(ValueError, match="normalised routing weights"):
        gguf_metadata(small_target(norm_topk_prob=False).config)
    config = small_target(norm_topk_prob=True).config
    config.model_type = "olmoe"
    with pytest.raises(
        ValueError, match="the model is a olmoe; it must be one of qwen3_moe, qwen3"
    ):
        gguf_metadata(config)


def test_an_unknown_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mlp\.bias is no tensor of a Qwen3 model"):
        list(gguf_tensors({"model.layers.0.mlp.bias": torch.zeros(2)}))


def test_matrices_can_be_rounded_and_norms_cannot() -> None:
    config = Qwen3Config(
        vocab_size=61,
        hidden_size=64,
        intermediate_size=40,  # no multiple of 32, in `down_proj`
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
    )
    tensors = dict(gguf_tensors(Qwen3ForCausalLM(config).bfloat16().state_dict()))
    unrounded = {name for name, tensor in tensors.items() if not suits_q8_0(tensor)}
    norms = {f"blk.0.{name}_norm.weight" for name in ("attn", "ffn", "attn_q", "attn_k")}
    assert unrounded == norms | {"output_norm.weight", "blk.0.ffn_down.weight"}
