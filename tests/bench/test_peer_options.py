"""The options of the comparison with llama.cpp, which are read without it."""

from __future__ import annotations

import argparse

import pytest

from acceptmoe.bench.workloads import Tree, chain
from peers.llama_cpp import drafters_of, parse, parse_arm, parse_draft, threads_sleep
from peers.llama_decoding import Draft


@pytest.fixture(autouse=True)
def active_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)


def test_arms_are_policies_with_trees() -> None:
    assert parse_arm("natural@chain:6") == ("natural", chain(6))
    assert parse_arm("accept:size=0.4@32:7") == ("accept:size=0.4", Tree(32, 7))
    with pytest.raises(argparse.ArgumentTypeError, match="must be POLICY@TREE"):
        parse_arm("accept")


def test_drafts_are_lengths_with_a_probability() -> None:
    assert parse_draft("3") == Draft(3)
    assert parse_draft("7:0.5") == Draft(7, 0.5)
    for text in ("0", "64", "3:1"):
        with pytest.raises(argparse.ArgumentTypeError, match="must be a length"):
            parse_draft(text)


def test_given_arms_take_the_place_of_the_default() -> None:
    assert len(parse([]).arm) == 1
    options = parse(["--arm", "accept@16", "--arm", "natural@16", "--draft", "2", "--quick"])
    assert [str(tree) for _, tree in options.arm] == ["16:5", "16:5"]
    assert options.draft == [Draft(2)]
    assert (options.prompts, options.rounds) == (2, 1)


def test_rounded_drafts_are_given_to_both() -> None:
    assert drafters_of(parse([]).draft_weights) == {"draft": False}
    options = parse(["--draft-weights", "int8"])
    assert drafters_of(options.draft_weights) == {"draft": False, "draft-q8": True}


def test_sleeping_threads_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not threads_sleep({})
    assert not threads_sleep({"OMP_WAIT_POLICY": "active"})
    assert not threads_sleep({"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "10000"})
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    with pytest.raises(SystemExit):
        parse([])
    assert "OMP_WAIT_POLICY is passive" in capsys.readouterr().err
