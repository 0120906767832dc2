"""A file of finished pieces of work, so that a run that was interrupted goes on where it stopped.

JSON lines: the first one says under which settings the others were measured.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from acceptmoe.errors import InvalidArgumentError

Record = dict[str, Any]


class WorkFile:
    """The records of one run, on disk and in memory.

    A record is on disk when `append` returns. A last line that was cut off, by a crash or a full
    disk, is dropped when the file is opened again; its work is done anew.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], *, is_fresh: bool = False) -> None:
        """Open `path`, or begin it where it does not exist or `is_fresh` says so.

        Raises `InvalidArgumentError` when the records in it were measured under other settings:
        rows of two commits or two trees must not be averaged.
        """
        self.path = path
        self.records: list[Record] = []
        self._settings = dict(settings)
        if path.exists() and not is_fresh:
            self._read()
        else:
            path.write_text(_line(self._settings), encoding="utf-8")

    def append(self, records: Iterable[Record]) -> None:
        """Add finished records."""
        added = list(records)
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(map(_line, added)))
            file.flush()
            os.fsync(file.fileno())
        self.records += added

    def _read(self) -> None:
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        try:
            lines = [json.loads(line) for line in whole.splitlines()]
        except ValueError as error:
            raise InvalidArgumentError(
                f"{self.path} is no file of finished work ({error}); remove it, or begin anew "
                "with --fresh"
            ) from error
        if not lines:
            self.path.write_text(_line(self._settings), encoding="utf-8")
            return
        self._check_settings(lines[0])
        if len(whole) < len(content):
            with self.path.open("r+b") as file:
                file.truncate(len(whole))
        self.records = lines[1:]

    def _check_settings(self, found: Any) -> None:
        found = found if isinstance(found, dict) else {}
        for name in sorted({*found, *self._settings}):
            old, new = found.get(name), self._settings.get(name)
            if old != new:
                raise InvalidArgumentError(
                    f"{self.path} holds work with {name} {old!r} and this run has {new!r}; they "
                    "cannot be mixed. Repeat the run with the old setting, write to another "
                    "folder (--out), or discard the old work (--fresh)"
                )


def _line(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n"
