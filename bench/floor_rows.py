"""Rows of `floor.json` from what the arms of `bench_floor.py` have measured."""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import Any

from floor_arms import STOCK_EXPERTS, Arm, Untimed
from floors import TargetSizes, compute_ms, floor_ms, read_ms
from step_log import Step

MIN_PASSES = 5  # of one size, for a row


def padded_rows(num_nodes: int, sizes: list[int]) -> int:
    """Rows of the compiled pass that takes `num_nodes` nodes.

    >>> padded_rows(9, [1, 4, 8, 16])
    16
    """
    return min(size for size in sizes if size >= num_nodes)


def rows_of(
    arm: Arm, untimed: Untimed, sizes: TargetSizes, bytes_per_s: float, rates: dict[int, float]
) -> list[dict[str, Any]]:
    """A row for each size of compiled pass that `arm` has run often enough.

    `rates` are operations per second by rows. A policy may leave nodes out of a draft, so a tree of
    up to 16 nodes can run in passes of 4, 8 and 16 rows.
    """
    report = arm.model.acceptmoe.report()
    by_size: dict[int, list[Step]] = defaultdict(list)
    for step in arm.steps:
        if step.routing is not None:
            by_size[padded_rows(step.num_nodes, report["compiled"]["sizes"])].append(step)
    shared = {
        "policy": arm.name.policy,
        "num_nodes": arm.name.num_nodes,
        "accepted_length": report["accepted_length"],
        "num_compilations": report["compiled"]["num_compilations"],
        "same_as_uncompiled": untimed.num_same,
    }
    return [
        {"T": size, **shared}
        | parts_of(by_size[size], report["num_sparse_layers"], untimed, sizes, bytes_per_s, rate)
        for size, rate in sorted(rates.items())
        if len(by_size[size]) >= MIN_PASSES
    ]


def parts_of(
    steps: list[Step],
    num_layers: int,
    untimed: Untimed,
    sizes: TargetSizes,
    bytes_per_s: float,
    operations_per_s: float,
) -> dict[str, Any]:
    """Medians over steps whose passes have one size, and the floors of these very passes."""
    counts = [step.routing for step in steps if step.routing is not None]
    works = [
        sizes.pass_work(
            step.num_nodes, num_layers * count.experts_used, num_layers * count.routed_pairs
        )
        for step, count in zip(steps, counts, strict=True)
    ]
    pass_ms, draft_ms, rest_ms = (
        statistics.median(getattr(step, name) for step in steps)
        for name in ("pass_ms", "draft_ms", "rest_ms")
    )
    floor = statistics.median(floor_ms(work, bytes_per_s, operations_per_s) for work in works)
    draft_floor = read_ms(untimed.draft, bytes_per_s)
    return {
        "pass_ms": pass_ms,
        "floor_ms": floor,
        "pass_ratio": pass_ms / floor,
        "floor_read_ms": statistics.median(read_ms(work, bytes_per_s) for work in works),
        "floor_compute_ms": statistics.median(compute_ms(w, operations_per_s) for w in works),
        "draft_ms": draft_ms,
        "draft_floor_ms": draft_floor,
        "draft_ratio": draft_ms / draft_floor if draft_floor else None,
        "draft_compute_ms": compute_ms(untimed.draft, operations_per_s),
        "select_ms": untimed.select_ms,
        "select_share": untimed.select_ms / pass_ms,
        "rest_ms": rest_ms,
        "rest_share": rest_ms / pass_ms,
        "mean_nodes": statistics.fmean(step.num_nodes for step in steps),
        "experts_used": statistics.fmean(count.experts_used for count in counts),
        "natural_union": statistics.fmean(count.natural_union for count in counts),
        "num_passes": len(steps),
    }


def compare_end_to_end(arms: list[Arm]) -> list[dict[str, Any]]:
    """Compiled passes with our op over the faster uncompiled loop with Transformers' experts."""
    by_tree: dict[tuple[str, int], dict[str, Arm]] = defaultdict(dict)
    for arm in arms:
        by_tree[arm.name.policy, arm.name.num_nodes][arm.name.implementation] = arm
    rows = []
    for (policy, num_nodes), ways in by_tree.items():
        if not set(STOCK_EXPERTS) <= set(ways):
            continue
        texts = {way: ways[way].texts for way in ("compiled", *STOCK_EXPERTS)}
        speeds = {way: [text.tokens_per_s or 0.0 for text in texts[way]] for way in texts}
        best = max(STOCK_EXPERTS, key=lambda way: statistics.median(speeds[way]))
        pairs = zip(speeds["compiled"], speeds[best], strict=True)
        same = zip(texts["compiled"], texts[best], strict=True)
        rows.append(
            {"policy": policy, "T": num_nodes, "best_stock_experts": best}
            | {f"{way}_tokens_per_s": statistics.median(speeds[way]) for way in speeds}
            | {
                "ratio": statistics.median(ours / stock for ours, stock in pairs if stock),
                "num_same": sum(a.token_ids == b.token_ids for a, b in same),
                "num_texts": len(texts[best]),
            }
        )
    return rows
