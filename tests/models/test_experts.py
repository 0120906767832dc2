"""`experts="acceptmoe"`: the same logits within rounding, the same text, nothing left behind."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import acceptmoe
from acceptmoe.bench.demo import twin_of
from acceptmoe.errors import (
    InvalidArgumentError,
    KernelBuildError,
    SelfCheckError,
    UnsupportedModelError,
)
from acceptmoe.models.adapter import MoEAdapter
from acceptmoe.models.experts import find_gating
from acceptmoe.ops import cpu_library
from model_state import ModelState
from tiny_models import CONFIGS, VOCAB_SIZE, is_available, make_model

FAMILIES = [name for name in CONFIGS if not name.endswith("_sliding") or name == "dots1_sliding"]
LOGIT_TOLERANCE = 1e-4  # what fp32 sums in another order may move; they move by about 1e-6
NUM_PROMPTS, NUM_TOKENS = 4, 32


def make_family(name: str) -> PreTrainedModel:
    if not is_available(name):
        pytest.skip(f"this Transformers version has no {name}")
    return make_model(name)


def make_prompts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    motif = torch.randint(VOCAB_SIZE, (NUM_PROMPTS, 7), generator=generator)
    return list(motif.repeat(1, 2)[:, None])  # repeated, so that the n-gram drafter has something


def generate(model: PreTrainedModel, prompt: Tensor) -> list[int]:
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        pad_token_id=0,
        max_new_tokens=NUM_TOKENS,
    )
    return out[0, prompt.shape[1] :].tolist()


@torch.no_grad()
def logits_of(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    return model(tokens).logits[0]


def is_excused(model: PreTrainedModel, prompt: Tensor, text: list[int], other: list[int]) -> bool:
    """Whether the first difference is where the model's two best tokens are as good as equal."""
    at = next(index for index, (a, b) in enumerate(zip(text, other, strict=True)) if a != b)
    tokens = torch.cat([prompt[0], torch.tensor(text[:at], dtype=torch.int64)])[None]
    best = logits_of(model, tokens)[-1].topk(2).values
    return bool(best[0] - best[1] < LOGIT_TOLERANCE)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_agree_and_so_do_greedy_texts(name: str) -> None:
    model = make_family(name)
    prompts = make_prompts()
    texts = [generate(model, prompt) for prompt in prompts]
    wholes = [
        torch.cat([prompt, torch.tensor([text])], dim=1)
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    expected = [logits_of(model, tokens) for tokens in wholes]
    state = ModelState.of(model)

    acceptmoe.wrap(model, policy="natural", num_nodes=10, max_depth=3, experts="acceptmoe")
    found = [logits_of(model, tokens) for tokens in wholes]
    others = [generate(model, prompt) for prompt in prompts]
    acceptmoe.unwrap(model)

    differences = [(a - b).abs().max() for a, b in zip(found, expected, strict=True)]
    assert 0 < max(differences) <= LOGIT_TOLERANCE  # at 0 the kernels would not have run
    num_excused = 0
    for prompt, text, other in zip(prompts, texts, others, strict=True):
        if text != other:
            assert is_excused(model, prompt, text, other)
            num_excused += 1
    assert num_excused <= 1
    state.check_same(model)
    restored = [logits_of(model, tokens) for tokens in wholes]
    assert all(torch.equal(a, b) for a, b in zip(restored, expected, strict=True))


def test_half_precision_agrees_within_its_rounding() -> None:
    model = make_model("qwen3_moe").to(torch.bfloat16)
    tokens = make_prompts()[0]
    expected = logits_of(model, tokens)
    acceptmoe.wrap(model, policy="natural", experts="acceptmoe")
    difference = (logits_of(model, tokens) - expected).abs().max()
    # bfloat16 keeps 8 bits; logits of this model reach about 4.
    assert 0 < difference <= 0.1


def test_the_weights_stay_where_and_what_they_are(tmp_path) -> None:
    model = make_model("qwen3_moe")
    before = {
        name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict().items()
    }
    acceptmoe.wrap(model, policy="natural", experts="acceptmoe")
    generate(model, make_prompts()[0])
    for name, tensor in model.state_dict().items():
        assert tensor.data_ptr() == before[name][0]
        assert torch.equal(tensor, before[name][1])
    model.save_pretrained(tmp_path)
    loaded = type(model)._unwrapped_class.from_pretrained(tmp_path)
    assert loaded.config._experts_implementation != "acceptmoe"
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, before[name][1])


def test_without_it_the_experts_are_transformers_own() -> None:
    model = make_model("qwen3_moe")
    tokens = make_prompts()[0]
    expected = logits_of(model, tokens)
    acceptmoe.wrap(model, policy="natural")
    assert torch.equal(logits_of(model, tokens), expected)


def test_twins_on_the_same_weights_keep_their_own_settings() -> None:
    model = make_model("qwen3_moe")
    tokens = make_prompts()[0]
    expected = logits_of(model, tokens)
    compiled = acceptmoe.wrap(twin_of(model), policy="natural", experts="acceptmoe")
    stock = acceptmoe.wrap(twin_of(model), policy="natural")
    own = logits_of(compiled, tokens)
    assert not torch.equal(own, expected)
    assert torch.equal(logits_of(stock, tokens), expected)
    assert torch.equal(logits_of(model, tokens), expected)
    acceptmoe.unwrap(stock)
    assert torch.equal(logits_of(compiled, tokens), own)
    acceptmoe.unwrap(compiled)
    assert torch.equal(logits_of(compiled, tokens), expected)


def test_models_of_one_configuration_object_keep_their_own_settings() -> None:
    model = make_model("mixtral")
    other = type(model)(model.config).eval()
    other.load_state_dict(model.state_dict())
    tokens = make_prompts()[0]
    expected = logits_of(model, tokens)
    acceptmoe.wrap(other, policy="natural", experts="acceptmoe")
    assert not torch.equal(logits_of(other, tokens), expected)
    assert torch.equal(logits_of(model, tokens), expected)


def test_a_copy_of_a_wrapped_model_unwraps_by_itself() -> None:
    model = make_model("gpt_oss")
    tokens = make_prompts()[0]
    expected = logits_of(model, tokens)
    acceptmoe.wrap(model, policy="natural", experts="acceptmoe")
    own = logits_of(model, tokens)
    twin = copy.deepcopy(model)
    acceptmoe.unwrap(twin)
    assert torch.equal(logits_of(twin, tokens), expected)
    assert torch.equal(logits_of(model, tokens), own)


@pytest.mark.parametrize(
    ("hidden_act", "activation"),
    [("silu", "silu"), ("gelu", "gelu"), ("gelu_pytorch_tanh", "gelu_tanh"), ("relu", "relu")],
)
def test_activations_are_recognised_by_what_they_compute(hidden_act, activation) -> None:
    model = make_model("qwen3_moe", hidden_act=hidden_act)
    layer = MoEAdapter(model).layers[0]
    assert find_gating(layer).activation == activation
    acceptmoe.wrap(model, policy="natural", experts="acceptmoe")  # its self-check compares outputs


class TestRefusals:
    """Each names its reason, before anything has changed."""

    def check(self, model: PreTrainedModel, error: type[Exception], message: str) -> None:
        state = ModelState.of(model)
        with pytest.raises(error, match=message):
            acceptmoe.wrap(model, policy="natural", experts="acceptmoe")
        assert not hasattr(model, "acceptmoe")
        state.check_same(model)

    def test_of_another_name(self) -> None:
        with pytest.raises(InvalidArgumentError, match="experts is 'eager'; it must be None"):
            acceptmoe.wrap(make_model("qwen3_moe"), policy="natural", experts="eager")

    def test_of_an_unknown_activation(self) -> None:
        model = make_model("qwen3_moe", hidden_act="quick_gelu")
        self.check(model, UnsupportedModelError, "the gating of model.layers.0.mlp .* none of")

    def test_of_a_gate_function_of_its_own(self) -> None:
        model = make_model("qwen3_moe")
        experts = model.model.layers[1].mlp.experts
        experts._apply_gate = lambda products: products.clamp(max=5).chunk(2, dim=-1)[0]
        self.check(model, UnsupportedModelError, "the gating of model.layers.1.mlp")

    def test_of_a_dtype_that_the_kernel_does_not_read(self) -> None:
        model = make_model("qwen3_moe").double()
        self.check(model, UnsupportedModelError, "in torch.float64; the compiled kernel reads")

    def test_of_weights_that_only_look_like_tensors(self) -> None:
        class Quantised(nn.Parameter):
            pass

        model = make_model("qwen3_moe")
        experts = model.model.layers[0].mlp.experts
        experts.down_proj = Quantised(experts.down_proj.data)
        self.check(model, UnsupportedModelError, "is a Quantised in torch.float32")

    def test_of_strided_weights(self) -> None:
        model = make_model("qwen3_moe")
        experts = model.model.layers[0].mlp.experts
        strided = experts.down_proj.data.transpose(1, 2).contiguous().transpose(1, 2)
        experts.down_proj = nn.Parameter(strided)
        self.check(model, UnsupportedModelError, "has the strides .* it must be contiguous")

    def test_of_experts_outside_the_registry(self) -> None:
        model = make_model("qwen3_moe")
        del model.model.layers[0].mlp.experts.is_transposed  # as in FP8Experts of some versions
        self.check(model, UnsupportedModelError, "does not use Transformers' registry")

    @pytest.mark.parametrize(
        ("flag", "value", "reason"),
        [("has_gate", False, "has no gates"), ("has_post_expert_norm", True, "has a norm behind")],
    )
    def test_of_other_kinds_of_experts(self, flag: str, value: bool, reason: str) -> None:
        model = make_model("qwen3_moe")
        setattr(model.model.layers[0].mlp.experts, flag, value)
        self.check(model, UnsupportedModelError, reason)

    def test_without_a_compiler(self, monkeypatch) -> None:
        def fail() -> None:
            raise KernelBuildError("no C++ compiler found")

        monkeypatch.setattr(cpu_library, "load", fail)
        self.check(make_model("qwen3_moe"), KernelBuildError, r"no C\+\+ compiler found")

    def test_of_a_layer_that_computes_something_else(self, monkeypatch) -> None:
        own = ALL_EXPERTS_FUNCTIONS["acceptmoe"]

        def twice(*arguments: object) -> Tensor:
            return 2 * own(*arguments)

        monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS, "acceptmoe", twice)
        self.check(make_model("qwen3_moe"), SelfCheckError, "output for model.layers.0.mlp")
