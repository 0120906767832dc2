"""Greedy decoding with the passes of one or two models, plainly and with drafted tokens.

Axes: T rows, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]


class Context(Protocol):
    """One model's keys and values of one sequence."""

    @property
    def length(self) -> int:
        """Tokens read and kept."""

    def keep(self, length: int) -> None:
        """Forget the tokens from position `length` on."""

    def read(self, tokens: Sequence[int], *, wants_all: bool = False) -> Logits:
        """Append `tokens` in one pass: the logits of the last, [1, V], or of all, [T, V]."""


@dataclass(frozen=True)
class Draft:
    """Drafts are chains of at most `num_tokens` tokens.

    They end before a token that the drafter holds less than `min_probability` likely.
    """

    num_tokens: int
    min_probability: float = 0.0

    def __str__(self) -> str:
        return f"{self.num_tokens}:{self.min_probability:g}"


def generate_plain(
    context: Context, prompt: Sequence[int], max_new_tokens: int, end_ids: Collection[int]
) -> tuple[list[int], float]:
    """The new tokens, an end included, and the seconds from the first to the last of them."""
    context.keep(0)
    tokens = [likeliest(context.read(prompt))]
    start = time.perf_counter()
    while tokens[-1] not in end_ids and len(tokens) < max_new_tokens:
        tokens.append(likeliest(context.read(tokens[-1:])))
    return tokens, time.perf_counter() - start


def generate_drafted(
    target: Context,
    drafter: Context,
    draft: Draft,
    prompt: Sequence[int],
    max_new_tokens: int,
    end_ids: Collection[int],
) -> tuple[list[int], float]:
    """The same tokens and their seconds, with chains of another model that `target` verifies.

    The drafter reads the prompt before the clock starts, too.
    """
    target.keep(0)
    drafter.keep(0)
    tokens = [likeliest(target.read(prompt))]
    drafter.read(prompt)
    start = time.perf_counter()
    while tokens[-1] not in end_ids and len(tokens) < max_new_tokens:
        drafter.keep(min(drafter.length, target.length))
        unread = tokens[drafter.length - len(prompt) :]
        drafted = propose(drafter, unread, draft, max_new_tokens - len(tokens) - 1)
        chosen = verify(target, tokens[-1], drafted)
        tokens += up_to_end(chosen, end_ids)
    return tokens, time.perf_counter() - start


def propose(drafter: Context, unread: Sequence[int], draft: Draft, most: int) -> list[int]:
    """The likeliest tokens behind all that the drafter has read and the `unread` ones."""
    drafted: list[int] = []
    num_tokens = min(draft.num_tokens, most)
    while len(drafted) < num_tokens:
        logits = drafter.read(drafted[-1:] or unread)
        token = likeliest(logits)
        if probability(logits, token) < draft.min_probability:
            break
        drafted.append(token)
    return drafted


def verify(target: Context, root: int, drafted: Sequence[int]) -> list[int]:
    """The target's own tokens behind `root`: as many drafted ones as are right, and one more."""
    found = target.read([root, *drafted], wants_all=True).argmax(axis=-1).tolist()
    num_right = 0
    while num_right < len(drafted) and drafted[num_right] == found[num_right]:
        num_right += 1
    target.keep(target.length - (len(drafted) - num_right))
    chosen: list[int] = found[: num_right + 1]
    return chosen


def up_to_end(tokens: Sequence[int], end_ids: Collection[int]) -> list[int]:
    """`tokens` until the first end, which is included."""
    ends = [index for index, token in enumerate(tokens) if token in end_ids]
    return list(tokens[: ends[0] + 1] if ends else tokens)


def time_pass(
    context: Context, prefix: Sequence[int], rows: Sequence[int], repeats: int
) -> list[float]:
    """Seconds of each pass over `rows`, the tokens that follow `prefix`, with all logits.

    The rows are a chain: what a pass costs does not depend on who sees whom.
    """
    context.keep(0)
    context.read(prefix)
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        context.read(rows, wants_all=True)
        times.append(time.perf_counter() - start)
        context.keep(len(prefix))
    return times[1:]  # the first one builds the graph for this number of rows


def likeliest(logits: Logits) -> int:
    """The token with the largest logit of the last row."""
    return int(logits[-1].argmax())


def probability(logits: Logits, token: int) -> float:
    """Of `token` in the last row."""
    row = logits[-1].astype(np.float64)
    return float(np.exp(row[token] - row.max()) / np.exp(row - row.max()).sum())
