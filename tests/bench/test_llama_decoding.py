"""Decoding with drafted chains emits what plain decoding does, and prompts are in no time."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import pytest

from peers import llama_decoding
from peers.llama_decoding import Draft, Logits, generate_drafted, generate_plain, time_pass

VOCABULARY, END = 23, 0
PROMPT = [5, 9, 2]


class FakeClock:
    """Every row of every context takes one second."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(llama_decoding, "time", clock)
    return clock


class FakeContext:
    """A model whose next token is a hash of the text; every `slip`-th text it takes another one."""

    def __init__(self, clock: FakeClock, seed: int = 0, slip: int = 0) -> None:
        self.text: list[int] = []
        self.passes: list[list[int]] = []
        self._clock, self._seed, self._slip = clock, seed, slip

    @property
    def length(self) -> int:
        return len(self.text)

    def keep(self, length: int) -> None:
        assert length <= self.length
        del self.text[length:]

    def read(self, tokens: Sequence[int], *, wants_all: bool = False) -> Logits:
        self.passes.append(list(tokens))
        rows = []
        for token in tokens:
            self.text.append(token)
            rows.append(self._logits())
        self._clock.now += len(tokens)
        return np.stack(rows if wants_all else rows[-1:])

    def _logits(self) -> Logits:
        code = zlib.crc32(bytes([self._seed, *self.text]))
        slips = self._slip and code % self._slip == 0
        logits = np.zeros(VOCABULARY, dtype=np.float32)
        logits[(code + bool(slips)) % VOCABULARY] = 3.0  # a probability of 0.48
        return logits


@pytest.mark.parametrize("num_drafted", [1, 3, 8])
@pytest.mark.parametrize("slip", [0, 2, 1])  # a perfect drafter, one half right, one never right
@pytest.mark.parametrize("seed", range(6))
def test_drafted_texts_are_plain_ones(
    clock: FakeClock, seed: int, slip: int, num_drafted: int
) -> None:
    target, drafter = FakeContext(clock, seed), FakeContext(clock, seed, slip)
    expected, _ = generate_plain(FakeContext(clock, seed), PROMPT, 30, [END])
    for _ in range(2):  # nothing of the first text is left in the second
        found, _ = generate_drafted(target, drafter, Draft(num_drafted), PROMPT, 30, [END])
        assert found == expected
    assert expected[-1] == END or len(expected) == 30


def test_right_drafts_save_passes_of_the_target(clock: FakeClock) -> None:
    target, drafter = FakeContext(clock), FakeContext(clock)
    tokens, _ = generate_drafted(target, drafter, Draft(3), PROMPT, 13, [])
    assert len(tokens) == 13
    assert [len(rows) for rows in target.passes] == [len(PROMPT), 4, 4, 4]


def test_an_unsure_drafter_drafts_nothing(clock: FakeClock) -> None:
    target, drafter = FakeContext(clock), FakeContext(clock)
    tokens, _ = generate_drafted(target, drafter, Draft(3, 0.5), PROMPT, 13, [])
    assert tokens == generate_plain(FakeContext(clock), PROMPT, 13, [])[0]
    assert [len(rows) for rows in target.passes[1:]] == [1] * 12


def test_the_prompt_is_in_no_time(clock: FakeClock) -> None:
    tokens, seconds = generate_plain(FakeContext(clock), PROMPT, 10, [])
    assert (len(tokens), seconds) == (10, 9.0)
    target, drafter = FakeContext(clock), FakeContext(clock)
    _, seconds = generate_drafted(target, drafter, Draft(3), PROMPT, 10, [])
    rows = sum(len(tokens) for context in (target, drafter) for tokens in context.passes)
    assert seconds == rows - 2 * len(PROMPT)


def test_passes_are_timed_behind_the_same_prefix(clock: FakeClock) -> None:
    context = FakeContext(clock)
    assert time_pass(context, PROMPT, [1, 2, 3, 4], repeats=3) == [4.0] * 3
    assert context.passes == [PROMPT] + [[1, 2, 3, 4]] * 4
    assert context.text == PROMPT
