"""Where the data folders beside the Python lie, in a checkout and in an installed wheel."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

from acceptmoe.errors import InvalidArgumentError

AssetKind = Literal["cuda", "graphs", "tables"]
PACKAGE_DIR = Path(__file__).resolve().parent


def asset_dir(kind: AssetKind) -> Path:
    """The folder of the CUDA sources, the captured tree shapes or the commitment tables.

    A wheel carries it inside the package (`_assets/<kind>`), a checkout beside `src/`. A real path,
    not a resource: NVRTC needs a folder for its include option.

    Raises `FileNotFoundError` naming both places when it is in neither, `InvalidArgumentError` for
    an unknown kind.
    """
    if kind not in get_args(AssetKind):
        raise InvalidArgumentError(
            f"kind is {kind!r}; the package has the data folders {', '.join(get_args(AssetKind))}"
        )
    in_wheel = PACKAGE_DIR / "_assets" / kind
    in_checkout = PACKAGE_DIR.parents[1] / kind
    for folder in (in_wheel, in_checkout):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(
        f"no folder {kind!r}: looked for {in_wheel} and {in_checkout}. Is the installation whole? "
        "Reinstall acceptmoe, or run from a complete checkout"
    )
