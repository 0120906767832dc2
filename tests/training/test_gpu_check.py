"""What of `bench/gpu_check.py` and `bench/layer_speed.py` needs no GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import gpu_check
import widened_speed
from layer_speed import (
    COLUMNS,
    CpuTimer,
    LayerShape,
    Machine,
    check_arms,
    floor_ms,
    layer_speed,
    measure_machine,
    speed_cases,
    spread_ids,
    times_ms,
    union_bytes,
)

TINY = LayerShape(16, 4, 32, 24, torch.float32)
QWEN = LayerShape()


def test_cases_are_those_that_rows_can_touch() -> None:
    cases = list(speed_cases(QWEN))
    assert cases[0] == (1, 8)
    assert [union for rows, union in cases if rows == 8] == [8, 16, 32, 64]
    assert [union for rows, union in cases if rows == 64] == [8, 16, 32, 64, 128]
    assert list(speed_cases(TINY)) == [(8, 8), (8, 16), (32, 8), (32, 16), (64, 8), (64, 16)]


@pytest.mark.parametrize(("num_rows", "union"), [(1, 8), (8, 64), (64, 128), (32, 16)])
def test_ids_touch_exactly_the_union(num_rows: int, union: int) -> None:
    ids = spread_ids(QWEN, num_rows, union, torch.Generator().manual_seed(0))
    assert ids.shape == (num_rows, 8)
    assert ids.unique().numel() == union
    assert all(row.unique().numel() == 8 for row in ids)


def test_the_floor_is_reading_or_multiplying_whichever_is_longer() -> None:
    # Three matrices of 2048 by 768 in two bytes: 9,437,184 for an expert.
    assert union_bytes(QWEN, 8) == 75_497_472
    reads = Machine(bytes_per_s=75_497_472, operations_per_s=1e30)
    assert floor_ms(QWEN, 1, 8, reads) == pytest.approx(1000)
    # 64 rows of 8 experts: 2 operations for each weight.
    multiplies = Machine(bytes_per_s=1e30, operations_per_s=2 * 64 * 8 * 3 * 2048 * 768)
    assert floor_ms(QWEN, 64, 8, multiplies) == pytest.approx(1000)


def test_arms_take_turns() -> None:
    calls: list[str] = []
    arms = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    times = times_ms(arms, CpuTimer(), repeats=3)
    assert calls == ["a", "b"] * 4
    assert {name: len(values) for name, values in times.items()} == {"a": 3, "b": 3}


def test_a_wrong_arm_is_not_timed() -> None:
    right = torch.ones(4)
    arms = {"ours": lambda: 2 * right, "grouped_mm": lambda: right}
    with pytest.raises(AssertionError, match="ours is off by 1 "):
        check_arms(arms)


def test_the_layer_is_measured_on_a_cpu_too() -> None:
    timer = CpuTimer()
    machine = measure_machine(timer, "cpu", num_bytes=2**16, matrix_size=32)
    rows = list(layer_speed(TINY, machine, timer, device="cpu", repeats=1, capture=lambda arm: arm))
    assert {row["arm"] for row in rows} == {"ours", "grouped_mm", "batched_mm"}
    assert len(rows) == 3 * 6
    assert all(tuple(row) == COLUMNS for row in rows)
    assert all(row["times_floor"] == row["median_ms"] / row["floor_ms"] for row in rows)


def test_whole_texts_are_measured_on_a_cpu_too() -> None:
    rows = list(
        widened_speed.widened_speed(
            "tiny-qwen3-moe",
            device="cpu",
            factor=1,
            dtype=torch.float32,
            num_prompts=1,
            max_new_tokens=8,
            kernels={"stock": {}, "ours": {"experts": "acceptmoe"}},
        )
    )
    assert all(tuple(row) == widened_speed.COLUMNS for row in rows)
    arms = ["transformers-generate", "natural 16:5", "accept 16:5"]
    assert [row["arm"] for row in rows] == arms * 2
    natural = [row for row in rows if row["arm"].startswith("natural")]
    assert [row["same_as_plain"] for row in natural] == [1.0, 1.0]
    assert all(row["tokens_per_pass"] > 1 for row in natural)


REPORT = """<testsuites><testsuite>
<testcase classname="tests.gpu.a" name="one" time="1.5"/>
<testcase classname="tests.gpu.a" name="two" time="0.5"><failure message="no"/></testcase>
<testcase classname="tests.gpu.a" name="three" time="0"><skipped message="why"/></testcase>
</testsuite></testsuites>"""


def results(**changes: Any) -> dict[str, Any]:
    return {
        "tests": gpu_check.test_rows(REPORT),
        "layer": {"bytes_per_s": 2e12, "rows": [dict.fromkeys(COLUMNS, 1.0)]},
        "widened": [dict.fromkeys(widened_speed.COLUMNS, "a word")],
        "provenance": {"gpu": "a GPU", "git_commit": "abc"},
        "seconds": 3.0,
        **changes,
    }


def test_a_failed_or_skipped_test_fails_the_check() -> None:
    rows = gpu_check.test_rows(REPORT)
    assert [row["outcome"] for row in rows] == ["passed", "failure", "skipped"]
    assert not gpu_check.passed(results())
    assert gpu_check.passed(results(tests=rows[:1]))
    assert not gpu_check.passed(results(tests=[]))
    assert gpu_check.passed(results(tests=None))


def test_the_report_ends_with_the_verdict() -> None:
    lines = gpu_check.report(results()).splitlines()
    assert lines[0] == "a GPU, commit abc"
    assert "tests.gpu.a::two  failure      0.5" in gpu_check.report(results())
    assert "1 tests" in gpu_check.report(results())
    assert "reads 2000 GB/s" in gpu_check.report(results())
    assert lines[-1] == "FAILED in 3 s"


def test_without_a_gpu_it_refuses(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "missing_gpu", lambda: "torch sees no CUDA device")
    assert gpu_check.main([]) == 1
    assert capsys.readouterr().err == "gpu_check: torch sees no CUDA device\n"


def test_results_are_written_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "missing_gpu", lambda: None)
    monkeypatch.setattr(gpu_check, "run_tests", lambda: gpu_check.test_rows(REPORT)[:1])
    path = tmp_path / "results.json"
    assert gpu_check.main(["--only", "tests", "--json", str(path)]) == 0
    written = json.loads(path.read_text(encoding="utf-8"))
    assert written["tests"][0]["test"] == "tests.gpu.a::one"
    assert written["layer"] is None
    assert written["widened"] is None
    assert {"gpu", "torch", "git_commit"} <= set(written["provenance"])


def test_wrong_usage_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        gpu_check.parse_arguments(["--repeats", "0"])
    assert "--repeats is 0; it must be 1 or more" in capsys.readouterr().err
