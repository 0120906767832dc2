"""Tree shapes, draft trees and masks."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from acceptmoe.errors import TreeError
from acceptmoe.tree import (
    MAX_NODES,
    DraftTree,
    TreeShape,
    best_first_nodes,
    sibling_tokens_are_distinct,
    tree_attention_mask,
)


@st.composite
def shapes(draw, max_nodes=24):
    num_nodes = draw(st.integers(1, max_nodes))
    return TreeShape((-1, *(draw(st.integers(0, node - 1)) for node in range(1, num_nodes))))


@given(shapes())
@settings(deadline=None)
def test_paths_depths_children_and_ancestry_agree(shape):
    for node in range(shape.num_nodes):
        path = shape.path(node)
        assert path[0] == 0
        assert path[-1] == node
        assert len(path) == shape.depths[node] + 1
        assert all(shape.parents[b] == a for a, b in itertools.pairwise(path))
        assert set(shape.ancestry[node].nonzero().flatten().tolist()) == set(path)
        assert all(shape.parents[child] == node for child in shape.children[node])
        assert (node in shape.leaves) == (not shape.children[node])
    assert shape.max_depth == max(shape.depths)


def test_a_shape_is_hashable_and_equal_by_value():
    assert {TreeShape((-1, 0, 0)): 1}[TreeShape([-1, 0, 0])] == 1


def test_a_chain_has_one_leaf():
    assert TreeShape.chain(4) == TreeShape((-1, 0, 1, 2))
    assert TreeShape.chain(1).leaves == (0,)


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ((), "has 0 nodes; it must have 1 to 4096"),
        ((-1,) * (MAX_NODES + 1), "has 4097 nodes"),
        ((0,), r"parents\[0\] is 0; node 0 is the root"),
        ((-1, -1), r"parents\[1\] is -1; it must be a node before it \(0 to 0\)"),
        ((-1, 1), r"parents\[1\] is 1; it must be a node before it"),
        ((-1, 2, 0), r"parents\[1\] is 2; it must be a node before it"),
    ],
)
def test_what_is_no_tree_is_refused(parents, message):
    with pytest.raises(TreeError, match=message):
        TreeShape(parents)


@pytest.mark.parametrize(
    ("tokens", "parents", "probabilities", "message"),
    [
        ((1, 2), (-1,), (1.0,), "2 tokens, 1 parents and 1 path probabilities"),
        ((1, -2), (-1, 0), (1.0, 0.5), "token -2 in the tree"),
        ((1, 2), (-1, 0), (0.9, 0.5), "root's path probability is 0.9; it must be 1"),
        ((1, 2), (-1, 0), (1.0, math.nan), r"path_probabilities\[1\] is nan"),
        ((1, 2), (-1, 0), (1.0, math.inf), r"path_probabilities\[1\] is inf"),
        ((1, 2), (-1, 0), (1.0, -0.1), r"path_probabilities\[1\] is -0.1"),
        ((1, 2, 3), (-1, 0, 1), (1.0, 0.5, 0.6), "more than its parent's 0.5"),
    ],
)
def test_an_impossible_draft_is_refused(tokens, parents, probabilities, message):
    with pytest.raises(TreeError, match=message):
        DraftTree(tokens, parents, probabilities)


def test_distinct_siblings_are_told_from_repeated_ones():
    assert sibling_tokens_are_distinct(DraftTree((1, 2, 3, 2), (-1, 0, 0, 1), (1, 0.5, 0.2, 0.1)))
    assert not sibling_tokens_are_distinct(DraftTree((1, 2, 2), (-1, 0, 0), (1, 0.5, 0.2)))


@given(shapes(), st.lists(st.booleans(), max_size=12), st.integers(0, 4), st.integers(1, 8))
@settings(deadline=None)
def test_the_mask_shows_each_row_its_own_path_within_the_window(shape, valid, spare, window):
    prefix = len(valid)
    num_slots = prefix + shape.num_nodes + spare
    is_valid = torch.tensor(valid, dtype=torch.bool)
    for limit in (None, window):
        mask = tree_attention_mask(shape, is_valid, num_slots, torch.float32, window=limit)
        assert mask.shape == (1, 1, shape.num_nodes, num_slots)
        for node in range(shape.num_nodes):
            place = prefix + shape.depths[node]
            seen = {slot for slot in range(prefix) if valid[slot]}
            seen = {slot for slot in seen if limit is None or place - slot < limit}
            for ancestor in shape.path(node):
                if limit is None or shape.depths[node] - shape.depths[ancestor] < limit:
                    seen.add(prefix + ancestor)
            row = mask[0, 0, node]
            assert set((row == 0).nonzero().flatten().tolist()) == seen
            assert set(row.unique().tolist()) <= {0.0, torch.finfo(torch.float32).min}


def test_a_cache_too_small_for_the_tree_is_refused():
    with pytest.raises(TreeError, match="5 cache slots cannot hold 3 tokens and a tree of 3"):
        tree_attention_mask(TreeShape.chain(3), torch.ones(3, dtype=torch.bool), 5, torch.float32)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.integers(1, 40), st.data())
@settings(deadline=None)
def test_the_likeliest_nodes_form_a_tree(shares, num_nodes, data):
    parents, probabilities = [-1], [1.0]
    for share in shares:
        parent = data.draw(st.integers(0, len(parents) - 1))
        parents.append(parent)
        probabilities.append(probabilities[parent] * share)
    chosen = best_first_nodes(probabilities, num_nodes)
    assert chosen == sorted(chosen)
    assert len(chosen) == min(num_nodes, len(parents))
    assert all(node == 0 or parents[node] in chosen for node in chosen)
    left_out = set(range(len(parents))) - set(chosen)
    if left_out:
        assert min(probabilities[n] for n in chosen) >= max(probabilities[n] for n in left_out)
