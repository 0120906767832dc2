"""What a pass or a draft must at least read and compute, and how long this machine needs for it.

Axes: T rows, E experts, K experts per row, H inputs, N outputs.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from acceptmoe.drafting import AssistantDrafter, Drafter, Eagle3Drafter
from acceptmoe.drafting.assistant_forward import AssistantForward
from acceptmoe.drafting.draft_weights import Int8Product
from acceptmoe.models.adapter import MoEAdapter
from acceptmoe.models.rounded import Int8Linear
from acceptmoe.ops.int8_linear import Int8Weight
from acceptmoe.ops.int8_linear import multiply as int8_multiply
from acceptmoe.ops.linear import linear

# A matrix of the rate's measurement: in float32 8 MB, so that it stays in the last cache.
RATE_SHAPE = (1024, 2048)  # N, H
RATE_REPEATS = 15
INT8_PRODUCT = "acceptmoe_int8_linears"  # among the ways to multiply


@dataclass
class Work:
    """Bytes of weights to read, and multiplications and additions to do with them."""

    num_bytes: float = 0.0
    num_operations: float = 0.0

    def add_product(self, num_rows: int, weight: Tensor | Int8Weight) -> None:
        """Count `num_rows` rows times `weight`, which is read once for all of them."""
        self.num_bytes += weight.nbytes
        self.num_operations += 2 * num_rows * math.prod(weight.shape)


Counting = Callable[[Any, Work], AbstractContextManager[None]]
"""Adds to the work what a drafter multiplies inside."""


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

    A weight counts each time it is read, in the precision in which it is: once a level of the tree,
    and once for the committed tokens. A drafter without weights counts nothing.
    """
    work = Work()
    if isinstance(drafter, Eagle3Drafter):
        count: Counting = _counted_head
    elif isinstance(drafter, AssistantDrafter):
        count = _counted_forward
    else:
        yield work
        return
    # Each text chooses anew what multiplies; counting goes around what it has chosen.
    with ExitStack() as counting:
        choose = drafter.use_kernels

        def use_kernels(**options: Any) -> None:
            counting.close()
            choose(**options)
            counting.enter_context(count(drafter, work))

        counting.enter_context(count(drafter, work))
        with _replaced(drafter, "use_kernels", use_kernels):
            yield work


@contextmanager
def _counted_head(drafter: Any, work: Work) -> Iterator[None]:
    """Count every product of an EAGLE-3 head."""
    product = drafter.head.product

    def counted(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        num_rows = rows.numel() // rows.shape[-1]
        is_rounded = isinstance(product, Int8Product)
        work.add_product(num_rows, product.rounded(weight) if is_rounded else weight)
        return product(rows, weight, bias)

    with _replaced(drafter.head, "product", counted):
        yield


@contextmanager
def _counted_forward(drafter: Any, work: Work) -> Iterator[None]:
    """Count the linear layers of an assistant, forward by forward.

    Around the calls of its forward, because hooks of layers do not run in a compiled one.
    """
    forward: AssistantForward = drafter._forward
    output_layer = forward.model.get_output_embeddings()
    layers = [m for m in forward.model.modules() if isinstance(m, (nn.Linear, Int8Linear))]
    read, expand = forward.read, forward.expand

    def add(num_rows: int, num_outputs: int) -> None:
        for layer in layers:
            weight = layer.rounded if isinstance(layer, Int8Linear) else layer.weight
            work.add_product(num_outputs if layer is output_layer else num_rows, weight)

    def counted_read(tokens: list[int], num_cached: int) -> Tensor:
        add(len(tokens), num_outputs=1)  # only the logits of the last one are wanted
        return read(tokens, num_cached)

    def counted_expand(tokens: Tensor, *others: Any) -> Tensor:
        add(len(tokens), num_outputs=len(tokens))
        return expand(tokens, *others)

    with _replaced(forward, "read", counted_read), _replaced(forward, "expand", counted_expand):
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner` has another attribute `name` inside."""
    own = vars(owner)
    before = {name: own[name]} if name in own else {}
    own[name] = value
    try:
        yield
    finally:
        del own[name]
        own.update(before)


def read_bandwidth(buffer: Tensor) -> float:
    """Bytes per second at which all threads together sum up `buffer`, an int64 tensor."""
    start = time.perf_counter()
    buffer.sum()
    return buffer.nbytes / (time.perf_counter() - start)


@torch.inference_mode()
def matrix_rates(num_rows: int) -> dict[str, float]:
    """Operations per second of T rows times a matrix in the last cache, by who multiplies.

    Medians; the ways take turns. See `best_rate`.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(RATE_SHAPE, generator=generator)
    rows = torch.randn(num_rows, RATE_SHAPE[1], generator=generator)
    short_weight, short_rows = weight.bfloat16(), rows.bfloat16()
    rounded = Int8Weight.of(weight)
    ways: dict[str, Callable[[], Tensor]] = {
        "torch_bfloat16": lambda: F.linear(short_rows, short_weight),
        "torch_float32": lambda: F.linear(rows, weight),
        "acceptmoe_linear": lambda: linear(short_rows, short_weight, None),
        INT8_PRODUCT: lambda: int8_multiply(short_rows, rounded),
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


def best_rate(rates: dict[str, float], weights: str | None = None) -> float:
    """The machine's rate of products with weights as they are, or with rounded ones ("int8").

    The best way counts, so that a slow product of one dtype makes no floor look near.

    >>> best_rate({"torch_bfloat16": 2.0, "acceptmoe_linear": 3.0, INT8_PRODUCT: 5.0})
    3.0
    """
    if weights == "int8":
        return rates[INT8_PRODUCT]
    return max(rate for name, rate in rates.items() if name != INT8_PRODUCT)
