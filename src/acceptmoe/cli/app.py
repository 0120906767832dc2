"""Puts the commands together."""

from __future__ import annotations

from typing import Annotated

import typer

from acceptmoe import __version__
from acceptmoe.cli.audit import audit
from acceptmoe.cli.bench import bench
from acceptmoe.cli.calibrate import calibrate
from acceptmoe.cli.demo import demo
from acceptmoe.cli.generate import generate
from acceptmoe.cli.info import info

app = typer.Typer(
    name="acceptmoe",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # a bug's traceback as Python prints it can be reported
    context_settings={"help_option_names": ["-h", "--help"]},
)
# An epilog is one paragraph; a command's example stays whole there on every width.
for command, example in (
    (demo, "acceptmoe demo --prompts 20"),
    (
        generate,
        'acceptmoe generate --target tiny-qwen3-moe "Exercise: What is the average of 5, 5 and 2?"',
    ),
    (
        calibrate,
        "acceptmoe calibrate --target tiny-qwen3-moe --drafter ngram --out ngram.json",
    ),
    (audit, "acceptmoe audit --target tiny-qwen3-moe --prompts my-prompts.txt --compare"),
    (info, "acceptmoe info --json"),
):
    app.command(epilog=f"Example:  {example}")(command)
app.add_typer(bench, name="bench")


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"acceptmoe {__version__}")
        raise typer.Exit


@app.callback(epilog="Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted.")
def acceptmoe(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Faster small-batch decoding of mixture-of-experts models.

    Draft trees are verified on the experts that the probably committed tokens want.
    """


def main() -> None:
    """Run the command line on this process's arguments, and exit."""
    app(prog_name="acceptmoe")
