"""Time of selection and constrained routing: the fused op against the pure functions.

    PYTHONPATH=src python bench/bench_select.py --out bench/results/select.json

An arm is the routing hook over the layers of one verification pass, with everything that a pass
does for them: the policy's row weights, selection, routing and counting. Both arms get the same
random logits and must give the same sets and experts before they are timed; they are timed in turn
(A B A B ...), in microseconds a layer. Time is that of one thread on the processor: the tensors are
too small for a second one, and what other processes take in between does not count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

from acceptmoe.bench.provenance import provenance
from acceptmoe.models.counters import RoutedLayer
from acceptmoe.models.patching import RouterHook, RoutingPatch
from acceptmoe.models.scoring import SoftmaxTopK
from acceptmoe.policies import load_policy
from acceptmoe.selection import BlockRows

SEED = 0
ARMS = ("fused", "unfused")
NUM_LAYERS, EXPERTS_PER_ROW = 8, 8
SCORING = SoftmaxTopK(renormalize=True)


class Pass:
    """The routers' outputs of one verification pass, and the hook that routes them."""

    def __init__(self, num_rows: int, num_experts: int, policy: str) -> None:
        generator = torch.Generator().manual_seed(SEED)
        router = nn.Module()
        router.top_k, router.num_experts = EXPERTS_PER_ROW, num_experts  # type: ignore[assignment]
        self.router = router
        self.outputs = [
            self._route(3 * torch.randn(num_rows, num_experts, generator=generator))
            for _ in range(NUM_LAYERS)
        ]
        depths = torch.arange(num_rows).div(num_rows / 6, rounding_mode="floor").long()
        commitment = torch.rand(num_rows, generator=generator) * 0.7**depths
        commitment[0] = 1.0
        is_real = torch.ones(num_rows, dtype=torch.bool)
        self.rows = BlockRows(depths, 0.7**depths, commitment, is_real)
        adapter: Any = SimpleNamespace(
            num_experts=num_experts, layers=(), family=SimpleNamespace(scoring=SCORING)
        )
        self.patch = RoutingPatch(adapter, load_policy(policy))
        self.hook = RouterHook(self.patch, SCORING.rule(router))

    def _route(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights, ids = logits.softmax(-1).topk(EXPERTS_PER_ROW)
        return logits, weights / weights.sum(-1, keepdim=True), ids

    def run(self, arm: str) -> list[RoutedLayer]:
        self.patch.is_fused = arm == "fused"
        with self.patch.verifying(self.rows) as layers:
            for output in self.outputs:
                self.hook(self.router, (), output)
        return layers


def check_arms(block: Pass) -> None:
    """Raise `AssertionError` unless both arms choose the same sets and the same experts."""
    for fused, unfused in zip(*(block.run(arm) for arm in ARMS), strict=True):
        assert fused.eligible is not None
        assert unfused.eligible is not None
        assert torch.equal(fused.eligible, unfused.eligible)
        assert torch.equal(fused.used_ids, unfused.used_ids)


@torch.no_grad()
def measure(num_rows: int, num_experts: int, policy: str, repeats: int) -> dict[str, Any]:
    """One row of the results: both arms' medians and quartiles, and the median paired ratio."""
    block = Pass(num_rows, num_experts, policy)
    check_arms(block)
    times: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for _ in range(repeats):
        for arm in ARMS:
            start = time.thread_time()
            block.run(arm)
            times[arm].append((time.thread_time() - start) * 1e6 / NUM_LAYERS)
    ratios = [b / a for a, b in zip(*(times[arm] for arm in ARMS), strict=True)]
    row: dict[str, Any] = {"T": num_rows, "E": num_experts, "K": EXPERTS_PER_ROW, "policy": policy}
    for arm in ARMS:
        q1, median, q3 = statistics.quantiles(times[arm], n=4)
        row |= {f"{arm}_us": round(median, 1), f"{arm}_q1_us": round(q1, 1)}
        row |= {f"{arm}_q3_us": round(q3, 1), f"{arm}_min_us": round(min(times[arm]), 1)}
    return row | {"ratio": round(statistics.median(ratios), 2)}


def show(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(title="Selection and routing of a layer (median us; verified before timing)")
    names = (
        "T",
        "E",
        "policy",
        "fused_us",
        "fused_min_us",
        "unfused_us",
        "unfused_min_us",
        "ratio",
    )
    for name in names:
        table.add_column(name, justify="left" if name == "policy" else "right")
    for row in rows:
        table.add_row(*(str(row[name]) for name in names))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--policy", default="accept")
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sizes = [(rows, experts) for rows in (8, 32, 64) for experts in (64, 128, 256)]
    console = Console()
    # Without a refreshing thread, which would take the interpreter's lock between operations.
    progress = track(sizes, "Measuring", console=console, auto_refresh=False)
    rows = [measure(*size, arguments.policy, arguments.repeats) for size in progress]
    show(rows, console)
    if arguments.out is not None:
        result = {"provenance": provenance(seed=SEED), "rows": rows}
        arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
