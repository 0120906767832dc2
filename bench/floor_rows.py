"""Rows of `floor.json` from what the arms of `bench_floor.py` have measured."""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import Any

from floor_arms import STOCK_EXPERTS, Arm, Untimed
from floors import TargetSizes, best_rate, compute_ms, floor_ms, read_ms
from step_log import Step

MIN_PASSES = 5  # of one range, for a row
ROW_BOUNDS = (4, 8, 12, 16, 24, 32, 48, 64)  # the most rows of each range of passes


def bounds_up_to(num_nodes: int) -> list[int]:
    """The bounds of the ranges in which trees of up to `num_nodes` nodes fall.

    >>> bounds_up_to(10)
    [4, 8, 12]
    """
    return [bound for bound in ROW_BOUNDS if bound <= bound_of(num_nodes)]


def bound_of(num_nodes: int) -> int:
    """The bound of the range that a pass over `num_nodes` rows falls in.

    >>> bound_of(9)
    12
    """
    return next((bound for bound in ROW_BOUNDS if bound >= num_nodes), num_nodes)


def rows_of(
    arm: Arm,
    untimed: Untimed,
    sizes: TargetSizes,
    bytes_per_s: float,
    rates: dict[int, dict[str, float]],
) -> list[dict[str, Any]]:
    """A row for each range of passes that `arm` has run often enough; T is the most rows of it.

    `rates` are those of `matrix_rates` by T. A policy may leave nodes out of a draft, so trees of
    up to 16 nodes can fall into several ranges.
    """
    report = arm.model.acceptmoe.report()
    by_bound: dict[int, list[Step]] = defaultdict(list)
    for step in arm.steps:
        if step.routing is not None:
            by_bound[bound_of(step.num_nodes)].append(step)
    shared = {
        "policy": arm.name.policy,
        "num_nodes": arm.name.num_nodes,
        "accepted_length": report["accepted_length"],
        "num_compilations": report["compiled"]["num_compilations"],
        "num_draft_compilations": report["compiled"]["num_draft_compilations"],
        "same_as_uncompiled": untimed.num_same,
    }
    num_layers, draft_weights = report["num_sparse_layers"], report["draft_weights"]
    return [
        {"T": bound, **shared}
        | pass_parts(steps, num_layers, sizes, bytes_per_s, best_rate(rates[bound]))
        | draft_parts(steps, untimed, bytes_per_s, best_rate(rates[bound], draft_weights))
        | other_parts(steps, untimed)
        for bound, steps in sorted(by_bound.items())
        if bound in rates and len(steps) >= MIN_PASSES
    ]


def pass_parts(
    steps: list[Step],
    num_layers: int,
    sizes: TargetSizes,
    bytes_per_s: float,
    operations_per_s: float,
) -> dict[str, Any]:
    """The median pass of steps of one range, and the floors of these very passes."""
    counts = [step.routing for step in steps if step.routing is not None]
    works = [
        sizes.pass_work(
            step.num_nodes, num_layers * count.experts_used, num_layers * count.routed_pairs
        )
        for step, count in zip(steps, counts, strict=True)
    ]
    pass_ms = statistics.median(step.pass_ms for step in steps)
    floor = statistics.median(floor_ms(work, bytes_per_s, operations_per_s) for work in works)
    return {
        "pass_ms": pass_ms,
        "floor_ms": floor,
        "pass_ratio": pass_ms / floor,
        "floor_read_ms": statistics.median(read_ms(work, bytes_per_s) for work in works),
        "floor_compute_ms": statistics.median(compute_ms(w, operations_per_s) for w in works),
        "mean_nodes": statistics.fmean(step.num_nodes for step in steps),
        "experts_used": statistics.fmean(count.experts_used for count in counts),
        "natural_union": statistics.fmean(count.natural_union for count in counts),
        "num_passes": len(steps),
    }


def draft_parts(
    steps: list[Step], untimed: Untimed, bytes_per_s: float, operations_per_s: float
) -> dict[str, Any]:
    """The median draft, and the floors of the arm's average one."""
    draft_ms = statistics.median(step.draft_ms for step in steps)
    floor = read_ms(untimed.draft, bytes_per_s)
    return {
        "draft_ms": draft_ms,
        "draft_floor_ms": floor,
        "draft_ratio": draft_ms / floor if floor else None,
        "draft_compute_ms": compute_ms(untimed.draft, operations_per_s),
        "draft_bytes": untimed.draft.num_bytes,
        "draft_operations": untimed.draft.num_operations,
    }


def other_parts(steps: list[Step], untimed: Untimed) -> dict[str, Any]:
    """The selection and what is left of a step, beside the pass."""
    pass_ms, rest_ms = (
        statistics.median(getattr(step, name) for step in steps) for name in ("pass_ms", "rest_ms")
    )
    return {
        "select_ms": untimed.select_ms,
        "select_share": untimed.select_ms / pass_ms,
        "rest_ms": rest_ms,
        "rest_share": rest_ms / pass_ms,
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
