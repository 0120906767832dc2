"""One expert layer's speed on a GPU against Transformers' own ways and against the floor.

Axes: T rows, E experts, K experts per row, H hidden, I inner. Every arm is captured as a CUDA graph
and replayed, so that launches from Python do not count; arms take turns, and before each turn a
buffer larger than any cache is written, because in a model the other layers' weights pass through
the cache too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

Arm = Callable[[], Any]
STOCK_ARMS = ("grouped_mm", "batched_mm")
NUM_ROWS = (1, 8, 32, 64)
UNIONS = (8, 16, 32, 64, 128)
COLUMNS = ("T", "eligible", "arm", "median_ms", "floor_ms", "union_bytes", "times_floor")
# Of the root of the mean square, in bfloat16: the arms round between the products.
MAX_ERROR = 2**-6


@dataclass(frozen=True)
class LayerShape:
    """The expert layer of Qwen3-30B-A3B, unless told otherwise."""

    num_experts: int = 128
    experts_per_row: int = 8
    hidden_size: int = 2048
    inner_size: int = 768
    dtype: torch.dtype = torch.bfloat16

    @property
    def weights_per_expert(self) -> int:
        return 3 * self.hidden_size * self.inner_size


@dataclass(frozen=True)
class Machine:
    """What a device can do: bytes per second read, operations per second in the layer's dtype."""

    bytes_per_s: float
    operations_per_s: float


def speed_cases(shape: LayerShape) -> Iterator[tuple[int, int]]:
    """Rows and unions that exist: a row alone touches K experts, T rows no more than T K."""
    for num_rows in NUM_ROWS:
        for union in UNIONS:
            most = min(shape.num_experts, num_rows * shape.experts_per_row)
            if shape.experts_per_row <= union <= most:
                yield num_rows, union


def union_bytes(shape: LayerShape, union: int) -> int:
    """The weights of the touched experts, each read once."""
    return union * shape.weights_per_expert * shape.dtype.itemsize


def floor_ms(shape: LayerShape, num_rows: int, union: int, machine: Machine) -> float:
    """What reading the union takes, or multiplying by it, whichever is longer."""
    operations = 2 * num_rows * shape.experts_per_row * shape.weights_per_expert
    reading_s = union_bytes(shape, union) / machine.bytes_per_s
    return 1e3 * max(reading_s, operations / machine.operations_per_s)


def spread_ids(shape: LayerShape, num_rows: int, union: int, generator: torch.Generator) -> Tensor:
    """[T, K] int64 ids that touch exactly `union` experts, evenly; distinct in each row."""
    experts = torch.randperm(shape.num_experts, generator=generator)[:union]
    pairs = torch.arange(num_rows * shape.experts_per_row) % union
    return experts[pairs].view(num_rows, shape.experts_per_row)


class Timer(Protocol):
    """Times one call in milliseconds, with cold caches."""

    def __call__(self, arm: Arm) -> float: ...


class CudaTimer:
    """By events on the device."""

    def __init__(self, cache_bytes: int = 512 * 2**20) -> None:
        self._buffer = torch.empty(cache_bytes, dtype=torch.uint8, device="cuda")

    def __call__(self, arm: Arm) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._buffer.zero_()
        begin.record()
        arm()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)


class CpuTimer:
    """By the clock: runs the same benchmark where there is no device, for its tests."""

    def __call__(self, arm: Arm) -> float:
        begin = time.perf_counter()
        arm()
        return 1e3 * (time.perf_counter() - begin)


def times_ms(arms: dict[str, Arm], timer: Timer, repeats: int) -> dict[str, list[float]]:
    """`repeats` times of each arm, in turns; a first turn of each does not count."""
    for arm in arms.values():
        timer(arm)
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(repeats):
        for name, arm in arms.items():
            times[name].append(timer(arm))
    return times


def measure_machine(timer: Timer, device: str, *, num_bytes: int, matrix_size: int) -> Machine:
    """The best of ten reads of a large buffer and of ten products of large matrices."""
    buffer = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    matrix = torch.ones(matrix_size, matrix_size, dtype=torch.bfloat16, device=device)
    arms: dict[str, Arm] = {"read": buffer.sum, "multiply": lambda: matrix @ matrix}
    best_s = {name: min(times) / 1e3 for name, times in times_ms(arms, timer, 10).items()}
    return Machine(num_bytes / best_s["read"], 2 * matrix_size**3 / best_s["multiply"])


def make_experts(shape: LayerShape, device: str) -> Any:
    """Transformers' stacked experts with random weights."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.experts_per_row,
        hidden_size=shape.hidden_size,
        moe_intermediate_size=shape.inner_size,
    )
    with torch.device(device):
        experts = Qwen3MoeExperts(config).to(shape.dtype)
    with torch.no_grad():
        for weight in experts.parameters():
            weight.normal_(0, weight.shape[-1] ** -0.5)
    return experts.requires_grad_(False)


def make_arms(experts: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> dict[str, Arm]:
    """Our op and Transformers' implementations, each a call without arguments."""
    from acceptmoe.ops.expert_mlp import expert_mlp

    union = int(ids.unique().numel())

    def ours() -> Tensor:
        output: Tensor = expert_mlp(
            hidden,
            ids,
            weights,
            experts.gate_up_proj,
            None,
            experts.down_proj,
            None,
            "silu",
            False,
            False,
            0.0,
            0.0,
            union,
        )
        return output

    def stock(name: str) -> Arm:
        def call() -> Tensor:
            experts.config._experts_implementation = name
            output: Tensor = experts(hidden, ids, weights)
            return output

        return call

    return {"ours": ours, **{name: stock(name) for name in STOCK_ARMS}}


def check_arms(arms: dict[str, Arm]) -> None:
    """Raise `AssertionError` unless all arms compute the same."""
    expected = arms[STOCK_ARMS[0]]().float()
    for name, arm in arms.items():
        error = (arm().float() - expected).square().mean().sqrt()
        relative = float(error / expected.square().mean().sqrt())
        if not relative <= MAX_ERROR:
            raise AssertionError(f"{name} is off by {relative:.2g} of the output's mean square")


def captured(arm: Arm) -> Arm:
    """`arm` as a CUDA graph, after a warm-up that compiles what it needs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        arm()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        arm()
    return graph.replay


def layer_speed(
    shape: LayerShape,
    machine: Machine,
    timer: Timer,
    *,
    device: str,
    repeats: int,
    capture: Callable[[Arm], Arm] = captured,
) -> Iterator[dict[str, Any]]:
    """Rows of `COLUMNS`: each arm's median for each number of rows and size of the union."""
    experts = make_experts(shape, device)
    generator = torch.Generator().manual_seed(0)
    for num_rows, union in speed_cases(shape):
        hidden = torch.randn(num_rows, shape.hidden_size, generator=generator)
        ids = spread_ids(shape, num_rows, union, generator).to(device)
        weights = torch.full(ids.shape, 1 / shape.experts_per_row, device=device)
        arms = make_arms(experts, hidden.to(device, shape.dtype), ids, weights.to(shape.dtype))
        check_arms(arms)
        floor = floor_ms(shape, num_rows, union, machine)
        times = times_ms({name: capture(arm) for name, arm in arms.items()}, timer, repeats)
        for name, values in times.items():
            median = statistics.median(values)
            yield {
                "T": num_rows,
                "eligible": union,
                "arm": name,
                "median_ms": median,
                "floor_ms": floor,
                "union_bytes": union_bytes(shape, union),
                "times_floor": median / floor,
            }
