"""The speed benchmark: turns, tuning, resuming and ratios, on a random target."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from acceptmoe import targets
from acceptmoe.bench.policy_grid import ASSISTED, LOOKUP, PEERS, PLAIN
from acceptmoe.bench.speed import (
    MeasurementError,
    SpeedSettings,
    check_natural,
    final_arms,
    measure_speed,
)
from acceptmoe.bench.speed_arms import ArmName, SpeedArms
from acceptmoe.bench.speed_rows import guard_rows, speed_rows, summarise_speed, tuning_rows
from acceptmoe.bench.work_file import Record
from acceptmoe.bench.workloads import TUNING_SPLIT, Tree, chain, mixed_problems, parse_tree
from acceptmoe.errors import InvalidArgumentError
from acceptmoe.policies import DEFAULT_POLICY
from acceptmoe.targets.tasks import split_of
from random_target import ASSISTANT, TARGET

GRID = (chain(3), Tree(6, 3))


def small_settings(table_file: Path) -> SpeedSettings:
    return SpeedSettings(
        targets=(TARGET,),
        policies=("natural", DEFAULT_POLICY),
        trees=GRID,
        table=str(table_file),
        factor=2,
        dtype="float32",
        num_prompts=2,
        num_tuning_prompts=1,
        num_guard_prompts=2,
        max_new_tokens=8,
    )


@pytest.fixture
def settings(bundled: str, table_file: Path) -> SpeedSettings:
    return small_settings(table_file)


@pytest.fixture(scope="module")
def measured(
    checkpoints: Path, table_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[Record], list[tuple[int, int]]]:
    """Work file, records and progress of one run of `settings`."""
    path = tmp_path_factory.mktemp("speed") / "work.jsonl"
    steps: list[tuple[int, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(targets, "_WEIGHTS", checkpoints)
        patch.setattr(targets, "_ASSISTANT_OF", {TARGET: ASSISTANT})
        records = measure_speed(
            small_settings(table_file), path, progress=lambda *step: steps.append(step)
        )
    return path, records, steps


@pytest.fixture
def records(measured: tuple[Path, list[Record], Any]) -> list[Record]:
    return measured[1]


def test_trees_are_tuned_on_other_prompts_than_the_reported() -> None:
    tuned = {problem.prompt for problem in mixed_problems(TUNING_SPLIT, 8)}
    reported = {problem.prompt for problem in mixed_problems("test", 8)}
    assert not tuned & reported
    assert {split_of(prompt) for prompt in tuned} == {"tuning"}


def test_arms_take_turns_and_each_prompt_begins_with_another(records: list[Record]) -> None:
    by_prompt = {
        index: [r["arm"] for r in records if (r["phase"], r["index"]) == ("test", index)]
        for index in (0, 1)
    }
    first, second = by_prompt[0], by_prompt[1]
    assert first[:3] == list(PEERS)
    assert second == [*first[1:], first[0]]
    tuning = [r["arm"] for r in records if r["phase"] == "tuning"]
    assert tuning == [
        PLAIN,
        *(f"{policy} {tree}" for policy in ("natural", DEFAULT_POLICY) for tree in GRID),
    ]


def test_lossless_arms_emit_the_text_of_plain_decoding(records: list[Record]) -> None:
    plain = {(r["phase"], r["index"]): r["token_ids"] for r in records if r["arm"] == PLAIN}
    others = [r for r in records if r["arm"].startswith((LOOKUP, ASSISTED, "natural"))]
    assert len(others) > 8
    for record in others:
        assert record["token_ids"] == plain[record["phase"], record["index"]]


def test_progress_ends_where_it_said(
    measured: tuple[Path, list[Record], list[tuple[int, int]]],
) -> None:
    steps = measured[2]
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)
    assert all(done <= total for done, total in steps)


def test_finished_prompts_are_not_decoded_again(
    settings: SpeedSettings,
    measured: tuple[Path, list[Record], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, records, _ = measured

    def unexpected(self: SpeedArms, name: ArmName, prompt: Any) -> Record:
        raise AssertionError(f"{name} was decoded again")

    monkeypatch.setattr(SpeedArms, "decode", unexpected)
    assert measure_speed(settings, path) == records
    with pytest.raises(InvalidArgumentError, match="factor 2 and this run has 1; they cannot be"):
        measure_speed(dataclasses.replace(settings, factor=1), path)


def test_rows_have_speeds_counts_and_ratios(settings: SpeedSettings, records: list[Record]) -> None:
    rows = speed_rows(settings, records)
    assert [row["policy"] for row in rows[:3]] == list(PEERS)
    names = [ArmName(r["policy"], None) for r in rows[:3]]
    assert final_arms(settings, records, TARGET)[:3] == names
    for row in rows:
        assert row["q1"] <= row["tokens_per_s"] <= row["q3"]
        assert row["num_prompts"] == 2
        assert row["num_experts"] == 8
    plain = rows[0]
    assert plain["ratios"][PLAIN] == {"median": 1.0, "low": None, "high": None}
    assert (plain["num_nodes"], plain["accepted_length"], plain["drafter"]) == (None, None, None)
    natural = [row for row in rows if row["policy"] == "natural"]
    assert {row["num_nodes"] for row in natural} >= {32, 64}
    assert sum(row["is_best_tree"] for row in natural) == 1
    assert all(row["same_as_natural"] == 1.0 for row in natural)
    (claim,) = summarise_speed(rows)
    ratios = claim["ratios"]
    assert claim["ratio_to_faster_usual_natural"] == min(
        ratios["natural-32"]["median"], ratios["natural-64"]["median"]
    )
    assert len(tuning_rows(settings, records)) == 4


def test_a_guard_keeps_useless_drafts_off(settings: SpeedSettings, records: list[Record]) -> None:
    (row,) = guard_rows(settings, records)
    assert (row["num_prompts"], row["same_as_natural"]) == (2, 1.0)
    assert row["ratio"]["median"] > 0
    assert row["tokens_per_s"] > 0
    assert row["guard_state"] in ("measuring", "plain", "speculating")
    assert row["guard_reason"]
    texts = [record["token_ids"] for record in records if record["phase"] == "guard"]
    assert {len(text) for text in texts} == {8}  # no end token ends them
    assert guard_rows(dataclasses.replace(settings, num_guard_prompts=0), records) == []


def timed(arm: str, phase: str, index: int, decode_s: float) -> Record:
    return {
        "target": TARGET,
        "phase": phase,
        "index": index,
        "arm": arm,
        "token_ids": [1] * 11,
        "decode_s": decode_s,
        "num_first": 1,
        "call_s": 2 * decode_s,
        "num_passes": 2,
        "num_verified_tokens": 10,
        "natural_union": 8.0,
        "eligible": 6.0,
        "experts_used": 4.0,
    }


def test_the_best_tree_is_chosen_on_tuning_prompts_alone(settings: SpeedSettings) -> None:
    speeds = {"chain:3": (1.0, 9.0), "6:3": (2.0, 0.1)}  # seconds on tuning and on test prompts
    records = [
        timed(f"{policy} {tree}", phase, 0, seconds)
        for policy in ("natural", DEFAULT_POLICY)
        for tree, both in speeds.items()
        for phase, seconds in zip(("tuning", "test"), both, strict=True)
    ]
    best = [name for name in final_arms(settings, records, TARGET) if name.tree is not None]
    assert best[:2] == [ArmName("natural", chain(3)), ArmName(DEFAULT_POLICY, chain(3))]


def test_ratios_pair_the_prompts(settings: SpeedSettings) -> None:
    arms = [*PEERS, "natural chain:3", "natural 32:5", "natural 64:5"]
    records = [timed(f"{policy} chain:3", "tuning", 0, 1.0) for policy in settings.policies or ()]
    settings = dataclasses.replace(settings, num_prompts=5)
    for index, seconds in enumerate((1.0, 10.0, 2.0, 5.0, 3.0)):
        records += [timed(arm, "test", index, seconds) for arm in arms]
        records.append(timed(f"{DEFAULT_POLICY} chain:3", "test", index, seconds / 2))
    (claim,) = summarise_speed(speed_rows(settings, records))
    for found in claim["ratios"].values():
        assert found == {"median": 2.0, "low": 2.0, "high": 2.0}


def test_natural_trees_that_emit_other_text_are_not_timed() -> None:
    records = [timed(PLAIN, "tuning", 0, 1.0)]
    records += [timed(f"natural {tree}", "tuning", 0, 1.0) for tree in (3, 4, 5)]
    check_natural(records, TARGET)
    for record in records[2:]:
        record["token_ids"] = [2] * 11
    with pytest.raises(MeasurementError, match="other text than plain generate 2 times of 3"):
        check_natural(records, TARGET)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("chain:6", Tree(6, 5, is_chain=True)),
        ("32", Tree(32, 5)),
        ("32:7", Tree(32, 7)),
        ("4", Tree(4, 3)),
    ],
)
def test_trees_are_read_as_they_are_written(text: str, expected: Tree) -> None:
    assert parse_tree(text) == expected
    assert parse_tree(str(expected)) == expected


@pytest.mark.parametrize("text", ["", "1", "chain:6:2", "tree", "100000", "8:0x"])
def test_other_texts_are_no_trees(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="; it must be a number of nodes from 2"):
        parse_tree(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": ("big-moe",)}, "target is 'big-moe'; it must be one of random-moe"),
        ({"trees": ()}, "no target or no tree"),
        ({"dtype": "int8"}, "dtype is 'int8'; it must be one of bfloat16, float32"),
        ({"num_prompts": 0}, "num_prompts is 0; it must be 1 or larger"),
        ({"num_guard_prompts": -1}, "num_guard_prompts is -1; it must be 0 or larger"),
        ({"factor": 512}, "factor is 512; it must be 256 or less"),
        ({"policies": ("best",)}, "policy is 'best'; it must be one of"),
        ({"drafter": "oracle"}, "drafter is 'oracle'; it must be one of"),
    ],
)
def test_bad_settings_are_refused(
    settings: SpeedSettings, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        dataclasses.replace(settings, **change).check()
