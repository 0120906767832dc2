"""Finished work outlives its process, and work of different settings is never mixed."""

from __future__ import annotations

from pathlib import Path

import pytest

from acceptmoe.bench.work_file import WorkFile
from acceptmoe.errors import InvalidArgumentError

SETTINGS = {"num_nodes": 8, "seed": 0}


def test_records_are_there_when_the_file_is_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "work.jsonl"
    WorkFile(path, SETTINGS).append([{"index": 0}, {"index": 1, "text": "a\nb é"}])
    again = WorkFile(path, SETTINGS)
    assert again.records == [{"index": 0}, {"index": 1, "text": "a\nb é"}]
    again.append([{"index": 2}])
    assert len(WorkFile(path, SETTINGS).records) == 3


def test_a_line_that_was_cut_off_is_dropped_and_written_over(tmp_path: Path) -> None:
    path = tmp_path / "work.jsonl"
    WorkFile(path, SETTINGS).append([{"index": 0}, {"index": 1}])
    path.write_bytes(path.read_bytes()[:-4])
    again = WorkFile(path, SETTINGS)
    assert again.records == [{"index": 0}]
    again.append([{"index": 7}])
    assert WorkFile(path, SETTINGS).records == [{"index": 0}, {"index": 7}]


def test_a_file_cut_off_in_its_first_line_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "work.jsonl"
    path.write_text('{"num_no')
    WorkFile(path, SETTINGS).append([{"index": 0}])
    assert WorkFile(path, SETTINGS).records == [{"index": 0}]


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "work.jsonl"
    WorkFile(path, SETTINGS)
    with pytest.raises(InvalidArgumentError, match="num_nodes 8 and this run has 16; they cannot"):
        WorkFile(path, {**SETTINGS, "num_nodes": 16})
    assert WorkFile(path, {**SETTINGS, "num_nodes": 16}, is_fresh=True).records == []


def test_another_file_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "work.jsonl"
    path.write_text("notes\n")
    with pytest.raises(InvalidArgumentError, match="no file of finished work"):
        WorkFile(path, SETTINGS)
    assert path.read_text() == "notes\n"
