"""The cached drafter against the slow one, and its checks of the target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from eagle3_fixtures import VARIANTS, random_head, small_target
from eagle3_oracle import OracleDrafter
from torch import Tensor

from acceptmoe.drafting.drafter import Drafter
from acceptmoe.drafting.eagle3 import Eagle3Drafter
from acceptmoe.drafting.eagle3_checkpoint import save_head
from acceptmoe.drafting.eagle3_layouts import LAYOUTS, Layout
from acceptmoe.errors import DrafterError, InvalidArgumentError
from acceptmoe.policies.drafts import keep_nodes
from acceptmoe.tree import DraftTree, sibling_tokens_are_distinct

TARGET = small_target()


def random_pairs(num_rows: int, width: int, seed: int = 1) -> tuple[list[int], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 61, (num_rows,), generator=generator).tolist()
    return tokens, torch.randn(num_rows, width, generator=generator)


def bound_drafter(topk: int = 4, **changes: Any) -> Eagle3Drafter:
    drafter = Eagle3Drafter(random_head(**changes), topk=topk)
    drafter.check_target(TARGET)
    return drafter


def assert_same_tree(tree: DraftTree, tokens: Any, parents: Any, scores: Any) -> None:
    assert tree.tokens == tokens
    assert tree.parents == parents
    # float32 sums in another order; scores lie in [0, 1]
    assert tree.path_probabilities == pytest.approx(scores, abs=1e-5)


def oracle_of(folder: Path, topk: int) -> OracleDrafter:
    return OracleDrafter(
        folder, TARGET.get_input_embeddings().weight, TARGET.lm_head.weight, topk=topk
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_layout_proposes_the_trees_of_a_slow_drafter_in_every_round(
    variant: str, tmp_path: Path
) -> None:
    drafters = []
    for layout in LAYOUTS:
        save_head(random_head(**VARIANTS[variant]), tmp_path / layout, layout=layout)
        drafters.append(Eagle3Drafter.from_pretrained(tmp_path / layout, TARGET, topk=3))
    oracle = oracle_of(tmp_path / "specforge", topk=3)
    tokens, features = random_pairs(8, drafters[0].head.config.feature_size)
    for drafter in drafters:
        drafter.start(torch.tensor([5, *tokens[:3]]), tokens[3], features[:4])
    for num_pairs, rounds in ((4, 5), (5, 8), (8, 8)):
        expected = oracle.propose(features[:num_pairs], tokens[:num_pairs], 10, 3)
        for drafter in drafters:
            assert_same_tree(drafter.propose(num_nodes=10, max_depth=3), *expected)
            drafter.extend(tokens[num_pairs:rounds], features[num_pairs:rounds])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_slow_drafter_reads_every_layout_alike(layout: Layout, tmp_path: Path) -> None:
    changes = {"qk_norm": True, "norm_before_residual": True, "norm_before_fc": True}
    drafter = bound_drafter(topk=2, **changes)
    save_head(drafter.head, tmp_path, layout=layout)
    tokens, features = random_pairs(5, 60)
    drafter.start(torch.tensor([3, *tokens[:4]]), tokens[4], features)
    expected = oracle_of(tmp_path, topk=2).propose(features, tokens, 6, 3)
    assert_same_tree(drafter.propose(6, 3), *expected)


@pytest.mark.parametrize(("num_nodes", "max_depth", "topk"), [(2, 1, 1), (6, 5, 1), (33, 5, 8)])
def test_other_tree_sizes_equal_the_slow_drafter_too(
    num_nodes: int, max_depth: int, topk: int, tmp_path: Path
) -> None:
    save_head(random_head(seed=3), tmp_path)
    drafter = Eagle3Drafter.from_pretrained(tmp_path, TARGET, topk=topk)
    oracle = oracle_of(tmp_path, topk)
    tokens, features = random_pairs(4, 60)
    drafter.start(torch.tensor([9, *tokens[:3]]), tokens[3], features)
    tree = drafter.propose(num_nodes, max_depth)
    assert_same_tree(tree, *oracle.propose(features, tokens, num_nodes, max_depth))
    assert sibling_tokens_are_distinct(tree)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_head_proposes_the_same_tree_from_every_layout(layout: Layout, tmp_path: Path) -> None:
    original = bound_drafter(fc_norm=True, norm_before_residual=True)
    save_head(original.head, tmp_path, layout=layout)
    loaded = Eagle3Drafter.from_pretrained(tmp_path, TARGET, topk=4)
    tokens, features = random_pairs(5, 60)
    for drafter in (original, loaded):
        drafter.start(torch.tensor([3, *tokens[:4]]), tokens[4], features)
    assert loaded.propose(20, 5) == original.propose(20, 5)


@pytest.mark.parametrize("min_probability", [1e-4, 2e-3, 0.01, 1.0])
def test_what_will_not_be_verified_is_not_expanded(min_probability: float) -> None:
    """Above the floor the trees are the same, round by round."""
    whole, drafter = bound_drafter(topk=8), bound_drafter(topk=8)
    drafter.min_probability = min_probability
    width = drafter.head.config.feature_size
    tokens, features = random_pairs(9, width)
    for each in (whole, drafter):
        each.start(torch.tensor(tokens), 3, features)
    for seed in range(3):
        expected, tree = (
            keep_nodes(
                tree, [n for n, p in enumerate(tree.path_probabilities) if p >= min_probability]
            )
            for tree in (each.propose(24, 5) for each in (whole, drafter))
        )
        assert_same_tree(tree, expected.tokens, expected.parents, expected.path_probabilities)
        committed, features = random_pairs(3, width, seed=seed + 5)
        for each in (whole, drafter):
            each.extend(committed, features)


def test_extending_equals_a_fresh_start() -> None:
    tokens, features = random_pairs(600, 60)
    extended, fresh = bound_drafter(), bound_drafter()
    prompt = torch.tensor([7, *tokens])
    extended.start(prompt[:6], tokens[5], features[:6])
    position = 6
    while position < 600:  # past two enlargements of the cache
        extended.propose(16, 4)
        step = min(1 + position % 7 * 9, 600 - position)
        rows = slice(position, position + step)
        extended.extend(tokens[rows], features[rows])
        position += step
    fresh.start(prompt[:600], tokens[599], features)
    expected = fresh.propose(16, 4)
    tree = extended.propose(16, 4)
    assert_same_tree(tree, expected.tokens, expected.parents, expected.path_probabilities)


@pytest.mark.parametrize("max_depth", [1, 2, 3])
@pytest.mark.parametrize("num_pairs", [248, 255, 256, 257])
def test_a_draft_fits_wherever_the_cache_ends(num_pairs: int, max_depth: int) -> None:
    tokens, features = random_pairs(num_pairs, 60)
    drafter = bound_drafter()
    drafter.start(torch.tensor([7, *tokens[:-1]]), tokens[-1], features)
    tree = drafter.propose(100, max_depth)
    assert tree.num_nodes == 1 + 4 + (max_depth - 1) * 16


def test_a_second_sequence_knows_nothing_of_the_first() -> None:
    tokens, features = random_pairs(9, 60)
    used, fresh = bound_drafter(), bound_drafter()
    used.start(torch.tensor([1, *tokens[:8]]), tokens[8], features)
    used.propose(12, 3)
    for drafter in (used, fresh):
        drafter.start(torch.tensor([2, 4]), 11, features[:2])
    assert used.propose(12, 3) == fresh.propose(12, 3)


def test_features_of_the_end_of_a_prompt_are_enough() -> None:
    tokens, features = random_pairs(5, 60)
    short, long = bound_drafter(), bound_drafter()
    short.start(torch.tensor([3, *tokens[:4]]), tokens[4], features)
    long.start(torch.tensor([8, 8, 8, 3, *tokens[:4]]), tokens[4], features)
    assert short.propose(12, 3) == long.propose(12, 3)


@pytest.mark.parametrize(("num_nodes", "max_depth"), [(1, 5), (8, 0)])
def test_a_tree_without_room_is_the_root(num_nodes: int, max_depth: int) -> None:
    drafter = bound_drafter()
    drafter.start(torch.tensor([1]), 4, torch.zeros(1, 60))
    assert drafter.propose(num_nodes, max_depth) == DraftTree.root_only(4)


def test_a_small_tree_offers_all_its_candidates() -> None:
    drafter = bound_drafter(topk=2)
    drafter.start(torch.tensor([1]), 4, torch.ones(1, 60))
    assert drafter.propose(num_nodes=100, max_depth=2).num_nodes == 1 + 2 + 4


def test_topk_is_capped_by_the_draft_vocabulary() -> None:
    drafter = bound_drafter(topk=99)
    drafter.start(torch.tensor([1]), 4, torch.ones(1, 60))
    assert drafter.propose(num_nodes=99, max_depth=1).num_nodes == 1 + 37


def test_the_head_takes_the_targets_dtype_unless_told() -> None:
    target = small_target().bfloat16()
    following, fixed = Eagle3Drafter(random_head()), Eagle3Drafter(random_head(), dtype=torch.float)
    tokens, features = random_pairs(3, 60)
    for drafter, dtype in ((following, torch.bfloat16), (fixed, torch.float32)):
        drafter.check_target(target)
        assert drafter.head.dtype == dtype
        drafter.start(torch.tensor([1, *tokens[:2]]), tokens[2], features.bfloat16())
        assert drafter.propose(12, 3).num_nodes == 12


def test_it_reads_the_targets_embedding_in_place() -> None:
    target = small_target()
    drafter = Eagle3Drafter(random_head(), topk=4)
    drafter.check_target(target)
    trees = []
    for _ in range(2):
        drafter.start(torch.tensor([1]), 4, torch.ones(1, 60))
        trees.append(drafter.propose(12, 3))
        target.get_input_embeddings().weight.data.neg_()
    assert trees[0] != trees[1]


def test_it_is_a_drafter() -> None:
    assert isinstance(Eagle3Drafter(random_head()), Drafter)


def test_the_default_rule_waits_for_the_target() -> None:
    drafter = Eagle3Drafter(random_head(boundaries=None))
    assert drafter.feature_boundaries == ()
    drafter.check_target(small_target(num_hidden_layers=8))
    assert drafter.feature_boundaries == (2, 4, 5)


def test_boundaries_can_be_overridden() -> None:
    drafter = Eagle3Drafter(random_head(), boundaries=(0, 1, 5))
    drafter.check_target(TARGET)
    assert (drafter.feature_boundaries, drafter.boundary_rule) == ((0, 1, 5), "override")
    with pytest.raises(DrafterError, match="boundaries has 2 layers; the head fuses 3"):
        Eagle3Drafter(random_head(), boundaries=(0, 1))


@pytest.mark.parametrize(
    ("target_changes", "head_changes", "message"),
    [
        ({"hidden_size": 22}, {}, "made for a target with hidden size 20; this Qwen3Moe.* has 22"),
        ({"vocab_size": 64}, {}, "made for a target with vocabulary size 61; this .* has 64"),
        ({"num_hidden_layers": 3}, {}, r"layers are \[2, 3, 4\] .* the target has 3 layers"),
        ({}, {"boundaries": None, "boundary_rule": "default"}, r"\[2, 2, 2\] \(by the rule 'def"),
        (
            {"num_hidden_layers": 8},
            {"boundaries": None, "num_aux": 4},
            "fuses 4 states and the default rule names 3",
        ),
    ],
)
def test_a_head_for_another_target_is_refused_by_name(
    target_changes: dict[str, Any], head_changes: dict[str, Any], message: str
) -> None:
    drafter = Eagle3Drafter(random_head(**head_changes))
    with pytest.raises(DrafterError, match=message):
        drafter.check_target(small_target(**target_changes))


def test_misuse_is_refused() -> None:
    drafter = bound_drafter()
    with pytest.raises(DrafterError, match="no sequence; call `start` first"):
        drafter.propose(8, 3)
    with pytest.raises(DrafterError, match=r"features have shape \(2, 59\); for 2 tokens"):
        drafter.start(torch.tensor([1, 2]), 3, torch.zeros(2, 59))
    with pytest.raises(DrafterError, match="features have shape None"):
        drafter.start(torch.tensor([1, 2]), 3, None)
    with pytest.raises(DrafterError, match="3 rows of features for a prompt of 2 tokens"):
        drafter.start(torch.tensor([1, 2]), 3, torch.zeros(3, 60))
    drafter.start(torch.tensor([1, 2]), 3, torch.zeros(2, 60))
    with pytest.raises(DrafterError, match=r"for 2 tokens they must have shape \(2, 60\)"):
        drafter.extend([1, 2], torch.zeros(1, 60))
    for topk in (0, 2.5, True, "8"):
        with pytest.raises(InvalidArgumentError, match=f"topk is {topk!r}; it must be a whole"):
            Eagle3Drafter(random_head(), topk=topk)
    with pytest.raises(DrafterError, match="call `check_target` first"):
        Eagle3Drafter(random_head()).start(torch.tensor([1, 2]), 3, torch.zeros(2, 60))
