"""What every command shares in talking to people and programs: output, progress, errors, exits."""

from __future__ import annotations

import errno
import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from acceptmoe.errors import AcceptMoEError

FAILED = 1
WRONG_USAGE = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

output = Console()
messages = Console(stderr=True)  # progress, errors, remarks: never among the results

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


def reports_errors(command: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
    """Wrap a command: errors of ours become one message and an exit code, bugs stay tracebacks."""

    @functools.wraps(command)
    def wrapped(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
        try:
            return command(*args, **kwargs)
        except AcceptMoEError as error:
            print_error(str(error))
            raise typer.Exit(FAILED) from error
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            print_error(
                f"the results cannot be written: {error.strerror}; make room, or write to "
                "another place"
            )
            raise typer.Exit(FAILED) from error
        except KeyboardInterrupt as error:
            print_remark("interrupted")
            raise typer.Exit(INTERRUPTED) from error

    return wrapped


def print_error(text: str) -> None:
    """One message on standard error; nothing in it is taken for markup or cut at the width."""
    messages.print(Text.assemble(("error: ", "bold red"), text), soft_wrap=True)


def print_remark(text: str, style: str = "dim") -> None:
    """A line beside the results, on standard error, as it is."""
    messages.print(Text(text, style), soft_wrap=True)


def print_line(text: str, style: str = "") -> None:
    """A line of the results, as it is: names and numbers in it get no markup and no colours."""
    output.print(Text(text, style), soft_wrap=not output.is_terminal)  # a file has no width


def print_json(value: Any) -> None:
    """`value` as the only thing on standard output."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


@contextmanager
def progress_bar(description: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error, moved by calling what is yielded with (finished, all)."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=messages,
        transient=True,
        disable=not messages.is_terminal,
    )
    with bar:
        task = bar.add_task(description, total=None)
        yield lambda finished, total: bar.update(task, completed=finished, total=total)
