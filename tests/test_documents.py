"""The documents name what exists, and their Python runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from acceptmoe.cli import app
from acceptmoe.models.adapter import FAMILIES
from acceptmoe.policies import POLICIES
from acceptmoe.table import shipped_tables
from acceptmoe.targets import target_names

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
NOT_RUN = "<!-- not run by the tests"
PYTHON_BLOCKS = [
    block
    for before, block in re.findall(r"([^\n]*)\n```python\n(.*?)```", README, re.DOTALL)
    if not before.startswith(NOT_RUN)
]
COMMANDS = [command.callback.__name__ for command in app.registered_commands if command.callback]


def test_readme_has_python_that_is_run() -> None:
    assert PYTHON_BLOCKS


@pytest.mark.skipif(
    "tiny-qwen3-moe" not in target_names() or "tiny-qwen3-moe__assistant" not in shipped_tables(),
    reason="the README's example uses the bundled target and its table, which are not in this tree",
)
@pytest.mark.parametrize("block", PYTHON_BLOCKS)
def test_readme_python_runs(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_readme_python_is_python(block: str) -> None:
    compile(block, "README.md", "exec")


@pytest.mark.parametrize("name", [*FAMILIES, *POLICIES])
def test_readme_names_every_family_and_policy(name: str) -> None:
    assert re.search(rf"`{name}[`:]", README)


@pytest.mark.parametrize("command", COMMANDS)
def test_readme_shows_every_command(command: str) -> None:
    assert f"acceptmoe {command}" in README


def test_contributing_has_the_recipe_that_errors_point_to() -> None:
    sources = "\n".join(path.read_text("utf-8") for path in (ROOT / "src").rglob("*.py"))
    headings = set(re.findall(r"^#+ (.*)$", CONTRIBUTING, re.MULTILINE))
    named = set(re.findall(r'CONTRIBUTING\.md, "([^"]*)"', sources))
    assert named
    assert named <= headings


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_files_that_documents_link_to_exist(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / link).exists(), link
