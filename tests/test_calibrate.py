import copy
import os

import numpy as np
import pytest
import torch
from sklearn.isotonic import IsotonicRegression
from transformers import AutoModelForCausalLM, LlamaConfig, OlmoeConfig

import acceptmoe
from acceptmoe.calibrate import (
    KNOT_TOLERANCE,
    MAX_KNOTS,
    NUM_BINS,
    BlockRecorder,
    calibrate,
    depth_statistics,
    expected_calibration_error,
    fit_curve,
    fit_table,
    isotonic_regression,
)
from acceptmoe.drafting import AssistantDrafter, NgramDrafter
from acceptmoe.errors import (
    DrafterError,
    InvalidArgumentError,
    TableError,
    TreeError,
    UnsupportedModelError,
    WrapStateError,
)
from acceptmoe.table import CommitmentTable, HeldOutError, Provenance, config_fingerprint
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


VOCAB_SIZE = 60


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = OlmoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        initializer_range=0.2,
        pad_token_id=0,
        eos_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module")
def assistant(model):
    """The target itself, slightly perturbed: many proposals are accepted, not all."""
    torch.manual_seed(1)
    noisy = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in noisy.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.03)
    return noisy


def random_prompts(num_prompts, seed=0):
    generator = torch.Generator().manual_seed(seed)
    # Without token 0: it is the padding, which plain `generate` would mask in a prompt.
    return [torch.randint(1, VOCAB_SIZE, (6,), generator=generator) for _ in range(num_prompts)]


class Spy:
    """A drafter that remembers what the other one proposed, and after how many tokens."""

    def __init__(self, drafter):
        self.drafter, self.name = drafter, drafter.name
        self.feature_boundaries = drafter.feature_boundaries
        self.proposals = []  # (prompt, number of new tokens before the block, tree)

    def check_target(self, model):
        self.drafter.check_target(model)

    def start(self, prompt, first_token, features):
        self.prompt, self.num_new = tuple(prompt.tolist()), 1
        self.drafter.start(prompt, first_token, features)

    def propose(self, num_nodes, max_depth):
        tree = self.drafter.propose(num_nodes, max_depth)
        self.proposals.append((self.prompt, self.num_new, tree))
        return tree

    def extend(self, tokens, features):
        self.num_new += len(tokens)
        self.drafter.extend(tokens, features)


@pytest.mark.parametrize("with_eos", [False, True], ids=["length", "eos"])
@pytest.mark.parametrize("kind", ["ngram", "assistant"])
def test_the_table_counts_what_plain_greedy_generate_confirms(model, assistant, kind, with_eos):
    prompts = random_prompts(5)
    num_new, max_depth = 40, 3
    settings = {"max_new_tokens": num_new, "do_sample": False}
    texts = {}
    for prompt in prompts:
        texts[tuple(prompt.tolist())] = model.generate(prompt[None], **settings)[0, 6:].tolist()
    eos = None
    if with_eos:  # a token that the model emits in the middle of many texts
        middles = [token for text in texts.values() for token in set(text[5:35])]
        eos = max(set(middles), key=middles.count)
        for prompt, text in texts.items():
            texts[prompt] = text[: text.index(eos) + 1] if eos in text else text
    spy = Spy(NgramDrafter() if kind == "ngram" else AssistantDrafter(assistant))
    target = copy.deepcopy(model)
    target.generation_config.eos_token_id = eos
    table = calibrate(
        target, spy, prompts, num_nodes=8, max_depth=max_depth, max_new_tokens=num_new
    )
    trials, successes, num_committed_last = 0, [0] * (max_depth + 1), 0
    for prompt, before, tree in spy.proposals:
        if tree.num_nodes == 1 or num_new - before - 1 < max_depth:
            continue  # nothing drafted, or a tree cut short by the end of the text
        trials += 1
        coming = texts[prompt][before:]  # the root is the token before
        depths = {0}
        for node in range(1, tree.num_nodes):
            drafted = [tree.tokens[n] for n in tree.shape.path(node)[1:]]
            if coming[: len(drafted)] == drafted:
                depths.add(len(drafted))
                num_committed_last += len(drafted) == len(coming)
        for depth in depths:
            successes[depth] += 1
    assert table.depths.trials == (trials,) * (max_depth + 1)
    assert table.depths.successes == tuple(successes)
    assert successes[1] > 10  # something was accepted
    assert successes[max_depth] < trials  # and something rejected
    if with_eos and kind == "assistant":
        assert num_committed_last > 0  # an EOS that was drafted


def test_the_curve_of_a_real_run_is_calibrated_on_held_out_prompts(model, assistant):
    table = calibrate(
        model,
        AssistantDrafter(assistant, min_reach=0.0),  # so that few prompts give enough nodes
        random_prompts(20),
        num_nodes=12,
        max_depth=4,
        max_new_tokens=40,
        dataset="random",
        command="pytest",
    )
    assert table.held_out_error.num_prompts == 5
    assert table.held_out_error.warnings == (), table.held_out_error
    assert table.target_fingerprint == config_fingerprint(model.config)
    assert table.target == "olmoe"  # it has no folder to be named after
    assert table.drafter == "assistant"
    assert (table.num_nodes, table.max_depth) == (12, 4)
    assert table.provenance.dataset == "random"
    assert table.provenance.num_prompts == 20
    assert CommitmentTable.from_json(table.to_json()) == table


def test_a_calibrated_table_serves_wrap(model, assistant):
    prompts = random_prompts(3)
    table = calibrate(model, assistant, prompts, num_nodes=8, max_depth=3, max_new_tokens=24)
    target = copy.deepcopy(model)
    for policy in ("accept", "accept-depth"):
        acceptmoe.wrap(target, table, drafter=assistant, policy=policy, num_nodes=8, max_depth=3)
        text = target.generate(prompts[0][None], max_new_tokens=12, do_sample=False)
        assert text.shape == (1, 18)
        acceptmoe.unwrap(target)
    with pytest.raises(TableError, match="drafter 'assistant' and this one is 'ngram'"):
        acceptmoe.wrap(target, table, drafter="ngram", num_nodes=8, max_depth=3)


def test_calibration_is_deterministic_and_says_how_it_was_made(model, assistant):
    runs = [
        calibrate(model, assistant, random_prompts(2), num_nodes=6, max_depth=2, max_new_tokens=16)
        for _ in range(2)
    ]
    assert runs[0].to_json() == runs[1].to_json()
    command = runs[0].provenance.command
    assert "num_nodes=6, max_depth=2, max_new_tokens=16, held_out_fraction=0.25, seed=0" in command


def test_the_model_comes_out_as_it_went_in(model, assistant):
    target = copy.deepcopy(model)
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in target.modules()]
    input_ids = torch.arange(9)[None]
    with torch.no_grad():
        logits = target(input_ids).logits
    calibrate(target, assistant, random_prompts(3), max_new_tokens=10)
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in target.modules()] == hooks
    assert type(target) is type(model)
    assert not hasattr(target, "acceptmoe")
    for name, tensor in target.state_dict().items():
        assert torch.equal(tensor, before[name])
    with torch.no_grad():
        assert torch.equal(target(input_ids).logits, logits)


def test_an_interrupted_calibration_leaves_the_model_and_the_old_table_alone(
    model, assistant, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "table.json"
    prompts = random_prompts(3)
    calibrate(model, assistant, prompts, max_new_tokens=10).save(path)
    old = path.read_text()
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]

    def interrupt(done, total):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(model, assistant, prompts, seed=1, max_new_tokens=10, progress=interrupt).save(
            path
        )
    assert path.read_text() == old
    assert os.listdir(tmp_path) == ["table.json"]
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
    # And the next run starts from the beginning.
    again = calibrate(model, assistant, prompts, max_new_tokens=10)
    assert again.to_json() == old


def test_progress_is_told_of_every_prompt(model, assistant):
    told = []
    calibrate(
        model,
        assistant,
        random_prompts(3),
        max_new_tokens=10,
        progress=lambda done, total: told.append((done, total)),
    )
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_a_prompt_may_be_one_row_of_a_batch(model, assistant):
    prompts = random_prompts(3)
    flat = calibrate(model, assistant, prompts, max_new_tokens=10)
    rows = calibrate(model, assistant, [p[None].int() for p in prompts], max_new_tokens=10)
    assert flat == rows


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_nodes": 1}, "num_nodes is 1; it must be a whole number, 2 or larger"),
        ({"num_nodes": 10**9}, "num_nodes is 1000000000; it must be 4096 or smaller"),
        ({"num_nodes": 8.0}, r"num_nodes is 8\.0; it must be a whole number"),
        ({"max_depth": 0}, "max_depth is 0; it must be a whole number, 1 or larger"),
        ({"max_depth": -5}, "max_depth is -5"),
        ({"max_depth": True}, "max_depth is True"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": 6}, "max_new_tokens is 6 and max_depth 5; .* 7 or larger"),
        ({"max_new_tokens": 10**6}, r"prompts\[0\] has 6 tokens .* has 128 positions"),
        ({"seed": -1}, "seed is -1"),
        ({"held_out_fraction": 0}, "held_out_fraction is 0; it must lie between 0 and 1"),
        ({"held_out_fraction": 1.0}, r"held_out_fraction is 1\.0"),
        ({"held_out_fraction": float("nan")}, "held_out_fraction is nan"),
        ({"held_out_fraction": "a"}, "held_out_fraction is 'a'"),
        ({"prompts": []}, "there are 0 prompts; calibration needs at least 2"),
        ({"prompts": random_prompts(1)}, "there are 1 prompts; .*one to fit and one held out"),
        (
            {"prompts": [*random_prompts(2), torch.empty(0, dtype=torch.int64)]},
            r"prompts\[2\] is empty",
        ),
        (
            {"prompts": [*random_prompts(2), torch.zeros(2, 3, dtype=torch.int64)]},
            r"prompts\[2\] is a tensor of int64 \[2, 3\]; .*\[length\]",
        ),
        ({"prompts": [*random_prompts(2), torch.zeros(3)]}, r"prompts\[2\] is a tensor of float32"),
        ({"prompts": ["text", "more"]}, r"prompts\[0\] is a str; it must be a tensor"),
        (
            {"prompts": [torch.tensor([1, 60]), torch.tensor([1])]},
            r"prompts\[0\] holds the token 60; .*0 to 59.*another tokenizer",
        ),
        ({"prompts": [torch.tensor([1, -1]), torch.tensor([1])]}, "holds the token -1"),
        (
            {"prompts": [torch.tensor([1]), torch.arange(50).repeat(3)]},
            r"prompts\[1\] has 150 tokens and max_new_tokens is 64; .* 128 positions",
        ),
        (
            {"prompts": [torch.tensor([1]), torch.tensor([2]), torch.tensor([1])]},
            r"prompts\[2\] repeats prompts\[0\]",
        ),
    ],
)
def test_bad_input_is_refused_before_anything_runs(model, changes, message):
    class Untouched:
        name, feature_boundaries = "untouched", ()

        def check_target(self, model):
            raise AssertionError("reached")

    changes = dict(changes)
    prompts = changes.pop("prompts", random_prompts(3))
    with pytest.raises(InvalidArgumentError, match=message):
        calibrate(model, Untouched(), prompts, **({"max_new_tokens": 64} | changes))


def test_what_cannot_be_calibrated_is_refused(model, assistant):
    prompts = random_prompts(3)
    dense = AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=60,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    )
    with pytest.raises(UnsupportedModelError, match="is a dense model"):
        calibrate(dense, assistant, prompts)
    with pytest.raises(InvalidArgumentError, match="drafter is 'nothing'"):
        calibrate(model, "nothing", prompts, max_new_tokens=16)
    other = AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=99,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    )
    with pytest.raises(DrafterError):
        calibrate(model, other, prompts, max_new_tokens=16)
    wrapped = acceptmoe.wrap(copy.deepcopy(model), policy="natural")
    with pytest.raises(WrapStateError, match=r"acceptmoe\.unwrap\(model\) first"):
        calibrate(wrapped, assistant, prompts, max_new_tokens=16)
