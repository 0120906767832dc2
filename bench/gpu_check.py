"""Everything that needs a CUDA device, in one run of at most eight minutes.

    python bench/gpu_check.py --json bench/results/gpu_check.json

First the tests marked gpu, in a process of their own: kernels against references, ops in graphs, on
streams and without waiting, captured passes and models against Transformers. Then the speed of one
expert layer, then whole texts of a widened target. Tables of all come last. Exit code 0: all
passed; 1: something failed, or there is no device; 2: wrong usage.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import widened_speed
from acceptmoe.bench.provenance import provenance
from acceptmoe.ops.devices import missing_gpu
from layer_speed import COLUMNS, CudaTimer, LayerShape, layer_speed, measure_machine

ROOT = Path(__file__).resolve().parents[1]
TEST_LIMIT_S = 270  # leaves three and a half minutes for the speeds
PARTS = ("tests", "layer", "widened")
WIDENED_TARGET = "tiny-qwen3-moe"
TEST_COLUMNS = ("test", "outcome", "seconds")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    description = "Everything that needs a CUDA device, in one run of at most eight minutes."
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, help="write the results there as well")
    parser.add_argument(
        "--repeats", type=int, default=30, help="timed calls of each arm (default: %(default)s)"
    )
    parser.add_argument("--only", choices=PARTS, help="leave the other parts out")
    parsed = parser.parse_args(arguments)
    if parsed.repeats < 1:
        parser.error(f"--repeats is {parsed.repeats}; it must be 1 or more")
    return parsed


def run_tests() -> list[dict[str, Any]]:
    """Rows of `TEST_COLUMNS` for every test marked gpu."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "--require-gpu", "-q"]
        command += ["tests/gpu", f"--junitxml={report}"]
        try:
            done = subprocess.run(command, cwd=ROOT, timeout=TEST_LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            return [{"test": "tests/gpu", "outcome": "timeout", "seconds": float(TEST_LIMIT_S)}]
        if not report.exists():
            outcome = f"pytest exited with {done.returncode}"
            return [{"test": "tests/gpu", "outcome": outcome, "seconds": 0.0}]
        return test_rows(report.read_text(encoding="utf-8"))


def test_rows(report: str) -> list[dict[str, Any]]:
    """The rows of a JUnit report."""
    rows = []
    for case in ElementTree.fromstring(report).iter("testcase"):
        outcomes = {child.tag for child in case} & {"failure", "error", "skipped"}
        rows.append(
            {
                "test": f"{case.get('classname')}::{case.get('name')}",
                "outcome": min(outcomes, default="passed"),
                "seconds": float(case.get("time", 0)),
            }
        )
    return rows


def measure_layer(repeats: int) -> dict[str, Any]:
    """The layer's shape, the machine's rates, and rows of `layer_speed.COLUMNS`."""
    shape, timer = LayerShape(), CudaTimer()
    machine = measure_machine(timer, "cuda", num_bytes=4 * 2**30, matrix_size=8192)
    rows = list(layer_speed(shape, machine, timer, device="cuda", repeats=repeats))
    return {
        "bytes_per_s": machine.bytes_per_s,
        "operations_per_s": machine.operations_per_s,
        "rows": rows,
    }


def measure_widened() -> list[dict[str, Any]]:
    """Rows of `widened_speed.COLUMNS`."""
    return list(widened_speed.widened_speed(WIDENED_TARGET, device="cuda"))


def passed(results: dict[str, Any]) -> bool:
    tests: list[dict[str, Any]] | None = results["tests"]
    if tests is None:
        return True
    return bool(tests) and all(row["outcome"] == "passed" for row in tests)


def summary_rows(tests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What did not pass, one row each, then how many did."""
    rows = [row for row in tests if row["outcome"] != "passed"]
    good = [row for row in tests if row["outcome"] == "passed"]
    seconds = sum(row["seconds"] for row in good)
    return [*rows, {"test": f"{len(good)} tests", "outcome": "passed", "seconds": seconds}]


def as_table(columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> str:
    """Right-aligned columns of text; numbers with four digits."""
    cells = [list(columns)]
    for row in rows:
        values = (row[column] for column in columns)
        cells.append(
            [f"{value:.4g}" if isinstance(value, float) else str(value) for value in values]
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in cells
    )


def report(results: dict[str, Any]) -> str:
    """The tables that come last."""
    parts = [f"{results['provenance']['gpu']}, commit {results['provenance']['git_commit']}"]
    if results["tests"] is not None:
        parts.append(as_table(TEST_COLUMNS, summary_rows(results["tests"])))
    if results["layer"] is not None:
        rate = results["layer"]["bytes_per_s"] / 1e9
        parts.append(f"expert layer of Qwen3-30B-A3B, bfloat16; reads {rate:.0f} GB/s")
        parts.append(as_table(COLUMNS, results["layer"]["rows"]))
    if results["widened"] is not None:
        parts.append(as_table(widened_speed.COLUMNS, results["widened"]))
    parts.append(f"{'passed' if passed(results) else 'FAILED'} in {results['seconds']:.0f} s")
    return "\n\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    reason = missing_gpu()
    if reason is not None:
        print(f"gpu_check: {reason}", file=sys.stderr)
        return 1
    begin = time.monotonic()
    wanted = PARTS if options.only is None else (options.only,)
    results: dict[str, Any] = {
        "tests": run_tests() if "tests" in wanted else None,
        "layer": measure_layer(options.repeats) if "layer" in wanted else None,
        "widened": measure_widened() if "widened" in wanted else None,
        "provenance": provenance(seed=0),
        "cuda": torch.version.cuda,
    }
    results["seconds"] = time.monotonic() - begin
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(report(results))
    return 0 if passed(results) else 1


if __name__ == "__main__":
    sys.exit(main())
