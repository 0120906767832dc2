"""`acceptmoe bench` through a user's door: files, tables, JSON, error texts and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console
from test_commands import plain_text, run, run_json

from acceptmoe.bench.policy_grid import setting_label
from acceptmoe.bench.results import load_results
from acceptmoe.cli.bench_tables import QUALITY_COLUMNS, make_table

QUALITY_KEYS = (
    *("target", "task", "policy", "params", "num_prompts", "accuracy", "accuracy_natural", "kl"),
    *("top1", "accepted_length", "natural_union", "experts_used", "num_experts"),
)
SPEED_KEYS = (
    *("target", "policy", "num_nodes", "tokens_per_s", "q1", "q3", "accepted_length"),
    *("experts_used", "same_as_natural"),
)
LIMITS = ("--max-new-tokens", 6)


@pytest.mark.parametrize(
    "command",
    ["run quality", "run speed", "run all", "compare", "report"],
)
def test_help_has_an_example(command: str) -> None:
    result = run("bench", *command.split(), "--help")
    assert result.exit_code == 0
    assert f"Example: acceptmoe bench {command}" in plain_text(result)


def test_quality_writes_rows_and_shows_them(bundled: str, table_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "made" / "with its parents"
    arguments = (
        *("bench", "run", "quality", "--prompts", 1, "--rival-prompts", 1, "--task", "algebra"),
        *("--policy", "moe-spec:budget=2", "--drafter", "assistant", "--table", table_file),
        *("--num-nodes", 8, "--max-depth", 3, "--audit", 1, "--out", out, *LIMITS),
    )
    content = run_json(*arguments)
    assert content == json.loads((out / "quality.json").read_text())
    assert [row["policy"] for row in content["rows"]] == [
        "accept-depth", "accept", "natural", "moe-spec",
    ]  # fmt: skip
    for row in content["rows"]:
        assert set(QUALITY_KEYS) <= set(row)
        assert row["kl_step"] is not None
    assert content["provenance"]["seed"] == 0
    assert content["settings"]["decoding"]["num_nodes"] == 8
    shown = run(*arguments)
    assert shown.exit_code == 0
    assert f"{bundled}, algebra" in shown.stdout
    assert "points from natural over 1 pairs" in shown.stdout
    assert "too few prompts for an interval" in plain_text(shown)
    assert "by trees: those behind the columns to the right" in plain_text(shown)
    assert f"wrote {out / 'quality.json'}" in plain_text(shown)
    other = run(*arguments, "--seed", 1)
    assert other.exit_code == 1
    assert "holds work with seed 0 and this run has 1" in plain_text(other)
    assert run(*arguments, "--seed", 1, "--fresh").exit_code == 0
    assert run("bench", "compare", out / "quality.json", out / "quality.json").exit_code == 0


def test_speed_writes_rows_and_shows_them(bundled: str, table_file: Path, tmp_path: Path) -> None:
    arguments = (
        *("bench", "run", "speed", "--prompts", 1, "--tuning-prompts", 1, "--policy", "accept"),
        *("--tree", "chain:3", "--table", table_file, "--widen", 2, "--dtype", "float32"),
        *("--guard-prompts", 1, "--out", tmp_path, *LIMITS),
    )
    content = run_json(*arguments)
    rows = load_results(tmp_path / "speed.json").rows
    assert content["rows"] == rows
    assert {row["policy"] for row in rows} == {
        *("natural", "accept", "transformers-generate", "transformers-prompt-lookup"),
        "transformers-assistant",
    }
    for row in rows:
        assert set(SPEED_KEYS) <= set(row)
    shown = run(*arguments)
    assert shown.exit_code == 0
    assert "the default at 3 nodes" in shown.stdout
    assert "random drafts under the guard" in shown.stdout
    assert {"transformers-prompt-lookup", "transformers-generate"} <= set(shown.stdout.split())


def test_tables_fit_and_break_no_name(capsys: pytest.CaptureFixture[str]) -> None:
    widest = {
        **{"num_prompts": 500, "accuracy": 1.0, "difference_points": -10.0, "kl": 0.12345},
        **{"difference_low_points": -20.0, "difference_high_points": 10.0},
        **{"num_prompts_by_trees": 500, "accepted_length": 4.5, "experts_used": 41.9},
        **{"nodes_per_verification": 31.9},
    }
    rows = [
        {"policy": "accept-depth", "params": {}, **widest},
        {"policy": "accept", "params": {"size": 0.1, "min_commitment": 0.15}, **widest},
    ]
    console = Console(width=80)
    console.print(make_table("title", rows, QUALITY_COLUMNS))
    lines = capsys.readouterr().out.splitlines()
    first = [line.split()[0] for line in lines[-4:] if line.strip()]
    assert first[-3:] == ["accept-depth", "accept:size=0.1,", "min_commitment=0.15"]
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)
    assert "-10.00 -20.0 +10.0   500 0.12345 4.50 31.9 41.9" in lines[-3]


def test_peers_are_named_without_their_one_setting() -> None:
    params = {"prompt_lookup_num_tokens": 10}
    assert setting_label("transformers-prompt-lookup", params) == "transformers-prompt-lookup"


def test_compare_fails_when_a_row_got_worse(tmp_path: Path) -> None:
    row = {
        **{"target": "a", "task": "b", "policy": "accept", "params": {}, "answers": "1" * 40},
        **{"kl": 0.1, "experts_used": 2.0},
    }
    files = []
    for name, answers in (("old", "1" * 40), ("new", "10" * 20)):
        content = {"benchmark": "quality", "provenance": {"seed": 0}}
        content["rows"] = [{**row, "answers": answers}]
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps(content))
    result = run("bench", "compare", *files)
    assert result.exit_code == 1
    assert "1 of 1 rows got worse" in plain_text(result)
    assert "a b accept" in result.stdout
    back = run_json("bench", "compare", *reversed(files))
    assert (back["rows"][0]["verdict"], back["num_worse"]) == ("better", 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "quality", "--target", "big-moe"], "target is 'big-moe'; it must be one of"),
        (["run", "quality", "--prompts", 0], "Invalid value for '--prompts'"),
        (["run", "quality", "--task", "chess"], "task is 'chess'; it must be one of"),
        (["run", "quality", "--policy", "best"], "policy is 'best'; it must be one of"),
        (["run", "quality", "--out", "taken"], "taken cannot be made a folder: it is a file"),
        (["run", "all", "--out", "taken/a"], "taken/a cannot be made a folder: Not a directory"),
        (["run", "speed", "--tree", "bush"], "tree is 'bush'; it must be a number of nodes"),
        (["run", "speed", "--draft-weights", "int4"], "Invalid value for '--draft-weights'"),
        (
            ["run", "speed", "--drafter", "ngram", "--draft-weights", "int8"],
            "weights is 'int8' and the drafter 'ngram' has no weights",
        ),
        (["run", "speed", "--dtype", "int8"], "dtype is 'int8'; it must be one of"),
        (["run", "speed", "--out", "taken"], "taken cannot be made a folder: it is a file"),
        (["run", "all", "--target", "big-moe"], "target is 'big-moe'; it must be one of"),
        (["run"], "Usage: acceptmoe bench run"),
        (["compare", "a.json", "b.json"], "a.json cannot be read"),
        (["report", "no/such"], "no/such is no folder; measure into it first"),
        (["report", "."], ". has neither quality.json nor speed.json"),
    ],
)
def test_wrong_usage_is_refused_at_the_door(
    bundled: str,
    arguments: list[object],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").touch()
    result = run("bench", *arguments)
    assert result.exit_code == 2
    assert message in plain_text(result)


def test_report_names_its_page(tmp_path: Path) -> None:
    row = {
        **{"target": "a", "policy": "natural", "params": {}, "num_nodes": 4, "is_chain": True},
        **{"tokens_per_s": 2.0, "q1": 1.0, "q3": 3.0},
    }
    content = {"benchmark": "speed", "rows": [row], "summary": []}
    (tmp_path / "speed.json").write_text(json.dumps(content))
    found = run_json("bench", "report", tmp_path)
    assert found["page"] == str(tmp_path / "report.html")
    assert found["figures"] == [str(tmp_path / "speed-a.png")]
    assert f"wrote {tmp_path / 'report.html'}" in run("bench", "report", tmp_path).stdout
