"""`acceptmoe demo`: four ways of decoding the same prompts, side by side."""

from __future__ import annotations

from typing import Annotated, Any

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table as RichTable

from acceptmoe.bench.demo import run_demo
from acceptmoe.bench.provenance import provenance
from acceptmoe.bench.workloads import mixed_problems
from acceptmoe.cli.console import output, print_json, print_line, progress_bar, reports_errors
from acceptmoe.cli.loading import (
    bundled_targets,
    drafter_label,
    open_drafter,
    open_table,
    open_target,
    widened_drafter,
    widened_target,
)
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
    Table,
)
from acceptmoe.drafting import Eagle3Drafter
from acceptmoe.policies import load_policy
from acceptmoe.targets import target_names

# Heading, key of the row, format of the value. Narrow: the table must fit 80 columns.
COLUMNS = (
    ("tokens\n/s", "tokens_per_s", "{:.0f}"),
    ("len-\ngth", "accepted_length", "{:.2f}"),
    ("rows", "nodes_per_verification", "{:.1f}"),
    ("union", "natural_union", "{:.1f}"),
    ("eli-\ngible", "eligible", "{:.1f}"),
    ("used", "experts_used", "{:.1f}"),
    ("same\ntext", "same_as_autoregressive", "{:.0%}"),
    ("top-1", "top1", "{:.4f}"),
    ("KL", "kl", "{:.4f}"),
    ("cor-\nrect", "accuracy", "{:.0%}"),
)
EXPLANATION = (
    "tokens/s: wall time of whole generate calls, prompt included, modes in turn; speed-up: over "
    "autoregressive. length: tokens emitted per verification pass. rows: nodes that a pass "
    "verifies, the root included; accept leaves hopeless ones out. union: experts that the rows "
    "want, eligible and used: those that they may and do get, per layer and pass. same text: "
    "outputs equal to autoregressive. top-1, KL (nats per token): against the unwrapped model on "
    "the same text; natural is lossless, the two below it are not. correct: answers that pass the "
    "task's checker. Widened: every feature repeated, so that the same tokens cost more, as in a "
    "larger model; at their own size the bundled targets fit into a processor's cache and there is "
    "nothing to save. Other models and machines differ."
)
# At their own size the experts that are left out cost next to nothing, so selecting is pure cost.
BUNDLED_WIDENING = 2
NO_GAIN = (
    "No mode was faster than plain decoding here: on this processor, with what else it runs, the "
    "work of checking a tree costs more than reading the experts. See Limits in the README."
)


@reports_errors
def demo(
    prompts: Annotated[
        int, typer.Option(min=1, max=10_000, help="Test prompts to decode, the tasks in turn.")
    ] = 4,
    target: Annotated[
        list[str] | None,
        typer.Option(
            "--target",
            help="A bundled target or the folder of a checkpoint; may be given several times. "
            "Default: every bundled one.",
            show_default=False,
        ),
    ] = None,
    drafter: Drafter = None,
    draft_weights: DraftWeights = None,
    table: Table = None,
    widen: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=16,
            help="Repeat the features of target and drafter this many times: the same tokens, with "
            f"larger matrices. Default: {BUNDLED_WIDENING} for a bundled target, else 1.",
            show_default=False,
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1024,
            help="Threads of the processor. Default: 1 for bundled targets, whose matrices are too "
            "small to share, else torch's.",
            show_default=False,
        ),
    ] = None,
    num_nodes: NumNodes = 32,
    max_depth: MaxDepth = 5,
    max_new_tokens: MaxNewTokens = 128,
    dtype: DtypeOption = Dtype.auto,
    device: DeviceOption = Device.auto,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Decode test prompts plainly, by natural trees, by the paper's rule and by ours; compare."""
    rows: list[dict[str, Any]] = []
    widenings: dict[str, int] = {}
    names = target or bundled_targets()
    if threads is not None or set(names) <= set(target_names()):
        torch.set_num_threads(threads or 1)
    for name in names:
        opened = open_target(name, dtype, device)
        chosen = open_drafter(drafter, opened, draft_weights)
        is_widened = opened.is_bundled and not isinstance(chosen, Eagle3Drafter)
        factor = widen or (BUNDLED_WIDENING if is_widened else 1)
        if factor > 1:
            opened, chosen = widened_target(opened, factor), widened_drafter(chosen, factor)
        widenings[name] = factor
        commitment = open_table(table, opened, chosen, load_policy(None))
        assert commitment is not None  # the default policy reads one
        with progress_bar(f"decoding with {opened.name}") as progress:
            measured = run_demo(
                opened.model,
                opened.tokenizer,
                mixed_problems("test", prompts, seed),
                target=opened.name,
                drafter=chosen,
                table=commitment,
                num_nodes=num_nodes,
                max_depth=max_depth,
                max_new_tokens=max_new_tokens,
                progress=progress,
            )
        rows += measured
        if not as_json:
            output.print(comparison(measured, factor, draft_weights))
            if any(row["num_cut_off"] for row in measured):
                print_line(cut_off_line(measured, max_new_tokens), "yellow")
            if max(row["tokens_per_s"] for row in measured[1:]) < measured[0]["tokens_per_s"]:
                print_line(NO_GAIN, "yellow")
    facts = {
        **provenance(seed=seed),
        "max_depth": max_depth,
        "max_new_tokens": max_new_tokens,
        "draft_weights": draft_weights,
        "widening": widenings,
    }
    if as_json:
        print_json({"rows": rows, "provenance": facts})
        return
    print_line(EXPLANATION, "dim")
    print_line(
        f"{facts['cpu']}, {facts['num_threads']} threads, torch {facts['torch']}, "
        f"transformers {facts['transformers']}, seed {seed}",
        "dim",
    )


def comparison(rows: list[dict[str, Any]], widening: int, draft_weights: str | None) -> RichTable:
    """The rows of one target as a table for people, with the speed-up over plain decoding."""
    plain, first = rows[0], rows[-1]
    size = f" widened {widening}x" if widening > 1 else ""
    drafter = drafter_label(first["drafter"], draft_weights)
    table = RichTable(
        title=f"{first['target']}{size}, drafter {drafter}, {first['num_nodes']} nodes, "
        f"{first['num_prompts']} prompts, {first['num_experts']} experts",
        box=SIMPLE_HEAD,
        padding=0,
        show_edge=False,
    )
    table.add_column("mode", no_wrap=True)
    table.add_column("speed\n-up", justify="right")
    for heading, _, _ in COLUMNS:
        table.add_column(heading, justify="right")
    for row in rows:
        cells = ["-" if row[key] is None else layout.format(row[key]) for _, key, layout in COLUMNS]
        speedup = row["tokens_per_s"] / plain["tokens_per_s"]
        table.add_row(row["mode"], f"{speedup:.2f}x", *cells)
    return table


def cut_off_line(rows: list[dict[str, Any]], max_new_tokens: int) -> str:
    """How many texts the limit cut off, mode by mode; such a text has no answer to check."""
    counts = ", ".join(f"{row['mode']} {row['num_cut_off']}" for row in rows)
    return (
        f"Of {rows[0]['num_prompts']} texts cut off before their end by --max-new-tokens "
        f"{max_new_tokens}, and so not correct: {counts}."
    )
