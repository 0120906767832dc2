"""A head multiplies by the compiled kernels where they are asked for and pay, and only there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from eagle3_fixtures import random_head, small_target
from transformers import Qwen3MoeForCausalLM

import acceptmoe
from acceptmoe.drafting.eagle3 import Eagle3Drafter
from acceptmoe.drafting.eagle3_checkpoint import save_head
from acceptmoe.models.dense import own_product
from acceptmoe.ops import cpu_library

BOUNDARIES = (2, 4, 5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_head(random_head(draft_vocab_size=61, boundaries=BOUNDARIES), tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def old_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """One without arithmetic in bfloat16, wherever the tests run."""
    monkeypatch.setattr(cpu_library, "cpu_features", lambda: frozenset({"avx2"}))


def low_precision_target(dtype: torch.dtype = torch.bfloat16) -> Qwen3MoeForCausalLM:
    model = small_target().to(dtype)
    model.set_experts_implementation("eager")  # torch's grouped product takes no such small sizes
    return model


def uses_kernels(folder: Path, dtype: torch.dtype, experts: str | None) -> bool:
    model = low_precision_target(dtype)
    drafter = Eagle3Drafter.from_pretrained(folder)
    acceptmoe.wrap(model, drafter=drafter, policy="natural", num_nodes=8, experts=experts)
    return uses_kernels_in_a_text(model, drafter)


def uses_kernels_in_a_text(model: Qwen3MoeForCausalLM, drafter: Eagle3Drafter) -> bool:
    with model.acceptmoe.drafting(model, "the test"):
        return drafter.head.product is own_product


def test_low_precision_uses_them_when_asked(folder: Path) -> None:
    assert uses_kernels(folder, torch.bfloat16, "acceptmoe")
    assert not uses_kernels(folder, torch.bfloat16, None)


def test_float32_never_does(folder: Path) -> None:
    assert not uses_kernels(folder, torch.float32, "acceptmoe")


def test_a_later_wrap_without_them_switches_them_off(folder: Path) -> None:
    drafter = Eagle3Drafter.from_pretrained(folder)
    for experts in ("acceptmoe", None):
        model = low_precision_target()
        acceptmoe.wrap(model, drafter=drafter, policy="natural", num_nodes=8, experts=experts)
        assert uses_kernels_in_a_text(model, drafter) is (experts is not None)


def test_trees_have_the_same_probabilities_within_rounding(folder: Path) -> None:
    target = low_precision_target()
    prompt = torch.arange(9)
    features = torch.randn(9, 60, generator=torch.Generator().manual_seed(0)).bfloat16()
    trees = []
    for is_wanted in (False, True):
        drafter = Eagle3Drafter.from_pretrained(folder, target)
        drafter.use_kernels(is_wanted=is_wanted)
        drafter.start(prompt, 3, features)
        # The root's children: further down, near-ties of a random head may fall either way.
        trees.append(drafter.propose(9, 1))
    # Node 0 is the root.
    stock, compiled = (
        dict(zip(tree.tokens[1:], tree.path_probabilities[1:], strict=True)) for tree in trees
    )
    shared = stock.keys() & compiled.keys()
    assert len(shared) >= 6  # of eight; the last ones may be near-ties too
    for token in shared:
        # bfloat16 keeps 8 bits, through two layers of products.
        assert compiled[token] == pytest.approx(stock[token], rel=0.1)
