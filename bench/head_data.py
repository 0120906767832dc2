"""What an EAGLE-3 head is trained on: token sequences of train-split problems.

Axes: B sequences, S positions.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from acceptmoe.targets.tasks import TASKS, problems
from eval_targets import greedy_completions

OWN_BATCH = 128  # problems whose continuations are generated together


@dataclass(frozen=True)
class Sample:
    """One text: the prompt's tokens and those of its completion, EOS included."""

    prompt: list[int]
    completion: list[int]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.completion)


@dataclass(frozen=True)
class HeadBatch:
    """Samples padded on the right, and where their completions lie."""

    input_ids: Tensor  # [B, S] int64
    attention_mask: Tensor  # [B, S] int64
    prompt_lengths: Tensor  # [B] int64
    completion_lengths: Tensor  # [B] int64

    @property
    def num_tokens(self) -> int:
        return int(self.attention_mask.sum())

    def row_positions(self) -> Tensor:
        """[B, R] int64: positions of the states from which a draft can begin.

        R is the longest completion less one. The first is the last position of the prompt: the
        completion's first token is the root of the first tree, so what it predicts is the second.
        """
        rows = torch.arange(max(int(self.completion_lengths.max()) - 1, 1))
        positions = self.prompt_lengths[:, None] - 1 + rows
        return positions.clamp(max=self.input_ids.shape[1] - 2)

    def is_row(self) -> Tensor:
        """[B, R] bool: False where a completion is shorter than the longest."""
        rows = torch.arange(self.row_positions().shape[1])
        return rows < self.completion_lengths[:, None] - 1


def reference_samples(
    tokenizer: PreTrainedTokenizerFast, count: int, seed: int, split: str = "train"
) -> list[Sample]:
    """`count` problems of each task with the completions that the target was trained on."""
    asked = [problem for task in TASKS for problem in problems(task, split, count, seed)]
    prompts = tokenizer([problem.prompt for problem in asked])["input_ids"]
    solutions = tokenizer([problem.solution for problem in asked])["input_ids"]
    return [
        Sample(prompt, [*solution, tokenizer.eos_token_id])
        for prompt, solution in zip(prompts, solutions, strict=True)
    ]


def own_samples(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    count: int,
    seed: int,
    split: str = "train",
    max_new_tokens: int = 160,
) -> Iterator[tuple[str, Sample]]:
    """Task and greedy continuation by the target, for `count` problems of each task."""
    for task in TASKS:
        asked = problems(task, split, count, seed)
        for start in range(0, count, OWN_BATCH):
            part = asked[start : start + OWN_BATCH]
            prompts = tokenizer([problem.prompt for problem in part])["input_ids"]
            completions = greedy_completions(model, tokenizer, part, max_new_tokens)
            for prompt, (tokens, ended) in zip(prompts, completions, strict=True):
                end = [tokenizer.eos_token_id] if ended else []
                yield task, Sample(prompt, [*tokens, *end])


def frequent_tokens(samples: Sequence[Sample], count: int, vocab_size: int) -> Tensor:
    """The most frequent tokens of the completions, ascending, [D] int64 with D = `count`.

    Where fewer occur, the lowest unused ids fill up: the width is part of the head's config.
    """
    counts = Counter(token for sample in samples for token in sample.completion)
    ranked = sorted(range(vocab_size), key=lambda token: (-counts[token], token))
    return torch.tensor(sorted(ranked[:count]))


def batches_of_epoch(
    samples: Sequence[Sample], rows: int, pad_id: int, seed: int, epoch: int
) -> Iterator[HeadBatch]:
    """All samples once, in an order that seed and epoch decide; a batch holds similar lengths."""
    rng = Random(f"heads/{seed}/{epoch}")
    order = list(range(len(samples)))
    rng.shuffle(order)
    groups: list[list[int]] = []
    window = 16 * rows
    for start in range(0, len(order), window):
        by_length = sorted(order[start : start + window], key=lambda i: len(samples[i]))
        groups += [by_length[i : i + rows] for i in range(0, len(by_length), rows)]
    rng.shuffle(groups)
    for group in groups:
        yield padded([samples[i] for i in group], pad_id)


def padded(samples: Sequence[Sample], pad_id: int) -> HeadBatch:
    longest = max(len(sample) for sample in samples)
    input_ids = torch.full((len(samples), longest), pad_id)
    attention_mask = torch.zeros_like(input_ids)
    for row, sample in enumerate(samples):
        input_ids[row, : len(sample)] = torch.tensor(sample.prompt + sample.completion)
        attention_mask[row, : len(sample)] = 1
    return HeadBatch(
        input_ids,
        attention_mask,
        torch.tensor([len(sample.prompt) for sample in samples]),
        torch.tensor([len(sample.completion) for sample in samples]),
    )
