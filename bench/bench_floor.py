"""How near a compiled decode step is to what this machine allows, part by part.

    python bench/bench_floor.py [--quick] [--threads 2] [--out bench/results/floor.json]

A bundled target, widened to hidden size 2048 in bfloat16, decodes tuning prompts with compiled
passes and `experts="acceptmoe"`. For every policy and size of tree: the pass, the draft, the
selection, and the rest of a step, beside the floors of the first two. The same texts are decoded
by the uncompiled loop with Transformers' own experts, for the comparison end to end.

Cells are measured one after the other, and the file is written anew after each. The arms of a cell
take turns prompt by prompt, each prompt beginning with another one. Before anything is timed, the
compiled arm must emit the tokens of the same arm uncompiled (most of them: in bfloat16 two tokens
can be as close as the rounding). Every text ends by itself, so that no draft is cut short.

T is the largest number of rows of the passes that a row stands for (`floor_rows.ROW_BOUNDS`).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from acceptmoe.bench.results import save_results
from acceptmoe.bench.setups import DRAFTERS, Setup, load_setup
from acceptmoe.bench.workloads import TUNING_SPLIT, encode, end_token_ids, mixed_problems
from acceptmoe.drafting.draft_weights import DRAFT_WEIGHTS
from acceptmoe.policies import DEFAULT_POLICY, load_policy
from acceptmoe.targets import target_names
from floor_arms import STOCK_EXPERTS, Arm, ArmName, check_arm, make_arm
from floor_rows import bounds_up_to, compare_end_to_end, rows_of
from floors import TargetSizes, matrix_rates, read_bandwidth

SEED = 0
# The default policy leaves unlikely nodes out of its trees; at 0 all stay, so its passes are full.
FULL_TREES = f"{DEFAULT_POLICY}:min_commitment=0"
CELLS = ["natural@16", "natural@32", "accept-depth@32", f"{FULL_TREES}@16", f"{FULL_TREES}@32"]
BUFFER_BYTES = 2**29  # far beyond any cache
COLUMNS = ("policy", "T", "pass_ms", "floor_ms", "pass_ratio", "draft_ms", "draft_floor_ms")
COLUMNS += ("draft_ratio", "select_ms", "select_share", "rest_ms", "rest_share")

Result = dict[str, Any]
"""What is written about some cells; see `merge`."""


def measure_in_turn(
    arms: list[Arm], prompts: list[Tensor], settings: dict[str, Any], rounds: int, cell: str
) -> list[float]:
    """Decode every prompt with every arm; the read bandwidths, in bytes/s, from between them."""
    buffer = torch.zeros(BUFFER_BYTES // 8, dtype=torch.int64)
    buffer.random_()  # pages of zeros would all be one page of memory
    bandwidths = []
    for arm in arms:
        arm.model.acceptmoe.reset_statistics()
    num_texts = rounds * len(prompts)
    for number in range(num_texts):
        first = number % len(arms)
        for arm in [*arms[first:], *arms[:first]]:
            bandwidths.append(read_bandwidth(buffer))
            arm.measure(prompts[number % len(prompts)], settings)
        show_progress(f"{cell}: text {number + 1} of {num_texts}")
    return bandwidths


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


def measure(options: argparse.Namespace, drafter: str) -> Iterator[Result]:
    """Everything about one target and drafter, cell by cell."""
    setup = load_setup(
        options.target,
        drafter,
        dtype=torch.bfloat16,
        factor=options.factor,
        draft_weights=options.draft_weights,
    )
    drawn = mixed_problems(TUNING_SPLIT, options.prompts, SEED)
    prompts = [encode(setup.tokenizer, drawn_.prompt, setup.model.device) for drawn_ in drawn]
    for name in parse_cells(options.cells):
        yield measure_cell(setup, name, prompts, options)


def measure_cell(
    setup: Setup, name: ArmName, prompts: list[Tensor], options: argparse.Namespace
) -> Result:
    """One compiled arm, and where they are compared the uncompiled loops beside it."""
    end_ids = end_token_ids(setup.model, setup.tokenizer)
    settings = {"do_sample": False, "eos_token_id": end_ids, "pad_token_id": end_ids[0]}
    start = time.perf_counter()
    arm = make_arm(setup, name, options.backend)
    untimed = check_arm(setup, arm, prompts, settings)
    arms = [arm]
    if name.policy in (DEFAULT_POLICY, FULL_TREES):
        arms += [make_arm(setup, replace(name, implementation=way)) for way in STOCK_EXPERTS]
    for stock in arms[1:]:
        stock.decode(prompts[0], settings)
    cell = f"{setup.drafter.name} {name.policy}@{name.num_nodes}"
    show_progress(f"{cell}: ready in {time.perf_counter() - start:.0f} s")
    bandwidths = measure_in_turn(arms, prompts, settings, options.rounds, cell)
    bandwidth = statistics.median(bandwidths)
    rates = {rows: matrix_rates(rows) for rows in bounds_up_to(name.num_nodes)}
    rows = rows_of(arm, untimed, TargetSizes.of(setup.model), bandwidth, rates)
    shown = {
        "target": setup.target,
        "drafter": setup.drafter.name,
        "draft_weights": options.draft_weights,
        "num_prompts": len(prompts),
    }
    return {
        "rows": [shown | row for row in rows],
        "end_to_end": [shown | row for row in compare_end_to_end(arms)],
        "read_bytes_per_s": {cell: bandwidth},
        "read_bytes_per_s_best": {cell: max(bandwidths)},
        "operations_per_s": {cell: {f"T={rows}": found for rows, found in rates.items()}},
    }


def show_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def print_tables(result: Result) -> None:
    """The parts of a cell's steps, then the comparison end to end."""
    for cell, bandwidth in result["read_bytes_per_s"].items():
        print(f"{cell}: reads {bandwidth / 1e9:.1f} GB/s (median)")
        for rows, rates in result["operations_per_s"][cell].items():
            shown = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in rates.items())
            print(f"{cell}: {rows}, products in Gop/s: {shown}")
    print(f"{'drafter':<10} {'policy':<24} " + " ".join(f"{name:>14}" for name in COLUMNS[1:]))
    for row in result["rows"]:
        cells = ["-" if row[name] is None else f"{row[name]:.3g}" for name in COLUMNS[1:]]
        print(f"{row['drafter']:<10} {row['policy']:<24} " + " ".join(f"{c:>14}" for c in cells))
    for row in result["end_to_end"]:
        print(
            f"{row['drafter']}, {row['policy']}, T = {row['T']}: "
            f"{row['compiled_tokens_per_s']:.1f} tokens/s, {row['ratio']:.2f} times the loop with "
            f"{row['best_stock_experts']}; same text {row['num_same']} of {row['num_texts']}",
            flush=True,
        )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="tiny-qwen3-moe", choices=target_names())
    parser.add_argument("--drafter", action="append", choices=DRAFTERS, help="default: eagle3")
    parser.add_argument("--draft-weights", choices=DRAFT_WEIGHTS, help="default: not rounded")
    parser.add_argument(
        "--cells",
        nargs="+",
        metavar="POLICY@T",
        help=f"default: {' '.join(CELLS)}",
    )
    parser.add_argument("--factor", type=int, default=16, help="hidden 128 becomes 2048")
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2, help="texts of each arm and prompt")
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


def merge(parts: list[Result]) -> Result:
    """The lists of all parts one after the other, and their dictionaries as one.

    >>> merge([{"rows": [1], "rates": {"a": 2}}, {"rows": [3], "rates": {"b": 4}}])
    {'rows': [1, 3], 'rates': {'a': 2, 'b': 4}}
    """
    merged = dict(parts[0])
    for part in parts[1:]:
        for key, value in part.items():
            merged[key] = merged[key] | value if isinstance(value, dict) else merged[key] + value
    return merged


def save(options: argparse.Namespace, parts: list[Result]) -> None:
    """Write what has been measured so far."""
    result = merge(parts)
    rows = result.pop("rows")
    names = ("factor", "rounds", "backend", "draft_weights")
    settings = {name: getattr(options, name) for name in names}
    save_results(options.out, "floor", rows, seed=SEED, **settings, **result)


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    parts: list[Result] = []
    for drafter in options.drafter:
        for part in measure(options, drafter):
            print_tables(part)
            parts.append(part)
            if options.out is not None:
                save(options, parts)  # after every cell: a run that is cut short keeps its rows


if __name__ == "__main__":
    main()
