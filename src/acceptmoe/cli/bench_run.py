"""`acceptmoe bench run`: measure quality and speed on the bundled targets."""

from __future__ import annotations

from collections.abc import Callable
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
from acceptmoe.bench.speed import DTYPES, SpeedSettings, measure_speed
from acceptmoe.bench.speed_rows import guard_rows, speed_rows, summarise_speed, tuning_rows
from acceptmoe.bench.workloads import TREES, Tree, parse_tree
from acceptmoe.cli.bench_tables import show_quality, show_speed
from acceptmoe.cli.console import print_json, print_remark, progress_bar, reports_errors
from acceptmoe.cli.folders import make_folder
from acceptmoe.cli.loading import bundled_targets
from acceptmoe.cli.options import AsJson, DraftWeights, MaxDepth, MaxNewTokens, NumNodes, Seed
from acceptmoe.errors import InvalidArgumentError
from acceptmoe.targets.tasks import MAX_NEW_TOKENS, TASKS
from acceptmoe.targets.widen import MAX_FACTOR

run = typer.Typer(no_args_is_help=True, help="Measure, and write a file of rows.")

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
Compile = Annotated[
    bool, typer.Option("--compile", help="Compile the verification passes; slow to begin.")
]
Jobs = Annotated[int, typer.Option(min=1, max=256, help="Processes that decode, one thread each.")]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1, max=1024, help="Threads of the processor. Default: torch's.", show_default=False
    ),
]
Out = Annotated[
    Path, typer.Option("--out", help="The folder of the results; made where there is none.")
]
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
    audit: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Share of passes that are also run naturally, for kl_step."
        ),
    ] = 0.0,
    jobs: Jobs = 1,
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
            audit=audit,
        ),
        jobs=jobs,
    )
    check_usage(settings.check)
    make_folder(out)
    content = run_quality(settings, out, fresh)
    if as_json:
        print_json(content)
    else:
        show_quality(content)


@run.command(epilog="Example:  acceptmoe bench run speed --target tiny-olmoe --out results")
@reports_errors
def speed(
    target: Targets = None,
    prompts: Annotated[
        int, typer.Option(min=1, max=100_000, help="Test prompts, the tasks in turn.")
    ] = 12,
    tuning_prompts: Annotated[
        int, typer.Option(min=1, max=100_000, help="Other prompts, which choose the trees.")
    ] = 4,
    guard_prompts: Annotated[
        int,
        typer.Option(
            min=0, max=100_000, help="Test prompts decoded under the guard with random drafts."
        ),
    ] = 4,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            help="A policy to measure beside natural, for instance accept; may be given several "
            "times. Default: all, one setting each.",
            show_default=False,
        ),
    ] = None,
    tree: Annotated[
        list[str] | None,
        typer.Option(
            "--tree",
            help="A tree that every policy tries: nodes, as '32', with a depth, as '32:7', or "
            f"'chain:6'; may be given several times. Default: {' '.join(map(str, TREES))}.",
            show_default=False,
        ),
    ] = None,
    drafter: BundledDrafter = "assistant",
    draft_weights: DraftWeights = None,
    table: Table = None,
    widen: Annotated[
        int,
        typer.Option(
            min=1,
            max=MAX_FACTOR,
            help="Repeat the features of target and drafter this many times; 16 makes 2048 of 128.",
        ),
    ] = 16,
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}.")] = "bfloat16",
    max_new_tokens: MaxNewTokens = 128,
    experts: Experts = None,
    compile_passes: Compile = False,
    threads: Threads = None,
    seed: Seed = 0,
    out: Out = Path(),
    fresh: Fresh = False,
    as_json: AsJson = False,
) -> None:
    """How fast every policy decodes, beside Transformers' own ways. Writes speed.json.

    Trees are chosen on tuning prompts and timed on test prompts, all arms in turn. An interrupted
    run goes on where it stopped; its finished work is in speed.work.jsonl.
    """
    settings = SpeedSettings(
        targets=tuple(target or bundled_targets()),
        policies=None if policy is None else tuple(policy),
        trees=tuple(map(as_tree, tree)) if tree else TREES,
        drafter=drafter,
        draft_weights=draft_weights,
        table=table,
        factor=widen,
        dtype=dtype,
        num_prompts=prompts,
        num_tuning_prompts=tuning_prompts,
        num_guard_prompts=guard_prompts,
        max_new_tokens=max_new_tokens,
        seed=seed,
        experts=experts,
        compile=compile_passes,
        threads=threads,
    )
    check_usage(settings.check)
    make_folder(out)
    content = run_speed(settings, out, fresh)
    if as_json:
        print_json(content)
    else:
        show_speed(content)


@run.command("all", epilog="Example:  acceptmoe bench run all --jobs 2 --out results")
@reports_errors
def run_all(
    target: Targets = None,
    experts: Experts = None,
    jobs: Jobs = 1,
    seed: Seed = 0,
    out: Out = Path(),
    fresh: Fresh = False,
    as_json: AsJson = False,
) -> None:
    """Quality, then speed, both with their usual settings."""
    targets = tuple(target or bundled_targets())
    decoding = DecodingSettings(seed=seed, experts=experts)
    quality_settings = QualitySettings(targets, decoding=decoding, jobs=jobs)
    speed_settings = SpeedSettings(targets, seed=seed, experts=experts)
    check_usage(quality_settings.check)
    check_usage(speed_settings.check)
    make_folder(out)
    num_threads = torch.get_num_threads()
    contents = {"quality": run_quality(quality_settings, out, fresh)}
    torch.set_num_threads(num_threads)  # quality takes one
    contents["speed"] = run_speed(speed_settings, out, fresh)
    if as_json:
        print_json(contents)
        return
    show_quality(contents["quality"])
    show_speed(contents["speed"])


def run_speed(settings: SpeedSettings, out: Path, is_fresh: bool) -> dict[str, Any]:
    """Measure and save."""
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    with progress_bar("speed") as progress:
        records = measure_speed(
            settings, out / "speed.work.jsonl", is_fresh=is_fresh, progress=progress
        )
    rows = speed_rows(settings, records)
    path = out / "speed.json"
    content = save_results(
        path,
        "speed",
        rows,
        seed=settings.seed,
        settings=asdict(settings),
        summary=summarise_speed(rows),
        guard=guard_rows(settings, records),
        tuning=tuning_rows(settings, records),
    )
    print_remark(f"wrote {path}")
    return content


def as_tree(text: str) -> Tree:
    """The tree of an option; a wrong one is wrong usage."""
    try:
        return parse_tree(text)
    except InvalidArgumentError as error:
        raise typer.BadParameter(str(error), param_hint="--tree") from error


def run_quality(settings: QualitySettings, out: Path, is_fresh: bool) -> dict[str, Any]:
    """Measure, judge and save."""
    torch.set_num_threads(1)  # the bundled targets' matrices are too small to share
    with progress_bar("quality") as progress:
        records = measure_quality(
            settings, out / "quality.work.jsonl", is_fresh=is_fresh, progress=progress
        )
    judged = judge(settings, records)
    path = out / "quality.json"
    content = save_results(
        path,
        "quality",
        quality_rows(judged),
        seed=settings.decoding.seed,
        settings=asdict(settings),
        summary=summarise(judged),
    )
    print_remark(f"wrote {path}")
    return content


def check_usage(check: Callable[[], None]) -> None:
    """Run a settings' check; what it refuses is wrong usage."""
    try:
        check()
    except InvalidArgumentError as error:
        raise typer.BadParameter(str(error)) from error
