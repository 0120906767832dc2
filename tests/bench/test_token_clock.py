"""Times of tokens: the first and the last new one, whoever streams them."""

from __future__ import annotations

import pytest
import torch

from acceptmoe import unwrap, wrap
from acceptmoe.bench import token_clock as module
from acceptmoe.bench.token_clock import TimedText, TokenClock, generate_timed
from acceptmoe.targets import load_target


def test_the_prompt_is_no_token_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 3.0, 4.0, 8.0])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(times))
    clock = TokenClock()
    for _ in range(4):
        clock.put(torch.zeros(1))
    clock.end()
    assert (clock.first_s, clock.last_s) == (3.0, 8.0)


def test_speed_leaves_out_what_the_prefill_gave() -> None:
    text = TimedText([1, 2, 3, 4, 5], decode_s=2.0, call_s=2.5)
    assert (text.tokens_per_s, text.call_tokens_per_s) == (2.0, 2.0)
    assert TimedText([1], decode_s=0.0, call_s=1.0).tokens_per_s is None
    # Three came out with the prompt.
    assert TimedText([1, 2, 3, 4, 5], 2.0, 2.5, num_first=3).tokens_per_s == 1.0
    assert TimedText([1, 2], decode_s=0.1, call_s=1.0, num_first=2).tokens_per_s is None


@pytest.mark.parametrize(
    "settings", [{}, {"prompt_lookup_num_tokens": 4}], ids=["plain", "prompt-lookup"]
)
def test_every_way_of_generating_is_timed_alike(bundled: str, settings: dict[str, int]) -> None:
    model, _ = load_target(bundled)
    prompt = torch.arange(1, 20)[None]
    greedy = {"max_new_tokens": 9, "do_sample": False}
    expected = model.generate(prompt, **greedy)[0, 19:].tolist()
    for timed in (
        generate_timed(model, prompt, **greedy, **settings),
        generate_timed(wrap(model, policy="natural", num_nodes=4), prompt, **greedy),
    ):
        assert timed.token_ids == expected
        assert 0 < timed.decode_s < timed.call_s
    unwrap(model)
