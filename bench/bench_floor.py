"""How near a compiled decode step is to what this machine allows, part by part.

    python bench/bench_floor.py [--quick] [--threads 2] [--out bench/results/floor.json]

A bundled target, widened to hidden size 2048 in bfloat16, decodes tuning prompts with compiled
passes and `experts="acceptmoe"`. For every policy and size of tree: the pass, the draft, the
selection, and the rest of a step, beside the floors of the first two. The same texts are decoded
by the uncompiled loop with Transformers' own experts, for the comparison end to end.

The arms take turns prompt by prompt, each prompt beginning with another one. Before anything is
timed, every compiled arm must emit the tokens of the same arm uncompiled (most of them: in bfloat16
two tokens can be as close as the rounding). Every text ends by itself, so that no draft is cut
short and each arm compiles few sizes of pass.

T is the number of rows of a compiled pass.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from acceptmoe import wrap
from acceptmoe.bench.demo import twin_of
from acceptmoe.bench.results import save_results
from acceptmoe.bench.setups import DRAFTERS, Setup, load_setup
from acceptmoe.bench.token_clock import TimedText, generate_timed
from acceptmoe.bench.workloads import TUNING_SPLIT, encode, end_token_ids, mixed_problems
from acceptmoe.decoding.graph_shapes import load_graph_shapes, sizes_for
from acceptmoe.drafting import Drafter, Eagle3Drafter
from acceptmoe.policies import DEFAULT_POLICY, load_policy
from acceptmoe.targets import target_names
from floors import (
    TargetSizes,
    Work,
    compute_ms,
    counted_products,
    floor_ms,
    matrix_rates,
    read_bandwidth,
    read_ms,
)
from recorded_routing import RecordedRouting
from step_log import Step, StepLog

SEED = 0
# The default policy leaves unlikely nodes out of its trees; at 0 all stay, so its passes are full.
FULL_TREES = f"{DEFAULT_POLICY}:min_commitment=0"
CELLS = ["natural@16", "natural@32", "accept-depth@32", f"{FULL_TREES}@16", f"{FULL_TREES}@32"]
CELLS += [f"{DEFAULT_POLICY}@16"]
MIN_PASSES = 5  # of one size, for a row
MAX_DEPTH = 5
# Prompt and text; no text comes near it, so no draft is cut short by it. With the rows of a tree
# it fills a compiled cache of 512 slots for every size of tree.
MAX_LENGTH = 448
BUFFER_BYTES = 2**29  # far beyond any cache
STOCK_EXPERTS = ("grouped_mm", "eager")
COLUMNS = ("policy", "T", "pass_ms", "floor_ms", "pass_ratio", "draft_ms", "draft_floor_ms")
COLUMNS += ("draft_ratio", "select_ms", "select_share", "rest_ms", "rest_share")


@dataclass(frozen=True)
class ArmName:
    """A policy, a size of tree, and how its experts and passes are computed."""

    policy: str
    num_nodes: int
    implementation: str = "compiled"  # or "uncompiled", or one of `STOCK_EXPERTS`, uncompiled

    def __str__(self) -> str:
        return f"{self.policy} {self.num_nodes} {self.implementation}"


@dataclass
class Arm:
    """One wrapped twin of the target, and what has been measured on it."""

    name: ArmName
    model: PreTrainedModel
    log: StepLog
    texts: list[TimedText] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def decode(self, prompt: Tensor, settings: dict[str, Any]) -> TimedText:
        """One text; its steps are in the log."""
        self.log.clear()
        num_new = MAX_LENGTH - prompt.shape[1]
        return generate_timed(self.model, prompt, max_new_tokens=num_new, **settings)

    def measure(self, prompt: Tensor, settings: dict[str, Any]) -> None:
        """Decode and keep the times."""
        self.texts.append(self.decode(prompt, settings))
        self.steps += self.log.steps()


def drafter_of(setup: Setup) -> Drafter:
    """A drafter for one arm, on the same weights.

    An EAGLE-3 head multiplies by our kernels or by torch's, as the last `wrap` of it said, so arms
    that differ in that need a head each.
    """
    drafter = setup.drafter
    if not isinstance(drafter, Eagle3Drafter):
        return drafter
    return Eagle3Drafter(copy.copy(drafter.head), topk=drafter.topk)


def make_arm(setup: Setup, name: ArmName, backend: str = "inductor") -> Arm:
    """A twin on the same weights, wrapped as `name` says; `backend` compiles its passes."""
    twin = twin_of(setup.model)
    is_stock = name.implementation in STOCK_EXPERTS
    if is_stock:
        twin.set_experts_implementation(name.implementation)
    model = wrap(
        twin,
        setup.table,
        drafter=drafter_of(setup),
        policy=load_policy(name.policy),
        num_nodes=name.num_nodes,
        max_depth=MAX_DEPTH,
        experts=None if is_stock else "acceptmoe",
        compile=backend if name.implementation == "compiled" else False,
        allow_table_mismatch=True,
    )
    return Arm(name, model, StepLog(model.acceptmoe))


@dataclass(frozen=True)
class Untimed:
    """What was counted while a compiled arm was checked against its uncompiled twin."""

    num_same: int
    draft: Work  # of one draft, on average
    select_ms: float


def check_arm(setup: Setup, arm: Arm, prompts: list[Tensor], settings: dict[str, Any]) -> Untimed:
    """Compile `arm`, compare its tokens, count its drafts, record routing and time the selection.

    Exits when most texts differ from those of the uncompiled twin.
    """
    reference = make_arm(setup, ArmName(arm.name.policy, arm.name.num_nodes, "uncompiled"))
    routing = RecordedRouting(reference.model)
    num_same, draft, num_drafts = 0, Work(), 0
    for prompt in prompts:
        with routing.recording():
            expected = reference.decode(prompt, settings).token_ids
        with counted_products(arm.model.acceptmoe.drafter) as work:
            arm.log.work = work
            num_same += arm.decode(prompt, settings).token_ids == expected
            arm.log.work = None
        drafted = arm.log.drafted_after_first()
        draft.num_bytes += drafted.num_bytes
        draft.num_operations += drafted.num_operations
        num_drafts += len(arm.log.steps())
    if 2 * num_same < len(prompts):
        sys.exit(
            f"{arm.name} emits the tokens of the uncompiled loop for {num_same} prompts of "
            f"{len(prompts)}; its speed would mean nothing"
        )
    mean = Work(draft.num_bytes / num_drafts, draft.num_operations / num_drafts)
    return Untimed(num_same, mean, routing.time_selection_ms())


def measure_in_turn(
    arms: list[Arm], prompts: list[Tensor], settings: dict[str, Any], rounds: int
) -> list[float]:
    """Decode every prompt with every arm; the read bandwidths, in bytes/s, from between them."""
    buffer = torch.zeros(BUFFER_BYTES // 8, dtype=torch.int64)
    buffer.random_()  # pages of zeros would all be one page of memory
    bandwidths = []
    for arm in arms:
        arm.model.acceptmoe.reset_statistics()
    for number in range(rounds * len(prompts)):
        first = number % len(arms)
        for arm in [*arms[first:], *arms[:first]]:
            bandwidths.append(read_bandwidth(buffer))
            arm.measure(prompts[number % len(prompts)], settings)
    return bandwidths


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


def parse_cells(texts: list[str]) -> list[ArmName]:
    """Compiled arms from texts like "accept@32" (policy, then rows).

    >>> parse_cells(["moe-spec:budget=8@16"])
    [ArmName(policy='moe-spec:budget=8', num_nodes=16, implementation='compiled')]
    """
    cells = []
    for text in texts:
        policy, at, rows = text.rpartition("@")
        if not at or not rows.isdigit() or int(rows) < 2:
            sys.exit(f"cell is {text!r}; it must be a policy and a number of rows, as 'accept@32'")
        load_policy(policy)
        cells.append(ArmName(policy, int(rows)))
    return cells


def measure(options: argparse.Namespace, drafter: str) -> dict[str, Any]:
    """Everything about one target and drafter."""
    setup = load_setup(options.target, drafter, dtype=torch.bfloat16, factor=options.factor)
    drawn = mixed_problems(TUNING_SPLIT, options.prompts, SEED)
    prompts = [encode(setup.tokenizer, drawn_.prompt, setup.model.device) for drawn_ in drawn]
    end_ids = end_token_ids(setup.model, setup.tokenizer)
    settings = {"do_sample": False, "eos_token_id": end_ids, "pad_token_id": end_ids[0]}
    sizes = TargetSizes.of(setup.model)
    compiled, untimed = [], {}
    for name in parse_cells(options.cells):
        start = time.perf_counter()
        arm = make_arm(setup, name, options.backend)
        untimed[name] = check_arm(setup, arm, prompts, settings)
        compiled.append(arm)
        print(f"{drafter}, {name}: ready in {time.perf_counter() - start:.0f} s", file=sys.stderr)
    stock = [
        make_arm(setup, ArmName(arm.name.policy, arm.name.num_nodes, way))
        for arm in compiled
        if arm.name.policy in (DEFAULT_POLICY, FULL_TREES)
        for way in STOCK_EXPERTS
    ]
    for arm in stock:
        arm.decode(prompts[0], settings)
    arms = [*compiled, *stock]
    bandwidths = measure_in_turn(arms, prompts, settings, options.rounds)
    max_nodes = max(arm.name.num_nodes for arm in compiled)
    rates = {rows: matrix_rates(rows) for rows in sizes_for(max_nodes, load_graph_shapes())}
    best_rates = {rows: max(found.values()) for rows, found in rates.items()}
    bandwidth = statistics.median(bandwidths)
    shown = {"target": options.target, "drafter": drafter, "num_prompts": len(prompts)}
    rows = [
        shown | row
        for arm in compiled
        for row in rows_of(arm, untimed[arm.name], sizes, bandwidth, best_rates)
    ]
    return {
        "rows": rows,
        "end_to_end": [shown | row for row in compare_end_to_end(arms)],
        "read_bytes_per_s": {drafter: bandwidth},
        "read_bytes_per_s_best": {drafter: max(bandwidths)},
        "operations_per_s": {drafter: {f"T={rows}": found for rows, found in rates.items()}},
    }


def print_tables(result: dict[str, Any]) -> None:
    """The parts of a step, then the comparison end to end."""
    for drafter, bandwidth in result["read_bytes_per_s"].items():
        print(f"{drafter}: reads {bandwidth / 1e9:.1f} GB/s (median)")
        for rows, rates in result["operations_per_s"][drafter].items():
            shown = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in rates.items())
            print(f"{drafter}: {rows}, products in Gop/s: {shown}")
    print(f"{'drafter':<10} {'policy':<24} " + " ".join(f"{name:>14}" for name in COLUMNS[1:]))
    for row in result["rows"]:
        cells = ["-" if row[name] is None else f"{row[name]:.3g}" for name in COLUMNS[1:]]
        print(f"{row['drafter']:<10} {row['policy']:<24} " + " ".join(f"{c:>14}" for c in cells))
    for row in result["end_to_end"]:
        print(
            f"{row['drafter']}, {row['policy']}, T = {row['T']}: "
            f"{row['compiled_tokens_per_s']:.1f} tokens/s, {row['ratio']:.2f} times the loop with "
            f"{row['best_stock_experts']}; same text {row['num_same']} of {row['num_texts']}"
        )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="tiny-qwen3-moe", choices=target_names())
    parser.add_argument("--drafter", action="append", choices=DRAFTERS, help="default: eagle3")
    parser.add_argument(
        "--cells",
        nargs="+",
        metavar="POLICY@T",
        help=f"default: {' '.join(CELLS)}",
    )
    parser.add_argument("--factor", type=int, default=16, help="hidden 128 becomes 2048")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3, help="texts of each arm and prompt")
    parser.add_argument("--quick", action="store_true", help="one cell, two prompts, one round")
    parser.add_argument("--backend", default="inductor", help="of torch.compile; 'eager' is quick")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="where to write JSON (default: nowhere)")
    options = parser.parse_args(arguments)
    options.drafter = options.drafter or ["eagle3"]
    if options.quick:
        options.prompts, options.rounds = 2, 1
    options.cells = options.cells or ([f"{FULL_TREES}@16"] if options.quick else CELLS)
    return options


def merge(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The lists of all parts one after the other, and their dictionaries as one."""
    merged = dict(parts[0])
    for part in parts[1:]:
        for key, value in part.items():
            merged[key] = merged[key] | value if isinstance(value, dict) else merged[key] + value
    return merged


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    result = merge([measure(options, drafter) for drafter in options.drafter])
    print_tables(result)
    if options.out is not None:
        rows = result.pop("rows")
        settings = {name: getattr(options, name) for name in ("factor", "rounds", "backend")}
        save_results(options.out, "floor", rows, seed=SEED, **settings, **result)


if __name__ == "__main__":
    main()
