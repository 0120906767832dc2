"""Packed training batches of the four tasks, reproducible from a seed and a chunk number."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from random import Random

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from acceptmoe.targets.tasks import TASKS, problem_stream

_BATCHES_PER_CHUNK = 32


@dataclass(frozen=True)
class Batch:
    """Rows of several samples each; positions restart at every sample, which keeps them apart."""

    input_ids: Tensor  # [B, L]
    position_ids: Tensor  # [B, L]
    labels: Tensor  # [B, L]: the next token where it belongs to a completion, else -100
    is_real: Tensor  # [B, L]: False on padding


@dataclass(frozen=True)
class Mix:
    """How many problems of each task are drawn for one another."""

    weights: dict[str, float]


def _samples(
    tokenizer: PreTrainedTokenizerFast,
    mix: Mix,
    seed: int,
    chunk: int,
    num_tokens: int,
    longest: int,
) -> list[tuple[list[int], list[int]]]:
    streams = {task: problem_stream(task, "train", seed * 1_000_003 + chunk) for task in TASKS}
    found: list[tuple[list[int], list[int]]] = []
    gathered = 0
    while gathered < num_tokens:
        drawn = [
            problem
            for task in TASKS
            for problem in islice(streams[task], round(100 * mix.weights[task]))
        ]
        prompts = tokenizer([problem.prompt for problem in drawn])["input_ids"]
        solutions = tokenizer([problem.solution for problem in drawn])["input_ids"]
        for prompt, solution in zip(prompts, solutions, strict=True):
            length = len(prompt) + len(solution) + 1
            if length <= longest:
                found.append((prompt, [*solution, tokenizer.eos_token_id]))
                gathered += length
    return found


def _pack(lengths: list[int], capacity: int) -> list[list[int]]:
    """Best fit, longest first: rows of sample ids whose lengths sum to at most the capacity."""
    open_rows: dict[int, list[list[int]]] = {}
    rows: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[i]
        room = next((r for r in range(length, capacity + 1) if open_rows.get(r)), None)
        if room is None:
            row: list[int] = []
            rows.append(row)
            room = capacity
        else:
            row = open_rows[room].pop()
        row.append(i)
        open_rows.setdefault(room - length, []).append(row)
    return rows


def chunk_batches(
    tokenizer: PreTrainedTokenizerFast, mix: Mix, seed: int, chunk: int, rows: int, length: int
) -> list[Batch]:
    """Return all batches of one chunk, in training order."""
    wanted = _BATCHES_PER_CHUNK * rows
    samples = _samples(tokenizer, mix, seed, chunk, wanted * length, length)
    rng = Random(f"pack/{seed}/{chunk}")
    rng.shuffle(samples)
    packed = _pack([len(p) + len(s) for p, s in samples], length)
    rng.shuffle(packed)  # rows of long and of short samples mix within every batch
    batches = []
    for start in range(0, len(packed) - rows + 1, rows):
        input_ids = torch.full((rows, length), tokenizer.pad_token_id)
        position_ids = torch.zeros(rows, length, dtype=torch.long)
        labels = torch.full((rows, length), -100)
        is_real = torch.zeros(rows, length, dtype=torch.bool)
        for r, members in enumerate(packed[start : start + rows]):
            at = 0
            for i in members:
                prompt, solution = samples[i]
                size = len(prompt) + len(solution)
                input_ids[r, at : at + size] = torch.tensor(prompt + solution)
                position_ids[r, at : at + size] = torch.arange(size)
                labels[r, at + len(prompt) - 1 : at + size - 1] = torch.tensor(solution)
                is_real[r, at : at + size] = True
                at += size
            position_ids[r, at:] = torch.arange(length - at)
        batches.append(Batch(input_ids, position_ids, labels, is_real))
    return batches


def batches_from(
    tokenizer: PreTrainedTokenizerFast, mix: Mix, seed: int, step: int, rows: int, length: int
) -> Iterator[Batch]:
    """Yield batches without end, from the one of the given step on."""
    chunk, skip = 0, step
    while True:
        # The number of batches in a chunk depends on its packing; a resumed run counts them again.
        batches = chunk_batches(tokenizer, mix, seed, chunk, rows, length)
        yield from batches[skip:]
        skip = max(0, skip - len(batches))
        chunk += 1
