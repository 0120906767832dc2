"""How benchmark results look on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from acceptmoe.bench.policy_grid import setting_label
from acceptmoe.cli.console import output, print_line

# Heading, key of the row, format of the value.
Column = tuple[str, str, str]

# Narrow: a row should fit 80 columns.
QUALITY_COLUMNS: tuple[Column, ...] = (
    ("n", "num_prompts", "{}"),
    ("correct", "accuracy", "{:.1%}"),
    ("points", "difference_points", "{:+.2f}"),
    ("from", "difference_low_points", "{:+.1f}"),
    ("to", "difference_high_points", "{:+.1f}"),
    ("KL", "kl", "{:.5f}"),
    ("length", "accepted_length", "{:.2f}"),
    ("used", "experts_used", "{:.1f}"),
)


SPEED_COLUMNS: tuple[Column, ...] = (
    ("nodes", "num_nodes", "{}"),
    ("tokens/s", "tokens_per_s", "{:.1f}"),
    ("q1", "q1", "{:.1f}"),
    ("q3", "q3", "{:.1f}"),
    ("call", "call_tokens_per_s", "{:.1f}"),
    ("length", "accepted_length", "{:.2f}"),
    ("used", "experts_used", "{:.1f}"),
    ("same", "same_as_natural", "{:.0%}"),
)


def show_speed(content: dict[str, Any]) -> None:
    """A table for each target, and how the default stands."""
    for target in dict.fromkeys(row["target"] for row in content["rows"]):
        rows = [row for row in content["rows"] if row["target"] == target]
        output.print(make_table(target, rows, SPEED_COLUMNS))
    for claim in content["summary"]:
        ratios = ", ".join(
            f"{found['median']:.2f}x {name} ({found['low']:.2f} to {found['high']:.2f})"
            for name, found in claim["ratios"].items()
            if found is not None
        )
        print_line(f"{claim['target']}: the default at {claim['num_nodes']} nodes: {ratios}")
    for row in content["guard"]:
        found = row["ratio"]
        print_line(
            f"{row['target']}: random drafts under the guard: "
            + ("-" if found is None else f"{found['median']:.2f}x plain decoding")
            + f"; {row['guard_reason']}"
        )


def show_quality(content: dict[str, Any]) -> None:
    """A table for each pair, and the summary."""
    pairs = dict.fromkeys((row["target"], row["task"]) for row in content["rows"])
    for target, task in pairs:
        rows = [r for r in content["rows"] if (r["target"], r["task"]) == (target, task)]
        output.print(make_table(f"{target}, {task}", rows, QUALITY_COLUMNS))
    for claim in content["summary"]["accuracy"]:
        print_line(
            f"{claim['policy']}: {claim['mean_difference_points']:+.2f} points from natural over "
            f"{claim['num_pairs']} pairs (95 %: {claim['low_points']:+.2f} to "
            f"{claim['high_points']:+.2f}); worst pair {', '.join(claim['worst_pair'])} "
            f"{claim['worst_difference_points']:+.2f}"
        )
    for claim in content["summary"]["default_against_paper"]:
        saved = claim["saved_share"]
        print_line(
            f"{claim['target']}: {claim['experts_used']:.1f} experts used at KL {claim['kl']:.5f}, "
            f"accept-depth {claim['experts_used_paper']:.1f} at {claim['kl_paper']:.5f}"
            + ("" if saved is None else f" ({saved:+.1%} saved)")
        )
    for claim in content["summary"]["default_against_moe_spec"]:
        best = "no setting uses as few"
        if claim["best"] is not None:
            best = (
                f"{claim['best']} {claim['best_experts_used']:.1f} at {claim['best_kl']:.5f}, "
                f"{claim['best_accepted_length']:.2f} tokens a pass"
            )
        print_line(
            f"{claim['target']}: {claim['rival']} {claim['experts_used']:.1f} at "
            f"{claim['kl']:.5f}, {claim['accepted_length']:.2f} tokens a pass; {best}",
            "" if claim["is_dominated"] else "yellow",
        )


def make_table(title: str, rows: Sequence[dict[str, Any]], columns: Sequence[Column]) -> Table:
    """Rows by policy; a value that a row does not have is a dash."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("policy", overflow="fold")
    for heading, _, _ in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        cells = ["-" if row[key] is None else layout.format(row[key]) for _, key, layout in columns]
        table.add_row(setting_label(row["policy"], row["params"]), *cells)
    return table
