"""What a pass or a draft must at least read and compute, and how long this machine needs for it.

Axes: T rows, E experts, K experts per row, H inputs, N outputs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from acceptmoe.drafting import AssistantDrafter, Drafter, Eagle3Drafter
from acceptmoe.models.adapter import MoEAdapter
from acceptmoe.ops.linear import linear

# A matrix of the rate's measurement: in float32 8 MB, so that it stays in the last cache.
RATE_SHAPE = (1024, 2048)  # N, H
RATE_REPEATS = 15


@dataclass
class Work:
    """Bytes of weights to read, and multiplications and additions to do with them."""

    num_bytes: float = 0.0
    num_operations: float = 0.0

    def add_product(self, num_rows: int, weight: Tensor) -> None:
        """Count `num_rows` rows times `weight`, which is read once for all of them."""
        self.num_bytes += weight.nbytes
        self.num_operations += 2 * num_rows * weight.numel()


def read_ms(work: Work, bytes_per_s: float) -> float:
    """Milliseconds of reading alone."""
    return 1e3 * work.num_bytes / bytes_per_s


def compute_ms(work: Work, operations_per_s: float) -> float:
    """Milliseconds of arithmetic alone."""
    return 1e3 * work.num_operations / operations_per_s


def floor_ms(work: Work, bytes_per_s: float, operations_per_s: float) -> float:
    """No pass is faster than its reads, nor than its arithmetic (the roofline).

    >>> floor_ms(Work(num_bytes=2e6, num_operations=1e6), bytes_per_s=1e9, operations_per_s=1e9)
    2.0
    """
    return max(read_ms(work, bytes_per_s), compute_ms(work, operations_per_s))


@dataclass(frozen=True)
class TargetSizes:
    """Numbers in the weights of a target: in one expert, and in all that every row goes through.

    The input embedding is in neither: a pass reads T rows of it.
    """

    dense: int
    expert: int
    itemsize: int  # bytes of a number

    @classmethod
    def of(cls, model: PreTrainedModel) -> TargetSizes:
        """The sizes of a supported target whose sparse layers are alike."""
        adapter = MoEAdapter(model)
        in_experts = sum(p.numel() for layer in adapter.layers for p in layer.experts.parameters())
        embedding = model.get_input_embeddings().weight
        is_tied = model.get_output_embeddings().weight is embedding
        read_by_row = 0 if is_tied else embedding.numel()
        total = sum(parameter.numel() for parameter in model.parameters())
        return cls(
            total - in_experts - read_by_row,
            in_experts // (len(adapter.layers) * adapter.num_experts),
            embedding.element_size(),
        )

    def pass_work(self, num_rows: float, num_experts_read: float, num_pairs: float) -> Work:
        """Of a pass over T rows; experts of the union and row-expert pairs are summed over layers.

        Keys and values are left out: a text of some hundred tokens has few of them.
        """
        return Work(
            self.itemsize * (self.dense + num_experts_read * self.expert),
            2 * (num_rows * self.dense + num_pairs * self.expert),
        )


@contextmanager
def counted_products(drafter: Drafter) -> Iterator[Work]:
    """Count what the products of `drafter` read and compute while the body runs.

    A weight counts each time it is read: once a level of the tree, and once for the committed
    tokens. A drafter without weights counts nothing.
    """
    work = Work()
    if isinstance(drafter, Eagle3Drafter):
        head: Any = drafter.head
        multiply = head.multiply

        def counted(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            work.add_product(rows.numel() // rows.shape[-1], weight)
            return multiply(rows, weight, bias)

        head.multiply = counted
        try:
            yield work
        finally:
            del head.multiply
    elif isinstance(drafter, AssistantDrafter):

        def count(layer: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
            work.add_product(args[0].numel() // args[0].shape[-1], layer.weight)

        layers = [module for module in drafter.model.modules() if isinstance(module, nn.Linear)]
        handles = [layer.register_forward_hook(count) for layer in layers]
        try:
            yield work
        finally:
            for handle in handles:
                handle.remove()
    else:
        yield work


def read_bandwidth(buffer: Tensor) -> float:
    """Bytes per second at which all threads together sum up `buffer`, an int64 tensor."""
    start = time.perf_counter()
    buffer.sum()
    return buffer.nbytes / (time.perf_counter() - start)


@torch.inference_mode()
def matrix_rates(num_rows: int) -> dict[str, float]:
    """Operations per second of T rows times a matrix in the last cache, by who multiplies.

    Medians; the ways take turns. The best of them is the machine's rate, so that a slow product of
    one dtype makes no floor look near.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(RATE_SHAPE, generator=generator)
    rows = torch.randn(num_rows, RATE_SHAPE[1], generator=generator)
    short_weight, short_rows = weight.bfloat16(), rows.bfloat16()
    ways: dict[str, Callable[[], Tensor]] = {
        "torch_bfloat16": lambda: F.linear(short_rows, short_weight),
        "torch_float32": lambda: F.linear(rows, weight),
        "acceptmoe_linear": lambda: linear(short_rows, short_weight, None),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(RATE_REPEATS):
        for name, multiply in ways.items():
            multiply()  # brings the matrix into the cache
            start = time.perf_counter()
            multiply()
            seconds[name].append(time.perf_counter() - start)
    num_operations = 2 * num_rows * weight.numel()
    return {name: num_operations / statistics.median(times) for name, times in seconds.items()}
