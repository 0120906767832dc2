import json
import math
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

import acceptmoe
from acceptmoe.drafting.eagle3 import Eagle3Drafter
from acceptmoe.drafting.eagle3_checkpoint import save_head
from acceptmoe.drafting.eagle3_head import Eagle3Config, Eagle3Head
from acceptmoe.errors import DrafterError, InvalidArgumentError, UnsupportedModelError
from acceptmoe.table import config_fingerprint
from acceptmoe.targets.widen import widen, widen_eagle3_head

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,  # multiples of 8: grouped products want rows of 16 bytes
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,  # logits of a few units, routes that are decided
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3}


def config_of(family, tied=False, num_layers=3):
    sizes = SIZES | {"tie_word_embeddings": tied, "num_hidden_layers": num_layers}
    if family == "qwen3_moe":  # one dense layer among the sparse ones
        moe = EXPERTS | {"moe_intermediate_size": 16, "mlp_only_layers": [1], "head_dim": 8}
        return Qwen3MoeConfig(**sizes, **moe, norm_topk_prob=True)
    if family == "olmoe":
        return OlmoeConfig(**sizes, **EXPERTS, clip_qkv=5.0)
    if family == "gpt_oss":
        moe = {"num_local_experts": 7, "num_experts_per_tok": 3, "head_dim": 8}
        return GptOssConfig(**sizes, **moe, sliding_window=4)
    if family == "qwen3":
        return Qwen3Config(**sizes, head_dim=8, attention_bias=True)
    return LlamaConfig(**sizes, attention_bias=True, mlp_bias=True)


def make_model(family, tied=False, dtype=torch.float32, num_layers=3):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(family, tied, num_layers))
    with torch.no_grad():  # norms, biases and sinks start out uniform, which would hide mistakes
        for parameter in model.parameters():
            if parameter.dim() == 1 or parameter.std() == 0:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.to(dtype).eval()


def routed_ids(model, input_ids):
    found, hooks = [], []
    for name, module in model.named_modules():
        if name.endswith(("mlp.gate", "mlp.router")):
            hooks.append(module.register_forward_hook(lambda m, a, output: found.append(output[2])))
    with torch.no_grad():
        logits = model(input_ids).logits
    for hook in hooks:
        hook.remove()
    return logits, found


FAMILIES = ["qwen3_moe", "olmoe", "gpt_oss", "qwen3", "llama"]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_widened_model_computes_the_same(family, tied):
    model = make_model(family, tied)
    input_ids = torch.randint(97, (2, 40), generator=torch.Generator().manual_seed(1))
    logits, ids = routed_ids(model, input_ids)
    assert logits.std() > 0.5  # a test of near-zero logits would prove nothing
    assert len(ids) == {"qwen3_moe": 2, "olmoe": 3, "gpt_oss": 3}.get(family, 0)
    for hidden_factor, inner_factor in ((4, 2), (3, 5), (1, 1)):
        wide_logits, wide_ids = routed_ids(widen(model, hidden_factor, inner_factor), input_ids)
        # Sums of other lengths in fp32, logits of up to 5.
        torch.testing.assert_close(wide_logits, logits, atol=2e-5, rtol=0)
        assert torch.equal(wide_logits.argmax(-1), logits.argmax(-1))
        assert len(wide_ids) == len(ids)
        assert all(torch.equal(a, b) for a, b in zip(wide_ids, ids, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_only_difference_is_rounding(family):
    # In fp64 the two agree to fp64's rounding, so nothing is approximated.
    model = make_model(family, dtype=torch.float64)
    model.set_experts_implementation("eager")  # the grouped product takes no fp64
    widened = widen(model, 4, 2)
    input_ids = torch.randint(97, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        difference = widened(input_ids).logits - model(input_ids).logits
    assert difference.abs().max() < 1e-12


@pytest.mark.parametrize("family", FAMILIES)
def test_a_widened_model_has_the_shapes_asked_for(family):
    model = make_model(family)
    widened = widen(model, 4, 2)
    old, new = model.config, widened.config
    assert new.hidden_size == 4 * old.hidden_size
    assert new.num_attention_heads == 4 * old.num_attention_heads
    assert new.num_key_value_heads == old.num_key_value_heads
    assert new.intermediate_size == 2 * old.intermediate_size
    state = widened.state_dict()
    assert state["model.embed_tokens.weight"].shape == (97, 128)
    if family == "qwen3_moe":
        assert state["model.layers.0.mlp.experts.gate_up_proj"].shape == (7, 64, 128)
        assert state["model.layers.1.mlp.gate_proj.weight"].shape == (48, 128)
    if family == "olmoe":
        assert state["model.layers.0.mlp.experts.down_proj"].shape == (7, 128, 48)
    if family == "gpt_oss":
        assert state["model.layers.0.mlp.experts.gate_up_proj"].shape == (7, 128, 96)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_residual_stream_is_the_original_repeated(family):
    # EAGLE-3 heads read it, so it must be known exactly what it is.
    model = make_model(family)
    widened = widen(model, 4, 2)
    input_ids = torch.arange(30)[None]
    with torch.no_grad():
        states = model(input_ids, output_hidden_states=True).hidden_states
        wide_states = widened(input_ids, output_hidden_states=True).hidden_states
    assert len(states) == 4
    for state, wide_state in zip(states, wide_states, strict=True):
        torch.testing.assert_close(wide_state, state.repeat(1, 1, 4), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_widened_model_generates_the_same_tokens(family):
    model = make_model(family)
    widened = widen(model, 2, 4)
    prompt = torch.arange(5, 13)[None]
    settings = {"max_new_tokens": 24, "do_sample": False}
    assert torch.equal(widened.generate(prompt, **settings), model.generate(prompt, **settings))


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_stays_bf16_and_divides_exactly(family):
    model = make_model(family, dtype=torch.bfloat16)
    widened = widen(model, 4, 8)
    assert {p.dtype for p in widened.parameters()} == {torch.bfloat16}
    # The weights are exact: in fp32 the bf16 pair agrees as closely as an fp32 pair.
    input_ids = torch.randint(97, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model.float()(input_ids).logits
        wide_logits = widened.float()(input_ids).logits
    torch.testing.assert_close(wide_logits, logits, atol=2e-5, rtol=0)
    assert torch.equal(wide_logits.argmax(-1), logits.argmax(-1))


@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe", "gpt_oss"])
def test_bf16_arithmetic_agrees_up_to_its_rounding(family):
    model = make_model(family, dtype=torch.bfloat16)
    input_ids = torch.randint(97, (1, 40), generator=torch.Generator().manual_seed(1))
    logits, ids = routed_ids(model, input_ids)
    wide_logits, wide_ids = routed_ids(widen(model, 4, 8), input_ids)
    # A flipped rounding (2^-8) near a tie may reroute a row; most rows must not notice.
    same_rows = torch.stack([(a == b).all(-1) for a, b in zip(wide_ids, ids, strict=True)]).float()
    assert same_rows.mean() > 0.9
    assert (wide_logits.argmax(-1) == logits.argmax(-1)).float().mean() > 0.9


def test_the_original_is_left_alone_and_shares_nothing():
    model = make_model("gpt_oss")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = model.config.to_dict()
    widened = widen(model, 1, 1)
    with torch.no_grad():
        for parameter in widened.parameters():
            parameter.zero_()
        for buffer in widened.buffers():
            buffer.zero_()
    assert model.config.to_dict() == config
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert all(buffer.abs().sum() > 0 for buffer in model.buffers())


def test_a_widened_model_is_an_ordinary_checkpoint(tmp_path):
    widened = widen(make_model("olmoe", tied=True), 2, 2)
    widened.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    input_ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(loaded(input_ids).logits, widened(input_ids).logits)
    assert config_fingerprint(loaded.config) == config_fingerprint(config_of("olmoe", tied=True))


def test_a_widened_model_keeps_the_fingerprint_of_its_original():
    model = make_model("qwen3_moe")
    once = widen(model, 2, 2)
    assert config_fingerprint(once.config) == config_fingerprint(model.config)
    assert config_fingerprint(widen(once, 2, 2).config) == config_fingerprint(model.config)


def test_settings_that_are_no_weights_are_kept():
    model = make_model("qwen3_moe")
    model.generation_config.max_new_tokens = 7
    model.set_attn_implementation("eager")
    model.train()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    widened = widen(model, 2, 2)
    assert widened.generation_config.max_new_tokens == 7
    assert widened.config._attn_implementation == "eager"
    assert widened.training
    assert not any(parameter.requires_grad for parameter in widened.parameters())


def test_real_matrix_shapes_are_built_in_seconds():
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=64,
        num_experts_per_tok=8,
        initializer_range=0.2,
        eos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    start = time.perf_counter()
    widened = widen(model, 16, 16)
    assert time.perf_counter() - start < 20  # 0.8 GB to write, about a second when idle
    experts = widened.model.layers[0].mlp.experts
    assert experts.gate_up_proj.shape == (64, 1024, 2048)
    input_ids = torch.arange(16)[None]
    logits, ids = routed_ids(model, input_ids)
    wide_logits, wide_ids = routed_ids(widened, input_ids)
    torch.testing.assert_close(wide_logits, logits, atol=2e-5, rtol=1e-5)
    assert torch.equal(wide_ids[0], ids[0])


@pytest.mark.parametrize("factor", [0, -1, 257, 10**9, 2.0, "2", True, None])
def test_bad_factors_are_refused(factor):
    model = make_model("llama")
    with pytest.raises(InvalidArgumentError, match=r"hidden_factor is .* from 1 to 256"):
        widen(model, factor, 2)
    with pytest.raises(InvalidArgumentError, match=r"inner_factor is .* from 1 to 256"):
        widen(model, 2, factor)
    with pytest.raises(InvalidArgumentError, match=r"inner_factor is .* from 1 to 256"):
        widen_eagle3_head({}, {}, 2, factor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_factors_that_a_short_float_type_cannot_divide_by_are_refused(dtype):
    model = make_model("llama", dtype=dtype)
    with pytest.raises(InvalidArgumentError, match=r"hidden_factor is 3 .*float16.*power of two"):
        widen(model, 3, 2)
    with pytest.raises(InvalidArgumentError, match=r"inner_factor is 6 .*float16.*power of two"):
        widen(model, 2, 6)


def test_another_family_is_refused():
    model = AutoModelForCausalLM.from_config(MixtralConfig(**SIZES, num_local_experts=4))
    with pytest.raises(UnsupportedModelError, match=r"type 'mixtral' .*supported: gpt_oss, llama"):
        widen(model, 2, 2)


def test_a_weight_that_is_not_the_familys_own_is_refused():
    model = make_model("llama")
    model.model.layers[1].mlp.register_parameter("lora_A", nn.Parameter(torch.zeros(3)))
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.1\.mlp\.lora_A.*quantised"):
        widen(model, 2, 2)


def test_a_wrapped_model_is_refused():
    model = make_model("olmoe")
    model.acceptmoe = object()
    with pytest.raises(UnsupportedModelError, match=r"acceptmoe\.unwrap"):
        widen(model, 2, 2)


# An EAGLE-3 head written from its published description alone: fuse, one decoder layer, head.

HEAD = {
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 97,
    "draft_vocab_size": 50,
}


def head_state(config, **extra):
    generator = torch.Generator().manual_seed(0)
    h, n, kv, d, i = (config[key] for key in list(HEAD)[:1] + list(HEAD)[2:5] + list(HEAD)[1:2])
    ht = config.get("target_hidden_size", h)
    shapes = {
        "midlayer.self_attn.q_proj.weight": (n * d, 2 * h),
        "midlayer.self_attn.k_proj.weight": (kv * d, 2 * h),
        "midlayer.self_attn.v_proj.weight": (kv * d, 2 * h),
        "midlayer.self_attn.o_proj.weight": (h, n * d),
        "midlayer.mlp.gate_proj.weight": (i, h),
        "midlayer.mlp.up_proj.weight": (i, h),
        "midlayer.mlp.down_proj.weight": (h, i),
        "midlayer.hidden_norm.weight": (h,),
        "midlayer.input_layernorm.weight": (h,),
        "midlayer.post_attention_layernorm.weight": (h,),
        "fc.weight": (h, 3 * ht),
        "norm.weight": (h,),
        "lm_head.weight": (config["draft_vocab_size"], h),
        "embed_tokens.weight": (config["vocab_size"], h),
    }
    state = {n: torch.randn(s, generator=generator) * 0.5 for n, s in (shapes | extra).items()}
    state["d2t"] = torch.arange(config["draft_vocab_size"])
    state["t2d"] = torch.ones(config["vocab_size"], dtype=torch.bool)
    return state


def rms_norm(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def head_logits(state, config, tokens, features):
    """[N] tokens, [N, 3 * Ht] features -> [N, Vd]; attention without positions, which stay."""
    state = {name.removeprefix("midlayer."): tensor for name, tensor in state.items()}
    n, kv, d = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    if "input_norm.weight" in state:
        features = rms_norm(features, state["input_norm.weight"])
    if "fc_norm.0.weight" in state:
        parts = features.chunk(3, dim=-1)
        normed = [rms_norm(x, state[f"fc_norm.{i}.weight"]) for i, x in enumerate(parts)]
        features = torch.cat(normed, dim=-1)
    g = features @ state["fc.weight"].T + state.get("fc.bias", 0)
    embedded = rms_norm(state["embed_tokens.weight"][tokens], state["input_layernorm.weight"])
    x = torch.cat([embedded, rms_norm(g, state["hidden_norm.weight"])], dim=-1)
    q = (x @ state["self_attn.q_proj.weight"].T).unflatten(-1, (n, d)).transpose(0, 1)
    k = (x @ state["self_attn.k_proj.weight"].T).unflatten(-1, (kv, d)).transpose(0, 1)
    v = (x @ state["self_attn.v_proj.weight"].T).unflatten(-1, (kv, d)).transpose(0, 1)
    k, v = (t.repeat_interleave(n // kv, dim=0) for t in (k, v))
    scores = (q @ k.transpose(1, 2) / math.sqrt(d)).softmax(-1)
    h = g + (scores @ v).transpose(0, 1).flatten(1) @ state["self_attn.o_proj.weight"].T
    y = rms_norm(h, state["post_attention_layernorm.weight"])
    gate = nn.functional.silu(y @ state["mlp.gate_proj.weight"].T)
    h = h + (gate * (y @ state["mlp.up_proj.weight"].T)) @ state["mlp.down_proj.weight"].T
    return rms_norm(h, state["norm.weight"]) @ state["lm_head.weight"].T


@pytest.mark.parametrize(
    ("changes", "extra"),
    [
        ({}, {}),
        ({"target_hidden_size": 16}, {}),
        ({}, {"fc.bias": (24,), "input_norm.weight": (72,)}),
        (
            {"target_hidden_size": 16},
            {f"fc_norm.{part}.weight": (16,) for part in range(3)},
        ),
    ],
    ids=["plain", "other-target-size", "bias-and-input-norm", "norm-per-feature"],
)
def test_a_widened_head_proposes_the_same_on_the_widened_features(changes, extra):
    config = HEAD | changes
    state = head_state(config, **extra)
    features = torch.randn(9, 3, config.get("target_hidden_size", 24))
    tokens = torch.arange(9)
    logits = head_logits(state, config, tokens, features.flatten(1))
    assert logits.std() > 0.5
    wide_state, wide_config = widen_eagle3_head(state, config, 4, 2)
    wide_features = features.repeat(1, 1, 4).flatten(1)  # each layer's state on its own
    wide_logits = head_logits(wide_state, wide_config, tokens, wide_features)
    torch.testing.assert_close(wide_logits, logits, atol=2e-5, rtol=1e-5)
    assert wide_state["fc.weight"].shape == (96, 12 * config.get("target_hidden_size", 24))
    assert wide_state["midlayer.mlp.gate_proj.weight"].shape == (40, 96)
    assert torch.equal(wide_state["d2t"], state["d2t"])
    assert wide_state["t2d"].dtype == torch.bool


def test_every_layout_of_a_head_widens_alike():
    state = head_state(HEAD)
    expected, expected_config = widen_eagle3_head(state, HEAD, 4, 2)
    assert expected_config["hidden_size"] == 96
    assert expected_config["num_attention_heads"] == 16
    assert expected_config["num_key_value_heads"] == 2
    assert expected_config["intermediate_size"] == 40
    nested = {
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 50,
        "transformer_layer_config": dict(HEAD),
    }
    for prefix in ("layers.0.", "model.midlayer.", "model.layers.0."):
        renamed = {name.replace("midlayer.", prefix): t for name, t in state.items()}
        wide, config = widen_eagle3_head(renamed, nested, 4, 2)
        for name, tensor in expected.items():
            assert torch.equal(wide[name.replace("midlayer.", prefix)], tensor)
        assert config["transformer_layer_config"] == expected_config
        assert "hidden_size" not in config
    assert nested["transformer_layer_config"] == HEAD


def test_a_head_without_a_head_dimension_keeps_the_one_it_had():
    config = {key: value for key, value in HEAD.items() if key != "head_dim"}
    state = head_state(HEAD | {"head_dim": 6})
    _, wide_config = widen_eagle3_head(state, config, 4, 2)
    assert wide_config["head_dim"] == 6


def test_a_bf16_head_stays_bf16_and_refuses_odd_factors():
    state = {
        name: t.bfloat16() if t.is_floating_point() else t for name, t in head_state(HEAD).items()
    }
    wide, _ = widen_eagle3_head(state, HEAD, 4, 2)
    assert wide["fc.weight"].dtype == torch.bfloat16
    with pytest.raises(InvalidArgumentError, match="power of two"):
        widen_eagle3_head(state, HEAD, 3, 2)


def test_what_is_no_head_is_refused():
    state = head_state(HEAD)
    with pytest.raises(DrafterError, match=r"layers\.1\.mlp.* is no tensor of an EAGLE-3 head"):
        widen_eagle3_head(state | {"layers.1.mlp.up_proj.weight": torch.zeros(2, 2)}, HEAD, 2, 2)
    with pytest.raises(DrafterError, match="no hidden_size, intermediate_size"):
        widen_eagle3_head(state, {}, 2, 2)
    with pytest.raises(DrafterError, match=r"fc\.weight reads 70 features; .* size 24"):
        widen_eagle3_head(state | {"fc.weight": torch.zeros(24, 70)}, HEAD, 2, 2)
    with pytest.raises(DrafterError, match=r"norm\.weight has the shape \[24, 1\]"):
        widen_eagle3_head(state | {"norm.weight": torch.zeros(24, 1)}, HEAD, 2, 2)


def decode_with_head(model, folder, prompt):
    """The text and every tree of natural speculation with the head in `folder`."""
    drafter = Eagle3Drafter.from_pretrained(folder, topk=4)
    wrapped = acceptmoe.wrap(model, policy="natural", drafter=drafter, num_nodes=12, max_depth=3)
    trees = []
    wrapped.acceptmoe.observers.append(lambda tree, nodes: trees.append((tree, nodes)))
    text = wrapped.generate(prompt, max_new_tokens=16, do_sample=False)
    acceptmoe.unwrap(model)
    return text, trees


@pytest.mark.parametrize(
    ("family", "tied", "layout"),
    [
        ("qwen3_moe", True, "specforge"),
        ("olmoe", False, "speculators"),
        ("gpt_oss", True, "speculators"),
    ],
)
def test_a_widened_pair_of_target_and_head_decodes_as_the_original_pair(
    family, tied, layout, tmp_path
):
    model = make_model(family, tied, num_layers=4)
    prompt = torch.arange(5, 13)[None]
    plain = model.generate(prompt, max_new_tokens=16, do_sample=False)
    # Its embedding and output matrix are the target's, which widening changes too.
    config = Eagle3Config(
        vocab_size=97,
        draft_vocab_size=97,
        hidden_size=32,
        target_hidden_size=32,
        intermediate_size=24,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        boundaries=(2, 3, 4),
        fc_norm=True,
        owns_lm_head=False,
    )
    torch.manual_seed(1)
    head = Eagle3Head(config)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    save_head(head, tmp_path / "head", layout=layout)
    state = load_file(tmp_path / "head" / "model.safetensors")
    raw = json.loads((tmp_path / "head" / "config.json").read_text())
    wide_state, wide_raw = widen_eagle3_head(state, raw, 4, 2)
    (tmp_path / "wide").mkdir()
    save_file(wide_state, tmp_path / "wide" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "wide" / "config.json").write_text(json.dumps(wide_raw))
    text, trees = decode_with_head(model, tmp_path / "head", prompt)
    wide_text, wide_trees = decode_with_head(widen(model, 4, 2), tmp_path / "wide", prompt)
    assert torch.equal(text, plain)
    assert torch.equal(wide_text, plain)
    assert len(trees) == len(wide_trees)
    for (tree, nodes), (wide_tree, wide_nodes) in zip(trees, wide_trees, strict=True):
        assert (wide_tree.tokens, wide_tree.parents) == (tree.tokens, tree.parents)
        assert wide_nodes == nodes
        probabilities = pytest.approx(tree.path_probabilities, abs=1e-4)  # fp32 softmax of logits
        assert wide_tree.path_probabilities == probabilities
