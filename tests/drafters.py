"""Slow, obvious drafters for tests of the decode loop."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel

from acceptmoe.tree import DraftTree


class ScriptedDrafter:
    """Proposes whatever `script(text, num_nodes, max_depth)` returns; keeps the text only."""

    name = "scripted"
    feature_boundaries: tuple[int, ...] = ()

    def __init__(self, script) -> None:
        self.script = script
        self.text: list[int] = []

    def check_target(self, model: PreTrainedModel) -> None:
        pass

    def start(self, prompt: Tensor, first_token: int, features: Tensor | None) -> None:
        self.text = [*prompt.tolist(), first_token]

    def extend(self, tokens: list[int], features: Tensor | None) -> None:
        self.text.extend(tokens)

    def propose(self, num_nodes: int, max_depth: int) -> DraftTree:
        return self.script(self.text, num_nodes, max_depth)


class OracleDrafter(ScriptedDrafter):
    """Knows the text that will come: a chain of it, with one wrong sibling before each node.

    Every `wrong_every`-th token of the chain is wrong, so that blocks end there.
    """

    name = "oracle"

    def __init__(self, future: list[int], vocab_size: int, wrong_every: int = 5) -> None:
        super().__init__(self._propose)
        self.future, self.vocab_size, self.wrong_every = future, vocab_size, wrong_every

    def _propose(self, text: list[int], num_nodes: int, max_depth: int) -> DraftTree:
        tokens, parents, probabilities = [text[-1]], [-1], [1.0]
        parent = 0
        for depth in range(max_depth):
            position = len(text) + depth
            if len(tokens) + 2 > num_nodes or position >= len(self.future):
                break
            right = self.future[position]
            if position % self.wrong_every == 0:
                right = (right + 2) % self.vocab_size
            for token in ((right + 1) % self.vocab_size, right):
                tokens.append(token)
                parents.append(parent)
                probabilities.append(probabilities[parent] * 0.5)
            parent = len(tokens) - 1
        return DraftTree(tuple(tokens), tuple(parents), tuple(probabilities))
