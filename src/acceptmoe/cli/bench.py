"""`acceptmoe bench`: measure quality and speed, compare two measurements, make a page of them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from acceptmoe.bench.quality import QualitySettings, measure_quality
from acceptmoe.bench.quality_decoding import DecodingSettings
from acceptmoe.bench.quality_rows import judge, quality_rows, summarise
from acceptmoe.bench.results import save_results
from acceptmoe.bench.setups import DRAFTERS
from acceptmoe.cli.bench_tables import show_quality
from acceptmoe.cli.console import print_json, print_remark, progress_bar, reports_errors
from acceptmoe.cli.loading import bundled_targets
from acceptmoe.cli.options import AsJson, MaxDepth, MaxNewTokens, NumNodes, Seed
from acceptmoe.errors import InvalidArgumentError
from acceptmoe.targets.tasks import MAX_NEW_TOKENS, TASKS

bench = typer.Typer(no_args_is_help=True, help="Measure quality and speed; compare; report.")
run = typer.Typer(no_args_is_help=True, help="Measure, and write a file of rows.")
bench.add_typer(run, name="run")

Targets = Annotated[
    list[str] | None,
    typer.Option(
        "--target",
        help="A bundled target; may be given several times. Default: every one.",
        show_default=False,
    ),
]
Tasks = Annotated[
    list[str] | None,
    typer.Option(
        "--task",
        help=f"One of {', '.join(TASKS)}; may be given several times. Default: every one.",
        show_default=False,
    ),
]
Policies = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        help="A policy to measure beside natural, accept-depth and the default, for instance "
        "moe-spec:budget=16; may be given several times. Default: the default's curve and all "
        "rivals.",
        show_default=False,
    ),
]
BundledDrafter = Annotated[str, typer.Option("--drafter", help=f"{', '.join(DRAFTERS)}.")]
Table = Annotated[
    str | None,
    typer.Option(
        "--table",
        help="A commitment table: a file, or a shipped table's name. Default: the shipped one for "
        "each target and the drafter.",
        show_default=False,
    ),
]
Experts = Annotated[
    str | None,
    typer.Option(
        "--experts", help="'acceptmoe': our compiled kernels. Default: Transformers' own."
    ),
]
Out = Annotated[Path, typer.Option("--out", help="The folder of the results; it must exist.")]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Discard finished work instead of going on with it.")
]


@run.command(epilog="Example:  acceptmoe bench run quality --prompts 20 --jobs 2 --out results")
@reports_errors
def quality(
    target: Targets = None,
    task: Tasks = None,
    prompts: Annotated[
        int,
        typer.Option(
            min=1, max=100_000, help="Test prompts of each task: natural, the paper's, the default."
        ),
    ] = 500,
    rival_prompts: Annotated[
        int,
        typer.Option(min=0, max=100_000, help="Of these, the first so many for every rival."),
    ] = 100,
    policy: Policies = None,
    drafter: BundledDrafter = "eagle3",
    table: Table = None,
    num_nodes: NumNodes = 32,
    max_depth: MaxDepth = 5,
    max_new_tokens: MaxNewTokens = MAX_NEW_TOKENS,
    experts: Experts = None,
    jobs: Annotated[
        int, typer.Option(min=1, max=256, help="Processes that decode, one thread each.")
    ] = 1,
    seed: Seed = 0,
    out: Out = Path(),
    fresh: Fresh = False,
    as_json: AsJson = False,
) -> None:
    """What every policy does to the output: accuracy, KL, experts used. Writes quality.json.

    An interrupted run goes on where it stopped; its finished work is in quality.work.jsonl.
    """
    settings = QualitySettings(
        targets=tuple(target or bundled_targets()),
        tasks=tuple(task or TASKS),
        num_prompts=prompts,
        num_rival_prompts=rival_prompts,
        rivals=None if policy is None else tuple(policy),
        decoding=DecodingSettings(
            drafter=drafter,
            table=table,
            num_nodes=num_nodes,
            max_depth=max_depth,
            max_new_tokens=max_new_tokens,
            seed=seed,
            experts=experts,
        ),
        jobs=jobs,
    )
    check_usage(settings.check)
    check_folder(out)
    content = run_quality(settings, out, fresh)
    finish(content, out / "quality.json", as_json, show_quality)


def run_quality(settings: QualitySettings, out: Path, is_fresh: bool) -> dict[str, Any]:
    """Measure, judge and save."""
    torch.set_num_threads(1)  # the bundled targets' matrices are too small to share
    with progress_bar("quality") as progress:
        records = measure_quality(
            settings, out / "quality.work.jsonl", is_fresh=is_fresh, progress=progress
        )
    judged = judge(settings, records)
    return save_results(
        out / "quality.json",
        "quality",
        quality_rows(judged),
        seed=settings.decoding.seed,
        settings=asdict(settings),
        summary=summarise(judged),
    )


def check_usage(check: Any) -> None:
    """Run a settings' check; what it refuses is wrong usage."""
    try:
        check()
    except InvalidArgumentError as error:
        raise typer.BadParameter(str(error)) from error


def check_folder(out: Path) -> None:
    """Fail before the work is done, not after it."""
    if not out.is_dir():
        raise typer.BadParameter(
            f"{out} is no folder; make it first, or give another", param_hint="--out"
        )


def finish(content: dict[str, Any], path: Path, as_json: bool, show: Any) -> None:
    """Results on standard output, and where they were written beside it."""
    if as_json:
        print_json(content)
    else:
        show(content)
    print_remark(f"wrote {path}")
