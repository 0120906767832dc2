"""The quality benchmark: what is planned, decoded and counted, on a random target."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from acceptmoe import targets, wrap
from acceptmoe.bench import quality as module
from acceptmoe.bench.demo import measure_fidelity
from acceptmoe.bench.quality import QualitySettings, fingerprint, measure_quality, plan
from acceptmoe.bench.quality_decoding import (
    PLAIN,
    DecodingSettings,
    QualityWorker,
    Work,
    drawn_problems,
    until_end,
)
from acceptmoe.bench.quality_rows import Means, against_moe_spec, judge, quality_rows, summarise
from acceptmoe.bench.setups import load_setup
from acceptmoe.bench.work_file import Record
from acceptmoe.bench.workloads import CALIBRATION_SPLIT, TEST_SPLIT, TUNING_SPLIT, encode
from acceptmoe.errors import InvalidArgumentError
from acceptmoe.policies import DEFAULT_POLICY
from acceptmoe.targets.tasks import TASKS, problems, split_of
from random_target import ASSISTANT, TARGET

TWO_TASKS = ("algebra", "python-asserts")


def small_settings(table_file: Path) -> QualitySettings:
    return QualitySettings(
        targets=(TARGET,),
        tasks=TWO_TASKS,
        num_prompts=2,
        num_rival_prompts=1,
        rivals=("moe-spec:budget=2",),
        decoding=DecodingSettings(
            drafter="assistant",
            table=str(table_file),
            num_nodes=8,
            max_depth=3,
            max_new_tokens=10,
        ),
    )


@pytest.fixture
def settings(bundled: str, table_file: Path) -> QualitySettings:
    return small_settings(table_file)


@pytest.fixture(scope="module")
def records(
    checkpoints: Path, table_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[Record]:
    """The records of `settings`, decoded once for all tests."""
    path = tmp_path_factory.mktemp("quality") / "work.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(targets, "_WEIGHTS", checkpoints)
        patch.setattr(targets, "_ASSISTANT_OF", {TARGET: ASSISTANT})
        return measure_quality(small_settings(table_file), path)


def test_no_reported_prompt_was_calibrated_or_tuned_with() -> None:
    for task in TASKS:
        reported = {problem.prompt for problem in drawn_problems(task, 12, 0)}
        assert {split_of(prompt) for prompt in reported} == {TEST_SPLIT}
        for split in (CALIBRATION_SPLIT, TUNING_SPLIT):
            assert not reported & {problem.prompt for problem in problems(task, split, 12, 0)}


def test_more_prompts_begin_with_the_fewer() -> None:
    # A run with more prompts goes on with the records of one with fewer.
    assert drawn_problems("algebra", 9, 3)[:4] == drawn_problems("algebra", 4, 3)


def test_every_policy_decodes_the_same_prompts(settings: QualitySettings) -> None:
    works = plan(settings, [])
    by_policy: dict[str, list[tuple[str, int]]] = {}
    for work in works:
        for spec in work.policies:
            by_policy.setdefault(spec, []).extend((work.task, index) for index in work.indices)
    every = [(task, index) for task in TWO_TASKS for index in (0, 1)]
    first = [(task, 0) for task in TWO_TASKS]
    assert {spec: sorted(found) for spec, found in by_policy.items()} == {
        PLAIN: every,
        "accept-depth": every,
        DEFAULT_POLICY: every,
        "natural": first,
        "moe-spec:budget=2": first,
    }


def test_a_run_goes_on_where_it_stopped(
    settings: QualitySettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "work.jsonl"
    decoded: list[Work] = []
    original = QualityWorker.decode

    def interrupted(self: QualityWorker, work: Work) -> list[Record]:
        if len(decoded) == 2:
            raise KeyboardInterrupt
        decoded.append(work)
        return original(self, work)

    monkeypatch.setattr(QualityWorker, "decode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure_quality(settings, path)
    finished = [*decoded]
    decoded.clear()

    def watched(self: QualityWorker, work: Work) -> list[Record]:
        decoded.append(work)
        return original(self, work)

    monkeypatch.setattr(QualityWorker, "decode", watched)
    steps: list[tuple[int, int]] = []
    records = measure_quality(settings, path, progress=lambda *step: steps.append(step))
    assert not set(decoded) & set(finished)
    assert steps[-1] == (16, 16)  # two tasks: plain, the paper's and the default twice, two once
    keys = [(r["task"], r["policy"], r["index"]) for r in records]
    assert len(keys) == len(set(keys)) == 16
    assert measure_quality(settings, path) == records

    smaller = dataclasses.replace(settings.decoding, num_nodes=7)
    with pytest.raises(InvalidArgumentError, match="num_nodes 8 and this run has 7"):
        measure_quality(dataclasses.replace(settings, decoding=smaller), path)
    monkeypatch.setattr(module, "git_commit", lambda: "0123")
    with pytest.raises(InvalidArgumentError, match="this run has '0123'"):
        measure_quality(settings, path)


def test_fidelity_equals_that_of_a_second_decoding(
    settings: QualitySettings, records: list[Record], table_file: Path
) -> None:
    setup = load_setup(settings.targets[0], "assistant", table=str(table_file))
    other = load_setup(settings.targets[0], "assistant", table=str(table_file))
    arm = wrap(
        other.model, other.table, drafter=other.drafter, policy="moe-spec:budget=2", num_nodes=8,
        max_depth=3,
    )  # fmt: skip
    prompt = encode(setup.tokenizer, drawn_problems("algebra", 2, 0)[0].prompt, arm.device)
    end = setup.tokenizer.eos_token_id
    expected = measure_fidelity(
        arm, setup.model, prompt,
        {"max_new_tokens": 10, "do_sample": False, "eos_token_id": end, "pad_token_id": end},
    )  # fmt: skip
    found = next(r for r in records if (r["task"], r["policy"]) == ("algebra", "moe-spec:budget=2"))
    assert found["num_tokens"] == expected.num_tokens
    assert found["kl_sum"] == pytest.approx(expected.kl_sum, rel=1e-4)  # fp32 rounding
    assert found["kl_sum"] > 1e-3
    report = arm.acceptmoe.report()
    assert found["experts_used"] == report["experts_used"] * report["num_verifications"]


def test_rows_are_averages_of_their_records(
    settings: QualitySettings, records: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "acceptmoe.bench.quality_rows.check_all",
        lambda problems, texts, ended: [len(text) % 2 == 0 for text in texts],
    )
    judged = judge(settings, records)
    rows = quality_rows(judged)
    assert [(row["task"], row["policy"]) for row in rows] == [
        (task, policy)
        for task in TWO_TASKS
        for policy in ("accept-depth", DEFAULT_POLICY, "natural", "moe-spec")
    ]
    for row in rows:
        trees = [
            r
            for r in records
            if r["task"] == row["task"] and r["policy"].partition(":")[0] == row["policy"]
        ]
        passes = sum(r["num_passes"] for r in trees)
        assert row["experts_used"] == pytest.approx(sum(r["experts_used"] for r in trees) / passes)
        assert row["accepted_length"] == sum(r["num_verified_tokens"] for r in trees) / passes
        assert row["num_prompts_by_trees"] == len(trees)
        assert row["difference_points"] == pytest.approx(
            100 * (row["accuracy"] - row["accuracy_natural"])
        )
        assert row["difference_low_points"] <= row["difference_points"]
        assert row["difference_points"] <= row["difference_high_points"]
        assert row["num_experts"] == 8
    natural = [row for row in rows if row["policy"] == "natural"]
    for row in natural:
        assert (row["same_as_natural"], row["num_prompts"]) == (1.0, 2)
        assert row["kl"] == pytest.approx(0.0, abs=1e-6)  # rounding of fp32
        assert row["top1"] == 1.0


def test_the_summary_compares_on_the_same_prompts(
    settings: QualitySettings, records: list[Record]
) -> None:
    summary = summarise(judge(settings, records))
    accuracy = {claim["policy"]: claim for claim in summary["accuracy"]}
    assert set(accuracy) == {"accept-depth", DEFAULT_POLICY}
    assert accuracy[DEFAULT_POLICY]["num_pairs"] == 2
    (paper,) = summary["default_against_paper"]
    assert paper["saved_share"] == 1 - paper["experts_used"] / paper["experts_used_paper"]
    (rival,) = summary["default_against_moe_spec"]
    used = [
        r["experts_used"] / r["num_passes"] for r in records if r["policy"] == "moe-spec:budget=2"
    ]
    assert rival["experts_used"] == pytest.approx(sum(used) / 2)


def test_of_the_settings_that_dominate_a_budget_the_one_that_accepts_most_is_named(
    settings: QualitySettings, records: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second has fewer experts and a lower KL, the third accepts more but has a higher KL."""
    means = {
        "moe-spec:budget=2": Means(4.0, 0.1, 4.0),
        "accept": Means(3.0, 0.05, 3.5),
        "accept:size=0.1": Means(2.0, 0.0, 1.0),
        "accept:size=0.2": Means(3.0, 0.2, 4.0),
        "accept:size=3": Means(5.0, 0.0, 4.0),
    }
    judged = judge(settings, records)
    monkeypatch.setattr(QualitySettings, "policies", lambda self, target: tuple(means))
    monkeypatch.setattr(
        "acceptmoe.bench.quality_rows.mean_over_tasks",
        lambda judged, target, policy, few_only: means[policy],
    )
    (row,) = against_moe_spec(judged, "random-moe")
    assert (row["best"], row["is_dominated"], row["best_accepted_length"]) == ("accept", True, 3.5)
    means["moe-spec:budget=2"] = Means(2.5, -1.0, 4.0)
    (row,) = against_moe_spec(judged, "random-moe")
    assert (row["best"], row["is_dominated"]) == ("accept:size=0.1", False)
    means["moe-spec:budget=2"] = Means(1.0, 0.1, 4.0)
    (row,) = against_moe_spec(judged, "random-moe")
    assert (row["best"], row["best_kl"], row["is_dominated"]) == (None, None, False)


def test_equal_texts_are_checked_once(
    settings: QualitySettings, records: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []

    def watched(problems: Any, texts: list[str], ended: list[bool]) -> list[bool]:
        asked.extend((p.prompt, text) for p, text in zip(problems, texts, strict=True))
        return [False] * len(texts)

    monkeypatch.setattr("acceptmoe.bench.quality_rows.check_all", watched)
    judge(settings, records)
    assert len(asked) == len(set(asked))


def test_a_text_ends_with_its_end_token() -> None:
    assert until_end([5, 2, 0, 0], [0, 9]) == [5, 2, 0]
    assert until_end([5, 2], [0]) == [5, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": ("big-moe",)}, "target is 'big-moe'; it must be one of random-moe"),
        ({"targets": ()}, "no target or no task"),
        ({"tasks": ("chess",)}, "task is 'chess'; it must be one of word-problems"),
        ({"tasks": ("algebra", "algebra")}, "same task was given twice"),
        ({"num_prompts": 0}, "num_prompts is 0; it must be 1 or larger"),
        ({"num_rival_prompts": -1}, "num_rival_prompts is -1; it must be 0 or larger"),
        ({"jobs": 0}, "jobs is 0; it must be 1 or larger"),
        ({"rivals": ("best",)}, "policy is 'best'; it must be one of"),
    ],
)
def test_bad_settings_are_refused(
    settings: QualitySettings, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        dataclasses.replace(settings, **change).check()


def test_two_processes_give_the_records_of_one(tmp_path: Path) -> None:
    # On a real target: a new process does not know the random one.
    settings = QualitySettings(
        targets=("tiny-qwen3-moe",),
        tasks=("algebra",),
        num_prompts=1,
        num_rival_prompts=0,
        decoding=DecodingSettings(drafter="ngram", max_new_tokens=4),
        jobs=2,
    )
    torch.set_num_threads(1)
    found = measure_quality(settings, tmp_path / "two.jsonl")
    one = dataclasses.replace(settings, jobs=1)
    expected = measure_quality(one, tmp_path / "one.jsonl")

    def ordered(records: list[Record]) -> list[Record]:
        return sorted(records, key=lambda record: str(record["policy"]))

    assert ordered(found) == ordered(expected)
    assert fingerprint(settings.decoding) == fingerprint(one.decoding)
