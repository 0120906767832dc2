"""The prompts that are decoded: test problems, and texts as tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from acceptmoe.errors import InvalidArgumentError
from acceptmoe.targets.problem import Problem
from acceptmoe.targets.tasks import TASKS, problems
from acceptmoe.tree import MAX_NODES

TEST_SPLIT = "test"  # what is reported
TUNING_SPLIT = "tuning"  # what choices are made with, tree sizes for instance
CALIBRATION_SPLIT = "calibration"  # what commitment tables are made with


@dataclass(frozen=True)
class Tree:
    """The limits of a draft tree; a chain has no two nodes with one parent."""

    num_nodes: int
    max_depth: int
    is_chain: bool = False

    def __str__(self) -> str:
        return f"chain:{self.num_nodes}" if self.is_chain else f"{self.num_nodes}:{self.max_depth}"


def chain(num_nodes: int) -> Tree:
    """A chain of `num_nodes` nodes, the root included."""
    return Tree(num_nodes, num_nodes - 1, is_chain=True)


# Deep ones for drafters that are seldom wrong.
TREES = (
    chain(4),
    chain(6),
    chain(11),
    Tree(8, 5),
    Tree(16, 5),
    Tree(32, 5),
    Tree(64, 5),
    Tree(16, 10),
    Tree(24, 12),
)


def parse_tree(text: str) -> Tree:
    """The tree that "chain:6", "32" (depth 5) or "32:7" stands for.

    >>> parse_tree("chain:6")
    Tree(num_nodes=6, max_depth=5, is_chain=True)
    """
    found = re.fullmatch(r"(chain:)?(\d+)(?::(\d+))?", text)
    if found is None or (found[1] and found[3]) or not 2 <= int(found[2]) <= MAX_NODES:
        raise InvalidArgumentError(
            f"tree is {text!r}; it must be a number of nodes from 2 to {MAX_NODES}, as '32', with "
            "a depth, as '32:7', or a chain, as 'chain:6'"
        )
    num_nodes = int(found[2])
    if found[1]:
        return chain(num_nodes)
    return Tree(num_nodes, min(int(found[3] or 5), num_nodes - 1) or 1)


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
