"""The sandbox process: reads programs as JSON on stdin, prints which of them passed.

Three walls, since the programs come from a language model. The syntax tree is checked first: no
imports, no classes, no names with double underscores. Then the program sees a short list of
builtins, without files, without `eval`. Last, it runs in a forked child with limits on time,
memory, file size and open files. Only the standard library is imported: the interpreter runs
isolated.
"""

import ast
import json
import math
import os
import resource
import signal
import sys
import time
from typing import Any

_CPU_SECONDS = 1
_WALL_SECONDS = 6  # the machine may be busy: the limit on CPU time is the one that decides
_MEMORY_BYTES = 256 * 2**20
_MAX_SOURCE = 10_000

_BUILTINS = [
    "abs",
    "all",
    "any",
    "bin",
    "bool",
    "chr",
    "dict",
    "divmod",
    "enumerate",
    "filter",
    "float",
    "format",
    "frozenset",
    "hex",
    "int",
    "isinstance",
    "iter",
    "len",
    "list",
    "map",
    "max",
    "min",
    "next",
    "oct",
    "ord",
    "pow",
    "range",
    "repr",
    "reversed",
    "round",
    "set",
    "slice",
    "sorted",
    "str",
    "sum",
    "tuple",
    "zip",
    "Exception",
    "IndexError",
    "KeyError",
    "StopIteration",
    "TypeError",
    "ValueError",
    "ZeroDivisionError",
]
_REFUSED_NODES = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.Global, ast.Nonlocal)


def is_allowed(tree: ast.AST) -> bool:
    """Return whether the program stays inside the language that the tasks need."""
    for node in ast.walk(tree):
        if isinstance(node, _REFUSED_NODES):
            return False
        for name in (getattr(node, "id", ""), getattr(node, "attr", ""), getattr(node, "name", "")):
            if isinstance(name, str) and "__" in name:
                return False
    return True


def passes(source: str, cases: list[list[str]]) -> bool:
    """Run the program in this process; only a limited child calls it."""
    tree = ast.parse(source)
    if not is_allowed(tree):
        return False
    builtins: dict[str, Any] = {name: __builtins__.__dict__[name] for name in _BUILTINS}
    namespace: dict[str, Any] = {"__builtins__": builtins, "math": math}
    exec(compile(tree, "<program>", "exec"), namespace)
    for call, expected in cases:
        got = eval(call, dict(namespace))
        # repr as well: 1 == True == 1.0 in Python, and they are different answers.
        if repr(got) != expected:
            return False
    return True


def limit_resources() -> None:
    """Give up what a generated program has no use for; nothing can raise the limits again."""
    for what, value in (
        (resource.RLIMIT_CPU, _CPU_SECONDS),
        (resource.RLIMIT_AS, _MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 3),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (value, value))


def run_limited(source: str, cases: list[list[str]]) -> bool:
    """Fork a limited child for one program and wait for its verdict, its exit status."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setsid()
            null = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(null, stream)
            limit_resources()
            status = 0 if passes(source, cases) else 1
        except BaseException:  # whatever a program raises, SystemExit too, is a failed program
            status = 1
        finally:
            os._exit(status)
    deadline = time.monotonic() + _WALL_SECONDS
    pause = 0.0005
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return False
        time.sleep(pause)
        pause = min(pause * 1.5, 0.02)


def main() -> None:
    """Answer the list of programs on stdin."""
    sys.setrecursionlimit(2000)
    jobs = json.load(sys.stdin)
    verdicts = [
        len(job["source"]) <= _MAX_SOURCE and run_limited(job["source"], job["cases"])
        for job in jobs
    ]
    json.dump(verdicts, sys.stdout)


if __name__ == "__main__":
    main()
