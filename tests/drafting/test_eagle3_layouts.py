"""Configs of published heads, as their makers write them."""

from __future__ import annotations

from typing import Any

import pytest
from eagle3_fixtures import PLAIN

from acceptmoe.drafting.eagle3_head import Eagle3Config
from acceptmoe.drafting.eagle3_layouts import describes_eagle3, read_config, write_config
from acceptmoe.errors import DrafterError

# Qwen3-30B-A3B as SpecForge describes its head
FLAT: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_hidden_layers": 1,
    "vocab_size": 151936,
    "draft_vocab_size": 32000,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
# gpt-oss-20b as speculators describes its head
NESTED: dict[str, Any] = {
    "architectures": ["Eagle3DraftModel"],
    "speculators_model_type": "eagle3",
    "draft_vocab_size": 64000,
    "norm_before_fc": True,
    "norm_before_residual": True,
    "target_hidden_size": None,
    "eagle_aux_hidden_state_layer_ids": None,
    "transformer_layer_config": {
        "model_type": "llama",
        "hidden_size": 2880,
        "num_hidden_layers": 1,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 2880,
        "vocab_size": 201088,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    },
}


def read(raw: dict[str, Any], boundaries: tuple[int, ...] | None = None) -> Eagle3Config:
    return read_config(raw, owns_embedding=False, owns_lm_head=True, boundaries=boundaries)


def nested_layer(**changes: Any) -> dict[str, Any]:
    return {
        **NESTED,
        "transformer_layer_config": {**NESTED["transformer_layer_config"], **changes},
    }


def test_a_flat_config_is_read() -> None:
    config = read(FLAT)
    assert (config.hidden_size, config.target_hidden_size, config.head_dim) == (2048, 2048, 128)
    assert (config.num_heads, config.num_kv_heads) == (32, 4)
    assert (config.vocab_size, config.draft_vocab_size) == (151936, 32000)
    assert (config.boundaries, config.boundary_rule, config.num_aux) == (None, "default", 3)
    assert config.rope == {"rope_type": "default", "rope_theta": 1e6}
    assert not config.norm_before_residual


def test_a_nested_config_is_read() -> None:
    config = read(NESTED)
    assert (config.hidden_size, config.target_hidden_size, config.vocab_size) == (
        2880,
        2880,
        201088,
    )
    assert config.norm_before_fc
    assert config.norm_before_residual
    assert config.rms_norm_eps == 1e-5
    assert not config.qk_norm
    assert read(nested_layer(model_type="qwen3")).qk_norm


def test_a_window_that_is_switched_off_is_none() -> None:
    assert read({**FLAT, "sliding_window": 4096, "use_sliding_window": False}) == read(FLAT)


def test_the_normalised_residual_is_the_default_of_nested_configs_only() -> None:
    nested = {key: value for key, value in NESTED.items() if key != "norm_before_residual"}
    assert read(nested).norm_before_residual
    assert not read({**NESTED, "norm_before_residual": False}).norm_before_residual
    assert read({**FLAT, "norm_before_residual": True}).norm_before_residual


@pytest.mark.parametrize(
    ("ids", "nested", "boundaries", "rule"),
    [
        ([1, 11, 21], False, (2, 12, 22), "layer outputs"),
        ([1, 46, 90], False, (2, 47, 91), "layer outputs"),
        ([2, 12, 21], False, (2, 12, 21), "boundaries"),
        ([24, 30, 36], False, (24, 30, 36), "boundaries"),
        ([1, 11, 21], True, (1, 11, 21), "boundaries"),
        ([0, 11, 21], True, (0, 11, 21), "boundaries"),
        ([], False, None, "default"),
        (None, True, None, "default"),
    ],
)
def test_feature_layers_follow_the_convention_of_their_layout(
    ids: list[int] | None, nested: bool, boundaries: tuple[int, ...] | None, rule: str
) -> None:
    raw = (
        {**NESTED, "eagle_aux_hidden_state_layer_ids": ids}
        if nested
        else {**FLAT, "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}
    )
    config = read(raw)
    assert (config.boundaries, config.boundary_rule) == (boundaries, rule)
    assert read(raw, (3, 4, 5)).boundaries == (3, 4, 5)


@pytest.mark.parametrize("ids", [[1, 1, 2], [3, 2, 1], [-1, 2, 3], [1.5, 2, 3], "123"])
def test_feature_layers_must_ascend(ids: Any) -> None:
    with pytest.raises(DrafterError, match="eagle_aux_hidden_state_layer_ids is"):
        read({**NESTED, "eagle_aux_hidden_state_layer_ids": ids})


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({**FLAT, "num_hidden_layers": 4}, "num_hidden_layers is 4; an EAGLE-3 head of one layer"),
        (nested_layer(num_hidden_layers=2), "num_hidden_layers is 2"),
        ({**FLAT, "kv_lora_rank": 512}, r"multi-head latent attention \(MLA\)"),
        ({**FLAT, "architectures": ["Eagle3MLAForCausalLM"]}, "MLA"),
        ({**FLAT, "eagle_config": {"use_aux_hidden_state": False}}, "EAGLE-1 or 2"),
        ({**FLAT, "hidden_act": "gelu"}, "hidden_act is 'gelu'; .* must have 'silu'"),
        ({**FLAT, "mlp_bias": True}, "mlp_bias is True"),
        ({**FLAT, "model_type": "mamba"}, "model_type is 'mamba'; .* 'llama' or 'qwen3'"),
        ({**FLAT, "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({**FLAT, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
        (nested_layer(sliding_window=2048), "sliding_window is 2048; .* its whole context"),
        ({**FLAT, "hidden_size": None}, "hidden_size is missing from config.json"),
        ({**FLAT, "vocab_size": "many"}, "vocab_size is 'many' in config.json"),
        ({**FLAT, "vocab_size": 0}, "vocab_size is 0 in config.json"),
        ({**FLAT, "draft_vocab_size": 200000}, "draft_vocab_size is 200000; it must be at most"),
        ({**FLAT, "num_key_value_heads": 5}, "32 attention heads and 5 key-value heads"),
        ({**FLAT, "head_dim": 127}, "head_dim is 127; rotary positions need an even number"),
        (
            {
                **FLAT,
                "num_aux_hidden_states": 2,
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
            },
            r"names 3 feature layers \[2, 3, 4\] and fuses 2 states",
        ),
        ({**NESTED, "speculators_model_type": "dflash"}, "speculators_model_type is 'dflash'"),
        ({"speculators_model_type": "eagle3"}, "transformer_layer_config is missing"),
    ],
)
def test_a_config_that_means_something_else_is_refused(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(DrafterError, match=message):
        read(raw)


def test_a_published_config_is_recognised() -> None:
    assert describes_eagle3(FLAT)
    assert describes_eagle3(NESTED)
    assert describes_eagle3({**FLAT, "architectures": ["LlamaForCausalLM"]})
    assert not describes_eagle3({"speculators_model_type": "dflash"})
    assert not describes_eagle3({"architectures": ["Qwen3MoeForCausalLM"], "model_type": "x"})


def test_a_flat_layout_refuses_feature_layers_it_cannot_express() -> None:
    config = Eagle3Config(**{**vars(PLAIN), "boundaries": (1, 2, 3)})
    with pytest.raises(DrafterError, match="save the head with layout='speculators'"):
        write_config(config, "specforge", "float32")
    assert read(write_config(config, "speculators", "float32")).boundaries == (1, 2, 3)
    later = Eagle3Config(**{**vars(PLAIN), "boundaries": (3, 4, 5)})
    assert read(write_config(later, "specforge", "float32")).boundaries == (3, 4, 5)
