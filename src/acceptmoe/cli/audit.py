"""`acceptmoe audit`: what the policy's speed costs on the user's prompts."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table as RichTable

from acceptmoe.api import unwrap, wrap
from acceptmoe.audit import AuditReport, audit_prompts
from acceptmoe.bench.compare_speed import compare_speed
from acceptmoe.bench.provenance import provenance
from acceptmoe.bench.workloads import encode, end_token_ids
from acceptmoe.cli.console import (
    FAILED,
    output,
    print_error,
    print_json,
    print_line,
    print_remark,
    progress_bar,
    reports_errors,
)
from acceptmoe.cli.loading import (
    LoadingError,
    drafter_label,
    open_drafter,
    open_table,
    open_target,
    parse_policy,
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
    Policy,
    Seed,
    Table,
)
from acceptmoe.cli.prompts import read_prompts
from acceptmoe.policies import RoutingPolicy
from acceptmoe.targets.tasks import TASKS

BUNDLED = "bundled"
SPLIT = "test"  # disjoint from what the shipped tables were made with
EXPLANATION = (
    "Audited blocks run twice from the same cache, naturally and under the policy. KL: natural to "
    "restricted, nats per emitted token, of the raw logits; what drift of the cache adds over a "
    "text is not in it. top-1: emitted tokens where both find the same one likeliest. excluded: "
    "share of the rows' own gates that lies outside the eligible experts, rows weighted by "
    "commitment. moved: rows that got other experts than their own. ±: standard error, of 5 "
    "blocks or more. tokens/s: without prompts and without the audit's own passes."
)


@reports_errors
def audit(
    target: Annotated[
        str, typer.Option("--target", help="A bundled target or the folder of a checkpoint.")
    ],
    prompts: Annotated[
        str,
        typer.Option(
            "--prompts",
            help=f"A text file with one prompt a line, '{BUNDLED}', or tasks separated by commas "
            f"({', '.join(TASKS)}); of tasks the test split is taken.",
        ),
    ] = BUNDLED,
    count: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Prompts in all, or the file's first ones.")
    ] = 20,
    policy: Policy = None,
    drafter: Drafter = None,
    draft_weights: DraftWeights = None,
    table: Table = None,
    share: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Share of the verification blocks that is audited."),
    ] = 0.25,
    max_kl: Annotated[
        float | None,
        typer.Option(
            help="Exit with 1 when the KL is above this, in nats per token. Nothing is switched: "
            "all prompts are measured under the policy.",
            show_default=False,
        ),
    ] = None,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Also time plain decoding and natural trees, in turn."),
    ] = False,
    num_nodes: NumNodes = 32,
    max_depth: MaxDepth = 5,
    max_new_tokens: MaxNewTokens = 128,
    dtype: DtypeOption = Dtype.auto,
    device: DeviceOption = Device.auto,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Decode prompts under a policy and measure by depth and layer what it changes."""
    check_limits(share, max_kl)
    rule = parse_policy(policy)
    texts = read_prompts(",".join(TASKS) if prompts == BUNDLED else prompts, count, seed, SPLIT)
    if not texts:
        raise LoadingError(f"{prompts} has no prompt; write at least one, one a line")
    opened = open_target(target, dtype, device)
    chosen = open_drafter(drafter, opened, draft_weights)
    commitment = open_table(table, opened, chosen, rule)
    encoded = [encode(opened.tokenizer, text, opened.model.device) for text in texts]
    end_ids = end_token_ids(opened.model, opened.tokenizer)
    settings: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "eos_token_id": end_ids or None,
        "pad_token_id": end_ids[0] if end_ids else None,  # never used; unset, generate would warn
    }
    model = wrap(
        opened.model,
        commitment,
        drafter=chosen,
        policy=rule,
        num_nodes=num_nodes,
        max_depth=max_depth,
    )
    with progress_bar("auditing") as progress:
        found = audit_prompts(model, encoded, share=share, progress=progress, **settings)
    unwrap(model)
    if not found.audit.num_blocks:
        raise LoadingError(
            f"none of {found.report['num_verifications']} verification blocks was audited, so "
            "there is nothing to report; raise --share, give more prompts or another --drafter"
        )
    rows = None
    if compare:
        with progress_bar("comparing") as progress:
            rows = compare_speed(
                model,
                encoded,
                policy=rule,
                table=commitment,
                drafter=chosen,
                num_nodes=num_nodes,
                max_depth=max_depth,
                settings={**settings, "do_sample": False},
                progress=progress,
            )
    warnings = audit_warnings(rule, found.audit)
    for warning in warnings:
        print_remark(f"warning: {warning}", "yellow")
    is_above = max_kl is not None and found.audit.kl is not None and found.audit.kl > max_kl
    if as_json:
        print_json(
            {
                "target": opened.name,
                "num_prompts": len(texts),
                "report": found.report,
                "max_kl": max_kl,
                "is_above_max_kl": is_above,
                "warnings": warnings,
                "compare": rows,
                "provenance": provenance(seed=seed),
            }
        )
    else:
        show(opened.name, found.report, found.audit, rows)
    if is_above:
        print_error(
            f"the KL is {found.audit.kl:.4g} nats per token, above --max-kl {max_kl:g}; try a "
            "milder policy, or --policy natural"
        )
        raise typer.Exit(FAILED)


def check_limits(share: float, max_kl: float | None) -> None:
    """Numbers that typer's bounds let through (no number at all is within any)."""
    if not 0.0 < share <= 1.0:
        raise typer.BadParameter("it must be above 0 and at most 1", param_hint="--share")
    if max_kl is not None and not 0.0 < max_kl < float("inf"):
        raise typer.BadParameter("it must be above 0, in nats per token", param_hint="--max-kl")


def audit_warnings(policy: RoutingPolicy, found: AuditReport) -> list[str]:
    """What the KL does not say."""
    is_root_alone = all(row.depth == 0 for row in found.by_depth if row.num_tokens)
    if not (policy.keeps_root and is_root_alone):
        return []
    return [
        f"no emitted token came from a restricted row: all {found.num_tokens} audited ones are of "
        f"roots, which {policy.name} leaves their own experts, so the KL is 0 by construction and "
        "says nothing; give more prompts, a larger --share or another --drafter"
    ]


def show(
    target: str, report: dict[str, Any], found: AuditReport, rows: list[dict[str, Any]] | None
) -> None:
    """Everything for people."""
    output.print(depth_table(found))
    output.print(layer_table(found))
    if rows is not None:
        output.print(speed_table(rows))
    drafter = drafter_label(report["drafter"], report["draft_weights"])
    print_line(
        f"{target}, policy {report['policy']}, drafter {drafter}: {found.num_blocks} of "
        f"{report['num_verifications']} verification blocks audited, {found.num_tokens} tokens in "
        "them"
    )
    print_line(cost_line(report, found, rows), "bold")
    print_line(EXPLANATION, "dim")


def cost_line(report: dict[str, Any], found: AuditReport, rows: list[dict[str, Any]] | None) -> str:
    """The one line to remember."""
    speed = "-" if report["tokens_per_s"] is None else f"{report['tokens_per_s']:.1f}"
    line = (
        f"what the speed costs on your prompts: KL {with_error(found.kl, found.kl_se, '.3g')} nats "
        f"per token, top-1 {with_error(found.top1, found.top1_se, '.1%')}, excluded mass "
        f"{with_error(found.excluded_mass, found.excluded_mass_se, '.1%')}, at {speed} tokens/s"
    )
    if rows is None:
        return line
    own = rows[-1]["tokens_per_s"]
    ratios = [f"{own / row['tokens_per_s']:.2f}x {row['mode']}" for row in rows[:-1]]
    return f"{line}; whole calls: {', '.join(ratios)}"


def depth_table(found: AuditReport) -> RichTable:
    """KL, agreement and excluded mass by depth of the tree."""
    table = make_table("by depth in the tree, 0 is the root")
    for heading in ("depth", "tokens", "KL", "top-1", "excluded"):
        table.add_column(heading, justify="right")
    for row in found.by_depth:
        table.add_row(
            str(row.depth),
            str(row.num_tokens),
            with_error(row.kl, row.kl_se, ".3g"),
            with_error(row.top1, row.top1_se, ".1%"),
            with_error(row.excluded_mass, row.excluded_mass_se, ".1%"),
        )
    return table


def layer_table(found: AuditReport) -> RichTable:
    """Excluded mass and moved rows by sparse layer."""
    table = make_table("by sparse layer")
    table.add_column("layer", justify="right")
    table.add_column("module")
    for heading in ("excluded", "moved"):
        table.add_column(heading, justify="right")
    for row in found.by_layer:
        table.add_row(
            str(row.layer),
            row.name,
            with_error(row.excluded_mass, row.excluded_mass_se, ".1%"),
            with_error(row.rows_moved, row.rows_moved_se, ".1%"),
        )
    return table


def speed_table(rows: list[dict[str, Any]]) -> RichTable:
    """Whole calls, prompt included, the modes in turn, nothing audited."""
    table = make_table("whole calls, nothing audited")
    table.add_column("mode")
    for heading in ("tokens/s", "speed-up", "length", "same text"):
        table.add_column(heading, justify="right")
    for row in rows:
        length = row["accepted_length"]
        table.add_row(
            row["mode"],
            f"{row['tokens_per_s']:.1f}",
            f"{row['tokens_per_s'] / rows[0]['tokens_per_s']:.2f}x",
            "-" if length is None else f"{length:.2f}",
            f"{row['same_as_autoregressive']:.0%}",
        )
    return table


def make_table(title: str) -> RichTable:
    return RichTable(
        title=title,
        title_justify="left",
        title_style="",
        box=SIMPLE_HEAD,
        padding=0,
        show_edge=False,
    )


def with_error(value: float | None, error: float | None, layout: str) -> str:
    """A number with its standard error, as far as they are known."""
    if value is None:
        return "-"
    return f"{value:{layout}}" if error is None else f"{value:{layout}} ± {error:{layout}}"
