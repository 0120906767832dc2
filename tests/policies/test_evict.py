"""`evict`: the prefix with the most expected tokens for its cost, against cases by hand."""

from __future__ import annotations

import pytest

from acceptmoe.errors import InvalidArgumentError
from acceptmoe.policies import EvictPolicy, load_policy
from acceptmoe.policies.evict import best_size, by_commitment, keep_nodes
from acceptmoe.policies.history import DecodingStep, StepHistory
from acceptmoe.tree import DraftTree
from tables import make_table_for
from tiny_models import make_model

#        0
#      /   \
#     1     2      path probabilities .5 .4
#    / \     \
#   3   4     5    .3 .05 .36
TREE = DraftTree((9, 1, 2, 3, 4, 5), (-1, 0, 0, 1, 1, 2), (1.0, 0.5, 0.4, 0.3, 0.05, 0.36))


def prune(costs: dict[int, float], tree: DraftTree = TREE) -> DraftTree:
    return EvictPolicy(costs=costs).tree_policy(StepHistory(), None).prune(tree)


def test_nodes_come_by_falling_path_probability():
    order, commitments = by_commitment(TREE, None)
    assert order == [0, 1, 2, 5, 3, 4]
    assert commitments == [1.0, 0.5, 0.4, 0.36, 0.3, 0.05]


def test_the_size_maximises_expected_tokens_over_cost():
    """Expected tokens 1, 1.5, 1.9, 2.26, 2.56, 2.61 over 1, 1.2, 1.4, 1.6, 1.8, 2.0."""
    commitments = [1.0, 0.5, 0.4, 0.36, 0.3, 0.05]
    # Rates 1, 1.25, 1.357, 1.4125, 1.4222, 1.305.
    assert best_size(commitments, lambda n: 0.8 + 0.2 * n) == 5
    assert best_size(commitments, lambda n: 1.0) == 6
    assert best_size(commitments, lambda n: float(n)) == 1


def test_the_kept_nodes_are_a_tree_in_their_old_order():
    kept = prune({1: 1.0, 6: 2.0})
    assert kept == DraftTree((9, 1, 2, 3, 5), (-1, 0, 0, 1, 2), (1.0, 0.5, 0.4, 0.3, 0.36))
    assert prune({1: 1.0, 6: 6.0}) == DraftTree.root_only(9)
    assert prune({1: 1.0}) is TREE
    assert keep_nodes(TREE, [0, 2, 5]).parents == (-1, 0, 1)


def test_a_table_calibrates_the_path_probabilities():
    """The curve maps .5 to .4 and .05 to about .026; a child counts for no more than its parent."""
    table = make_table_for(make_model("qwen3_moe"), num_nodes=6, max_depth=2, drafter="x")
    order, commitments = by_commitment(TREE, table)
    assert order == [0, 1, 2, 5, 3, 4]
    assert commitments[:2] == pytest.approx([1.0, 0.4])
    assert commitments[-1] == pytest.approx(0.001 + 0.049 / 2)


def test_costs_are_measured_for_every_power_of_two_before_they_are_believed():
    history = StepHistory()
    policy = EvictPolicy().tree_policy(history, None)
    sizes = []
    for _ in range(13):
        size = policy.prune(TREE).num_nodes
        sizes.append(size)
        # Two nodes cost as much as one, four ten times as much.
        history.record(DecodingStep(6, size, 1, 0.0, {1: 1.0, 2: 1.0}.get(size, 10.0)))
    # Four each, since the first of a size is not timed.
    assert sizes == [1] * 4 + [2] * 4 + [4] * 4 + [2]


def test_what_drafting_takes_counts_for_every_size():
    """At 1 + n / 2 a pass three nodes are best; with 200 on top of each the whole draft is."""
    history = StepHistory()
    policy = EvictPolicy().tree_policy(history, None)
    for draft_s, best in ((0.0, 3), (200.0, 6)):
        for _ in range(20):
            size = policy.prune(TREE).num_nodes
            history.record(DecodingStep(6, size, 1, draft_s, 1.0 + size / 2))
        assert policy.prune(TREE).num_nodes == best


@pytest.mark.parametrize(
    "costs",
    [
        {},
        {2: 1.0},
        {1: 0.0},
        {1: -1.0},
        {1: "x"},
        {1.0: 1.0},
        {1: float("nan")},
        {1: 10**400},
        [1.0],
        3,
    ],
)
def test_what_is_no_cost_is_refused(costs):
    with pytest.raises(InvalidArgumentError, match=r"costs is .*; it must map numbers of nodes"):
        EvictPolicy(costs=costs)


def test_it_loads_by_name_and_routes_naturally():
    policy = load_policy("evict")
    assert policy.is_natural
    assert not policy.reads_table
    assert policy.params() == {"costs": "measured"}
    assert EvictPolicy(costs={32: 2, 1: 1}).params() == {"costs": {1: 1.0, 32: 2.0}}
