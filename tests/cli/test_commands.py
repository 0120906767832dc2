"""Every command through the same door as a user's, on a random target; every error text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from acceptmoe import CommitmentTable, __version__
from acceptmoe.calibrate import calibrate as make_table
from acceptmoe.cli import app
from acceptmoe.cli.generate import read_prompt
from acceptmoe.targets import load_target
from random_target import ASSISTANT, TARGET, save_table

SMALL_TREE = ["--num-nodes", "8", "--max-depth", "3"]
SOURCES = Path(__file__).parents[2] / "src"
ROW_KEYS = (
    "mode",
    "target",
    "drafter",
    "num_nodes",
    "num_prompts",
    "tokens_per_s",
    "accepted_length",
    "nodes_per_verification",
    "natural_union",
    "eligible",
    "experts_used",
    "num_experts",
    "same_as_autoregressive",
    "top1",
    "kl",
    "accuracy",
    "num_cut_off",
)


def run(*arguments: object, typed: str | None = None) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=typed)


def run_json(*arguments: object) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)  # fails on anything else on standard output


def plain_text(result: Result) -> str:
    """What was written, without the box and the line breaks that rich puts around usage errors."""
    return " ".join(result.output.replace("│", " ").split())


# Help and facts


@pytest.mark.parametrize("command", ["demo", "generate", "calibrate", "info"])
def test_help_has_an_example(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"Example: acceptmoe {command}" in plain_text(result)


def test_version_is_the_packages() -> None:
    assert run("--version").stdout == f"acceptmoe {__version__}\n"


def test_no_command_is_wrong_usage_and_shows_help() -> None:
    result = run()
    assert result.exit_code == 2
    assert "Usage: acceptmoe" in plain_text(result)


def test_info_tells_people_and_programs_the_same(bundled: str) -> None:
    facts = run_json("info")
    assert facts["acceptmoe"] == __version__
    assert facts["torch"] == torch.__version__
    assert facts["bundled_targets"] == [bundled]
    assert {"accept", "accept-depth", "natural"} <= set(facts["policies"])
    shown = plain_text(run("info"))
    for name in ("qwen3_moe", bundled, facts["cpu"], facts["python"]):
        assert name in shown


# generate


def greedy_ids(prompt: str, max_new_tokens: int) -> list[int]:
    model, tokenizer = load_target(TARGET)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    out = model.generate(ids, max_new_tokens=max_new_tokens, do_sample=False)
    new: list[int] = out[0, ids.shape[1] :].tolist()
    return new


@pytest.mark.parametrize("drafter", ["ngram", "assistant"])
def test_generate_with_natural_routing_equals_greedy_generate(bundled: str, drafter: str) -> None:
    found = run_json(
        *("generate", "abc abc abc", "--policy", "natural"),
        *("--drafter", drafter, "--max-new-tokens", 24, *SMALL_TREE),
    )
    assert found["token_ids"] == greedy_ids("abc abc abc", 24)
    assert found["prompt_tokens"] == len("abc abc abc")
    assert found["report"]["policy"] == "natural"
    assert found["target"] == bundled


@pytest.mark.parametrize("policy", ["evict", "utility"])
def test_lossless_draft_policies_and_the_guard_leave_the_text_alone(
    bundled: str, policy: str
) -> None:
    found = run_json(
        *("generate", "abc abc abc", "--policy", policy, "--guard"),
        *("--drafter", "ngram", "--max-new-tokens", 24, *SMALL_TREE),
    )
    assert found["token_ids"] == greedy_ids("abc abc abc", 24)
    assert found["report"]["guard_state"] in ("measuring", "speculating", "plain")


def test_the_remark_says_what_the_guard_does(bundled: str) -> None:
    arguments = ("generate", "--policy", "natural", "--guard", "--max-new-tokens", 3, *SMALL_TREE)
    assert "too few steps were timed" in run(*arguments, "abc").stderr


def test_generate_prints_the_text_and_a_remark_beside_it(bundled: str, table_file: Path) -> None:
    arguments = ("generate", "--table", table_file, "--max-new-tokens", 12, *SMALL_TREE)
    shown = run(*arguments, "abc")
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.strip() == run_json(*arguments, "abc")["text"].strip()
    assert "[accept] 12 tokens" in shown.stderr
    assert "of 8 experts used per layer" in shown.stderr
    assert run(*arguments, "-", typed="abc").stdout == shown.stdout


def test_generate_takes_a_checkpoint_folder(checkpoints: Path) -> None:
    found = run_json(
        *("generate", "--target", checkpoints / TARGET, "--policy", "natural"),
        *("--max-new-tokens", 4, "abc"),
    )
    assert found["target"] == TARGET
    assert found["report"]["drafter"] == "ngram"


def test_generate_drafts_with_rounded_weights(bundled: str) -> None:
    found = run_json(
        *("generate", "abc abc abc", "--policy", "natural", "--draft-weights", "int8"),
        *("--drafter", "assistant", "--max-new-tokens", 24, *SMALL_TREE),
    )
    assert found["token_ids"] == greedy_ids("abc abc abc", 24)
    assert found["report"]["draft_weights"] == "int8"


# calibrate


def test_calibrate_measures_rounded_drafts(
    bundled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafters = []

    def observed(model: Any, drafter: Any, *args: Any, **kwargs: Any) -> CommitmentTable:
        drafters.append(drafter)
        return make_table(model, drafter, *args, **kwargs)

    monkeypatch.setattr("acceptmoe.cli.calibrate.make_table", observed)
    table = tmp_path / "made.json"
    run_json(
        *("calibrate", "--target", bundled, "--out", table, "--prompts", "algebra", "--count", 2),
        *("--max-new-tokens", 8, "--draft-weights", "int8", *SMALL_TREE),
    )
    assert [drafter.weights for drafter in drafters] == ["int8"]
    assert CommitmentTable.load(table).drafter == "assistant"


def test_calibrate_writes_a_table_that_generate_takes(bundled: str, tmp_path: Path) -> None:
    table, prompts = tmp_path / "new" / "folder" / "made.json", tmp_path / "prompts.txt"
    prompts.write_text("abc abc abc\n\nhello hello\nabc abc abc\nx = 1; x = 1;\n12 12 12\n")
    arguments = ("calibrate", "--target", bundled, "--drafter", "assistant", "--out", table)
    shown = run(*arguments, "--prompts", prompts, "--max-new-tokens", 16, *SMALL_TREE)
    assert shown.exit_code == 0, shown.output
    assert f"wrote {table}" in shown.stdout
    made = CommitmentTable.load(table)
    assert (made.target, made.drafter, made.num_nodes) == (bundled, "assistant", 8)
    assert made.provenance.num_prompts == 4  # the repeated and the empty line do not count
    assert made.provenance.dataset == "prompts.txt"
    assert run("generate", "--table", table, "--max-new-tokens", 4, *SMALL_TREE, "a").exit_code == 0


def test_calibrate_takes_tasks_and_reports_as_json(bundled: str, tmp_path: Path) -> None:
    table = tmp_path / "made.json"
    found = run_json(
        *("calibrate", "--target", bundled, "--out", table, "--prompts", "algebra,word-problems"),
        *("--count", 4, "--max-new-tokens", 8, *SMALL_TREE),
    )
    assert found["table"] == str(table)
    assert found["commitment_by_depth"][0] == 1.0
    made = CommitmentTable.load(table)
    assert made.provenance.dataset == "algebra,word-problems (calibration split)"


def test_interrupted_calibration_leaves_no_file(
    bundled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("acceptmoe.cli.calibrate.make_table", interrupted)
    result = run("calibrate", "--target", bundled, "--out", tmp_path / "made.json")
    assert result.exit_code == 130
    assert "interrupted" in result.stderr
    assert list(tmp_path.iterdir()) == []


# demo


def demo_arguments(table_file: Path) -> tuple[object, ...]:
    return ("demo", "--prompts", 2, "--max-new-tokens", 12, "--table", table_file, *SMALL_TREE)


def test_demo_json_has_one_row_a_mode(bundled: str, table_file: Path) -> None:
    found = run_json(*demo_arguments(table_file))
    assert set(found) == {"rows", "provenance"}
    assert all(tuple(row) == ROW_KEYS for row in found["rows"])
    modes = [row["mode"] for row in found["rows"]]
    assert modes == ["autoregressive", "natural", "accept-depth", "accept"]
    plain, natural, *restricted = found["rows"]
    assert (plain["drafter"], plain["num_nodes"], plain["accepted_length"]) == (None, 1, 1.0)
    assert natural["same_as_autoregressive"] == 1.0
    assert natural["top1"] == 1.0
    assert natural["kl"] < 1e-6  # fp32 rounding between one pass over a tree and one over a text
    assert natural["eligible"] == natural["num_experts"] == 8
    assert natural["natural_union"] == natural["experts_used"]
    for row in restricted:
        assert row["experts_used"] <= row["eligible"] <= row["num_experts"]
    for row in (natural, *restricted):
        assert 1 < row["nodes_per_verification"] <= 8
    for row in found["rows"]:
        assert (row["target"], row["num_prompts"]) == (bundled, 2)
        assert row["num_cut_off"] == 2  # the random target seldom ends a text
        assert row["tokens_per_s"] > 0
    facts = found["provenance"]
    assert {"git_commit", "torch", "transformers", "python", "cpu", "command", "date"} <= set(facts)
    assert (facts["seed"], facts["max_new_tokens"]) == (0, 12)


def test_widened_demo_emits_the_same_tokens(bundled: str, table_file: Path) -> None:
    found = run_json(*demo_arguments(table_file), "--widen", 2)
    assert found["provenance"]["widening"] == {bundled: 2}
    plain, natural, *_ = found["rows"]
    assert natural["same_as_autoregressive"] == 1.0
    at_own_size = run_json(*demo_arguments(table_file), "--widen", 1)["rows"]
    assert natural["natural_union"] == at_own_size[1]["natural_union"]
    assert plain["accuracy"] == at_own_size[0]["accuracy"]


def test_demo_says_in_which_precision_it_drafts(bundled: str, table_file: Path) -> None:
    arguments = (*demo_arguments(table_file), "--draft-weights", "int8", "--widen", 2)
    found = run_json(*arguments)
    assert found["provenance"]["draft_weights"] == "int8"
    assert found["rows"][1]["same_as_autoregressive"] == 1.0
    assert "drafter assistant in int8, 8 nodes" in plain_text(run(*arguments))


def test_demo_shows_every_mode_within_80_columns(bundled: str, table_file: Path) -> None:
    shown = run(*demo_arguments(table_file))
    assert shown.exit_code == 0, shown.output
    for mode in ("autoregressive", "natural", "accept-depth", "accept"):
        assert any(line.startswith(f"{mode} ") for line in shown.stdout.splitlines())
    assert "…" not in shown.stdout
    assert max(map(len, shown.stdout.partition("Of 2 texts")[0].splitlines())) <= 80
    assert "natural is lossless" in plain_text(shown)
    assert (
        "Of 2 texts cut off before their end by --max-new-tokens 12, and so not correct: "
        "autoregressive 2, natural 2, accept-depth 2, accept 2."
    ) in plain_text(shown)


# Errors


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["generate", ""], "Invalid value for PROMPT: it is empty; give at least one character"),
        (["generate", "--max-new-tokens", "0", "a"], "Invalid value for '--max-new-tokens'"),
        (["generate", "--num-nodes", "-3", "a"], "Invalid value for '--num-nodes'"),
        (["generate", "--num-nodes", "two", "a"], "Invalid value for '--num-nodes'"),
        (["generate", "--dtype", "int8", "a"], "'int8' is not one of"),
        (
            ["generate", "--draft-weights", "int4", "a"],
            "Invalid value for '--draft-weights': weights is 'int4'; it must be None",
        ),
        (["demo", "--draft-weights", "int4"], "Invalid value for '--draft-weights'"),
        (
            ["calibrate", "--target", TARGET, "--out", "t.json", "--draft-weights", "int4"],
            "Invalid value for '--draft-weights'",
        ),
        (
            ["generate", "--drafter", "ngram", "--draft-weights", "int8", "a"],
            "Invalid value for --draft-weights: weights is 'int8' and the drafter 'ngram' has no",
        ),
        (["generate", "--policy", "best", "a"], "policy is 'best'; it must be one of accept,"),
        (["generate", "--policy", "accept:beta=1", "a"], "sets 'beta'; the settings of 'accept'"),
        (["generate", "--target", "nowhere", "a"], "'nowhere' is no folder and no bundled target"),
        (["generate", "--chat", "a"], "this target's tokenizer has no chat template"),
        (["generate", "--nonsense", "a"], "No such option: --nonsense"),
        (["generate"], "Missing argument"),
        (["demo", "--prompts", "0"], "Invalid value for '--prompts'"),
        (["demo", "--seed", "-1"], "Invalid value for '--seed'"),
        (["calibrate", "--target", TARGET], "Missing option '--out'"),
        (
            ["calibrate", "--target", TARGET, "--out", "/dev/null/table.json"],
            "/dev/null cannot be made a folder: File exists",
        ),
        (["calibrate", "--target", TARGET, "--out", "/"], "/ is a folder; give a file"),
        (
            ["calibrate", "--target", TARGET, "--out", "t.json", "--prompts", "chess"],
            "'chess' is no file and not among the tasks",
        ),
        (["fly"], "No such command 'fly'"),
    ],
)
def test_wrong_usage_exits_2_and_says_what(
    bundled: str, arguments: list[str], expected: str
) -> None:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert expected in plain_text(result)
    assert result.stdout == ""


def test_failures_exit_1_with_one_message(
    bundled: str, checkpoints: Path, table_file: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text(table_file.read_text()[:100])
    lonely = tmp_path / "lonely.txt"
    lonely.write_text("one prompt\n")
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9\n")
    empty = tmp_path / "empty"
    empty.mkdir()
    ngram_table = save_table(checkpoints, tmp_path / "ngram.json", "ngram")
    target = ("--target", checkpoints / TARGET)
    out = ("--out", tmp_path / "made.json")
    for arguments, expected in (
        (("generate", "a"), "no table for target 'random-moe' and drafter 'assistant'"),
        (("generate", "--table", broken, "a"), "it is truncated"),
        (("generate", "--table", "nowhere", "a"), "no table 'nowhere'; it is neither a file"),
        (("generate", "--table", ngram_table, *SMALL_TREE, "a"), "ngram"),
        (
            ("generate", "--table", table_file, "--policy", "accept-depth", "a"),
            "this tree has depth 5",
        ),
        (("generate", "--drafter", empty, "--policy", "natural", "a"), "no config.json"),
        (("generate", "--drafter", "fast", "--policy", "natural", "a"), "drafter is 'fast'"),
        (("generate", "--target", empty, "a"), "cannot be loaded"),
        (("generate", "--target", checkpoints / ASSISTANT, "a"), "no table for target"),
        (
            ("generate", "--target", checkpoints / ASSISTANT, "--policy", "natural", "a"),
            "Qwen3ForCausalLM is a dense model",
        ),
        (("calibrate", *target, *out, "--prompts", lonely), "has 1 different prompts, one a line"),
        (("calibrate", *target, *out, "--prompts", latin), "cannot be read as text in UTF-8"),
    ):
        result = run(*arguments)
        assert result.exit_code == 1, (arguments, result.output)
        assert expected in plain_text(result), arguments
        assert result.stderr.startswith("error: ")
        assert "Traceback" not in result.output
        assert result.stdout == ""


def test_assistant_of_a_target_that_is_not_bundled_is_wrong_usage(checkpoints: Path) -> None:
    result = run("generate", "--target", checkpoints / TARGET, "--drafter", "assistant", "a")
    assert result.exit_code == 2
    assert "'assistant' is the drafter of a bundled target" in plain_text(result)


def test_demo_without_bundled_weights_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("acceptmoe.targets._WEIGHTS", tmp_path)
    result = run("demo")
    assert result.exit_code == 1
    assert "no bundled target is installed, its weights are missing" in plain_text(result)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU where there is none")
def test_a_gpu_that_is_not_there_is_wrong_usage(bundled: str) -> None:
    result = run("generate", "--device", "cuda", "a")
    assert result.exit_code == 2
    assert "torch sees no CUDA device here" in plain_text(result)


def test_the_module_runs_in_a_process_of_its_own(checkpoints: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "acceptmoe", "generate", "--json", "--policy", "natural"),
            *("--target", str(checkpoints / TARGET), "--max-new-tokens", "4", "abc"),
        ],
        env={**os.environ, "PYTHONPATH": str(SOURCES)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["token_ids"]) == 4
    assert json.loads(done.stdout)["provenance"]["command"].startswith("acceptmoe generate --json")


@pytest.mark.parametrize("text", [b"\xff\xfe", b"abc\x80"])
def test_a_prompt_that_is_no_text_is_wrong_usage(text: bytes) -> None:
    typed = CliRunner().invoke(app, ["generate", "-"], input=text)
    given = run("generate", text.decode(errors="surrogateescape"))
    for result in (typed, given):
        assert result.exit_code == 2
        assert "it cannot be read as text in UTF-8" in plain_text(result)


def test_a_closed_standard_input_is_an_empty_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(typer.BadParameter, match="it is empty"):
        read_prompt("-")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the full device is Linux's")
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_full_disk_under_the_results_is_one_message(options: list[str]) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run(
            [sys.executable, "-m", "acceptmoe", "info", *options],
            env={**os.environ, "PYTHONPATH": str(SOURCES)},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.startswith("error: the results cannot be written: ")
    assert "Traceback" not in done.stderr
