"""The names that users may import, and nothing less or more than those."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import acceptmoe
from acceptmoe import errors

ROOT = Path(__file__).parents[1]
PUBLIC = [
    "AcceptMoEError",
    "CommitmentTable",
    "DraftTree",
    "DrafterError",
    "InvalidArgumentError",
    "KLLimitWarning",
    "KernelBuildError",
    "SelfCheckError",
    "TableError",
    "TargetError",
    "TreeError",
    "TreeShape",
    "UnsupportedGenerateError",
    "UnsupportedModelError",
    "WrapStateError",
    "__version__",
    "load_target",
    "unwrap",
    "wrap",
]


def test_the_public_names_are_these() -> None:
    # A new one is a promise: it goes into the changelog and the README with this list.
    assert sorted(acceptmoe.__all__) == sorted(PUBLIC)
    for name in PUBLIC:
        assert hasattr(acceptmoe, name)


def test_every_error_is_public_and_has_one_base() -> None:
    for name, kind in vars(errors).items():
        if inspect.isclass(kind):
            assert name in acceptmoe.__all__
            assert issubclass(kind, acceptmoe.AcceptMoEError)


def test_every_public_name_has_a_docstring() -> None:
    for name in PUBLIC:
        if name != "__version__":
            assert inspect.getdoc(getattr(acceptmoe, name))


def test_the_version_is_stated_once_more_and_alike() -> None:
    # Read by hand: Python 3.10 has no tomllib.
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.findall(r'^version = "(.*)"$', text, re.MULTILINE) == [acceptmoe.__version__]
    assert f"## {acceptmoe.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_wrap_keeps_its_arguments() -> None:
    parameters = inspect.signature(acceptmoe.wrap).parameters
    assert list(parameters)[:2] == ["model", "table"]
    assert {"drafter", "policy", "num_nodes", "max_depth"} <= set(parameters)
    assert parameters["table"].default is None
