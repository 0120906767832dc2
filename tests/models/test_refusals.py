"""Models that cannot be wrapped are refused with their own reason, and stay as they are."""

from __future__ import annotations

import re

import pytest
import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
)

import acceptmoe
from acceptmoe.errors import SelfCheckError, UnsupportedModelError
from acceptmoe.models.adapter import FAMILIES, MoEAdapter
from acceptmoe.models.refusals import REASONS, check_kind
from model_state import ModelState
from tiny_models import make_model

RECURRENT = "has recurrent or convolutional layers; their single running state would mix"
INDEXED = "picks the keys of its sparse attention with an indexer"
MULTIMODAL = "takes images and has positions on several axes"
# The families with DeepSeek-V3's router that are not supported, and the best known hybrids.
REFUSED = {
    "bailing_hybrid": RECURRENT,
    "kimi_linear": RECURRENT,
    "nemotron_h": RECURRENT,
    "deepseek_v32": INDEXED,
    "dots3_note": INDEXED,
    "glm_moe_dsa": INDEXED,
    "hy_v4": INDEXED,
    "glm4v_moe": MULTIMODAL,
    "glm5_next": MULTIMODAL,
    "hy_v4_vl": MULTIMODAL,
    "jamba": RECURRENT,
    "lfm2_moe": RECURRENT,
    "minimax": RECURRENT,
    "qwen3_next": RECURRENT,
}


NEEDED = {"lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}}


def make_empty(model_type: str, auto: type = AutoModelForCausalLM, **settings) -> PreTrainedModel:
    """A model of the default configuration without weights; only its kind is looked at."""
    try:
        config = AutoConfig.for_model(model_type, **NEEDED.get(model_type, {}), **settings)
    except ValueError:
        pytest.skip(f"this Transformers version has no {model_type}")
    text = config.get_text_config(decoder=True)
    with torch.device("meta"):
        if type(config) in auto._model_mapping:
            return auto.from_config(config)
        return AutoModelForImageTextToText.from_config(config if config is not text else text)


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_family_that_cannot_be_verified_as_a_tree_is_refused(model_type: str) -> None:
    model = make_empty(model_type)
    with pytest.raises(UnsupportedModelError, match=re.escape(REFUSED[model_type])) as caught:
        acceptmoe.wrap(model, policy="natural")
    assert str(caught.value).startswith(type(model).__name__)
    assert "Supported: axk1, deepseek_v3" in str(caught.value)
    assert not hasattr(model, "acceptmoe")


def test_no_family_is_both_supported_and_refused() -> None:
    assert not set(FAMILIES) & set(REASONS)


def test_hybrids_that_nobody_listed_are_refused_too() -> None:
    with pytest.raises(UnsupportedModelError, match=RECURRENT):
        acceptmoe.wrap(make_empty("mamba", num_hidden_layers=1), policy="natural")
    for model_type in ("lfm2_moe", "qwen3_next"):  # one without `_is_stateful`, one with it
        model = make_empty(model_type)
        model.config.model_type = "something_new"
        with pytest.raises(UnsupportedModelError, match=RECURRENT):
            check_kind(model, FAMILIES)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gpt2"])
def test_dense_models_are_refused(model_type: str) -> None:
    model = make_empty(model_type, num_hidden_layers=1)
    text = f"{type(model).__name__} is a dense model, it has no experts to restrict. Supported: "
    with pytest.raises(UnsupportedModelError, match=text):
        acceptmoe.wrap(model, policy="natural")


def test_a_supported_family_without_a_sparse_layer_is_refused() -> None:
    model = make_model("qwen3_moe", mlp_only_layers=[0, 1])
    before = ModelState.of(model)
    with pytest.raises(UnsupportedModelError, match="has no sparse layer in this configuration"):
        acceptmoe.wrap(model, policy="natural")
    before.check_same(model)


def test_sparse_models_without_an_adapter_are_refused() -> None:
    model = make_empty("granitemoe", num_hidden_layers=1)
    text = r"no adapter for model_type 'granitemoe' \(GraniteMoeForCausalLM\); supported: axk1, .*"
    with pytest.raises(UnsupportedModelError, match=f'{text} See CONTRIBUTING.md, "Add a model"'):
        acceptmoe.wrap(model, policy="natural")


def test_encoder_decoder_models_are_refused() -> None:
    model = make_empty("switch_transformers", AutoModelForSeq2SeqLM)
    with pytest.raises(UnsupportedModelError, match="is an encoder-decoder model; only decoders"):
        acceptmoe.wrap(model, policy="natural")


def test_base_models_without_a_head_are_refused() -> None:
    model = AutoModel.from_config(make_model("olmoe").config)
    text = "got a OlmoeModel; of olmoe only OlmoeForCausalLM is supported, load the model with"
    with pytest.raises(UnsupportedModelError, match=text):
        acceptmoe.wrap(model, policy="natural")


@pytest.mark.parametrize(
    ("name", "attention", "allowed"),
    [
        ("qwen3_moe", "flash_attention_2", "'sdpa' or 'eager'"),
        ("qwen3_moe", "flex_attention", "'sdpa' or 'eager'"),
        ("gpt_oss", "sdpa", "'eager'"),
        ("mimo_v2_flash", "flash_attention_3", "'eager'"),
    ],
)
def test_attention_that_takes_no_tree_mask_is_refused(
    name: str, attention: str, allowed: str
) -> None:
    model = make_model(name)
    model.config._attn_implementation = attention
    before = ModelState.of(model)
    text = (
        f"attn_implementation is {attention!r}, which takes no tree mask; for {name} use {allowed}"
    )
    with pytest.raises(UnsupportedModelError, match=text):
        acceptmoe.wrap(model, policy="natural")
    before.check_same(model)


def test_mxfp4_experts_are_refused() -> None:
    model = make_model("gpt_oss")
    experts = model.model.layers[1].mlp.experts
    experts.__class__ = type("Mxfp4GptOssExperts", (type(experts),), {})
    before = ModelState.of(model)
    text = r"layers.1.mlp holds MXFP4 experts, .*=Mxfp4Config\(dequantize=True\)"
    with pytest.raises(UnsupportedModelError, match=text):
        acceptmoe.wrap(model, policy="natural")
    before.check_same(model)


def test_expert_parallelism_is_refused() -> None:
    model = make_model("qwen3_moe")
    model.model.layers[0].mlp.experts._is_expert_parallel = True
    text = "the experts of model.layers.0.mlp are spread over devices"
    with pytest.raises(UnsupportedModelError, match=re.escape(text)):
        acceptmoe.wrap(model, policy="natural")


def test_an_unknown_layer_type_is_refused() -> None:
    model = make_model("gpt_oss")
    model.config.layer_types = ["chunked_attention", "full_attention"]
    model.config.attention_chunk_size = 4
    with pytest.raises(UnsupportedModelError, match=r"layer_types has \['chunked_attention'\]"):
        MoEAdapter(model)


class TestSelfCheck:
    @staticmethod
    def check_refused(model: PreTrainedModel, text: str) -> None:
        before = ModelState.of(model)
        with pytest.raises(SelfCheckError, match=text):
            acceptmoe.wrap(model, policy="natural")
        before.check_same(model)

    def test_refuses_a_block_that_another_patch_replaced(self) -> None:
        # What use_kernels=True does to gpt-oss: the block computes without its router module.
        model = make_model("gpt_oss")
        block = model.model.layers[1].mlp
        block.forward = lambda hidden_states: (hidden_states, None)
        self.check_refused(model, "called the router of model.layers.1.mlp 0 times instead of once")

    def test_refuses_a_router_that_scores_otherwise(self) -> None:
        model = make_model("qwen3_moe")
        router = model.model.layers[0].mlp.gate
        natural = router.forward

        def doubled(hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
            logits, weights, ids = natural(hidden_states)
            return logits, 2 * weights, ids

        router.forward = doubled
        self.check_refused(model, "the router of model.layers.0.mlp .* does not score as softmax_t")

    def test_passes_in_half_precision(self) -> None:
        for name in ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"):
            for dtype in (torch.bfloat16, torch.float16):
                acceptmoe.wrap(make_model(name).to(dtype), policy="natural")


def test_the_families_here_are_those_of_the_installed_transformers() -> None:
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
    assert set(FAMILIES) <= set(known)
