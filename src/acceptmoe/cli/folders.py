"""Folders that results are written to."""

from __future__ import annotations

from pathlib import Path

import typer


def make_folder(folder: Path) -> None:
    """Make the folder behind `--out`, with its parents; called before the work, not after it.

    What cannot be made is wrong usage.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = "it is a file" if folder.is_file() else error.strerror
        raise typer.BadParameter(
            f"{folder} cannot be made a folder: {reason}; give another place", param_hint="--out"
        ) from error
