"""`acceptmoe audit` through the same door as a user's, on a random target; every error text."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from acceptmoe.audit import AuditReport, DepthAudit
from acceptmoe.cli import app
from acceptmoe.cli.audit import audit_warnings
from acceptmoe.cli.prompts import read_prompts
from acceptmoe.policies import load_policy
from acceptmoe.targets.tasks import problems
from random_target import TARGET

HARSH = ("--policy", "moe-spec:budget=2")
SMALL = ("--num-nodes", "8", "--max-depth", "3", "--max-new-tokens", "16", "--share", "1")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["audit", *map(str, arguments)])


def plain_text(result: Result) -> str:
    return " ".join(result.output.replace("│", " ").split())


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text("abc abc abc\n\nhello hello\nabc abc abc\nx = 1; x = 1;\n")
    return file


def run_json(*arguments: object) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)  # fails on anything else on standard output


def test_help_has_an_example() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert "Example: acceptmoe audit" in plain_text(result)


def test_json_has_the_audit_in_the_report(bundled: str, prompts: Path) -> None:
    found = run_json("--target", bundled, "--prompts", prompts, *HARSH, *SMALL)
    assert set(found) == {
        *("target", "num_prompts", "report", "max_kl", "is_above_max_kl", "compare", "provenance"),
        "warnings",
    }
    assert found["target"] == bundled
    assert found["num_prompts"] == 3  # the repeated and the empty line do not count
    assert found["compare"] is None
    assert found["warnings"] == []
    report = found["report"]
    audit = report["audit"]
    assert audit["num_blocks"] == report["num_verifications"] > 0
    assert audit["kl"] > 0.0
    depths = [row["depth"] for row in audit["by_depth"]]
    assert depths == list(range(len(depths)))
    assert 1 < len(depths) <= 4
    assert [row["layer"] for row in audit["by_layer"]] == [0, 1]
    assert report["policy_params"] == {"budget": 2}
    assert report["tokens_per_s"] > 0.0


def test_people_see_both_tables_the_cost_and_the_comparison(
    bundled: str, table_file: Path, prompts: Path
) -> None:
    arguments = ("--target", bundled, "--prompts", prompts, "--table", table_file, *SMALL)
    shown = run(*arguments, "--compare", "--count", 2)
    assert shown.exit_code == 0, shown.output
    text = plain_text(shown)
    for expected in (
        "by depth in the tree, 0 is the root",
        "by sparse layer",
        "model.layers.1.mlp",
        "what the speed costs on your prompts: KL",
        "policy accept, drafter assistant",
        "x autoregressive,",
        "x natural",
    ):
        assert expected in text, expected
    tables = shown.stdout.partition(f"\n{bundled}, policy")[0]
    assert max(map(len, tables.splitlines())) <= 80
    assert "…" not in tables
    rows = run_json(*arguments, "--compare", "--count", 2)["compare"]
    assert [row["mode"] for row in rows] == ["autoregressive", "natural", "accept"]
    assert rows[1]["same_as_autoregressive"] == 1.0
    assert all(row["tokens_per_s"] > 0 for row in rows)


def test_a_natural_policy_has_no_second_row_of_its_own(bundled: str) -> None:
    arguments = ("--target", bundled, "--policy", "natural", "--count", 1, *SMALL)
    found = run_json(*arguments, "--compare", "--max-kl", "1e-9")
    assert [row["mode"] for row in found["compare"]] == ["autoregressive", "natural"]
    assert found["report"]["audit"]["kl"] == 0.0
    assert found["is_above_max_kl"] is False


def test_rounded_drafts_are_audited_and_named(bundled: str) -> None:
    arguments = ("--target", bundled, "--policy", "natural", "--count", 1, *SMALL)
    arguments = (*arguments, "--draft-weights", "int8")
    assert run_json(*arguments)["report"]["draft_weights"] == "int8"
    assert "drafter assistant in int8" in plain_text(run(*arguments))


def test_a_kl_above_the_limit_exits_1_after_the_results(bundled: str, prompts: Path) -> None:
    arguments = ("--target", bundled, "--prompts", prompts, *HARSH, *SMALL, "--max-kl", "1e-6")
    shown = run(*arguments)
    assert shown.exit_code == 1
    assert "what the speed costs on your prompts" in plain_text(shown)
    assert "nats per token, above --max-kl 1e-06" in plain_text(shown)
    found = run(*arguments, "--json")
    assert found.exit_code == 1
    assert json.loads(found.stdout)["is_above_max_kl"] is True
    assert run(*arguments[:-1], "1000").exit_code == 0


def test_a_kl_of_roots_alone_is_said_to_mean_nothing(
    bundled: str, table_file: Path, prompts: Path
) -> None:
    # Only rows that lost nothing are accepted, and no row but the root keeps its experts.
    policy = "accept:exponent=16,top=0,size=1e-6,max_lost=0,max_lost_unsure=0"
    arguments = ("--target", bundled, "--prompts", prompts, "--table", table_file, *SMALL)
    shown = run(*arguments, "--policy", policy, "--max-kl", 0.1, "--json")
    assert shown.exit_code == 0
    found = json.loads(shown.stdout)
    assert found["report"]["accepted_length"] == 1.0
    (warning,) = found["warnings"]
    assert "no emitted token came from a restricted row" in warning
    assert "the KL is 0 by construction" in plain_text(shown)
    nothing = (None,) * 6
    by_depth = (DepthAudit(0, 9, *nothing), DepthAudit(1, 1, *nothing))
    committed = AuditReport(9, 10, *(None,) * 8, by_depth=by_depth, by_layer=())
    assert audit_warnings(load_policy("accept"), committed) == []
    roots = dataclasses.replace(committed, by_depth=by_depth[:1])
    assert len(audit_warnings(load_policy("accept"), roots)) == 1
    assert audit_warnings(load_policy("oea:top=2"), roots) == []  # it restricts roots too


def test_bundled_prompts_are_those_of_the_test_split() -> None:
    texts = read_prompts("algebra", 3, 0, "test")
    assert texts == [problem.prompt for problem in problems("algebra", "test", 3, 0)]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "Missing option '--target'"),
        (["--target", TARGET, "--share", "0"], "it must be above 0 and at most 1"),
        (["--target", TARGET, "--share", "1.5"], "Invalid value for '--share'"),
        (["--target", TARGET, "--share", "nan"], "Invalid value for '--share'"),
        (["--target", TARGET, "--max-kl", "0"], "it must be above 0, in nats per token"),
        (["--target", TARGET, "--max-kl", "nan"], "it must be above 0, in nats per token"),
        (["--target", TARGET, "--count", "0"], "Invalid value for '--count'"),
        (["--target", TARGET, "--draft-weights", "int4"], "Invalid value for '--draft-weights'"),
        (["--target", TARGET, "--policy", "best"], "policy is 'best'; it must be one of"),
        (["--target", TARGET, "--prompts", "chess"], "'chess' is no file and not among the tasks"),
        (["--target", "nowhere"], "'nowhere' is no folder and no bundled target"),
    ],
)
def test_wrong_usage_exits_2_and_says_what(
    bundled: str, arguments: list[str], expected: str
) -> None:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert expected in plain_text(result)
    assert result.stdout == ""


def test_failures_exit_1_with_one_message(bundled: str, prompts: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("\n\n")
    target = ("--target", bundled)
    no_draft = ("--num-nodes", "1", "--max-new-tokens", "4", "--policy", "natural", "--count", "1")
    for arguments, expected in (
        ((*target, "--prompts", empty), "has no prompt; write at least one, one a line"),
        ((*target, "--prompts", prompts), "no table for target 'random-moe' and drafter"),
        ((*target, "--prompts", prompts, *no_draft), "none of 0 verification blocks was audited"),
    ):
        result = run(*arguments)
        assert result.exit_code == 1, (arguments, result.output)
        assert expected in plain_text(result), arguments
        assert result.stderr.startswith("error: ")
        assert result.stdout == ""
