"""Time `acceptmoe::expert_mlp` on the CPU against Transformers' own ways and against the floor.

    python bench/bench_ops.py [--quick] [--threads 2] [--out bench/results/ops.json]

One layer of Qwen3-30B-A3B in bfloat16 (E = 128, K = 8, H = 2048, I = 768), 1.2 GB. The rows of a
verification block are routed inside a set of eligible experts, another one for every call, so that
the cache of the processor holds none of it. The arms take turns on the same rows and ids, and each
round begins with another arm. Before anything is timed, the arms' outputs are compared.

The floor of a pass is the bytes of its union over the rate at which this machine reads memory,
measured in the same run, between the rounds.

Axes: T rows, E experts, K experts per row, H hidden, I inner.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from acceptmoe.bench.provenance import provenance
from acceptmoe.models.experts import IMPLEMENTATION, Gating

NUM_EXPERTS, EXPERTS_PER_ROW, HIDDEN_SIZE, INNER_SIZE = 128, 8, 2048, 768
EXPERT_BYTES = 3 * HIDDEN_SIZE * INNER_SIZE * 2
LAYER_BYTES = NUM_EXPERTS * EXPERT_BYTES
ROWS = (1, 8, 16, 32, 64)
ELIGIBLE = (8, 16, 32, 64, 128)
QUICK_CELLS = ((1, 8), (8, 16), (32, 32))
ARMS = {"ours": IMPLEMENTATION, "eager": "eager", "grouped_mm": "grouped_mm"}
# Of the largest output: bfloat16 keeps 8 bits, and stock layers round three times on the way.
TOLERANCE = 0.05


@dataclass(frozen=True)
class Call:
    """One verification block: rows, and where the router sent them."""

    hidden: Tensor  # [T, H] bfloat16
    ids: Tensor  # [T, K]
    weights: Tensor  # [T, K]

    @property
    def union_bytes(self) -> int:
        return int(self.ids.unique().numel()) * EXPERT_BYTES


def make_layer() -> Any:
    """The expert layer with random weights of a usual spread."""
    config = Qwen3MoeConfig(
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=EXPERTS_PER_ROW,
        hidden_size=HIDDEN_SIZE,
        moe_intermediate_size=INNER_SIZE,
    )
    with torch.device("meta"):
        layer: Any = Qwen3MoeExperts(config)
    generator = torch.Generator().manual_seed(0)
    # A million numbers, over and over: drawing 600 million would take longer than the benchmark.
    noise = (0.02 * torch.randn(2**20 + 7, generator=generator)).bfloat16()
    for name in ("gate_up_proj", "down_proj"):
        shape = getattr(layer, name).shape
        repeats = -(-shape.numel() // noise.numel())
        values = noise.repeat(repeats)[: shape.numel()].view(shape)
        setattr(layer, name, nn.Parameter(values, requires_grad=False))
    layer._acceptmoe_gating = Gating("silu")
    return layer


class Calls:
    """Blocks of T rows inside `eligible` experts; every call takes the next ones of the layer."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.first = 0

    def make(self, num_rows: int, eligible: int) -> Call:
        experts = (torch.arange(eligible) + self.first) % NUM_EXPERTS
        self.first = (self.first + eligible) % NUM_EXPERTS
        scores = torch.rand(num_rows, eligible, generator=self.generator)
        hidden = torch.randn(num_rows, HIDDEN_SIZE, generator=self.generator).bfloat16()
        weights = torch.rand(num_rows, EXPERTS_PER_ROW, generator=self.generator)
        ids = experts[scores.topk(EXPERTS_PER_ROW).indices]
        return Call(hidden, ids, weights / weights.sum(dim=-1, keepdim=True))


def run_arm(layer: Any, arm: str, call: Call) -> tuple[Tensor, float]:
    """The output and the milliseconds of one call."""
    layer.config._experts_implementation = ARMS[arm]
    start = time.perf_counter()
    output = layer(call.hidden, call.ids, call.weights.to(call.hidden.dtype))
    return output, 1e3 * (time.perf_counter() - start)


def check_outputs(layer: Any, call: Call) -> None:
    """Exit unless every arm computes the same within rounding."""
    outputs = {arm: run_arm(layer, arm, call)[0].float() for arm in ARMS}
    scale = outputs["eager"].abs().max()
    for arm, output in outputs.items():
        error = float((output - outputs["eager"]).abs().max() / scale)
        if not error <= TOLERANCE:
            sys.exit(f"{arm} differs from eager by {error:.3g} of the largest output")


def read_bandwidth(weights: Tensor, part: int) -> float:
    """Bytes per second at which all threads together sum up a quarter of the weights."""
    quarters = weights.view(torch.int64).flatten().chunk(4)
    numbers = quarters[part % 4]
    start = time.perf_counter()
    numbers.sum()
    return numbers.numel() * 8 / (time.perf_counter() - start)


def measure_cell(
    layer: Any, calls: Calls, num_rows: int, eligible: int, rounds: int, bandwidths: list[float]
) -> list[dict[str, Any]]:
    """One row for each arm; times in milliseconds, medians over the rounds."""
    times: dict[str, list[float]] = {arm: [] for arm in ARMS}
    union_bytes = []
    names = list(ARMS)
    for number in range(rounds):
        first = number % len(names)
        call = calls.make(num_rows, eligible)
        union_bytes.append(call.union_bytes)
        for arm in [*names[first:], *names[:first]]:
            bandwidths.append(read_bandwidth(layer.gate_up_proj, len(bandwidths)))  # empties caches
            times[arm].append(run_arm(layer, arm, call)[1])
    mean_bytes = statistics.fmean(union_bytes)
    ratios = [
        min(eager, grouped) / ours
        for ours, eager, grouped in zip(*(times[arm] for arm in names), strict=True)
    ]
    return [
        {
            "T": num_rows,
            "eligible": eligible,
            "arm": arm,
            "median_ms": statistics.median(times[arm]),
            "best_ms": min(times[arm]),
            "union_bytes": mean_bytes,
            "median_paired_ratio": statistics.median(ratios) if arm == "ours" else None,
        }
        for arm in names
    ]


def measure(
    layer: Any, cells: list[tuple[int, int]], rounds: int, progress: Callable[[str], None]
) -> dict[str, Any]:
    """The rows of all cells, with their floors."""
    calls, bandwidths, rows = Calls(seed=1), [], []
    check_outputs(layer, calls.make(24, 32))
    for num_rows, eligible in cells:
        progress(f"T {num_rows}, {eligible} eligible")
        rows += measure_cell(layer, calls, num_rows, eligible, rounds, bandwidths)
    bandwidth = statistics.median(bandwidths)
    for row in rows:
        row["floor_ms"] = 1e3 * row["union_bytes"] / bandwidth
    return {
        "read_bytes_per_s": bandwidth,
        "read_bytes_per_s_best": max(bandwidths),
        "rounds": rounds,
        "rows": rows,
    }


def print_table(result: dict[str, Any]) -> None:
    """One line a cell: milliseconds of each arm, and how near ours is to the floor."""
    print(f"read bandwidth {result['read_bytes_per_s'] / 1e9:.1f} GB/s (median of all reads)")
    print(
        f"{'T':>3} {'eligible':>8} {'ours':>8} {'eager':>8} {'grouped':>8} {'floor':>8}"
        f" {'ratio':>6} {'of floor':>8}"
    )
    for ours, eager, grouped in zip(*(iter(result["rows"]),) * 3, strict=True):
        cells = [ours["median_ms"], eager["median_ms"], grouped["median_ms"], ours["floor_ms"]]
        print(
            f"{ours['T']:>3} {ours['eligible']:>8} "
            + " ".join(f"{value:8.2f}" for value in cells)
            + f" {ours['median_paired_ratio']:6.2f} {ours['floor_ms'] / ours['median_ms']:8.0%}"
        )


def check_memory() -> None:
    """Exit when the layer does not fit."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    sizes = dict(line.split(":", 1) for line in lines)
    available = int(sizes["MemAvailable"].split()[0]) * 1024
    needed = 2 * LAYER_BYTES
    if available < needed:
        sys.exit(f"{available / 1e9:.1f} GB of memory are free; the layer needs {needed / 1e9:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three cells, three rounds")
    parser.add_argument("--rounds", type=int, help="calls of each arm in a cell (default 9)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="where to write JSON (default: nowhere)")
    options = parser.parse_args()
    check_memory()
    torch.set_num_threads(options.threads)
    grid = [(rows, eligible) for rows in ROWS for eligible in ELIGIBLE if eligible <= rows * 8]
    cells = list(QUICK_CELLS) if options.quick else grid
    rounds = options.rounds or (3 if options.quick else 9)
    with torch.inference_mode():
        result = measure(make_layer(), cells, rounds, lambda text: print(text, file=sys.stderr))
    print_table(result)
    if options.out is not None:
        record = {"provenance": provenance(seed=1), **result}
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
