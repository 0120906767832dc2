"""The head's training: what it computes is what drafting computes, and it can be interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from eagle3_fixtures import random_head, small_target
from eagle3_oracle import OracleDrafter
from torch import Tensor
from transformers import PreTrainedModel

from acceptmoe.drafting.eagle3 import Eagle3Drafter
from acceptmoe.drafting.eagle3_checkpoint import save_head
from acceptmoe.tree import DraftTree, TreeShape
from head_acceptance import accepted_lengths
from head_data import HeadBatch, Sample, batches_of_epoch, frequent_tokens, padded
from head_loss import TargetView, step_losses, take_rows, unrolled, view_target
from train_heads import Training, continued_head, head_config, new_head, parse, train

TARGET = small_target().requires_grad_(False)
EMBEDDING = TARGET.get_input_embeddings().weight


def random_samples(count: int, seed: int = 0) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)

    def tokens(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high, (1,), generator=generator))
        return torch.randint(0, 61, (length,), generator=generator).tolist()

    return [Sample(tokens(2, 6), tokens(4, 12)) for _ in range(count)]


@pytest.mark.parametrize("norm_output", [False, True])
def test_training_steps_compute_what_a_draft_computes(norm_output: bool, tmp_path: Path) -> None:
    head = random_head(norm_output=norm_output)
    save_head(head, tmp_path)
    oracle = OracleDrafter(tmp_path, EMBEDDING, TARGET.lm_head.weight, topk=1)
    batch = padded(random_samples(2, seed=4), pad_id=0)
    features = torch.randn(*batch.input_ids.shape, 60, generator=torch.Generator().manual_seed(5))
    outputs = unrolled(head, EMBEDDING, features, batch, num_steps=3)
    positions = batch.row_positions()
    for row, place in ((0, 0), (0, 4), (1, 2)):
        start = int(positions[row, place])
        text = batch.input_ids[row].tolist()
        states = [oracle.fuse(feature) for feature in features[row, : start + 1]]
        tokens = text[1 : start + 2]
        for step in range(3):
            hidden = oracle.layer(states, tokens)
            torch.testing.assert_close(outputs[step][row, place], hidden, rtol=0, atol=1e-4)
            states.append(oracle.norm(hidden, "norm.weight") if norm_output else hidden)
            tokens.append(text[start + 2 + step])


def test_rows_are_scored_inside_the_completion_only() -> None:
    batch = padded([Sample([1, 2, 3], [4, 5, 6, 7]), Sample([1], [2, 3])], pad_id=0)
    assert batch.row_positions().tolist() == [[2, 3, 4], [0, 1, 2]]
    assert batch.is_row().tolist() == [[True] * 3, [True, False, False]]
    view = view_target(TARGET, (2, 3, 4), batch)
    losses = step_losses(random_head(), EMBEDDING, view, batch, num_steps=4)
    # The first token of a completion is the target's own; each step after it predicts one later.
    assert losses.rows == [3 + 1, 2, 1, 0]


def test_a_target_token_outside_the_draft_vocabulary_gives_no_loss_but_counts() -> None:
    head = random_head()
    batch = padded([Sample([1, 2], [3, 4, 5])], pad_id=0)
    logits = torch.zeros(1, 2, 61)
    known = set(head.token_ids.tolist())
    unknown = next(token for token in range(61) if token not in known)
    logits[..., unknown] = 9.0
    logits[0, 0, head.token_ids[7]] = 99.0  # the only row that can be learnt
    features = torch.randn(1, 5, 60, generator=torch.Generator().manual_seed(0))
    losses = step_losses(head, EMBEDDING, TargetView(features, logits), batch, num_steps=1)
    hidden = unrolled(head, EMBEDDING, features, batch, 1)[0][0, 0]
    expected = -head.lm_head(head.normalize(hidden)).log_softmax(-1)[7]
    torch.testing.assert_close(losses.losses[0], expected)
    assert losses.rows == [2]


def test_features_are_the_residual_streams_entering_the_layers() -> None:
    batch = padded(random_samples(2), pad_id=0)
    view = view_target(TARGET, (0, 3, 5), batch)
    with torch.no_grad():
        output = TARGET(batch.input_ids, batch.attention_mask, output_hidden_states=True)
    first, middle, last = view.features.chunk(3, dim=-1)
    assert torch.equal(first, output.hidden_states[0])
    assert torch.equal(middle, output.hidden_states[3])
    assert torch.equal(TARGET.model.norm(last), output.hidden_states[5])
    predicted = take_rows(output.logits, batch.row_positions() + 1)
    torch.testing.assert_close(view.logits, predicted)


def test_the_draft_vocabulary_is_the_most_frequent_tokens() -> None:
    samples = [Sample([8, 8, 8], [5, 5, 9]), Sample([8], [9, 5, 2])]
    assert frequent_tokens(samples, 2, vocab_size=10).tolist() == [5, 9]
    assert frequent_tokens(samples, 5, vocab_size=10).tolist() == [0, 1, 2, 5, 9]


def test_an_epoch_holds_every_sample_once() -> None:
    samples = random_samples(23)
    batches = list(batches_of_epoch(samples, 4, pad_id=0, seed=1, epoch=2))
    assert sum(len(batch.input_ids) for batch in batches) == 23
    assert sum(batch.num_tokens for batch in batches) == sum(map(len, samples))
    assert sum(int(b.is_row().sum()) for b in batches) == sum(
        len(s.completion) - 1 for s in samples
    )


def trained(file: Path, stops: list[int], arguments: list[str]) -> Tensor:
    """Weights after training, interrupted at `stops`."""
    samples = random_samples(12)
    for steps in stops:
        options = parse(["--target", "t", "--out", "o", *arguments])
        torch.manual_seed(3)
        config = head_config(TARGET, (2, 3, 4), 20, 16)
        head = new_head(TARGET, config, frequent_tokens(samples, 20, 61))
        training = Training(head, options, file)
        until = parse(["--target", "t", "--out", "o", *arguments])
        until.steps = steps
        train(TARGET, training, samples, 0, until)
    return torch.cat([parameter.detach().flatten() for parameter in training.head.parameters()])


def test_an_interrupted_run_ends_as_an_uninterrupted_one(tmp_path: Path) -> None:
    arguments = ["--steps", "4", "--rows", "4", "--lr", "0.01"]
    whole = trained(tmp_path / "whole.pt", [4], arguments)
    parts = trained(tmp_path / "parts.pt", [1, 4], arguments)
    assert torch.equal(whole, parts)
    with pytest.raises(SystemExit, match="belongs to a run with other arguments"):
        trained(tmp_path / "parts.pt", [4], [*arguments, "--seed", "9"])


def test_training_lowers_the_loss(tmp_path: Path) -> None:
    samples = random_samples(8)
    options = parse(["--target", "t", "--out", "o", "--steps", "12", "--rows", "8", "--lr", "0.03"])
    head = new_head(
        TARGET, head_config(TARGET, (2, 3, 4), 30, 16), frequent_tokens(samples, 30, 61)
    )
    batch = padded(samples, pad_id=0)
    view = view_target(TARGET, (2, 3, 4), batch)
    before = float(step_losses(head, EMBEDDING, view, batch, 5).total().detach())
    train(TARGET, Training(head, options, tmp_path / "training.pt"), samples, 0, options)
    after = float(step_losses(head, EMBEDDING, view, batch, 5).total().detach())
    assert after < 0.95 * before


def test_training_can_go_on_from_a_saved_head(tmp_path: Path) -> None:
    head = random_head()
    save_head(head, tmp_path, dtype=torch.bfloat16)
    start = continued_head(tmp_path, head.config)
    assert start.dtype == torch.float32
    assert all(parameter.requires_grad for parameter in start.parameters())
    assert torch.equal(start.token_ids, head.token_ids)
    with pytest.raises(SystemExit, match="has another shape than the head to be trained"):
        continued_head(tmp_path, head_config(TARGET, (2, 3, 4), 20, 16))


class Prophet:
    """Drafts a chain of the true continuation, wrong from its `num_right` + 1st token on."""

    name = "prophet"
    feature_boundaries = ()

    def __init__(self, text: list[int], num_right: int) -> None:
        self.text, self.num_right, self.done = text, num_right, 0

    def check_target(self, model: PreTrainedModel) -> None: ...

    def start(self, prompt: Tensor, first_token: int, features: Tensor | None) -> None:
        self.done = len(prompt) + 1

    def extend(self, tokens: list[int], features: Tensor | None) -> None:
        assert tokens == self.text[self.done : self.done + len(tokens)]
        self.done += len(tokens)

    def propose(self, num_nodes: int, max_depth: int) -> DraftTree:
        right = self.text[self.done : self.done + self.num_right]
        tokens = [self.text[self.done - 1], *right, *[60] * (max_depth - len(right))]
        shape = TreeShape.chain(len(tokens))
        return DraftTree(tuple(tokens), shape.parents, (1.0,) + (0.5,) * (len(tokens) - 1))


@pytest.mark.parametrize(("num_right", "passes"), [(0, 12), (1, 6), (3, 3), (5, 2)])
def test_accepted_length_counts_the_tokens_of_verification_passes(
    num_right: int, passes: int
) -> None:
    sample = Sample([1, 2], list(range(3, 16)))
    prophet = Prophet(sample.prompt + sample.completion, num_right)
    assert accepted_lengths(TARGET, prophet, [sample], 6, 5) == (12, passes)


def test_accepted_length_of_a_head_can_be_measured() -> None:
    drafter = Eagle3Drafter(random_head(), topk=4)
    drafter.check_target(TARGET)
    samples = random_samples(3)
    tokens, passes = accepted_lengths(TARGET, drafter, samples, 12, 3)
    assert tokens == sum(len(sample.completion) - 1 for sample in samples)
    assert 0 < passes <= tokens


def test_batches_are_padded_on_the_right() -> None:
    batch = padded([Sample([1], [2, 3]), Sample([4], [5])], pad_id=9)
    assert isinstance(batch, HeadBatch)
    assert batch.input_ids.tolist() == [[1, 2, 3], [4, 5, 9]]
    assert batch.attention_mask.tolist() == [[1, 1, 1], [1, 1, 0]]
