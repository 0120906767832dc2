"""`acceptmoe bench`: measure quality and speed, compare two measurements, make a page of them."""

from __future__ import annotations

import typer

from acceptmoe.cli.bench_run import run

bench = typer.Typer(no_args_is_help=True, help="Measure quality and speed; compare; report.")
bench.add_typer(run, name="run")
