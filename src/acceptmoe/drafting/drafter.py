"""What every drafter offers to the decode loop."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor
from transformers import PreTrainedModel

from acceptmoe.tree import DraftTree


@runtime_checkable
class Drafter(Protocol):
    """Proposes a tree of continuations of the committed text; keeps the state of one sequence.

    `check_target` is called by `wrap` and again before each `generate`: wrapped models may share a
    drafter, one text at a time, and it drafts for the one that was checked last.

    The loop calls `start` once for each `generate`, at the first draft, then `propose` and `extend`
    in turn. While it does not draft it calls nothing, and one `extend` later brings the tokens of
    all steps in between. Features are the target's residual streams at `feature_boundaries`,
    concatenated: row i is the target's state at the token *before* `tokens[i]`, so it belongs to
    the prediction of that token.

    A drafter may have an attribute `min_probability`. Before each text it is set to the path
    probability below which no node will be verified, so that such nodes need not be drafted.
    """

    name: str  # goes into tables and reports: "ngram", "assistant", "eagle3"
    feature_boundaries: tuple[int, ...]  # boundary b: the residual stream entering layer b; () none

    def check_target(self, model: PreTrainedModel) -> None:
        """Raise `DrafterError` when this drafter cannot draft for `model`."""

    def start(self, prompt: Tensor, first_token: int, features: Tensor | None) -> None:
        """Forget everything and begin with `prompt` ([P] int64) followed by `first_token`.

        `features` is [P', F] for the last P' <= P prompt positions, or None without boundaries.
        """

    def propose(self, num_nodes: int, max_depth: int) -> DraftTree:
        """A tree of at most `num_nodes` nodes (root included) and depth `max_depth`."""

    def extend(self, tokens: list[int], features: Tensor | None) -> None:
        """Take over n newly committed tokens; `features` [n, F] belong to the rows before them."""
