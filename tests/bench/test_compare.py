"""Two measurements of one benchmark: which rows changed, and how surely."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from result_files import quality_row, save_quality, save_speed, speed_row

from acceptmoe.bench.compare import compare_results, verdict
from acceptmoe.bench.results import load_results, row_key
from acceptmoe.errors import InvalidArgumentError


def test_a_file_does_not_differ_from_itself(tmp_path: Path) -> None:
    path = save_quality(tmp_path / "a.json", [quality_row("accept", "1101" * 10)])
    found = compare_results(path, path)
    (row,) = found.rows
    assert (row["difference_points"], row["low"], row["high"]) == (0.0, 0.0, 0.0)
    assert (row["verdict"], found.num_worse, found.is_paired, found.provenance) == (
        "same", 0, True, {},
    )  # fmt: skip


def test_answers_are_paired_by_prompt(tmp_path: Path) -> None:
    # One prompt of twenty got lost; the pairs see no other difference.
    before = save_quality(tmp_path / "a.json", [quality_row("accept", "10" * 10)])
    after = save_quality(tmp_path / "b.json", [quality_row("accept", "00" + "10" * 9 + "11")])
    (row,) = compare_results(before, after).rows
    assert row["difference_points"] == pytest.approx(-5.0)
    assert -16 < row["low"] < row["high"] == 0.0
    other_seed = save_quality(
        tmp_path / "c.json", [quality_row("accept", "00" + "10" * 9 + "11")], seed=1
    )
    found = compare_results(before, other_seed)
    assert not found.is_paired
    assert found.provenance == {"seed": (0, 1)}
    assert found.rows[0]["low"] < row["low"]  # unpaired is less sure


def test_a_certain_loss_is_worse(tmp_path: Path) -> None:
    rows = [quality_row("accept", "1" * 40), quality_row("natural", "1" * 40)]
    before = save_quality(tmp_path / "a.json", rows)
    worse = [quality_row("accept", "10" * 20), quality_row("oea", "1" * 40)]
    found = compare_results(before, save_quality(tmp_path / "b.json", worse))
    assert [row["verdict"] for row in found.rows] == ["worse"]
    assert (found.num_worse, found.num_only_before, found.num_only_after) == (1, 1, 1)


def test_speeds_are_compared_as_ratios_of_the_same_prompts(tmp_path: Path) -> None:
    before = save_speed(tmp_path / "a.json", [speed_row("natural", [10.0, 40.0, None, 20.0] * 2)])
    after = save_speed(tmp_path / "b.json", [speed_row("natural", [20.0, 80.0, 5.0, 40.0] * 2)])
    (row,) = compare_results(before, after).rows
    assert (row["ratio"], row["low"], row["high"], row["verdict"]) == (2.0, 2.0, 2.0, "better")
    (back,) = compare_results(after, before).rows
    assert (back["ratio"], back["verdict"]) == (0.5, "worse")


def test_a_row_without_speeds_is_no_change(tmp_path: Path) -> None:
    path = save_speed(tmp_path / "a.json", [speed_row("natural", [None])])
    (row,) = compare_results(path, path).rows
    assert (row["ratio"], row["verdict"]) == (None, "unknown")


def test_a_few_prompts_make_nothing_worse(tmp_path: Path) -> None:
    before = save_quality(tmp_path / "a.json", [quality_row("accept", "1111")])
    after = save_quality(tmp_path / "b.json", [quality_row("accept", "0000")])
    found = compare_results(before, after)
    (row,) = found.rows
    assert (row["difference_points"], row["low"], row["high"]) == (-100.0, None, None)
    assert (row["verdict"], found.num_worse) == ("unknown", 0)
    before = save_speed(tmp_path / "c.json", [speed_row("natural", [30.0])])
    after = save_speed(tmp_path / "d.json", [speed_row("natural", [10.0])])
    (row,) = compare_results(before, after).rows
    assert (row["ratio"], row["low"], row["verdict"]) == (pytest.approx(1 / 3), None, "unknown")


def test_small_changes_are_none() -> None:
    assert verdict(-0.9, -0.1, 1.0) == "same"
    assert verdict(-3.0, -1.1, 1.0) == "worse"
    assert verdict(-3.0, 4.0, 1.0) == "same"
    assert verdict(1.1, 4.0, 1.0) == "better"
    assert verdict(0.9, 0.94, 0.05, unchanged=1.0) == "worse"
    assert verdict(None, None, 1.0) == "unknown"


def test_rows_are_told_apart_by_policy_and_settings() -> None:
    first = quality_row("moe-spec", "1", params={"budget": 8})
    second = quality_row("moe-spec", "1", params={"budget": 16})
    assert row_key("quality", first) != row_key("quality", second)
    assert row_key("quality", first)[-1] == "budget=8"


def test_files_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    quality = save_quality(tmp_path / "q.json", [quality_row("accept", "1")])
    speed = save_speed(tmp_path / "s.json", [speed_row("accept", [1.0])])
    other = save_quality(tmp_path / "o.json", [quality_row("oea", "1")])
    with pytest.raises(InvalidArgumentError, match="'speed'; compare two files of one benchmark"):
        compare_results(quality, speed)
    with pytest.raises(InvalidArgumentError, match="no row in common, by target, task, policy"):
        compare_results(quality, other)
    del (row := quality_row("accept", "1"))["answers"]
    old = save_quality(tmp_path / "old.json", [row])
    with pytest.raises(InvalidArgumentError, match="lacks 'answers'; measure anew"):
        compare_results(old, quality)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("rows", "is no JSON text"),
        ("[]", "has the benchmark None; it must be one of quality, speed"),
        (json.dumps({"benchmark": "ops", "rows": []}), "has the benchmark 'ops'"),
        (json.dumps({"benchmark": "speed", "rows": []}), "has no rows"),
        (json.dumps({"benchmark": "speed", "rows": [1]}), "has no rows"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(content)
    with pytest.raises(InvalidArgumentError, match=message):
        load_results(path)
    with pytest.raises(InvalidArgumentError, match="cannot be read"):
        load_results(tmp_path / "missing.json")
