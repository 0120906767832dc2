"""Bad input is refused at the door: what, got, allowed, next; and the model stays untouched."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedModel, StaticCache
from transformers.cache_utils import StaticLayer
from transformers.generation.streamers import BaseStreamer

import acceptmoe
from acceptmoe.drafting import NgramDrafter
from acceptmoe.errors import (
    AcceptMoEError,
    DrafterError,
    InvalidArgumentError,
    TableError,
    UnsupportedGenerateError,
    UnsupportedModelError,
    WrapStateError,
)
from acceptmoe.models.kv import find_cache_keyword
from acceptmoe.policies import AcceptDepthPolicy, AcceptPolicy, RoutingPolicy
from acceptmoe.selection import RoutedBlock, Selection
from acceptmoe.tree import DraftTree
from drafters import ScriptedDrafter
from model_state import ModelState
from tables import make_table_for
from tiny_models import NUM_LAYERS, VOCAB_SIZE, make_model

PROMPT = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4]])


@pytest.fixture
def model() -> PreTrainedModel:
    return make_model("qwen3_moe")


@pytest.fixture
def wrapped(model: PreTrainedModel) -> PreTrainedModel:
    return acceptmoe.wrap(model, policy="natural", num_nodes=6, max_depth=2)


class NeverCalled(BaseStreamer):
    def put(self, value: Tensor) -> None:
        raise AssertionError("a refused call streamed something")

    end = put


def check_wrap_refuses(
    model: Any, error: type[AcceptMoEError], text: str, *args: Any, **keywords: Any
) -> None:
    before = ModelState.of(model) if isinstance(model, PreTrainedModel) else None
    with pytest.raises(error, match=re.escape(text)):
        acceptmoe.wrap(model, *args, **{"policy": "natural", **keywords})
    if before is not None:
        before.check_same(model)


def check_generate_refuses(
    wrapped: PreTrainedModel, error: type[Exception], text: str, *args: Any, **keywords: Any
) -> None:
    """Refused, nothing streamed, nothing changed, and the next call is exact."""
    before = ModelState.of(wrapped)
    keywords = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 5, **keywords}
    if not args:
        args = (PROMPT,)
    with pytest.raises(error, match=re.escape(text)):
        wrapped.generate(*args, streamer=NeverCalled(), **keywords)
    before.check_same(wrapped)
    again = {"attention_mask": torch.ones_like(PROMPT), "do_sample": False, "pad_token_id": 0}
    output = wrapped.generate(PROMPT, max_new_tokens=5, **again)
    acceptmoe.unwrap(wrapped)
    assert torch.equal(output, wrapped.generate(PROMPT, max_new_tokens=5, **again))


class TestModel:
    @pytest.mark.parametrize("value", [None, "Qwen/Qwen3-30B-A3B", 3, torch.nn.Linear(2, 2)])
    def test_that_is_no_model(self, value: Any) -> None:
        text = f"got a {type(value).__name__}; wrap takes a Transformers causal language model"
        check_wrap_refuses(value, UnsupportedModelError, text)

    def test_that_is_wrapped_already(self, wrapped: PreTrainedModel) -> None:
        check_wrap_refuses(wrapped, WrapStateError, "call acceptmoe.unwrap(model) first")
        acceptmoe.unwrap(wrapped)

    def test_that_is_not_wrapped(self, model: PreTrainedModel) -> None:
        before = ModelState.of(model)
        with pytest.raises(WrapStateError, match="Qwen3MoeForCausalLM is not wrapped; "):
            acceptmoe.unwrap(model)
        before.check_same(model)

    def test_unwrapped_twice(self, wrapped: PreTrainedModel) -> None:
        acceptmoe.unwrap(wrapped)
        with pytest.raises(WrapStateError, match="is not wrapped"):
            acceptmoe.unwrap(wrapped)

    @pytest.mark.parametrize("value", [None, "model", 7])
    def test_unwrapping_what_is_no_model(self, value: Any) -> None:
        with pytest.raises(WrapStateError, match=f"this {type(value).__name__} is not wrapped"):
            acceptmoe.unwrap(value)

    def test_whose_attention_is_changed_after_wrap(self, wrapped: PreTrainedModel) -> None:
        wrapped.set_attn_implementation("flex_attention")
        with pytest.raises(UnsupportedModelError, match="attn_implementation is 'flex_attention'"):
            wrapped.generate(PROMPT, streamer=NeverCalled())


class TestArguments:
    @pytest.mark.parametrize("name", ["num_nodes", "max_depth"])
    @pytest.mark.parametrize("value", [0, -1, 4097, 10**12, 2.0, True, "8", None, float("nan")])
    def test_a_tree_of_absurd_size(self, model: PreTrainedModel, name: str, value: Any) -> None:
        text = f"{name} is {value!r}; it must be a whole number from 1 to 4096"
        check_wrap_refuses(model, InvalidArgumentError, text, **{name: value})

    @pytest.mark.parametrize("value", ["fastest", "", 3, AcceptPolicy])
    def test_a_policy_that_does_not_exist(self, model: PreTrainedModel, value: Any) -> None:
        text = f"policy is {value!r}; it must be one of accept, accept-depth, "
        check_wrap_refuses(model, InvalidArgumentError, text, policy=value)

    @pytest.mark.parametrize("policy", ["moe-spec:budget=1", "moe-spec:budget=9", "s2:size=1000"])
    def test_a_set_that_the_layers_cannot_have(self, model: PreTrainedModel, policy: str) -> None:
        name, _, value = policy.partition(":")[2].partition("=")
        text = (
            f"{name} is {value}; this model routes each token to 2 of 8 experts, so it must be "
            "from 2 to 8"
        )
        check_wrap_refuses(model, InvalidArgumentError, text, policy=policy)

    @pytest.mark.parametrize("value", [-0.5, 16.5, float("nan"), float("inf"), True, "0.5", None])
    def test_an_absurd_exponent(self, value: Any) -> None:
        for make, name in (
            (lambda: AcceptPolicy(exponent=value), "exponent"),
            (lambda: AcceptDepthPolicy(beta=value), "beta"),
        ):
            with pytest.raises(InvalidArgumentError, match=f"{name} is {value!r}; it must be"):
                make()

    def test_an_unknown_keyword(self, model: PreTrainedModel) -> None:
        before = ModelState.of(model)
        with pytest.raises(TypeError, match="num_experts"):
            acceptmoe.wrap(model, policy="natural", num_experts=16)
        before.check_same(model)


class TestTable:
    SIZE: ClassVar = {"num_nodes": 8, "max_depth": 3}

    def test_that_is_missing(self, model: PreTrainedModel) -> None:
        text = "policy 'accept' reads a commitment table and table is None; make one with"
        check_wrap_refuses(model, TableError, text, policy=None)

    @pytest.mark.parametrize("value", [3, {"target": "x"}, True, 0.5])
    def test_of_a_wrong_type(self, model: PreTrainedModel, value: Any) -> None:
        text = f"table is a {type(value).__name__}; it must be a CommitmentTable, a path"
        check_wrap_refuses(model, InvalidArgumentError, text, value)

    def test_of_another_target(self, model: PreTrainedModel) -> None:
        table = make_table_for(make_model("olmoe"), drafter="ngram", **self.SIZE)
        text = "was made for the target OlmoeForCausalLM"
        check_wrap_refuses(model, TableError, text, table, policy="accept", **self.SIZE)

    def test_of_another_drafter(self, model: PreTrainedModel) -> None:
        table = make_table_for(model, drafter="eagle3", **self.SIZE)
        text = "was made with the drafter 'eagle3' and this one is 'ngram'"
        check_wrap_refuses(model, TableError, text, table, policy="accept", **self.SIZE)

    def test_of_a_shallower_tree(self, model: PreTrainedModel) -> None:
        table = make_table_for(model, drafter="ngram", **self.SIZE)
        text = "covers depths 0 to 3 and this tree has depth 5; run: acceptmoe calibrate"
        check_wrap_refuses(
            model, TableError, text, table, policy="accept-depth", num_nodes=8, max_depth=5
        )

    def test_of_another_number_of_nodes(self, model: PreTrainedModel) -> None:
        table = make_table_for(model, drafter="ngram", **self.SIZE)
        text = "was made with trees of 8 nodes and this one has 9"
        keywords = {"policy": "accept-depth", "num_nodes": 9, "max_depth": 3}
        check_wrap_refuses(model, TableError, text, table, **keywords)
        acceptmoe.wrap(model, table, allow_table_mismatch=True, **keywords)
        acceptmoe.unwrap(model)

    def test_of_another_tree_suits_a_policy_that_reads_paths_only(
        self, model: PreTrainedModel
    ) -> None:
        table = make_table_for(model, drafter="ngram", **self.SIZE)
        acceptmoe.wrap(model, table, policy="accept", num_nodes=20, max_depth=9)


class TestDrafter:
    @pytest.mark.parametrize("value", [None, 3, True, object(), b"ngram"])
    def test_of_a_wrong_type(self, model: PreTrainedModel, value: Any) -> None:
        check_wrap_refuses(model, InvalidArgumentError, "drafter is ", drafter=value)

    def test_that_does_not_exist(self, model: PreTrainedModel) -> None:
        check_wrap_refuses(model, InvalidArgumentError, "drafter is 'ngrams'", drafter="ngrams")

    def test_with_another_vocabulary(self, model: PreTrainedModel) -> None:
        drafter = make_model("qwen3_moe", vocab_size=VOCAB_SIZE + 8)
        text = f"has vocab_size {VOCAB_SIZE + 8} and the target Qwen3MoeForCausalLM has 128"
        check_wrap_refuses(model, DrafterError, text, drafter=drafter)

    def test_that_reads_layers_which_the_target_lacks(self, model: PreTrainedModel) -> None:
        drafter = ScriptedDrafter(None)
        drafter.feature_boundaries = (0, 9)
        text = "the drafter reads the target at layer boundaries (0, 9); this target has bound"
        check_wrap_refuses(model, DrafterError, text, drafter=drafter)

    def test_that_is_a_class(self, model: PreTrainedModel) -> None:
        check_wrap_refuses(model, InvalidArgumentError, "drafter is ", drafter=NgramDrafter)

    @pytest.mark.parametrize(
        ("name", "value", "text"),
        [
            ("name", None, "name of the drafter ScriptedDrafter is None; it must be a text"),
            ("name", "", "name of the drafter ScriptedDrafter is ''; it must be a text"),
            ("feature_boundaries", None, "feature_boundaries of the drafter 'scripted' is None"),
            ("feature_boundaries", 3, "feature_boundaries of the drafter 'scripted' is 3"),
            ("feature_boundaries", (0.5,), "feature_boundaries of the drafter 'scripted' is (0.5"),
            ("feature_boundaries", ("0",), "feature_boundaries of the drafter 'scripted' is ('0'"),
        ],
    )
    def test_with_a_strange_attribute(
        self, model: PreTrainedModel, name: str, value: Any, text: str
    ) -> None:
        drafter = ScriptedDrafter(None)
        setattr(drafter, name, value)
        check_wrap_refuses(model, InvalidArgumentError, text, drafter=drafter)

    @pytest.mark.parametrize(
        ("tree", "text"),
        [
            (lambda root: DraftTree((root + 1,), (-1,), (1.0,)), "proposed a tree with root"),
            (
                lambda root: DraftTree((root, *range(9)), (-1, *[0] * 9), (1.0, *[0.1] * 9)),
                "proposed 10 nodes of depth 1; it was asked for at most 6 of depth 2",
            ),
            (
                lambda root: DraftTree((root, 1, 2, 3), (-1, 0, 1, 2), (1.0, 0.5, 0.5, 0.5)),
                "proposed 4 nodes of depth 3; it was asked for at most 6 of depth 2",
            ),
            (
                lambda root: DraftTree((root, 1, 1), (-1, 0, 0), (1.0, 0.5, 0.5)),
                "proposed the same token twice after one node",
            ),
            (
                lambda root: DraftTree((root, VOCAB_SIZE), (-1, 0), (1.0, 0.5)),
                f"proposed token {VOCAB_SIZE}; the target's tokens are 0 to {VOCAB_SIZE - 1}",
            ),
            (lambda root: None, "proposed a NoneType; it must be a DraftTree"),
            (lambda root: (root,), "proposed a tuple; it must be a DraftTree"),
        ],
    )
    def test_that_breaks_its_promise(self, model: PreTrainedModel, tree, text: str) -> None:
        drafter = ScriptedDrafter(lambda known, *_: tree(known[-1]))
        acceptmoe.wrap(model, policy="natural", drafter=drafter, num_nodes=6, max_depth=2)
        with pytest.raises(DrafterError, match=re.escape(text)):
            model.generate(
                PROMPT, attention_mask=torch.ones_like(PROMPT), do_sample=False, pad_token_id=0
            )


class AnyPolicy(RoutingPolicy):
    """Selects whatever `answer(block)` returns."""

    name = "any"

    def __init__(self, answer) -> None:
        self.select = answer  # type: ignore[method-assign]

    def select(self, block: RoutedBlock) -> Selection:
        raise AssertionError("replaced by the constructor")


def first_experts(block: RoutedBlock, number: int) -> Tensor:
    return torch.arange(block.num_experts) < number


class TestPolicy:
    def test_without_a_name(self, model: PreTrainedModel) -> None:
        policy = AnyPolicy(None)
        policy.name = ""  # type: ignore[misc]
        text = "name of the policy AnyPolicy is ''; it must be a text"
        check_wrap_refuses(model, InvalidArgumentError, text, policy=policy)

    @pytest.mark.parametrize(
        ("answer", "text"),
        [
            (lambda block: None, "must return a Selection; it is a NoneType"),
            (lambda block: first_experts(block, 4), "must return a Selection; it is a Tensor"),
            (lambda block: Selection([True] * 8), "must return eligible as a tensor; it is a list"),
            (
                lambda block: Selection(torch.ones(9, dtype=torch.bool)),
                "must return eligible of shape (8,) on cpu; it has (9,) on cpu",
            ),
            (
                lambda block: Selection(block.is_wanted),
                "must return eligible of shape (8,) on cpu; it has (",
            ),
            (
                lambda block: Selection(first_experts(block, 4).to("meta")),
                "must return eligible of shape (8,) on cpu; it has (8,) on meta",
            ),
            (
                lambda block: Selection(first_experts(block, 4).float()),
                "must return eligible in torch.bool; it is torch.float32",
            ),
            (
                lambda block: Selection(first_experts(block, 4), combine="sum"),
                "must return combine 'router' or 'natural'; it is 'sum'",
            ),
            (
                lambda block: Selection(first_experts(block, 4), torch.zeros(8)),
                "must return choice_bias of shape (",
            ),
            (
                lambda block: Selection(first_experts(block, 4), block.gates * torch.nan),
                "choice_bias of policy 'any' holds numbers that are not finite",
            ),
            (
                lambda block: Selection(first_experts(block, 1)),
                "made 1 experts eligible; a row is routed to 2",
            ),
        ],
    )
    def test_that_breaks_its_promise(self, model: PreTrainedModel, answer, text: str) -> None:
        drafter = ScriptedDrafter(
            lambda known, *_: DraftTree((known[-1], 1, 2), (-1, 0, 0), (1.0, 0.5, 0.5))
        )
        acceptmoe.wrap(model, policy=AnyPolicy(answer), drafter=drafter, num_nodes=6, max_depth=2)
        with pytest.raises(InvalidArgumentError, match=re.escape(text)):
            model.generate(
                PROMPT, attention_mask=torch.ones_like(PROMPT), do_sample=False, pad_token_id=0
            )


class TestPrompt:
    def test_that_is_empty(self, wrapped: PreTrainedModel) -> None:
        empty = torch.zeros(1, 0, dtype=torch.int64)
        check_generate_refuses(wrapped, InvalidArgumentError, "the prompt is empty", empty)

    def test_that_is_missing(self, wrapped: PreTrainedModel) -> None:
        text = "the prompt is missing and the model has no BOS token"
        check_generate_refuses(wrapped, InvalidArgumentError, text, None)

    @pytest.mark.parametrize(
        ("value", "got"),
        [
            ([[1, 2]], "list"),
            ("hello", "str"),
            (torch.rand(1, 3), "float32"),
            (torch.ones(1, 3, dtype=torch.bool), "bool"),
            (torch.ones(1, 3, dtype=torch.uint8), "uint8"),
            (torch.ones(1, 3, dtype=torch.complex64), "complex64"),
        ],
    )
    def test_that_is_no_tensor_of_tokens(
        self, wrapped: PreTrainedModel, value: Any, got: str
    ) -> None:
        text = f"{got}; it must be an integer tensor [1, length]"
        check_generate_refuses(wrapped, InvalidArgumentError, text, value)

    @pytest.mark.parametrize("token", [-1, VOCAB_SIZE])
    def test_with_a_token_that_the_model_lacks(self, wrapped: PreTrainedModel, token: int) -> None:
        text = f"the prompt has token {token}; this model's tokens are 0 to {VOCAB_SIZE - 1}"
        prompt = torch.tensor([[1, token, 2]])
        check_generate_refuses(wrapped, InvalidArgumentError, text, prompt)

    @pytest.mark.parametrize("shape", [(2, 5), (5,), (1, 1, 5)])
    def test_that_is_not_one_sequence(self, wrapped: PreTrainedModel, shape: tuple) -> None:
        text = f"input_ids has shape {shape}; a wrapped model generates one sequence at a time"
        prompt = torch.ones(shape, dtype=torch.int64)
        check_generate_refuses(wrapped, UnsupportedGenerateError, text, prompt)

    def test_as_embeddings(self, wrapped: PreTrainedModel) -> None:
        embeddings = wrapped.get_input_embeddings()(PROMPT)
        text = "inputs_embeds was given; drafters need the prompt's tokens"
        check_generate_refuses(
            wrapped, UnsupportedGenerateError, text, None, inputs_embeds=embeddings
        )

    @pytest.mark.parametrize("value", [[[1] * 11], torch.ones(11), torch.ones(2, 11)])
    def test_with_a_mask_that_is_not_of_one_sequence(
        self, wrapped: PreTrainedModel, value: Any
    ) -> None:
        text = "it must be a tensor [1, length], one number for every token"
        check_generate_refuses(wrapped, InvalidArgumentError, text, attention_mask=value)

    def test_with_a_mask_of_another_length(self, wrapped: PreTrainedModel) -> None:
        mask = torch.ones(1, 7, dtype=torch.int64)
        mask[0, 0] = 0
        text = "attention_mask has shape (1, 7); with 11 input tokens and 0 in the cache it must be"
        check_generate_refuses(wrapped, InvalidArgumentError, text, attention_mask=mask)


class TestGenerateKeywords:
    @pytest.mark.parametrize(
        ("keywords", "text"),
        [
            ({"num_beams": 2}, "num_beams is 2; it must be 1"),
            ({"do_sample": True}, "do_sample is True; a wrapped model decodes greedily"),
            ({"do_sample": True, "num_beams": 3}, "num_beams is 3; it must be 1"),
            ({"num_return_sequences": 2}, "num_return_sequences is 2; it must be 1"),
            ({"use_cache": False}, "use_cache is False; tree verification keeps"),
            ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens was given"),
            ({"custom_generate": lambda model, **_: None}, "custom_generate was given"),
            ({"custom_generate": "someone/something"}, "custom_generate was given"),
            ({"cache_implementation": "paged"}, "cache_implementation is 'paged'"),
            ({"cache_implementation": "offloaded"}, "cache_implementation is 'offloaded'"),
            ({"cache_implementation": "quantized"}, "cache_implementation is 'quantized'"),
            ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha is 0.6"),
            ({"dola_layers": "low"}, "dola_layers is 'low'"),
            (
                {"output_attentions": True, "return_dict_in_generate": True},
                "output_attentions is True; its rows would be those of draft trees",
            ),
            (
                {"output_hidden_states": True, "return_dict_in_generate": True},
                "output_hidden_states is True; its rows would be those of draft trees",
            ),
            ({"synced_gpus": True}, "synced_gpus is True"),
        ],
    )
    def test_that_trees_do_not_support(
        self, wrapped: PreTrainedModel, keywords: dict, text: str
    ) -> None:
        check_generate_refuses(wrapped, UnsupportedGenerateError, text, **keywords)

    def test_an_assistant_model(self, wrapped: PreTrainedModel) -> None:
        text = "assistant_model was given to generate; give it to wrap"
        assistant = make_model("qwen3_moe", seed=1)
        check_generate_refuses(wrapped, UnsupportedGenerateError, text, assistant_model=assistant)

    def test_sampling_in_a_generation_config(self, wrapped: PreTrainedModel) -> None:
        config = GenerationConfig(do_sample=True, max_new_tokens=4, pad_token_id=0)
        with pytest.raises(UnsupportedGenerateError, match="do_sample is True"):
            wrapped.generate(PROMPT, generation_config=config, streamer=NeverCalled())

    def test_sampling_in_the_models_own_generation_config(self, wrapped: PreTrainedModel) -> None:
        wrapped.generation_config.do_sample = True
        with pytest.raises(UnsupportedGenerateError, match="do_sample is True"):
            wrapped.generate(PROMPT, pad_token_id=0, streamer=NeverCalled())

    @pytest.mark.parametrize("name", ["max_new_tokens", "max_length"])
    @pytest.mark.parametrize("value", [0, -5, 2.5, True, "9"])
    def test_an_absurd_length(self, wrapped: PreTrainedModel, name: str, value: Any) -> None:
        text = f"{name} is {value!r}; it must be a whole number from 1"
        keywords = {"max_new_tokens": None, name: value}
        check_generate_refuses(wrapped, InvalidArgumentError, text, **keywords)

    @pytest.mark.parametrize("value", [{"max_new_tokens": 3}, {}, "default"])
    def test_a_generation_config_of_a_wrong_type(
        self, wrapped: PreTrainedModel, value: Any
    ) -> None:
        text = f"generation_config is a {type(value).__name__}; it must be a GenerationConfig"
        check_generate_refuses(wrapped, InvalidArgumentError, text, generation_config=value)

    def test_a_positional_generation_config(self, wrapped: PreTrainedModel) -> None:
        config = GenerationConfig(penalty_alpha=0.6, top_k=4, pad_token_id=0)
        text = "penalty_alpha is 0.6; it must be 0"
        check_generate_refuses(wrapped, UnsupportedGenerateError, text, PROMPT, config)

    @pytest.mark.parametrize("value", [3, [], "stdout", NeverCalled])
    def test_a_streamer_that_is_none(self, wrapped: PreTrainedModel, value: Any) -> None:
        with pytest.raises(InvalidArgumentError, match="it must be an object with the methods put"):
            wrapped.generate(PROMPT, streamer=value)

    def test_a_keyword_that_nobody_knows(self, wrapped: PreTrainedModel) -> None:
        check_generate_refuses(wrapped, ValueError, "num_experts", num_experts=3)


class TestCacheOfTheCaller:
    def test_that_drops_what_leaves_the_window(self) -> None:
        wrapped = acceptmoe.wrap(make_model("mixtral_sliding"), policy="natural")
        cache = DynamicCache(config=wrapped.config)
        text = "the cache has a DynamicSlidingWindowLayer; a draft tree can be compacted in"
        check_generate_refuses(
            wrapped, UnsupportedGenerateError, text, **{find_cache_keyword(wrapped): cache}
        )

    def test_a_static_one_with_windows(self) -> None:
        wrapped = acceptmoe.wrap(make_model("mixtral_sliding"), policy="natural")
        cache = StaticCache(config=wrapped.config, max_cache_len=64)
        text = "the cache has a StaticSlidingWindowLayer; a draft tree can be compacted in"
        check_generate_refuses(
            wrapped, UnsupportedGenerateError, text, **{find_cache_keyword(wrapped): cache}
        )

    def test_that_is_too_small(self, wrapped: PreTrainedModel) -> None:
        cache = Cache(layers=[StaticLayer(max_cache_len=14) for _ in range(NUM_LAYERS)])
        text = "the static cache has 14 slots and this call may need 15; give it 21"
        check_generate_refuses(
            wrapped, UnsupportedGenerateError, text, **{find_cache_keyword(wrapped): cache}
        )

    @pytest.mark.parametrize("value", [((PROMPT, PROMPT),), "static", 3])
    def test_that_is_no_cache(self, wrapped: PreTrainedModel, value: Any) -> None:
        keyword = find_cache_keyword(wrapped)
        text = f"{keyword} is a {type(value).__name__}; it must be a Cache"
        check_generate_refuses(wrapped, InvalidArgumentError, text, **{keyword: value})
