"""`wrap` changes one instance, `unwrap` undoes it, and nothing outside `generate` is affected."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

import acceptmoe
from acceptmoe.api import AcceptMoEMixin
from acceptmoe.errors import WrapStateError
from acceptmoe.models.adapter import FAMILIES
from acceptmoe.models.features import FeatureTap
from acceptmoe.models.kv import find_cache_keyword
from drafters import OracleDrafter, ScriptedDrafter
from model_state import ModelState
from tables import make_table_for
from tiny_models import CONFIGS, VOCAB_SIZE, is_available, make_model

NUM_TOKENS = 16


def make_prompt(length: int = 10, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB_SIZE, (1, length), generator=torch.Generator().manual_seed(seed))


def generate(model: PreTrainedModel, prompt: Tensor, **keywords) -> list[int]:
    """New tokens of greedy decoding."""
    keywords.setdefault("max_new_tokens", NUM_TOKENS)
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        pad_token_id=0,
        **keywords,
    )
    return output[0, prompt.shape[1] :].tolist()


@torch.no_grad()
def logits_of(model: PreTrainedModel) -> Tensor:
    return model(torch.cat([make_prompt(9, seed=1), make_prompt(9, seed=2)])).logits


def wrap_natural(model: PreTrainedModel, drafter=None, **keywords) -> PreTrainedModel:
    """A wrapped model whose drafter knows the text after `make_prompt()`."""
    if drafter is None:
        future = [*make_prompt()[0].tolist(), *generate(model, make_prompt())]
        drafter = OracleDrafter(future, VOCAB_SIZE)
    return acceptmoe.wrap(
        model, policy="natural", drafter=drafter, **{"num_nodes": 8, "max_depth": 3, **keywords}
    )


def wrap_restricted(model: PreTrainedModel) -> PreTrainedModel:
    """A wrapped model that routes differently in its verification passes."""
    table = make_table_for(model, num_nodes=8, max_depth=3, drafter="oracle")
    future = [*make_prompt()[0].tolist(), *generate(model, make_prompt())]
    drafter = OracleDrafter(future, VOCAB_SIZE)
    return acceptmoe.wrap(
        model, table, policy="accept-depth", drafter=drafter, num_nodes=8, max_depth=3
    )


def test_there_is_a_tiny_model_of_every_family() -> None:
    made = {name.removesuffix("_sliding") for name in CONFIGS}
    assert made == set(FAMILIES)


@pytest.mark.parametrize("name", CONFIGS)
def test_wrapping_changes_no_forward_and_unwrapping_restores_everything(name: str) -> None:
    if not is_available(name):
        pytest.skip(f"this Transformers version has no {name}")
    model = make_model(name)
    before, logits = ModelState.of(model), logits_of(model)
    text = generate(model, make_prompt())

    wrapped = acceptmoe.wrap(model, policy="natural", num_nodes=6, max_depth=2)
    assert wrapped is model
    assert isinstance(model, before.classes[0])
    assert type(model).__name__ == before.classes[0].__name__
    assert torch.equal(logits_of(model), logits)
    assert generate(model, make_prompt()) == text
    assert torch.equal(logits_of(model), logits)
    with torch.enable_grad():
        assert model(make_prompt()).logits.requires_grad  # training goes on as before

    assert acceptmoe.unwrap(model) is model
    before.check_same(model)
    assert torch.equal(logits_of(model), logits)
    assert generate(model, make_prompt()) == text


def test_a_drafter_that_reads_features_leaves_no_hook_behind() -> None:
    model = make_model("qwen3_moe")
    before, text = ModelState.of(model), generate(model, make_prompt())
    drafter = OracleDrafter([*make_prompt()[0].tolist(), *text], VOCAB_SIZE)
    drafter.feature_boundaries = (0, 2)
    seen = []
    drafter.extend = lambda tokens, features: (
        seen.append(features),
        drafter.text.extend(tokens),
    )
    wrap_natural(model, drafter)
    assert generate(model, make_prompt()) == text
    hidden_size = model.config.hidden_size
    assert all(features.shape[1] == 2 * hidden_size for features in seen)
    acceptmoe.unwrap(model)
    before.check_same(model)


def test_a_boundary_named_twice_is_recorded_once() -> None:
    model = make_model("qwen3_moe")
    tap = FeatureTap(model, (1, 1))
    with tap.recording():
        model(make_prompt(7))
    assert tap.features is not None
    assert tap.features.shape == (7, 2 * model.config.hidden_size)
    tap.detach()


def test_only_the_given_instance_changes() -> None:
    model, other = make_model("qwen3_moe"), make_model("qwen3_moe")
    wrap_natural(model)
    assert not isinstance(other, AcceptMoEMixin)
    assert not any(module._forward_hooks for module in other.modules())


def test_a_second_wrap_after_unwrap_is_a_fresh_one() -> None:
    model = make_model("olmoe")
    text = generate(model, make_prompt())
    for _ in range(2):
        wrap_natural(model)
        assert generate(model, make_prompt()) == text
        assert model.acceptmoe.report()["num_prompts"] == 1
        acceptmoe.unwrap(model)


class TestOtherThreads:
    def test_a_plain_forward_during_verification_routes_naturally(self) -> None:
        model = make_model("qwen3_moe")
        logits = logits_of(model)
        wrap_restricted(model)
        inside, done = threading.Event(), threading.Event()
        main = threading.get_ident()

        def pause_in_verification(*_: object) -> None:
            # Between the first layer's router and the second's.
            if threading.get_ident() != main and model.acceptmoe.patch.active_block is not None:
                inside.set()
                done.wait(timeout=60)

        handle = model.model.layers[1].register_forward_pre_hook(pause_in_verification)
        thread = threading.Thread(target=generate, args=(model, make_prompt()))
        thread.start()
        try:
            assert inside.wait(timeout=60)
            during = logits_of(model)
        finally:
            done.set()
            thread.join()
            handle.remove()
        assert torch.equal(during, logits)
        assert model.acceptmoe.report()["eligible"] < 8  # it did restrict

    def test_two_threads_get_the_right_text_each(self) -> None:
        model = make_model("mixtral")
        prompts = [make_prompt(8, seed=seed) for seed in range(4)]
        texts = [generate(model, prompt) for prompt in prompts]
        acceptmoe.wrap(model, policy="natural", num_nodes=6, max_depth=2)
        outputs: dict[int, list[int]] = {}

        def work(numbers: range) -> None:
            for number in numbers:
                outputs[number] = generate(model, prompts[number])

        threads = [threading.Thread(target=work, args=(range(i, 4, 2),)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [outputs[number] for number in range(4)] == texts


class Raises(BaseStreamer):
    """Raises after `after` tokens."""

    def __init__(self, error: BaseException, after: int) -> None:
        self.error, self.left = error, after

    def put(self, value: Tensor) -> None:
        self.left -= 1
        if self.left < 0:
            raise self.error

    def end(self) -> None:
        pass


class TestAfterAnException:
    @pytest.mark.parametrize("error", [RuntimeError("torn"), KeyboardInterrupt()])
    @pytest.mark.parametrize("after", [0, 1, 5, 9])
    def test_of_a_streamer_the_next_call_is_exact(self, error: BaseException, after: int) -> None:
        model = make_model("qwen3_moe")
        text, logits = generate(model, make_prompt()), logits_of(model)
        wrap_natural(model)
        with pytest.raises(type(error)):
            generate(model, make_prompt(), streamer=Raises(error, after))
        self.check(model, text, logits)

    def test_of_a_drafter_the_next_call_is_exact(self) -> None:
        model = make_model("qwen3_moe")
        text, logits = generate(model, make_prompt()), logits_of(model)
        future = [*make_prompt()[0].tolist(), *text]
        oracle = OracleDrafter(future, VOCAB_SIZE)
        calls = []

        def propose(*arguments):
            calls.append(arguments)
            if len(calls) == 3:
                raise RuntimeError("no idea")
            return oracle.propose(*arguments)

        class Forgetful(ScriptedDrafter):
            def start(self, *arguments) -> None:
                oracle.start(*arguments)

            def extend(self, *arguments) -> None:
                oracle.extend(*arguments)

        wrap_natural(model, Forgetful(lambda _, *limits: propose(*limits)))
        with pytest.raises(RuntimeError, match="no idea"):
            generate(model, make_prompt())
        self.check(model, text, logits)

    def test_inside_a_verification_pass_the_next_call_is_exact(self) -> None:
        model = make_model("qwen3_moe")
        logits = logits_of(model)
        wrap_restricted(model)
        text = generate(model, make_prompt())

        def fail(*_: object) -> None:
            if model.acceptmoe.patch.active_block is not None:
                raise RuntimeError("out of memory")

        handle = model.model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            generate(model, make_prompt())
        handle.remove()
        self.check(model, text, logits)

    def test_the_callers_cache_keeps_no_rejected_draft(self) -> None:
        model = make_model("qwen3_moe")
        text = generate(model, make_prompt())
        wrap_natural(model)
        for after in (5, 7, 8):
            cache = DynamicCache()
            keywords = {find_cache_keyword(model): cache}
            with pytest.raises(RuntimeError, match="torn"):
                generate(
                    model, make_prompt(), streamer=Raises(RuntimeError("torn"), after), **keywords
                )
            num_kept = int(cache.get_seq_length())
            assert 10 <= num_kept < 10 + after
            known = torch.tensor([[*make_prompt()[0].tolist(), *text[: num_kept - 9]]])
            rest = generate(model, known, max_new_tokens=NUM_TOKENS - (num_kept - 9), **keywords)
            assert rest == text[num_kept - 9 :]

    @staticmethod
    def check(model: PreTrainedModel, text: list[int], logits: Tensor) -> None:
        assert torch.equal(logits_of(model), logits)
        assert generate(model, make_prompt()) == text
        acceptmoe.unwrap(model)
        assert torch.equal(logits_of(model), logits)


class TestInsideGenerate:
    """What a streamer, processor or criterion may not do, instead of waiting for itself."""

    @pytest.mark.parametrize(
        ("call", "name"),
        [(lambda model: generate(model, make_prompt()), "generate"), (acceptmoe.unwrap, "unwrap")],
    )
    def test_is_refused(self, call: Callable[[PreTrainedModel], object], name: str) -> None:
        model = make_model("olmoe")
        text = generate(model, make_prompt())
        wrap_natural(model)

        class CallsBack(BaseStreamer):
            def put(self, value: Tensor) -> None:
                call(model)

            def end(self) -> None:
                pass

        with pytest.raises(WrapStateError, match=f"{name} was called from inside a running gen"):
            generate(model, make_prompt(), streamer=CallsBack())
        assert generate(model, make_prompt()) == text
        acceptmoe.unwrap(model)


class TestCopies:
    @pytest.mark.parametrize(
        "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
    )
    def test_a_copy_is_wrapped_by_itself(
        self, copied: Callable[[PreTrainedModel], PreTrainedModel]
    ) -> None:
        model = make_model("qwen3_moe")
        text, logits = generate(model, make_prompt()), logits_of(model)
        acceptmoe.wrap(model, policy="natural", num_nodes=6, max_depth=2)
        other = copied(model)
        assert other.acceptmoe is not model.acceptmoe
        assert generate(other, make_prompt()) == text
        assert torch.equal(logits_of(other), logits)
        assert other.acceptmoe.report()["num_prompts"] == 1
        assert model.acceptmoe.report()["num_prompts"] == 0
        acceptmoe.unwrap(other)
        assert not any(module._forward_hooks for module in other.modules())
        assert type(other) is type(make_model("qwen3_moe"))
        assert generate(model, make_prompt()) == text  # the original still is wrapped
        assert isinstance(model, AcceptMoEMixin)

    def test_a_copy_restricts_its_own_routers(self) -> None:
        model = wrap_restricted(make_model("qwen3_moe"))
        text = generate(model, make_prompt())
        other = copy.deepcopy(model)
        assert generate(other, make_prompt()) == text
        mine, theirs = model.acceptmoe.report(), other.acceptmoe.report()
        assert theirs["eligible"] == mine["eligible"]
        assert theirs["num_verifications"] == 2 * mine["num_verifications"]  # it copied the counts

    def test_a_saved_model_loads_unwrapped_and_the_same(self, tmp_path) -> None:
        model = make_model("qwen3_moe")
        text, logits = generate(model, make_prompt()), logits_of(model)
        wrap_natural(model)
        model.save_pretrained(tmp_path)
        assert generate(model, make_prompt()) == text
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        assert type(loaded) is type(make_model("qwen3_moe"))
        assert loaded.config.architectures == ["Qwen3MoeForCausalLM"]
        assert torch.equal(logits_of(loaded), logits)
