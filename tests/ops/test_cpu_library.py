"""The kernels are compiled once, by whatever compiler there is, and failures say what to do."""

from __future__ import annotations

import ctypes
import importlib
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from acceptmoe.errors import KernelBuildError
from acceptmoe.ops import cpu_library


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and sources small enough to compile often."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "add.cpp").write_text('#include "add.h"\nextern "C" int add() { return VALUE; }\n')
    (sources / "add.h").write_text("#define VALUE 7\n")
    monkeypatch.setattr(cpu_library, "SOURCES", sources)
    folder = tmp_path / "cache"
    monkeypatch.setenv("ACCEPTMOE_CACHE", str(folder))
    return folder


def fake_compiler(folder: Path, script: str) -> str:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_library_is_compiled_once_and_kept(cache: Path) -> None:
    library = cpu_library.build()
    assert library.parent == cache
    assert ctypes.CDLL(str(library)).add() == 7
    written = library.stat().st_mtime_ns
    assert cpu_library.build() == library
    assert library.stat().st_mtime_ns == written
    assert list(cache.iterdir()) == [library]  # nothing unfinished stays behind


def test_a_changed_header_makes_another_library(cache: Path) -> None:
    first = cpu_library.build()
    (cpu_library.SOURCES / "add.h").write_text("#define VALUE 8\n")
    second = cpu_library.build()
    assert second != first
    assert ctypes.CDLL(str(second)).add() == 8


def test_other_flags_make_another_library(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = cpu_library.build()
    monkeypatch.setattr(cpu_library, "FLAGS", ("-std=c++17", "-O1", "-fPIC"))
    assert cpu_library.build() != first


BUILD = """
from pathlib import Path
from acceptmoe.ops import cpu_library
cpu_library.SOURCES = Path({sources!r})
print(cpu_library.build())
"""


def test_processes_that_build_at_once_end_with_one_library(cache: Path) -> None:
    program = BUILD.format(sources=str(cpu_library.SOURCES))
    source = str(Path(cpu_library.__file__).parents[2])
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONPATH": source},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    paths = {process.communicate()[0].strip() for process in running}
    assert all(process.returncode == 0 for process in running)
    assert [str(path) for path in cache.iterdir()] == list(paths)
    assert ctypes.CDLL(paths.pop()).add() == 7


def test_the_library_shares_torchs_openmp_runtime() -> None:
    def loaded() -> set[str]:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
        return {line.split()[-1] for line in maps.splitlines() if "libgomp" in line}

    importlib.import_module("sklearn.isotonic")  # brings a runtime of its own
    runtime, before = cpu_library.find_openmp_runtime(), loaded()
    assert runtime is not None
    assert Path(torch.__file__).parent in Path(runtime).parents or len(before) == 1
    ctypes.CDLL(str(cpu_library.build()))
    assert loaded() == before


def test_the_compiler_can_be_named(cache: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("CXX", "g++ -DUNUSED=1")
    assert cpu_library.find_compiler()[1:] == ("-DUNUSED=1",)
    assert ctypes.CDLL(str(cpu_library.build())).add() == 7


def test_a_named_compiler_must_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with pytest.raises(KernelBuildError, match="CXX is 'no-such-compiler -O2', which is not a"):
        cpu_library.find_compiler()


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(KernelBuildError, match=r"no C\+\+ compiler found .*Install g\+\+"):
        cpu_library.find_compiler()


def test_a_failing_compiler_is_quoted(cache: Path, tmp_path: Path, monkeypatch) -> None:
    compiler = fake_compiler(tmp_path, 'echo "something is wrong with line 3" >&2; exit 4')
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(KernelBuildError, match=r"exit code 4.*\n.*is wrong with line 3"):
        cpu_library.build()
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, cache, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ACCEPTMOE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(KernelBuildError, match=r"cannot be kept in .*set ACCEPTMOE_CACHE to"):
        cpu_library.build()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"ACCEPTMOE_CACHE": "/a/b"}, "/a/b"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/acceptmoe"),
        ({"HOME": "/home/me"}, "/home/me/.cache/acceptmoe"),
    ],
)
def test_the_cache_is_where_the_user_keeps_caches(monkeypatch, variables, expected: str) -> None:
    for name in ("ACCEPTMOE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(cpu_library.cache_folder()) == expected
