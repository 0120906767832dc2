"""Ways to decode the same prompts: what came out, how fast, and how the ways compare."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from acceptmoe.bench.intervals import median_ratio_interval, quartiles

PLAIN = "plain"
TRANSFORMERS, LLAMA, OURS = "transformers", "llama.cpp", "acceptmoe"
# Two steps of bfloat16, one for each of two engines that round the same logit.
TIE = 2 * 2**-7
# Rounding adds up over layers: one text in so many may differ beyond a tie in its last rounding.
TEXTS_PER_WRONG_ONE = 8

Decode = Callable[[Tensor], tuple[list[int], float]]  # a prompt [1, P]: new tokens and seconds
Row = dict[str, Any]


class OtherModelError(RuntimeError):
    """An engine that must be lossless emits other tokens; its speed would mean nothing."""


@dataclass
class Engine:
    """One way to decode a prompt, and what came out, prompt by prompt.

    `speeds` are tokens per second of every timed text, None for a text of one token. `wrapped` is
    the model whose report tells more, if there is one.
    """

    name: str
    mode: str
    decode: Decode
    num_nodes: int = 1
    is_lossless: bool = True
    wrapped: PreTrainedModel | None = None
    texts: list[list[int]] = field(default_factory=list)
    speeds: list[float | None] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.name} {self.mode}"

    def known_speeds(self) -> list[float]:
        return [speed for speed in self.speeds if speed is not None]


def check_texts(
    engines: Sequence[Engine], model: PreTrainedModel, prompts: Sequence[Tensor]
) -> dict[str, Row]:
    """Compare the texts of all engines with those of Transformers' plain `generate`, by engine.

    `same_text` counts equal texts, `tied_text` those that part where the two tokens are as likely
    as bfloat16 can tell. Raises `OtherModelError` for more than a few others of a lossless engine.
    """
    expected = next(engine.texts for engine in engines if engine.name == TRANSFORMERS)
    found = {}
    for engine in engines:
        gaps = [
            gap_where_texts_part(model, *texts)
            for texts in zip(prompts, expected, engine.texts, strict=True)
        ]
        num_same = sum(gap is None for gap in gaps)
        num_tied = sum(gap is not None and gap <= TIE for gap in gaps)
        num_wrong = len(gaps) - num_same - num_tied
        if engine.is_lossless and num_wrong * TEXTS_PER_WRONG_ONE > len(gaps):
            raise OtherModelError(
                f"{engine} emits other tokens than Transformers for {num_wrong} prompts of "
                f"{len(gaps)}, where no two tokens are equally likely; its speed would mean nothing"
            )
        found[str(engine)] = {
            "same_text": num_same,
            "tied_text": num_tied,
            "num_texts": len(gaps),
        }
    return found


@torch.inference_mode()
def gap_where_texts_part(
    model: PreTrainedModel, prompt: Tensor, expected: list[int], found: list[int]
) -> float | None:
    """Between the model's logits of the first two tokens that differ, as a share of the largest.

    None for equal texts. One that ends before the other counts as infinitely far from it.
    """
    if expected == found:
        return None
    pairs = enumerate(zip(expected, found, strict=False))
    parting = next((index for index, (a, b) in pairs if a != b), None)
    if parting is None:
        return float("inf")
    text = prompt.new_tensor([expected[:parting]])
    logits = model(torch.cat((prompt, text), dim=1)).logits[0, -1].float()
    gap = logits[expected[parting]] - logits[found[parting]]
    return (gap.abs() / logits.abs().max()).item()


def rows_of(engines: Sequence[Engine]) -> list[Row]:
    """Speeds, and ratios over llama.cpp: over its faster plain decoding, and over its best mode."""
    peers = [engine for engine in engines if engine.name == LLAMA]
    plain = fastest([engine for engine in peers if engine.mode.startswith(PLAIN)])
    best = fastest(peers)
    return [
        {
            "engine": engine.name,
            "mode": engine.mode,
            "num_nodes": engine.num_nodes,
            **speed_of(engine),
            "over_llama_plain": ratio(engine, plain),
            "over_llama_best": ratio(engine, best),
            **pass_facts(engine),
        }
        for engine in engines
    ]


def fastest(engines: Sequence[Engine]) -> Engine:
    return max(engines, key=lambda engine: statistics.median(engine.known_speeds()))


def speed_of(engine: Engine) -> Row:
    q1, median, q3 = quartiles(engine.known_speeds())
    return {"tokens_per_s": median, "q1": q1, "q3": q3}


def ratio(engine: Engine, peer: Engine) -> Row:
    """The median of the ratios text by text, with its 95 % bootstrap interval."""
    pairs = [
        (ours, theirs)
        for ours, theirs in zip(engine.speeds, peer.speeds, strict=True)
        if ours is not None and theirs is not None
    ]
    low, high = median_ratio_interval(*zip(*pairs, strict=True))
    return {
        "peer": str(peer),
        "ratio": statistics.median(ours / theirs for ours, theirs in pairs),
        "low": low,
        "high": high,
    }


def pass_facts(engine: Engine) -> Row:
    """What a block of a wrapped model's timed texts emitted and cost, in means over blocks."""
    if engine.wrapped is None:
        return {}
    report = engine.wrapped.acceptmoe.report()
    num_blocks = max(1, report["num_verifications"] + report["num_plain_steps"])
    return {
        "accepted_length": report["accepted_length"],
        "experts_used": report["experts_used"],
        "draft_ms": 1e3 * report["draft_s"] / num_blocks,
        "pass_ms": 1e3 * report["verify_s"] / num_blocks,
    }
