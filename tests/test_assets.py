from pathlib import Path

import pytest

from acceptmoe import assets
from acceptmoe.errors import InvalidArgumentError


def test_a_checkout_finds_its_data_folders_beside_src():
    root = Path(__file__).parents[1]
    for kind in ("cuda", "graphs", "tables"):
        assert assets.asset_dir(kind) == root / kind


def test_a_wheel_finds_its_data_folders_inside_the_package(tmp_path, monkeypatch):
    package = tmp_path / "site-packages" / "acceptmoe"
    (package / "_assets" / "tables").mkdir(parents=True)
    monkeypatch.setattr(assets, "PACKAGE_DIR", package)
    assert assets.asset_dir("tables") == package / "_assets" / "tables"


def test_a_missing_data_folder_is_named_in_both_places(tmp_path, monkeypatch):
    package = tmp_path / "lib" / "acceptmoe"
    monkeypatch.setattr(assets, "PACKAGE_DIR", package)
    with pytest.raises(FileNotFoundError) as error:
        assets.asset_dir("tables")
    assert str(package / "_assets" / "tables") in str(error.value)
    assert str(tmp_path / "tables") in str(error.value)
    assert "Is the installation whole?" in str(error.value)


def test_an_unknown_kind_is_refused():
    with pytest.raises(InvalidArgumentError, match=r"kind is 'weights'.*cuda, graphs, tables"):
        assets.asset_dir("weights")
