"""The report of a folder of results: figures, claims and tables on one page, and PNG files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from acceptmoe.bench.intervals import interval_text
from acceptmoe.bench.page import (
    Column,
    Figure,
    bullets,
    facts,
    figures,
    heading,
    page,
    paragraph,
    table,
)
from acceptmoe.bench.plots import (
    LABEL_WIDTH,
    check_matplotlib,
    draw,
    plot_accuracy,
    plot_calibration,
    plot_kl,
    plot_lengths,
    plot_speed,
    row_label,
    speed_label,
)
from acceptmoe.bench.policy_grid import label_lines
from acceptmoe.bench.results import Results, Row, load_results
from acceptmoe.errors import InvalidArgumentError
from acceptmoe.policies import DEFAULT_POLICY, load_policy
from acceptmoe.table import CommitmentTable, shipped_tables

PAGE = "report.html"
GUARD_GOAL = 0.95  # of plain decoding's speed, whatever the drafter
QUALITY_COLUMNS = (
    Column("prompts", "num_prompts", "{}"),
    Column("correct", "accuracy", "{:.1%}"),
    Column("points", "difference_points", "{:+.2f}", "accuracy minus natural's"),
    Column("from", "difference_low_points", "{:+.2f}", "95 % bootstrap interval"),
    Column("to", "difference_high_points", "{:+.2f}", "95 % bootstrap interval"),
    Column(
        "by trees",
        "num_prompts_by_trees",
        "{}",
        "prompts decoded by draft trees, behind the columns to the right of this one",
    ),
    Column("KL", "kl", "{:.5f}", "nats per token, against the unwrapped model"),
    Column("KL a step", "kl_step", "{:.5f}", "natural against restricted, from the same cache"),
    Column("top-1", "top1", "{:.4f}"),
    Column("length", "accepted_length", "{:.2f}", "tokens per verification pass"),
    Column("rows", "nodes_per_verification", "{:.1f}", "nodes a pass verifies, the root included"),
    Column("union", "natural_union", "{:.1f}", "experts that the rows want"),
    Column("eligible", "eligible", "{:.1f}"),
    Column("used", "experts_used", "{:.1f}"),
    Column("of", "num_experts", "{}"),
    Column("same text", "same_as_natural", "{:.0%}"),
)
SPEED_COLUMNS = (
    Column("tokens/s", "tokens_per_s", "{:.1f}", "of decoding, median over prompts"),
    Column("q1", "q1", "{:.1f}"),
    Column("q3", "q3", "{:.1f}"),
    Column("whole call", "call_tokens_per_s", "{:.1f}", "prefill included"),
    Column("length", "accepted_length", "{:.2f}", "tokens per verification pass"),
    Column("union", "natural_union", "{:.1f}"),
    Column("used", "experts_used", "{:.1f}"),
    Column("same text", "same_as_natural", "{:.0%}"),
)


def write_report(folder: Path) -> list[Path]:
    """Write `report.html` and the PNG files of its figures into `folder`; the files, page first.

    Reads quality.json and speed.json there, as far as they exist. Raises `InvalidArgumentError`
    where neither does or one is of another version, and `MissingPlotExtraError` without matplotlib.
    """
    found = {name: folder / f"{name}.json" for name in ("quality", "speed")}
    results = {name: load_results(path) for name, path in found.items() if path.is_file()}
    if not results:
        raise InvalidArgumentError(
            f"{folder} has neither quality.json nor speed.json; measure first: acceptmoe bench run "
            f"all --out {folder}"
        )
    check_matplotlib()
    parts: list[str] = []
    drawn: list[Figure] = []
    for name, parts_of in (("quality", quality_parts), ("speed", speed_parts)):
        if name not in results:
            continue
        try:
            parts += parts_of(results[name], drawn)
        except KeyError as error:
            raise InvalidArgumentError(
                f"{found[name]} has no {error}; another version of acceptmoe has written it: "
                f"measure anew with 'acceptmoe bench run {name}'"
            ) from error
    parts += calibration_parts(results, drawn)
    for name, result in results.items():
        parts += [heading(f"How {name} was measured"), facts(result.content.get("provenance", {}))]
    paths = [folder / PAGE]
    paths[0].write_text(page("AcceptMoE: what the benchmarks found", parts), encoding="utf-8")
    for figure in drawn:
        path = folder / f"{figure.name}.png"
        path.write_bytes(figure.png)
        paths.append(path)
    return paths


def quality_parts(results: Results, drawn: list[Figure]) -> list[str]:
    """Claims, three figures a target, and a table for each pair."""
    rows = results.rows
    by_target = grouped(rows, "target")
    parts = [heading("Quality"), bullets(quality_claims(results.content["summary"]))]
    kinds = (
        ("experts used against KL", "kl", plot_kl, "every policy a curve; lower left is better"),
        (
            "experts used against accuracy",
            "accuracy",
            plot_accuracy,
            "every policy a curve; upper left is better",
        ),
        ("accepted length", "length", plot_lengths, "tokens per verification pass, by policy"),
    )
    for title, name, plot, remark in kinds:
        made = [
            Figure(
                f"quality-{name}-{target}",
                draw(plot(group), target, num_lines(group) if name == "length" else 0),
                f"{target}: {title}, {remark}. {prompts_behind(group)}",
            )
            for target, group in by_target.items()
        ]
        drawn += made
        parts += [
            heading(f"{title[0].upper()}{title[1:]}", 3),
            paragraph(f"Means over the tasks; {remark}. {prompts_behind(rows)}"),
            figures(made),
        ]
    for target, group in by_target.items():
        for task, pair in grouped(group, "task").items():
            is_ours = [is_default(row) for row in pair]
            labels = [row_label(row) for row in pair]
            parts += [
                heading(f"{target}, {task}", 3),
                table(pair, labels, QUALITY_COLUMNS, is_ours),
            ]
    return parts


def prompts_behind(rows: Sequence[Row]) -> str:
    """How many prompts were decoded by trees for the points of a plot, in a sentence."""
    counts = {row_label(row): row["num_prompts_by_trees"] for row in rows}
    most = max(counts.values())
    labels = [label for label, count in counts.items() if count == most]
    fewer = {count for count in counts.values() if count < most}
    if not fewer:
        return f"Each point stands on {most} prompts a task."
    others = " to ".join(str(count) for count in sorted({min(fewer), max(fewer)}))
    return (
        f"The points of {', '.join(labels)} stand on {most} prompts a task, all others on the "
        f"first {others} of them."
    )


def quality_claims(summary: dict[str, Any]) -> Iterable[tuple[str, bool]]:
    """The summary in sentences, each with whether it is as one would wish."""
    for claim in summary["accuracy"]:
        yield (
            f"{claim['policy']}: {claim['mean_difference_points']:+.2f} points from natural over "
            f"{claim['num_pairs']} pairs of target and task (95 %: "
            f"{interval_text(claim['low_points'], claim['high_points'], '{:+.2f}')}); "
            f"worst pair {', '.join(claim['worst_pair'])} at "
            f"{claim['worst_difference_points']:+.2f}.",
            True,
        )
    for claim in summary["default_against_paper"]:
        yield (
            f"{claim['target']}: {claim['experts_used']:.1f} experts used at KL {claim['kl']:.5f}; "
            f"the paper's rule {claim['experts_used_paper']:.1f} at {claim['kl_paper']:.5f}.",
            claim["experts_used"] <= claim["experts_used_paper"]
            and claim["kl"] <= claim["kl_paper"],
        )
    rivals = summary["default_against_moe_spec"]
    if rivals:
        num_dominated = sum(claim["is_dominated"] for claim in rivals)
        yield (
            f"Of {len(rivals)} budgets of MoE-Spec over all targets, {num_dominated} are "
            "dominated: some setting of the default uses no more experts at no higher KL.",
            num_dominated == len(rivals),
        )
    for claim in rivals:
        if claim["best"] is not None:
            yield (
                f"{claim['target']}, {claim['rival']}: {claim['experts_used']:.1f} experts, KL "
                f"{claim['kl']:.5f}, {claim['accepted_length']:.2f} tokens a pass. "
                f"{claim['best']}: {claim['best_experts_used']:.1f} experts, "
                f"{claim['best_kl']:.5f}, {claim['best_accepted_length']:.2f}.",
                claim["is_dominated"],
            )


def speed_parts(results: Results, drawn: list[Figure]) -> list[str]:
    """Claims, a figure a target, and a table for each."""
    by_target = grouped(results.rows, "target")
    made = [
        Figure(
            f"speed-{target}",
            draw(plot_speed(group), target, len(group)),
            f"{target}: tokens per second of every policy at its best tree, with quartiles",
        )
        for target, group in by_target.items()
    ]
    drawn += made
    settings = results.content.get("settings", {})
    parts = [
        heading("Speed"),
        paragraph(
            f"Targets widened {settings.get('factor')} times, {settings.get('dtype')}, batch 1, "
            f"drafter {settings.get('drafter')}. Each policy at the tree that was best on tuning "
            "prompts, natural at 32 and 64 nodes as well; all arms in turn on test prompts."
        ),
        bullets([*speed_claims(results.content["summary"]), *guard_claims(results.content)]),
        figures(made),
    ]
    for target, group in by_target.items():
        is_ours = [is_default(row) for row in group]
        labels = [speed_label(row) for row in group]
        parts += [heading(target, 3), table(group, labels, SPEED_COLUMNS, is_ours)]
    return parts


def speed_claims(summary: Sequence[Row]) -> Iterable[tuple[str, bool]]:
    """How the default's best tree stands against everything else."""
    for claim in summary:
        ratios = {name: found for name, found in claim["ratios"].items() if found is not None}
        yield (
            f"{claim['target']}: {claim['tokens_per_s']:.1f} tokens/s at {claim['num_nodes']} "
            "nodes; "
            + ", ".join(
                f"{found['median']:.2f} times {name} "
                f"({interval_text(found['low'], found['high'], '{:.2f}')})"
                for name, found in ratios.items()
            )
            + ".",
            all(found["median"] >= 1 for found in ratios.values()),
        )


def guard_claims(content: dict[str, Any]) -> Iterable[tuple[str, bool]]:
    """What the guard makes of a drafter that is useless on purpose."""
    for row in content.get("guard", ()):
        found = row["ratio"]
        if found is not None:
            yield (
                f"{row['target']}: random drafts under the guard run at {found['median']:.2f} "
                f"times plain decoding ({interval_text(found['low'], found['high'], '{:.2f}')}): "
                f"{row['guard_reason']}.",
                found["median"] >= GUARD_GOAL,
            )


def calibration_parts(results: dict[str, Results], drawn: list[Figure]) -> list[str]:
    """The curve of every shipped table of the measured targets."""
    targets = {row["target"] for result in results.values() for row in result.rows}
    made = []
    for name in shipped_tables():
        loaded = CommitmentTable.load(name)
        if loaded.target in targets:
            title = f"{loaded.target}, {loaded.drafter}"
            png = draw(plot_calibration(loaded), title)
            made.append(Figure(f"calibration-{name}", png, f"{title}: calibration curve"))
    if not made:
        return []
    drawn += made
    return [
        heading("Calibration"),
        paragraph(
            "How often a draft node was committed, by the drafter's probability of its path: what "
            "the tables turn one into the other with. On the dashed line the drafter is right."
        ),
        figures(made),
    ]


def num_lines(rows: Iterable[Row]) -> int:
    """How many lines the rows' policies with their settings take, one below the other."""
    labels = {row_label(row) for row in rows}
    return sum(1 + label_lines(label, LABEL_WIDTH).count("\n") for label in labels)


def is_default(row: Row) -> bool:
    """Whether a row is that of the default policy at its own setting."""
    return bool(row["policy"] == DEFAULT_POLICY and row["params"] == load_policy(None).params())


def grouped(rows: Iterable[Row], name: str) -> dict[str, list[Row]]:
    """The rows by one of their values, in the order in which it appears."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[name], []).append(row)
    return groups
