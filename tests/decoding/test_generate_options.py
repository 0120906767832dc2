"""Every keyword of `generate` means to a wrapped model what it means to the model itself."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    Cache,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.cache_utils import StaticLayer
from transformers.generation.streamers import BaseStreamer

import acceptmoe
from acceptmoe.drafting import AssistantDrafter
from acceptmoe.models.kv import find_cache_keyword
from decoding.test_exactness import perturbed
from tiny_models import NUM_LAYERS, VOCAB_SIZE, make_model

NUM_TOKENS = 24
# Logits differ by the order of fp32 sums; those of these models are of order 1 to 10.
TOLERANCE = 2e-5


class Pair:
    """A model and a wrapped model of the same weights."""

    def __init__(self, name: str) -> None:
        self.plain = make_model(name)
        self.wrapped = acceptmoe.wrap(
            make_model(name),
            policy="natural",
            drafter=AssistantDrafter(perturbed(self.plain), num_children=3, frontier=2),
            num_nodes=8,
            max_depth=3,
        )
        generator = torch.Generator().manual_seed(11)
        self.prompt = torch.randint(VOCAB_SIZE, (1, 11), generator=generator)
        self.text = self.run(self.plain)[0, 11:].tolist()

    def run(self, model: PreTrainedModel, prompt: Tensor | None = None, **keywords):
        prompt = self.prompt if prompt is None else prompt
        keywords = {"max_new_tokens": NUM_TOKENS, "pad_token_id": 0, **keywords}
        if "generation_config" in keywords:
            del keywords["max_new_tokens"]
        keywords.setdefault("attention_mask", torch.ones_like(prompt))
        return model.generate(prompt, do_sample=False, **keywords)

    def check(self, prompt: Tensor | None = None, **keywords) -> Tensor:
        """Both say the same; returns it. A callable keyword is called anew for each run."""
        texts = [
            self.run(
                model,
                prompt,
                **{
                    name: value() if isinstance(value, type(lambda: 0)) else value
                    for name, value in keywords.items()
                },
            )
            for model in (self.plain, self.wrapped)
        ]
        assert torch.equal(texts[0], texts[1])
        return texts[1]


@pytest.fixture(scope="module", params=["qwen3_moe", "gpt_oss"])
def pair(request) -> Pair:
    return Pair(request.param)


class EvenTokensOnly(LogitsProcessor):
    """Forbids odd tokens after an even text length: depends on the position."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        if input_ids.shape[1] % 2 == 0:
            scores[:, 1::2] = -torch.inf
        return scores


OPTIONS = {
    "repetition_penalty": {"repetition_penalty": 1.3},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "own logits processor": {"logits_processor": lambda: LogitsProcessorList([EvenTokensOnly()])},
    "suppress_tokens": {"suppress_tokens": list(range(0, VOCAB_SIZE, 3))},
    "bad_words_ids": {"bad_words_ids": [[5], [7, 8], [100, 101]]},
    "prefix_allowed_tokens_fn": {
        "prefix_allowed_tokens_fn": lambda: lambda _, ids: list(range(int(ids[-1]) % 7, 128, 5))
    },
    "static cache": {"cache_implementation": "static"},
    "dynamic cache": {"cache_implementation": "dynamic"},
    "chunked prefill": {"prefill_chunk_size": 4},
    "chunked prefill, static cache": {"prefill_chunk_size": 4, "cache_implementation": "static"},
    "one new token": {"max_new_tokens": 1},
    "two new tokens": {"max_new_tokens": 2},
    "max_length": {"max_new_tokens": None, "max_length": 20},
    "max_time, long": {"max_time": 600.0},
    "max_time, over at once": {"max_time": 1e-9},
    "generation_config": {
        "generation_config": lambda: GenerationConfig(
            max_new_tokens=9, pad_token_id=0, repetition_penalty=1.2
        )
    },
    "forced_eos_token_id": {"forced_eos_token_id": 3, "eos_token_id": 3},
    "use_cache": {"use_cache": True},
    "remove_invalid_values": {"remove_invalid_values": True},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_option_gives_the_plain_text(pair: Pair, option: str) -> None:
    pair.check(**OPTIONS[option])


def test_min_new_tokens_holds_eos_back(pair: Pair) -> None:
    text = pair.check(eos_token_id=pair.text[3], min_new_tokens=9)
    assert text.shape[1] >= 11 + 9


def test_several_eos_tokens_end_at_the_first(pair: Pair) -> None:
    text = pair.check(eos_token_id=[pair.text[9], pair.text[12]])
    assert text.shape[1] <= 11 + 10


def test_a_prompt_of_one_token(pair: Pair) -> None:
    pair.check(prompt=torch.tensor([[17]]))


def test_left_padding_of_one_sequence_is_not_read(pair: Pair) -> None:
    prompt = torch.nn.functional.pad(pair.prompt, (4, 0), value=9)
    mask = torch.ones_like(prompt)
    mask[:, :4] = 0
    text = pair.check(prompt=prompt, attention_mask=mask)
    assert text[0, 15:].tolist() == pair.text


def test_a_mask_with_a_hole_in_the_middle(pair: Pair) -> None:
    mask = torch.ones_like(pair.prompt)
    mask[:, 3:6] = 0
    pair.check(attention_mask=mask)


def test_scores_and_logits_are_returned_for_every_token(pair: Pair) -> None:
    keywords = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "repetition_penalty": 1.3,
    }
    plain, wrapped = (pair.run(m, **keywords) for m in (pair.plain, pair.wrapped))
    assert torch.equal(plain.sequences, wrapped.sequences)
    for name in ("scores", "logits"):
        expected, got = plain[name], wrapped[name]
        assert len(expected) == len(got) == NUM_TOKENS
        for one, other in zip(expected, got, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)
    assert wrapped.attentions is None
    assert wrapped.hidden_states is None


def test_the_returned_cache_holds_the_committed_text(pair: Pair) -> None:
    returned = pair.run(pair.wrapped, return_dict_in_generate=True)
    cache = returned[find_cache_keyword(pair.plain)]
    # All tokens but the last, whose keys a next call would add.
    assert int(cache.get_seq_length()) == returned.sequences.shape[1] - 1
    again = DynamicCache()
    pair.plain(returned.sequences[:, :-1], **{find_cache_keyword(pair.plain): again})
    for got, expected in zip(cache.layers, again.layers, strict=True):
        torch.testing.assert_close(got.keys, expected.keys, rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(got.values, expected.values, rtol=0, atol=TOLERANCE)


class RecordingStreamer(BaseStreamer):
    def __init__(self) -> None:
        self.events: list[list[int] | str] = []

    def put(self, value: Tensor) -> None:
        assert value.device.type == "cpu"
        self.events.append(value.flatten().tolist())

    def end(self) -> None:
        self.events.append("end")


def test_a_streamer_gets_the_prompt_every_token_and_the_end(pair: Pair) -> None:
    streamers = [RecordingStreamer(), RecordingStreamer()]
    for model, streamer in zip((pair.plain, pair.wrapped), streamers, strict=True):
        pair.run(model, streamer=streamer)
    assert streamers[0].events == streamers[1].events
    assert streamers[1].events[0] == pair.prompt[0].tolist()
    assert len(streamers[1].events) == NUM_TOKENS + 2


class StopAtSum(StoppingCriteria):
    """Stops when the last two tokens add up to a multiple of 7; remembers when it was asked."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, input_ids: Tensor, scores, **keywords) -> Tensor:
        self.lengths.append(input_ids.shape[1])
        return input_ids[:, -2:].sum(dim=-1) % 7 == 0


def test_a_stopping_criterion_is_asked_after_every_token(pair: Pair) -> None:
    criteria = [StopAtSum(), StopAtSum()]
    texts = [
        pair.run(model, stopping_criteria=StoppingCriteriaList([criterion]))
        for model, criterion in zip((pair.plain, pair.wrapped), criteria, strict=True)
    ]
    assert torch.equal(texts[0], texts[1])
    assert criteria[0].lengths == criteria[1].lengths
    assert criteria[1].lengths == list(range(12, texts[1].shape[1] + 1))


def test_a_criterion_reads_the_scores_so_far(pair: Pair) -> None:
    seen = []

    class NeedsScores(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores, **keywords) -> Tensor:
            seen.append(len(scores))
            return torch.zeros(1, dtype=torch.bool)

    pair.run(
        pair.wrapped,
        stopping_criteria=StoppingCriteriaList([NeedsScores()]),
        return_dict_in_generate=True,
        output_scores=True,
    )
    assert seen == list(range(1, NUM_TOKENS + 1))


def make_tokenizer(printable: set[int]) -> PreTrainedTokenizerFast:
    """One character or byte a token; those of `printable` are printable characters."""
    order = sorted(range(VOCAB_SIZE), key=lambda token: (token not in printable, token))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())  # the printable ASCII ones come first
    vocabulary = {alphabet[place]: token for place, token in enumerate(order)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def test_stop_strings_end_the_text_inside_a_block(pair: Pair) -> None:
    tokenizer = make_tokenizer(set(pair.text))
    stop = tokenizer.decode(pair.text[6:8])
    assert len(stop) == 2
    text = pair.check(stop_strings=[stop], tokenizer=tokenizer)
    assert text.shape[1] <= 11 + 8


class TestCachesOfTheCaller:
    @staticmethod
    def with_cache(pair: Pair, make_cache) -> dict:
        return {find_cache_keyword(pair.plain): make_cache}

    def test_an_empty_dynamic_cache_is_filled(self, pair: Pair) -> None:
        pair.check(**self.with_cache(pair, lambda: DynamicCache()))

    @pytest.mark.parametrize("num_known", [1, 6, 10])
    def test_a_cache_of_the_prompts_beginning_is_continued(
        self, pair: Pair, num_known: int
    ) -> None:
        def known() -> DynamicCache:
            cache = DynamicCache()
            pair.plain(pair.prompt[:, :num_known], **{find_cache_keyword(pair.plain): cache})
            return cache

        text = pair.check(**self.with_cache(pair, lambda: known()))
        assert text[0, 11:].tolist() == pair.text

    def test_a_returned_cache_is_continued_with_the_whole_text(self, pair: Pair) -> None:
        keyword = find_cache_keyword(pair.plain)
        first = pair.run(pair.wrapped, max_new_tokens=10, return_dict_in_generate=True)
        text = pair.run(
            pair.wrapped,
            first.sequences,
            max_new_tokens=NUM_TOKENS - 10,
            **{keyword: first[keyword]},
        )
        assert text[0, 11:].tolist() == pair.text

    def test_a_static_cache_of_plain_layers_is_used(self, pair: Pair) -> None:
        def static(num_slots: int) -> Cache:
            return Cache(layers=[StaticLayer(max_cache_len=num_slots) for _ in range(NUM_LAYERS)])

        # Without room for a tree beyond the text, and with it.
        for num_slots in (11 + NUM_TOKENS - 1, 60):
            cache = static(num_slots)
            text = pair.run(pair.wrapped, **{find_cache_keyword(pair.plain): cache})
            assert text[0, 11:].tolist() == pair.text
            assert int(cache.get_seq_length()) == text.shape[1] - 1


def test_a_static_cache_of_transformers_is_used() -> None:
    pair = Pair("qwen3_moe")
    keyword = find_cache_keyword(pair.plain)
    cache = StaticCache(config=pair.plain.config, max_cache_len=50)
    text = pair.run(pair.wrapped, **{keyword: cache})
    assert text[0, 11:].tolist() == pair.text


def test_guidance_scale_runs_the_model_itself(pair: Pair) -> None:
    # Classifier-free guidance calls the model inside its processor, once for each token in order.
    pair.check(guidance_scale=1.5, negative_prompt_ids=torch.tensor([[3, 4]]))


def test_router_logits_in_the_configuration_do_no_harm() -> None:
    pair = Pair("qwen3_moe")
    pair.wrapped.config.output_router_logits = True
    assert pair.run(pair.wrapped)[0, 11:].tolist() == pair.text


def test_blocks_are_accepted_and_rejected_in_these_tests(pair: Pair) -> None:
    pair.wrapped.acceptmoe.reset_statistics()
    pair.check()
    report = pair.wrapped.acceptmoe.report()
    assert 1.5 <= report["accepted_length"] < 4
