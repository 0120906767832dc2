"""Imports point down the layers, and each heavy dependency has one home."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "acceptmoe"
# Top first: a unit may import itself and anything on a later line, nothing on its own line.
LAYERS = [
    {"__main__"},
    {"cli"},
    {"bench"},
    {"__init__"},
    {"api"},
    {"calibrate", "audit"},
    {"integrations"},
    {"decoding"},
    {"drafting"},
    {"offload"},
    {"models"},
    {"targets"},
    {"ops"},
    {"policies"},
    {"routing"},
    {"selection"},
    {"table"},
    {"tree"},
    {"assets"},
    {"errors"},
]
DEPTH = {unit: depth for depth, units in enumerate(LAYERS) for unit in units}
TRANSFORMERS_HOMES = {
    "api",
    "audit",
    "bench",
    "calibrate",
    "cli",
    "decoding",
    "drafting",
    "integrations",
    "models",
    "targets",
}
HOMES = {
    "cupy": {"ops"},
    "matplotlib": {"bench"},
    "triton": {"ops"},
    "rich": {"cli"},
    "typer": {"cli"},
    "transformers": TRANSFORMERS_HOMES,
}
# What `import acceptmoe` must not need: some users have no GPU, some no terminal.
NOT_IMPORTED = ("cupy", "matplotlib", "triton", "rich", "typer")


def imported_modules(source: str, package: tuple[str, ...]) -> set[str]:
    """Absolute dotted names that a module of `package` imports, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*parents, *([node.module] if node.module else [])])
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


def violations(unit: str, modules: set[str]) -> list[str]:
    """What `unit` imports against the rules."""
    found = []
    for module in sorted(modules):
        top, _, rest = module.partition(".")
        if top == "acceptmoe":
            target = rest.partition(".")[0]
            target = target if target in DEPTH else "__init__"  # defined in acceptmoe/__init__.py
            if target != unit and DEPTH[target] <= DEPTH[unit]:
                found.append(f"{unit} may not import {target}")
        elif top in HOMES and unit not in HOMES[top]:
            found.append(f"{top} is imported only in {sorted(HOMES[top])}, not {unit}")
    return found


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_imports_point_down(path: Path) -> None:
    unit = path.relative_to(PACKAGE).with_suffix("").parts[0]
    assert unit in DEPTH, f"give {unit} a line in LAYERS"
    package = path.relative_to(PACKAGE.parent).parent.parts
    modules = imported_modules(path.read_text(encoding="utf-8"), package)
    assert violations(unit, modules) == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import acceptmoe.cli", ["decoding may not import cli"]),
        ("from acceptmoe import wrap", ["decoding may not import __init__"]),
        ("from .. import api", ["decoding may not import api"]),
        ("def f():\n    from ..bench.demo import rows", ["decoding may not import bench"]),
        ("import rich.table", ["rich is imported only in ['cli'], not decoding"]),
        ("from ..models.kv import keep_path\nfrom .verify import Prefix\nimport torch", []),
    ],
)
def test_the_rules_catch_what_they_should(source: str, expected: list[str]) -> None:
    assert violations("decoding", imported_modules(source, ("acceptmoe", "decoding"))) == expected


IMPORT_AND_WATCH = """
import sys

class Watch:
    asked = []  # of the watched packages, those that a module of ours asked for

    def find_spec(self, name, path=None, target=None):
        frame = sys._getframe(1)
        while "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        is_ours = frame.f_globals.get("__name__", "").startswith("acceptmoe")
        if is_ours and name.partition(".")[0] in %r:
            self.asked.append(name)

sys.meta_path.insert(0, Watch())
import acceptmoe
assert not Watch.asked, Watch.asked
assert not {"cupy", "rich", "typer"} & set(sys.modules)
"""


def test_importing_the_package_imports_no_gpu_and_no_terminal_library() -> None:
    # torch itself imports triton where it is installed, so who asks counts.
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_AND_WATCH % (NOT_IMPORTED,)],
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
