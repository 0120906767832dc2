"""`acceptmoe bench`: measure quality and speed, compare two measurements, make a page of them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from acceptmoe.bench.compare import Comparison, compare_results
from acceptmoe.bench.intervals import MIN_VALUES
from acceptmoe.bench.policy_grid import label_lines, setting_label
from acceptmoe.bench.report import write_report
from acceptmoe.cli.bench_run import run
from acceptmoe.cli.bench_tables import LABEL_WIDTH
from acceptmoe.cli.console import (
    FAILED,
    output,
    print_error,
    print_json,
    print_line,
    print_remark,
    reports_errors,
)
from acceptmoe.cli.options import AsJson
from acceptmoe.errors import InvalidArgumentError

bench = typer.Typer(no_args_is_help=True, help="Measure quality and speed; compare; report.")
bench.add_typer(run, name="run")


@bench.command(epilog="Example:  acceptmoe bench compare old/speed.json new/speed.json")
@reports_errors
def compare(
    before: Annotated[Path, typer.Argument(help="A file of 'bench run', the older one.")],
    after: Annotated[Path, typer.Argument(help="The newer one, of the same benchmark.")],
    as_json: AsJson = False,
) -> None:
    """Compare two measurements row by row; exit with 1 when one got worse.

    A row is worse when the 95 % interval of its change lies below a loss of 1 point of accuracy or
    5 % of tokens/s. With too few prompts for an interval nothing is said.
    """
    try:
        found = compare_results(before, after)
    except InvalidArgumentError as error:
        raise typer.BadParameter(str(error)) from error
    if as_json:
        print_json({**asdict(found), "num_worse": found.num_worse})
    else:
        show(found)
    if found.num_worse:
        print_error(f"{found.num_worse} of {len(found.rows)} rows got worse")
        raise typer.Exit(FAILED)


def show(found: Comparison) -> None:
    """A table of the common rows, and what may explain the differences."""
    is_quality = found.benchmark == "quality"
    table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("row")
    change = "points" if is_quality else "ratio"
    for heading in ("before", "after", change, "from", "to", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in found.rows:
        table.add_row(
            *cells(row, is_quality), style={"worse": "red", "better": "green"}.get(row["verdict"])
        )
    output.print(table)
    for name, (old, new) in found.provenance.items():
        print_line(f"{name}: {old} before, {new} after", "dim")
    if any(row["low"] is None for row in found.rows):
        print_line(f"unknown: fewer than {MIN_VALUES} prompts, too few for an interval", "dim")
    if not found.is_paired:
        print_line("other seeds, other prompts: the intervals are wider than those of pairs", "dim")
    if found.num_only_before or found.num_only_after:
        print_line(
            f"not compared: {found.num_only_before} rows only before, {found.num_only_after} only "
            "after",
            "dim",
        )


def cells(row: dict[str, Any], is_quality: bool) -> list[str]:
    """One line of the table."""
    place = row["task"] if is_quality else row["num_nodes"] or "-"
    label = label_lines(setting_label(row["policy"], row["params"]), LABEL_WIDTH)
    name = f"{row['target']} {place} {label}"
    change = row["difference_points"] if is_quality else row["ratio"]
    values, layout = (row["before"], row["after"]), "{:.1%}" if is_quality else "{:.1f}"
    layouts = (layout, layout, *(("{:+.2f}",) if is_quality else ("{:.2f}",)) * 3)
    numbers = (*values, change, row["low"], row["high"])
    texts = [
        "-" if value is None else text.format(value)
        for value, text in zip(numbers, layouts, strict=True)
    ]
    return [name, *texts, row["verdict"]]


@bench.command(epilog="Example:  acceptmoe bench report bench/results")
@reports_errors
def report(
    folder: Annotated[
        Path, typer.Argument(help="The folder with quality.json, speed.json or both.")
    ],
    as_json: AsJson = False,
) -> None:
    """Make report.html, one page that needs no network, and the PNG files of its plots."""
    if not folder.is_dir():
        raise typer.BadParameter(
            f"{folder} is no folder; measure into it first: acceptmoe bench run all --out {folder}",
            param_hint="FOLDER",
        )
    try:
        paths = write_report(folder)
    except InvalidArgumentError as error:
        raise typer.BadParameter(str(error), param_hint="FOLDER") from error
    if as_json:
        print_json({"page": str(paths[0]), "figures": [str(path) for path in paths[1:]]})
        return
    print_line(f"wrote {paths[0]}")
    print_remark(f"and {len(paths) - 1} PNG files beside it")
