"""When the tokens of one text came out, taken alike in every way of generating."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer


@dataclass(frozen=True)
class TimedText:
    """New tokens, seconds from the first to the last of them, and of the whole call.

    `num_first` tokens came out together at the beginning of `decode_s`: more than one where a draft
    is verified with the prompt.
    """

    token_ids: list[int]
    decode_s: float
    call_s: float
    num_first: int = 1

    @property
    def tokens_per_s(self) -> float | None:
        """Of decoding: tokens after the first ones, which the prefill gives; None without any."""
        num_decoded = len(self.token_ids) - self.num_first
        return num_decoded / self.decode_s if num_decoded > 0 and self.decode_s > 0 else None

    @property
    def call_tokens_per_s(self) -> float:
        """Of the whole call, the prompt's prefill included."""
        return len(self.token_ids) / self.call_s


class TokenClock(BaseStreamer):  # type: ignore[misc]
    """A streamer that notes when it got the first and the last new token, and how many at first."""

    def __init__(self) -> None:
        self.first_s = self.last_s = 0.0
        self.num_first = 0
        self._num_puts = 0

    def put(self, value: Tensor) -> None:
        now = time.perf_counter()
        self._num_puts += 1
        if self._num_puts == 2:  # the first is the prompt
            self.first_s = now
            self.num_first = value.numel()
        self.last_s = now

    def end(self) -> None:
        """Nothing: the last token has been put by then."""


def generate_timed(model: PreTrainedModel, prompt: Tensor, **settings: Any) -> TimedText:
    """The text that `model.generate` makes of `prompt` [1, P], and its times."""
    clock = TokenClock()
    start = time.perf_counter()
    sequence = model.generate(prompt, streamer=clock, **settings)
    if sequence.is_cuda:
        torch.cuda.synchronize()
    call_s = time.perf_counter() - start
    token_ids = sequence[0, prompt.shape[1] :].tolist()
    return TimedText(token_ids, clock.last_s - clock.first_s, call_s, clock.num_first)
