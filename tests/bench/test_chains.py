"""Chains: one path, the one that the drafter holds likeliest."""

from __future__ import annotations

import pytest
import torch

from acceptmoe.bench.chains import LikeliestPath, chain_drafter
from acceptmoe.drafting import AssistantDrafter, NgramDrafter
from acceptmoe.targets import load_assistant
from acceptmoe.tree import DraftTree


class FixedDrafter(NgramDrafter):
    def propose(self, num_nodes: int, max_depth: int) -> DraftTree:
        #   7 - (8: .2), (9: .6 - (3: .5), (4: .5 - (5: .1)))
        return DraftTree((7, 8, 9, 3, 4, 5), (-1, 0, 0, 2, 2, 4), (1.0, 0.2, 0.6, 0.5, 0.5, 0.1))


def test_the_likeliest_child_is_taken_and_the_first_of_equals() -> None:
    tree = LikeliestPath(FixedDrafter()).propose(6, 3)
    assert (tree.tokens, tree.parents) == ((7, 9, 3), (-1, 0, 1))
    assert tree.path_probabilities == (1.0, 0.6, 0.5)


def test_a_drafter_without_ideas_gives_its_root() -> None:
    drafter = LikeliestPath(NgramDrafter())
    drafter.start(torch.tensor([1, 2, 3]), 4, None)
    assert drafter.propose(8, 5).tokens == (4,)
    drafter.extend([1], None)
    assert drafter.propose(8, 5).tokens == (1, 2, 3, 4, 1, 2)


@pytest.mark.parametrize("name", ["assistant", "ngram"])
def test_chains_keep_the_drafters_name(bundled: str, name: str) -> None:
    drafter = NgramDrafter()
    if name == "assistant":  # to the full depth, although this text makes little sense
        drafter = AssistantDrafter(load_assistant(bundled), min_reach=0.0)
    chain = chain_drafter(drafter)
    assert chain.name == name
    chain.start(torch.tensor([1, 2, 3, 1, 2]), 3, None)
    tree = chain.propose(4, 3)
    assert tree.parents == (-1, 0, 1, 2)
