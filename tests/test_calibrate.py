import numpy as np
import pytest
import torch
from sklearn.isotonic import IsotonicRegression

from acceptmoe.calibrate import (
    KNOT_TOLERANCE,
    MAX_KNOTS,
    NUM_BINS,
    BlockRecorder,
    depth_statistics,
    expected_calibration_error,
    fit_curve,
    fit_table,
    isotonic_regression,
)
from acceptmoe.errors import InvalidArgumentError, TreeError
from acceptmoe.table import HeldOutError, Provenance
from acceptmoe.tree import DraftTree


def random_tree(rng, num_nodes, max_depth=5):
    """A tree with drafter probabilities in which every node is accepted less often than claimed."""
    parents, depths, probabilities = [-1], [0], [1.0]
    while len(parents) < num_nodes:
        parent = int(rng.integers(len(parents)))
        if depths[parent] < max_depth:
            parents.append(parent)
            depths.append(depths[parent] + 1)
            probabilities.append(probabilities[parent] * float(rng.random()))
    tokens = tuple(int(token) for token in rng.integers(100, size=num_nodes))
    return DraftTree(tokens, tuple(parents), tuple(probabilities))


def random_walk(rng, tree):
    accepted = [0]
    while children := tree.shape.children[accepted[-1]]:
        if rng.random() < 0.3:
            break
        accepted.append(int(rng.choice(children)))
    return accepted


def truthful_block(rng, share):
    """A block of single nodes under the root; node i is accepted with `share(probability)`.

    One of the nodes at most, as siblings exclude each other.
    """
    probabilities = rng.dirichlet(np.full(8, 0.5))
    tree = DraftTree(tuple(range(9)), (-1,) + (0,) * 8, (1.0, *probabilities.tolist()))
    draw, accepted = rng.random(), [0]
    for node, threshold in enumerate(np.cumsum(share(probabilities)), start=1):
        if draw < threshold:
            accepted.append(node)
            break
    return tree, accepted


def record(rng, num_prompts, num_blocks, share):
    recorders = []
    for _ in range(num_prompts):
        recorder = BlockRecorder()
        for _ in range(num_blocks):
            recorder.observe(*truthful_block(rng, share))
        recorders.append(recorder)
    return recorders


def table_of(recorders, **changes):
    arguments = {
        "target": "tiny",
        "target_fingerprint": "0" * 16,
        "drafter": "ngram",
        "num_nodes": 9,
        "max_depth": 2,
        "held_out_fraction": 0.25,
        "seed": 0,
        "provenance": Provenance("synthetic", (0,), len(recorders), "0.1.0", "pytest"),
    }
    return fit_table(recorders, **(arguments | changes))


def test_a_node_is_committed_if_it_lies_on_the_accepted_path():
    rng = np.random.default_rng(0)
    recorder = BlockRecorder()
    labels, probabilities, depths = [], [], []
    for _ in range(50):
        tree = random_tree(rng, int(rng.integers(2, 33)))
        accepted = random_walk(rng, tree)
        recorder.observe(tree, accepted)
        for node in range(1, tree.num_nodes):
            labels.append(node in accepted)
            probabilities.append(tree.path_probabilities[node])
        depths.append(tree.shape.depths[accepted[-1]])
    assert recorder.is_committed == labels
    assert recorder.path_probabilities == probabilities
    assert recorder.committed_depths == depths


def test_descendants_of_a_rejected_node_are_not_committed():
    tree = DraftTree((5, 6, 7, 8), (-1, 0, 0, 1), (1.0, 0.6, 0.4, 0.5))
    recorder = BlockRecorder()
    recorder.observe(tree, [0, 2])
    assert recorder.is_committed == [False, True, False]


def test_a_block_without_drafts_is_left_out():
    recorder = BlockRecorder()
    recorder.observe(DraftTree.root_only(3), [0])
    assert recorder == BlockRecorder()


@pytest.mark.parametrize("accepted", [[], [1], [0, 3], [0, 1, 2], [0, 9], [0, -1], [0, 0]])
def test_what_is_no_path_from_the_root_is_refused(accepted):
    tree = DraftTree((5, 6, 7, 8), (-1, 0, 0, 1), (1.0, 0.6, 0.4, 0.5))
    recorder = BlockRecorder()
    with pytest.raises(TreeError, match="it must be node ids of the tree from the root down"):
        recorder.observe(tree, accepted)
    assert recorder == BlockRecorder()


def test_depth_statistics_count_blocks_that_reached_each_depth():
    first = BlockRecorder(committed_depths=[0, 2, 1])
    second = BlockRecorder(committed_depths=[3])
    statistics = depth_statistics([first, second, BlockRecorder()], max_depth=4)
    assert statistics.trials == (4, 4, 4, 4, 4)
    assert statistics.successes == (4, 3, 2, 1, 0)


@pytest.mark.parametrize("seed", range(30))
def test_isotonic_regression_equals_scikit_learn(seed):
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 200))
    values = rng.integers(0, 5, size).astype(float) if seed % 2 else rng.normal(size=size)
    weights = rng.integers(1, 9, size) if seed % 3 else rng.random(size) + 1e-3
    expected = IsotonicRegression().fit_transform(np.arange(size), values, sample_weight=weights)
    np.testing.assert_allclose(isotonic_regression(values, weights), expected, atol=1e-12)


def test_isotonic_regression_keeps_what_already_ascends_and_levels_what_descends():
    assert isotonic_regression([0, 0, 1, 5], [1, 2, 3, 4]).tolist() == [0, 0, 1, 5]
    assert isotonic_regression([3, 2, 1], [1, 1, 1]).tolist() == [2, 2, 2]
    assert isotonic_regression([1, 0], [3, 1]).tolist() == [0.75, 0.75]


@pytest.mark.parametrize("seed", range(10))
def test_the_curve_equals_scikit_learn_before_it_is_thinned(seed):
    rng = np.random.default_rng(seed)
    probabilities = rng.random(400).astype(np.float32)
    if seed % 2:
        probabilities = (probabilities * 20).round() / 20  # many equal ones
    labels = (rng.random(400) < probabilities**2).astype(float)
    oracle = IsotonicRegression(out_of_bounds="clip").fit(probabilities, labels)
    curve = fit_curve(probabilities, labels, max_knots=1000, tolerance=0.0)
    x = np.concatenate([probabilities, rng.random(200), [0, 1]])
    got = np.interp(x, curve.path_probabilities, curve.commitments)
    # scikit-learn interpolates in the fp32 of its inputs.
    np.testing.assert_allclose(got, oracle.predict(x), atol=1e-5)


def test_the_thinned_curve_stays_within_its_tolerance_with_few_knots():
    rng = np.random.default_rng(0)
    probabilities = rng.random(20_000)
    labels = rng.random(20_000) < probabilities**1.5
    full = fit_curve(probabilities, labels, max_knots=10_000, tolerance=0.0)
    x = np.linspace(0, 1, 5001)
    reference = np.interp(x, full.path_probabilities, full.commitments)
    loose = fit_curve(probabilities, labels, max_knots=10_000, tolerance=0.01)
    got = np.interp(x, loose.path_probabilities, loose.commitments)
    assert np.abs(got - reference).max() <= 0.01 + 1e-9
    assert len(loose.path_probabilities) < len(full.path_probabilities)
    few = fit_curve(probabilities, labels)
    assert len(few.path_probabilities) <= MAX_KNOTS
    got = np.interp(x, few.path_probabilities, few.commitments)
    assert np.abs(got - reference).mean() <= 10 * KNOT_TOLERANCE


@pytest.mark.parametrize("probability", [0.0, 0.3, 1.0])
def test_a_drafter_with_a_single_probability_gets_a_flat_curve(probability):
    curve = fit_curve([probability] * 4, [1, 0, 0, 0])
    assert curve.path_probabilities == (0.0, 1.0)
    assert curve.commitments == (0.25, 0.25)


def test_probabilities_that_fp32_cannot_tell_apart_are_pooled():
    curve = fit_curve([0.1, 1.0 - 1e-9, 1.0], [0, 1, 0])
    assert curve.commitments == (0.0, 0.5)


def test_a_curve_of_nothing_is_refused():
    with pytest.raises(InvalidArgumentError, match="no draft nodes to fit"):
        fit_curve([], [])
    with pytest.raises(InvalidArgumentError, match="no draft nodes to measure"):
        expected_calibration_error([], [])


def test_calibration_error_equals_a_loop_over_equal_bins():
    rng = np.random.default_rng(0)
    for size in (15, 30, 1500, 1507):
        predictions = rng.permutation(size) / size  # all different
        labels = (rng.random(size) < 0.4).astype(float)
        pairs = sorted(zip(predictions, labels, strict=True))
        total = 0.0
        for bin_id in range(NUM_BINS):
            members = [pair for rank, pair in enumerate(pairs) if rank * 15 // size == bin_id]
            gap = sum(prediction - label for prediction, label in members)
            total += abs(gap) / size
        assert expected_calibration_error(predictions, labels) == pytest.approx(total)


def test_calibration_error_of_constant_predictions_is_their_distance_from_the_share():
    labels = [1] * 30 + [0] * 70
    assert expected_calibration_error([0.3] * 100, labels) == pytest.approx(0.0)
    assert expected_calibration_error([0.8] * 100, labels) == pytest.approx(0.5)


def test_opposite_errors_do_not_cancel_across_bins():
    predictions = np.concatenate([np.full(100, 0.2), np.full(100, 0.8)])
    labels = np.concatenate([np.ones(100), np.zeros(100)])
    assert expected_calibration_error(predictions, labels) == pytest.approx(0.8)


def test_an_overconfident_drafter_is_calibrated_on_prompts_the_fit_did_not_see():
    rng = np.random.default_rng(0)
    table = table_of(record(rng, num_prompts=40, num_blocks=60, share=lambda p: 0.7 * p**2))
    error = table.held_out_error
    assert error.num_prompts == 10
    assert error.num_nodes == 10 * 60 * 8
    assert error.curve <= 0.03
    assert error.curve < error.raw
    assert error.warnings == ()
    # Above 0.7 there are but 98 nodes, too few for a close fit.
    p = torch.tensor([1.0, 0.2, 0.4, 0.6])
    expected = torch.tensor([1.0, 0.7 * 0.04, 0.7 * 0.16, 0.7 * 0.36])
    torch.testing.assert_close(table.path_commitment(p), expected, atol=0.08, rtol=0)


def test_the_curve_depends_on_no_held_out_prompt():
    rng = np.random.default_rng(0)
    recorders = record(rng, num_prompts=12, num_blocks=10, share=lambda p: 0.5 * p)
    table = table_of(recorders)
    changed_curves = 0
    for prompt in range(12):
        others = list(recorders)
        others[prompt] = BlockRecorder(
            path_probabilities=recorders[prompt].path_probabilities,
            is_committed=[not label for label in recorders[prompt].is_committed],
            committed_depths=recorders[prompt].committed_depths,
        )
        changed = table_of(others)
        is_fitted = changed.curve != table.curve
        changed_curves += is_fitted
        if not is_fitted:  # then it was held out, and its error counts
            assert changed.held_out_error != table.held_out_error
    assert changed_curves == 9


def test_the_same_seed_gives_the_same_table_and_another_seed_another_split():
    rng = np.random.default_rng(0)
    recorders = record(rng, num_prompts=12, num_blocks=10, share=lambda p: 0.5 * p)
    assert table_of(recorders).to_json() == table_of(recorders).to_json()
    assert table_of(recorders, seed=1).curve != table_of(recorders).curve


@pytest.mark.parametrize(
    ("num_prompts", "fraction", "num_held_out"), [(2, 0.01, 1), (2, 0.99, 1), (3, 0.5, 2)]
)
def test_both_sides_of_the_split_keep_a_prompt(num_prompts, fraction, num_held_out):
    rng = np.random.default_rng(0)
    recorders = record(rng, num_prompts, num_blocks=5, share=lambda p: 0.5 * p)
    table = table_of(recorders, held_out_fraction=fraction)
    assert table.held_out_error.num_prompts == num_held_out


def test_a_drafter_that_proposes_nothing_cannot_be_calibrated():
    rng = np.random.default_rng(0)
    recorders = [BlockRecorder() for _ in range(4)]
    with pytest.raises(InvalidArgumentError, match="'ngram' proposed no token on the 3 fitted"):
        table_of(recorders)
    only_first_speaks = [*record(rng, 1, 5, lambda p: 0.5 * p), BlockRecorder()]
    messages = set()
    for seed in range(8):
        with pytest.raises(InvalidArgumentError, match="proposed no token on the 1 ") as error:
            table_of(only_first_speaks, seed=seed)
        messages.add(str(error.value).split(" prompts")[0].split()[-1])
    assert messages == {"fitted", "held-out"}


def test_a_poor_calibration_warns():
    poor = HeldOutError(curve=0.05, raw=0.04, num_prompts=2, num_nodes=9)
    assert len(poor.warnings) == 2
    assert "0.0500; it should be at most 0.03" in poor.warnings[0]
    assert "0.0500 with the curve and 0.0400 without" in poor.warnings[1]
    assert HeldOutError(curve=0.03, raw=0.04, num_prompts=2, num_nodes=9).warnings == ()
