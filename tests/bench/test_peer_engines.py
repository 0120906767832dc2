"""Texts of a peer may part from ours by a tie only, and ratios pair texts."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from peers.engines import (
    LLAMA,
    OURS,
    TRANSFORMERS,
    Engine,
    OtherModelError,
    check_texts,
    gap_where_texts_part,
    rows_of,
)

PROMPT = torch.tensor([[1, 2]])
LOGITS = [0.0, 8.0, 7.9375, 4.0]


def same_logits(text: Tensor) -> Any:
    return SimpleNamespace(logits=torch.tensor(LOGITS).expand(1, text.shape[1], -1))


MODEL: Any = same_logits  # whatever the text


def engine(name: str, mode: str = "plain", **facts: Any) -> Engine:
    return Engine(name, mode, lambda prompt: ([], 0.0), **facts)


def test_the_gap_is_taken_where_texts_part() -> None:
    def gap(expected: Sequence[int], found: Sequence[int]) -> float | None:
        return gap_where_texts_part(MODEL, PROMPT, list(expected), list(found))

    assert gap([1, 1, 3], [1, 1, 3]) is None
    assert gap([1, 1, 3], [1, 3, 0, 0]) == pytest.approx(0.5)
    assert gap([1, 1], [2, 1]) == pytest.approx(0.0625 / 8)
    assert gap([1, 1], [1, 1, 1]) == float("inf")


def test_ties_are_counted_apart() -> None:
    texts = {TRANSFORMERS: [[1], [1]], LLAMA: [[1], [2]], OURS: [[3], [3]]}
    engines = [engine(name, texts=found, is_lossless=name != OURS) for name, found in texts.items()]
    assert check_texts(engines, MODEL, [PROMPT] * 2) == {
        "transformers plain": {"same_text": 2, "tied_text": 0, "num_texts": 2},
        "llama.cpp plain": {"same_text": 1, "tied_text": 1, "num_texts": 2},
        "acceptmoe plain": {"same_text": 0, "tied_text": 0, "num_texts": 2},
    }


@pytest.mark.parametrize(("num_wrong", "is_refused"), [(1, False), (2, True)])
def test_a_peer_with_other_tokens_is_refused(num_wrong: int, is_refused: bool) -> None:
    texts = [[3]] * num_wrong + [[1]] * (8 - num_wrong)
    engines = [engine(TRANSFORMERS, texts=[[1]] * 8), engine(LLAMA, texts=texts)]
    if not is_refused:
        assert check_texts(engines, MODEL, [PROMPT] * 8)["llama.cpp plain"]["same_text"] == 7
        return
    with pytest.raises(OtherModelError, match=r"llama.cpp plain emits other .* for 2 prompts of 8"):
        check_texts(engines, MODEL, [PROMPT] * 8)


def test_ratios_are_over_the_faster_plain_decoding_and_over_the_best_mode() -> None:
    rows = rows_of(
        [
            engine(LLAMA, "plain flash", speeds=[1.0, 1.0, 1.0]),
            engine(LLAMA, "plain no-flash", speeds=[2.0, 4.0, 1.0]),
            engine(LLAMA, "draft:3:0", speeds=[8.0, None, 8.0]),
            engine(OURS, "accept 16:5", num_nodes=16, speeds=[6.0, 8.0, 3.0]),
        ]
    )
    ours = rows[-1]
    assert (ours["engine"], ours["num_nodes"], ours["tokens_per_s"]) == (OURS, 16, 6.0)
    assert ours["over_llama_plain"]["peer"] == "llama.cpp plain no-flash"
    assert ours["over_llama_plain"]["ratio"] == 3.0
    assert ours["over_llama_best"]["peer"] == "llama.cpp draft:3:0"
    assert ours["over_llama_best"]["ratio"] == pytest.approx((6 / 8 + 3 / 8) / 2)


def test_a_wrapped_model_says_what_its_blocks_cost() -> None:
    report = {
        "num_verifications": 3,
        "num_plain_steps": 1,
        "accepted_length": 4.5,
        "experts_used": 20.0,
        "draft_s": 0.2,
        "verify_s": 0.4,
    }
    wrapped = SimpleNamespace(acceptmoe=SimpleNamespace(report=lambda: report))
    rows = rows_of([engine(LLAMA, speeds=[1.0]), engine(OURS, speeds=[1.0], wrapped=wrapped)])
    assert "pass_ms" not in rows[0]
    facts = {name: rows[1][name] for name in ("accepted_length", "draft_ms", "pass_ms")}
    assert facts == pytest.approx({"accepted_length": 4.5, "draft_ms": 50.0, "pass_ms": 100.0})
