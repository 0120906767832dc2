"""`acceptmoe calibrate`: make the commitment table of a target and a drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from acceptmoe.bench.provenance import command_line
from acceptmoe.bench.workloads import encode
from acceptmoe.calibrate import calibrate as make_table
from acceptmoe.cli.console import print_json, print_line, print_remark, progress_bar, reports_errors
from acceptmoe.cli.folders import make_folder
from acceptmoe.cli.loading import LoadingError, open_drafter, open_target
from acceptmoe.cli.options import (
    AsJson,
    Device,
    DeviceOption,
    Drafter,
    DraftWeights,
    Dtype,
    DtypeOption,
    MaxDepth,
    MaxNewTokens,
    NumNodes,
    Seed,
)
from acceptmoe.cli.prompts import read_prompts
from acceptmoe.targets.tasks import TASKS

SPLIT = "calibration"  # disjoint from the prompts of the demo and the benchmarks


@reports_errors
def calibrate(
    target: Annotated[
        str, typer.Option("--target", help="A bundled target or the folder of a checkpoint.")
    ],
    out: Annotated[Path, typer.Option("--out", help="The table's file; replaced if it exists.")],
    drafter: Drafter = None,
    draft_weights: DraftWeights = None,
    prompts: Annotated[
        str,
        typer.Option(
            "--prompts",
            help=f"A text file with one prompt a line, or tasks separated by commas "
            f"({', '.join(TASKS)}); of tasks the calibration split is taken.",
        ),
    ] = ",".join(TASKS),
    count: Annotated[
        int, typer.Option(min=2, max=1_000_000, help="Prompts in all, or the file's first ones.")
    ] = 200,
    num_nodes: NumNodes = 32,
    max_depth: MaxDepth = 5,
    max_new_tokens: MaxNewTokens = 128,
    held_out: Annotated[
        float, typer.Option(min=0.01, max=0.99, help="Share of prompts the curve is tested on.")
    ] = 0.25,
    dtype: DtypeOption = Dtype.auto,
    device: DeviceOption = Device.auto,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Decode prompts by natural draft trees and count which draft nodes the output commits."""
    check_writable(out)
    texts = read_prompts(prompts, count, seed, SPLIT)
    check_number(texts, prompts)
    opened = open_target(target, dtype, device)
    chosen = open_drafter(drafter, opened, draft_weights)
    with progress_bar("decoding") as progress:
        table = make_table(
            opened.model,
            chosen,
            [encode(opened.tokenizer, text, opened.model.device) for text in texts],
            num_nodes=num_nodes,
            max_depth=max_depth,
            max_new_tokens=max_new_tokens,
            held_out_fraction=held_out,
            seed=seed,
            target=opened.name,
            dataset=dataset_name(prompts),
            command=command_line(),
            progress=progress,
        )
    table.save(out)
    for warning in table.held_out_error.warnings:
        print_remark(f"warning: {warning}", "yellow")
    error = table.held_out_error
    if as_json:
        print_json(
            {
                "table": str(out),
                "target": table.target,
                "drafter": table.drafter,
                "commitment_by_depth": list(table.depths.commitment),
                "held_out_error": error.curve,
                "raw_error": error.raw,
                "warnings": list(error.warnings),
            }
        )
        return
    by_depth = ", ".join(f"{share:.3f}" for share in table.depths.commitment)
    print_line(f"wrote {out}")
    print_line(f"commitment by depth: {by_depth}")
    print_line(
        f"held-out calibration error: {error.curve:.4f} (the drafter's own: {error.raw:.4f}) over "
        f"{error.num_nodes} nodes of {error.num_prompts} prompts"
    )


def check_writable(out: Path) -> None:
    """Fail before the work is done, not after it."""
    if out.is_dir():
        raise typer.BadParameter(f"{out} is a folder; give a file", param_hint="--out")
    make_folder(out.parent)


def check_number(texts: list[str], prompts: str) -> None:
    """Fail where nothing could be held out."""
    if len(texts) < 2:
        raise LoadingError(
            f"{prompts} has {len(texts)} different prompts, one a line; calibration needs at "
            "least 2, some are held out"
        )


def dataset_name(spec: str) -> str:
    """Where the prompts came from, for the table."""
    return Path(spec).name if Path(spec).is_file() else f"{spec} ({SPLIT} split)"
