"""Turns logits into emitted tokens: processors, streamer, scores, stopping criteria."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer


class HeldStreamer(BaseStreamer):  # type: ignore[misc]
    """Keeps what Transformers streams before decoding begins, the prompt, until `release`.

    `generate` streams the prompt before its last checks; nobody should see the beginning of a text
    that is then refused.
    """

    def __init__(self, streamer: BaseStreamer) -> None:
        self._streamer = streamer
        self._held: list[Tensor] = []

    def put(self, value: Tensor) -> None:
        self._held.append(value)

    def end(self) -> None:
        raise AssertionError("a held streamer is released before the text ends")

    def release(self) -> BaseStreamer:
        """The caller's streamer, after it has got everything held."""
        for value in self._held:
            self._streamer.put(value)
        return self._streamer


class TokenEmitter:
    """The text of one sequence and everything that happens for each of its new tokens.

    Tokens are chosen as Transformers' greedy search does: fp32 logits, the processors on the text
    so far, argmax. Every criterion is asked after every single token, so none is overshot.
    """

    def __init__(
        self,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        streamer: BaseStreamer | None,
        *,
        keeps_scores: bool,
        keeps_logits: bool,
    ) -> None:
        self.input_ids = input_ids  # [1, L] int64, prompt and emitted tokens
        self.scores: list[Tensor] | None = [] if keeps_scores else None
        self.logits: list[Tensor] | None = [] if keeps_logits else None
        self._processor = logits_processor
        self._criteria = stopping_criteria
        self._streamer = streamer
        self._argmax: list[int] = []
        self._block = input_ids.new_empty(0)

    def begin_block(self, logits: Tensor) -> None:
        """Take the logits [T, V] of a verification block, row t after node t."""
        self._block = logits
        # One read for the whole block where nothing but the logits decides.
        self._argmax = logits.float().argmax(dim=-1).tolist() if self._is_plain else []

    def next_token(self, row: int) -> int:
        """The greedy token after row `row` of the block."""
        if self._is_plain:
            return self._argmax[row]
        raw = self._block[row : row + 1].to(
            copy=True, dtype=torch.float32, device=self.input_ids.device
        )
        scores = self._processor(self.input_ids, raw)
        if self.logits is not None:
            self.logits.append(raw)
        if self.scores is not None:
            self.scores.append(scores)
        return int(scores.argmax(dim=-1))

    def emit(self, token: int) -> bool:
        """Append and stream `token`; True when a criterion ends the generation with it."""
        new = self.input_ids.new_tensor([[token]])
        self.input_ids = torch.cat([self.input_ids, new], dim=-1)
        if self._streamer is not None:
            self._streamer.put(new[0].cpu())
        scores: Any = tuple(self.scores) if self.scores is not None else None
        return bool(self._criteria(self.input_ids, scores).all())

    def end(self) -> None:
        if self._streamer is not None:
            self._streamer.end()

    @property
    def _is_plain(self) -> bool:
        return not self._processor and self.scores is None and self.logits is None
