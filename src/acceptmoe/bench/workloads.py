"""The prompts that are decoded: test problems, and texts as tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from acceptmoe.targets.problem import Problem
from acceptmoe.targets.tasks import TASKS, problems

TEST_SPLIT = "test"  # what is reported
TUNING_SPLIT = "tuning"  # what choices are made with, tree sizes for instance
CALIBRATION_SPLIT = "calibration"  # what commitment tables are made with


def mixed_problems(
    split: str, count: int, seed: int = 0, tasks: Sequence[str] = TASKS
) -> list[Problem]:
    """`count` different problems of a split, taking the tasks in turn.

    >>> [problem.task for problem in mixed_problems("test", 3, tasks=("algebra", "word-problems"))]
    ['algebra', 'word-problems', 'algebra']
    """
    share = -(-count // len(tasks))
    by_task = [problems(task, split, share, seed) for task in tasks]
    return [problem for turn in zip(*by_task, strict=True) for problem in turn][:count]


def encode(tokenizer: PreTrainedTokenizerBase, text: str, device: torch.device) -> Tensor:
    """[1, P] token ids of a prompt on the model's device."""
    ids: Tensor = tokenizer(text, return_tensors="pt")["input_ids"]
    return ids.to(device)


def end_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that end a text: those of the model's generation config, or the tokenizer's."""
    configured = model.generation_config.eos_token_id
    if configured is None:
        configured = tokenizer.eos_token_id
    if configured is None:
        return []
    return [configured] if isinstance(configured, int) else list(configured)
