"""What a release holds: the sdist, and the wheel that is built from it."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ASSETS = ("cuda", "graphs", "tables")

pytestmark = pytest.mark.skipif(
    not (ROOT / ".git").exists(), reason="compares with what git tracks; this is no checkout"
)


def tracked(*folders: str) -> list[str]:
    done = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "--", *folders],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel that `python -m build` makes from it."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)],
        capture_output=True,
        check=True,
    )
    return folder


@pytest.fixture(scope="module")
def wheel(release: Path) -> Path:
    (path,) = release.glob("*.whl")
    return path


def test_the_wheel_holds_the_package_and_its_data(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {path.removeprefix("src/") for path in tracked("src/acceptmoe")}
    assert sources <= names
    assert "acceptmoe/py.typed" in names
    assert {f"acceptmoe/_assets/{path}" for path in tracked(*ASSETS)} <= names


def test_the_wheel_holds_nothing_else(wheel: Path) -> None:
    sources = {path.removeprefix("src/") for path in tracked("src/acceptmoe")}
    assets = {f"acceptmoe/_assets/{path}" for path in tracked(*ASSETS)}
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    # What git does not track yet is in too, and is meant to be: a release is built from a commit.
    untracked = set(names - sources - assets)
    assert not {name for name in untracked if name.endswith((".pyc", ".cubin", ".safetensors"))}
    assert all(name.startswith("acceptmoe/") for name in names)


def test_the_sdist_can_be_built_and_tested_from(release: Path) -> None:
    (path,) = release.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in ("Makefile", "constraints.txt", "pyproject.toml", "LICENSE", "CHANGELOG.md"):
        assert name in names
    assert set(tracked("tests", "bench", *ASSETS)) <= names


def test_the_installed_wheel_finds_its_data(wheel: Path, tmp_path: Path) -> None:
    # Unpacking is all that installing a wheel of Python files does, and needs no network.
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import acceptmoe.assets as a; from acceptmoe.cli.info import collect; "
        "print(a.__file__, *(a.asset_dir(kind) for kind in ('cuda', 'graphs', 'tables')), "
        "collect()['git_commit'], sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    module, *folders, commit = done.stdout.splitlines()
    assert module == str(tmp_path / "acceptmoe" / "assets.py")
    assert folders == [str(tmp_path / "acceptmoe" / "_assets" / kind) for kind in ASSETS]
    assert commit == "None"


def test_entry_points_name_what_exists(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/entry_points.txt"))
    assert "acceptmoe = acceptmoe.cli:main" in archive.read(name).decode()
