"""Stand-ins for the compiler and for CUDA graphs: what is around them is tested by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import acceptmoe
from acceptmoe.decoding.compiled import CompiledPasses
from acceptmoe.decoding.cuda_graphs import Graph


class Uncompiled:
    """A backend that leaves a pass as it is, and counts how many there are."""

    name = "none"
    num_attentions_folded = num_linears_rewritten = 0

    def __init__(self) -> None:
        self.num_graphs = 0

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        self.num_graphs += 1
        return function


class FakeGraphs:
    """Graphs that replay by calling the function again and writing to the same output tensors.

    A real one reads and writes the addresses that it saw at capture; so must the function here read
    only tensors that stay, or a replay would show old values.
    """

    def __init__(self) -> None:
        self.num_replays = 0
        self.num_reset = 0

    def capture(self, function: Callable[[], Any]) -> Graph[Any]:
        function()  # warm-up
        output = function()

        def replay() -> None:
            self.num_replays += 1
            for kept, new in zip(tensors(output), tensors(function()), strict=True):
                kept.copy_(new)

        def reset() -> None:
            self.num_reset += 1
            for kept in tensors(output):
                kept.fill_(0)

        return Graph(replay, output, 1000, reset)


def tensors(output: Any) -> list[Tensor]:
    """Every tensor in nested tuples."""
    if isinstance(output, Tensor):
        return [output]
    return [] if output is None else [found for part in output for found in tensors(part)]


def wrap_with_passes(
    model: PreTrainedModel,
    sizes: tuple[int, ...],
    *,
    backend: Any = None,
    graphs: FakeGraphs | None = None,
    steps_before_compiling: int = 0,
    **keywords: Any,
) -> PreTrainedModel:
    """`wrap` with passes of these sizes, by default neither compiled nor captured."""
    acceptmoe.wrap(model, **keywords)
    session = model.acceptmoe
    session.compiled = CompiledPasses(
        sizes,
        min(session.max_depth + 1, session.num_nodes),
        session.policy,
        backend or Uncompiled(),
        keeps_layers=bool(session.auditor.share),
        graphs=graphs,
        steps_before_compiling=steps_before_compiling,
    )
    return model


def greedy(model: PreTrainedModel, prompt: Tensor, **keywords: Any) -> list[int]:
    """The whole text of a greedy `generate`."""
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        pad_token_id=0,
        **{"max_new_tokens": 24, **keywords},
    )
    return output[0].tolist()
