"""A widened head on a widened target drafts what the original drafts on the original."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from eagle3_fixtures import random_head, small_target
from safetensors.torch import load_file, save_file

from acceptmoe.drafting.eagle3 import Eagle3Drafter
from acceptmoe.drafting.eagle3_checkpoint import save_head
from acceptmoe.drafting.eagle3_layouts import Layout
from acceptmoe.targets.widen import widen, widen_eagle3_head

FACTOR = 2


@pytest.mark.parametrize("layout", ["specforge", "speculators"])
def test_a_widened_head_proposes_the_same_trees(layout: Layout, tmp_path: Path) -> None:
    target = small_target()
    save_head(random_head(fc_bias=True, norm_before_fc=True), tmp_path / "narrow", layout=layout)
    tensors, config = widen_eagle3_head(
        load_file(tmp_path / "narrow" / "model.safetensors"),
        json.loads((tmp_path / "narrow" / "config.json").read_text()),
        FACTOR,
        FACTOR,
    )
    (tmp_path / "wide").mkdir()
    save_file(tensors, tmp_path / "wide" / "model.safetensors")
    (tmp_path / "wide" / "config.json").write_text(json.dumps(config))

    narrow = Eagle3Drafter.from_pretrained(tmp_path / "narrow", target)
    wide = Eagle3Drafter.from_pretrained(tmp_path / "wide", widen(target, FACTOR, FACTOR))
    assert wide.head.config.hidden_size == FACTOR * narrow.head.config.hidden_size
    assert wide.feature_boundaries == narrow.feature_boundaries
    features = torch.randn(4, 3, 20, generator=torch.Generator().manual_seed(2))
    prompt = torch.tensor([5, 9, 2, 17])
    narrow.start(prompt, 8, features.flatten(1))
    wide.start(prompt, 8, features.repeat(1, 1, FACTOR).flatten(1))
    expected, tree = narrow.propose(20, 4), wide.propose(20, 4)
    assert (tree.tokens, tree.parents) == (expected.tokens, expected.parents)
    assert tree.path_probabilities == pytest.approx(expected.path_probabilities, abs=1e-5)
