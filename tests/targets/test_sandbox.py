"""Generated programs: judged exactly, and unable to do harm."""

import time
from pathlib import Path

import pytest

from acceptmoe.targets.problem import Case
from acceptmoe.targets.sandbox import Program, run_programs

GOOD = Program("def f(x):\n    return x + 1", (Case("f(1)", "2"), Case("f(-1)", "0")))

HARMFUL = {
    "endless loop": "def f(x):\n    while True:\n        pass",
    "endless loop at import": "while True:\n    pass",
    "swallows everything": (
        "def f(x):\n    while True:\n        try:\n            [0] * 10**12\n"
        "        except Exception:\n            x = 1"
    ),
    "memory bomb": "def f(x):\n    return len([0] * 10**10)",
    "growing list": "def f(x):\n    a = [0]\n    while True:\n        a += a",
    "huge number": "def f(x):\n    return 9 ** 9 ** 9",
    "recursion": "def f(x):\n    return f(x)",
    "writes a file": "def f(x):\n    open('made', 'w').write('x')\n    return x + 1",
    "imports": "import os\ndef f(x):\n    return x + 1",
    "imports inside": "def f(x):\n    from socket import socket\n    return x + 1",
    "dynamic import": "def f(x):\n    __import__('os').abort()\n    return x + 1",
    "climbs to object": ("def f(x):\n    ().__class__.__base__.__subclasses__()\n    return x + 1"),
    "always equal": (
        "class A:\n    def __eq__(self, other):\n        return True\ndef f(x):\n    return A()"
    ),
    "exits": "def f(x):\n    raise SystemExit(0)",
    "wrong": "def f(x):\n    return x",
    "wrong type": "def f(x):\n    return float(x + 1)",
    "no function": "x = 1",
    "not Python": "def f(x) return",
    "null byte": "def f(x):\n    return x + 1\0",
    "deeply nested": "f = " + "(" * 5000 + "1" + ")" * 5000,
    "empty": "",
    "very long": "def f(x):\n    return x + 1\n" + "# long\n" * 10_000,
}


@pytest.mark.parametrize("name", HARMFUL)
def test_a_bad_program_fails_and_its_neighbors_do_not(name: str) -> None:
    bad = Program(HARMFUL[name], GOOD.cases)
    assert run_programs([GOOD, bad, GOOD]) == [True, False, True]


def test_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_programs([Program(HARMFUL["writes a file"], GOOD.cases)])
    assert not list(tmp_path.iterdir())


def test_an_argument_is_fresh_for_every_case() -> None:
    program = Program(
        "def f(a):\n    a.append(1)\n    return a", (Case("f([])", "[1]"), Case("f([])", "[1]"))
    )
    assert run_programs([program]) == [True]


def test_no_programs_start_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.run", None)
    assert run_programs([]) == []


def test_two_hundred_programs_are_quick() -> None:
    started = time.monotonic()
    assert all(run_programs([GOOD] * 200))
    assert time.monotonic() - started < 20  # about one second on an idle machine
