"""Turns logits into emitted tokens: processors, streamer, scores, stopping criteria."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria
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
    so far, argmax. Every criterion is asked after every single token, so none is overshot. Where
    only the length and EOS end the text, the host knows both, and no token waits for the device.
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
        self.scores: list[Tensor] | None = [] if keeps_scores else None
        self.logits: list[Tensor] | None = [] if keeps_logits else None
        self._input_ids = input_ids
        self._pending: list[int] = []  # emitted, not in `_input_ids` yet
        self._processor = logits_processor
        self._criteria = stopping_criteria
        self._ending = HostEnding.of(stopping_criteria)
        self._streamer = streamer
        self._argmax: list[int] = []
        self._block = input_ids.new_empty(0)

    @property
    def input_ids(self) -> Tensor:
        """[1, L] int64: the prompt and the emitted tokens."""
        if self._pending:
            new = self._input_ids.new_tensor([self._pending])
            self._input_ids = torch.cat([self._input_ids, new], dim=-1)
            self._pending = []
        return self._input_ids

    @property
    def length(self) -> int:
        """L, the number of tokens in `input_ids`."""
        return self._input_ids.shape[1] + len(self._pending)

    def begin_block(self, logits: Tensor, is_trusted: Tensor | None = None) -> None:
        """Take the logits [T, V] of a verification block, row t after node t.

        `is_trusted` [T] bool says which rows may be accepted, None that all may.
        """
        self._block = logits
        self.is_trusted: list[bool] | None = None
        if not self._is_plain:
            self.is_trusted = None if is_trusted is None else is_trusted.tolist()
            return
        # Nothing but the logits decides, so one read for the whole block is enough.
        argmax = logits.float().argmax(dim=-1)
        if is_trusted is None:
            self._argmax = argmax.tolist()
            return
        self._argmax, trusted = torch.stack([argmax, is_trusted.to(argmax)]).tolist()
        self.is_trusted = list(map(bool, trusted))

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
        self._pending.append(token)
        if self._streamer is not None:
            self._streamer.put(torch.tensor([token]))
        if self._ending is not None:
            return self._ending.is_reached(token, self.length)
        scores: Any = tuple(self.scores) if self.scores is not None else None
        return bool(self._criteria(self.input_ids, scores).all())

    def end(self) -> None:
        if self._streamer is not None:
            self._streamer.end()

    @property
    def _is_plain(self) -> bool:
        return not self._processor and self.scores is None and self.logits is None


@dataclass(frozen=True)
class HostEnding:
    """What ends a text, as numbers on the host: its length and the EOS tokens."""

    max_length: float
    end_tokens: frozenset[int]

    @classmethod
    def of(cls, criteria: StoppingCriteriaList) -> HostEnding | None:
        """The same as `criteria`, or None when they ask for more than length and EOS."""
        max_length, end_tokens = math.inf, frozenset[int]()
        for criterion in criteria:
            if type(criterion) is MaxLengthCriteria:
                # Beyond the model's positions it warns; then it is asked itself.
                positions = criterion.max_position_embeddings
                if positions is not None and positions < criterion.max_length:
                    return None
                max_length = min(max_length, criterion.max_length)
            elif type(criterion) is EosTokenCriteria:
                end_tokens |= frozenset(criterion.eos_token_id.flatten().tolist())
            else:
                return None
        return cls(max_length, end_tokens)

    def is_reached(self, token: int, length: int) -> bool:
        """Whether a text of `length` tokens that ends with `token` is finished."""
        return length >= self.max_length or token in self.end_tokens
