"""The head inside the decode loop: lossless, and fed with the states it was trained on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from eagle3_fixtures import random_head, small_target

import acceptmoe
from acceptmoe.drafting.eagle3 import Eagle3Drafter
from acceptmoe.drafting.eagle3_checkpoint import save_head
from acceptmoe.tree import DraftTree

NUM_TOKENS = 24
PROMPT = torch.tensor([[3, 14, 15, 9, 26, 5]])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A head that is right now and then: it ends in the target's own output matrix."""
    target = small_target()
    head = random_head(draft_vocab_size=61, boundaries=(2, 4, 5))
    head.fc.weight.zero_()
    head.fc.weight[:, 40:] = torch.eye(20)  # the state that the target predicts from
    head.norm.copy_(target.model.norm.weight)
    head.lm_head.weight.copy_(target.lm_head.weight)
    save_head(head, tmp_path)
    return tmp_path


def test_greedy_text_with_a_head_is_the_models_own(folder: Path) -> None:
    model = small_target()
    settings = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None}
    expected = model.generate(PROMPT, **settings)
    acceptmoe.wrap(model, drafter=folder, policy="natural", num_nodes=16, max_depth=4)
    blocks: list[tuple[DraftTree, tuple[int, ...]]] = []
    model.acceptmoe.observers.append(lambda tree, nodes: blocks.append((tree, nodes)))
    text = model.generate(PROMPT, **settings)
    assert torch.equal(text, expected)
    acceptmoe.unwrap(model)

    # Every tree is the one of a fresh drafter on the states of a plain forward over the text.
    with torch.no_grad():
        states = model(text, output_hidden_states=True).hidden_states
    last = []
    handle = model.model.norm.register_forward_pre_hook(lambda _, args: last.append(args[0][0]))
    with torch.no_grad():
        model(text)
    handle.remove()
    features = torch.cat([states[2][0], states[4][0], last[0]], dim=-1)
    drafter = Eagle3Drafter.from_pretrained(folder, model)
    done = PROMPT.shape[1] + 1
    num_accepted = 0
    for tree, nodes in blocks:
        if tree.num_nodes > 1:
            drafter.start(text[0, : done - 1], int(text[0, done - 1]), features[: done - 1])
            depth = min(4, PROMPT.shape[1] + NUM_TOKENS - done - 1)
            expected_tree = drafter.propose(16, depth)
            assert (tree.tokens, tree.parents) == (expected_tree.tokens, expected_tree.parents)
            assert tree.path_probabilities == pytest.approx(
                expected_tree.path_probabilities, abs=1e-4
            )
        done += len(nodes)
        num_accepted += len(nodes) - 1
    assert num_accepted > 0
    assert done >= PROMPT.shape[1] + NUM_TOKENS
