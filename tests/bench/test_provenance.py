"""What goes with every measured number."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import torch

from acceptmoe import __version__
from acceptmoe.bench import provenance as module
from acceptmoe.bench.provenance import command_line, cpu_flags, git_commit, provenance


def test_provenance_names_versions_machine_and_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/bin/acceptmoe", "demo", "--seed", "7"])
    facts = provenance(seed=7)
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    assert (facts["acceptmoe"], facts["torch"]) == (__version__, torch.__version__)
    assert (facts["seed"], facts["command"]) == (7, "acceptmoe demo --seed 7")
    assert facts["num_threads"] == torch.get_num_threads()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", facts["date"])


def test_a_module_run_is_named_as_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/somewhere/acceptmoe/__main__.py", "info"])
    assert command_line() == "acceptmoe info"


def test_the_commit_says_whether_the_sources_were_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHECKOUT", tmp_path)
    assert git_commit() is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "module.py").touch()
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "All"]):
        subprocess.run([*git, *arguments], check=True)
    commit = git_commit()
    assert re.fullmatch("[0-9a-f]{40}", str(commit))
    (tmp_path / "notes.txt").touch()
    assert git_commit() == commit  # not a source
    (tmp_path / "src" / "module.py").write_text("x = 1\n")
    assert git_commit() == f"{commit}-dirty"


def test_a_broken_repository_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(module, "CHECKOUT", tmp_path)
    assert git_commit() is None


def test_a_machine_without_cpuinfo_has_a_name_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cpu_info", dict)
    assert cpu_flags() == frozenset()
    assert module.cpu_name()
