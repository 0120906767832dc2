"""The plots of the report, one small figure a target, so that a phone can stack them.

matplotlib is imported here alone, and only when something is drawn: it comes with the extra `plot`.
"""

from __future__ import annotations

import io
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from acceptmoe.bench.policy_grid import NATURAL, PAPER, label_lines, setting_label
from acceptmoe.errors import AcceptMoEError
from acceptmoe.policies import DEFAULT_POLICY
from acceptmoe.table import CommitmentTable

Row = dict[str, Any]
Axes = Any  # matplotlib publishes types, but is no dependency

WIDTH_INCHES, HEIGHT_INCHES = 3.9, 3.1  # small, so that its texts are large enough on a phone
LINE_INCHES = 0.19  # of a plot with a line for each policy
LABEL_WIDTH = 36  # characters of a policy beside its dot
DOTS_PER_INCH = 240
# The palette of Okabe and Ito, which colour-blind people can tell apart, and greys.
COLOURS = {
    NATURAL: "#000000",
    PAPER: "#0072B2",
    DEFAULT_POLICY: "#D55E00",
    "moe-spec": "#009E73",
    "xshare": "#CC79A7",
    "oea": "#E69F00",
    "lynx": "#56B4E9",
    "s2": "#7A5195",
    "evict": "#8C6D31",
    "utility": "#B5A642",
}
OTHER_COLOUR = "#888888"
MARKERS = {NATURAL: "s", PAPER: "D", DEFAULT_POLICY: "o"}
LOWEST_KL = 1e-7  # natural's is rounding; a logarithm needs a floor


class MissingPlotExtraError(AcceptMoEError, ImportError):
    """matplotlib is not installed."""


def check_matplotlib() -> None:
    """Raise `MissingPlotExtraError` where plots cannot be drawn."""
    try:
        import matplotlib
    except ImportError as error:
        raise MissingPlotExtraError(
            "plots need matplotlib, which is not installed; run: pip install 'acceptmoe[plot]'"
        ) from error
    matplotlib.use("Agg")  # no display is needed


def draw(plot: Callable[[Axes], None], title: str, num_lines: int = 0) -> bytes:
    """The PNG of one figure, high enough for `num_lines` labels below each other."""
    content = io.BytesIO()
    # Without the date, so that equal results give equal files.
    make_figure(plot, title, num_lines).savefig(content, format="png", metadata={"Software": None})
    return content.getvalue()


def make_figure(plot: Callable[[Axes], None], title: str, num_lines: int = 0) -> Any:
    """The figure that `draw` makes a PNG of."""
    from matplotlib.figure import Figure

    height = max(HEIGHT_INCHES, 0.9 + LINE_INCHES * num_lines)
    figure = Figure(figsize=(WIDTH_INCHES, height), dpi=DOTS_PER_INCH, layout="constrained")
    axes = figure.subplots()
    plot(axes)
    axes.set_title(title, fontsize=10, loc="left")
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.5)
    axes.set_axisbelow(True)
    return figure


def plot_kl(rows: Sequence[Row]) -> Callable[[Axes], None]:
    """Experts used against KL, every policy a curve; down and left is better."""

    def plot(axes: Axes) -> None:
        for policy, points in curves(rows, "kl").items():
            floored = [(used, max(kl, LOWEST_KL)) for used, kl in points]
            _curve(axes, policy, floored)
        axes.set_yscale("log")
        axes.set_xlabel("experts used per layer and pass", fontsize=8)
        axes.set_ylabel("KL from natural, nats per token", fontsize=8)
        axes.legend(fontsize=7, frameon=False)

    return plot


def plot_accuracy(rows: Sequence[Row]) -> Callable[[Axes], None]:
    """Experts used against the accuracy's difference from natural; up and left is better."""

    def plot(axes: Axes) -> None:
        axes.axhline(0, color="#000000", linewidth=0.6)
        for policy, points in curves(rows, "difference_points").items():
            _curve(axes, policy, points)
        axes.set_xlabel("experts used per layer and pass", fontsize=8)
        axes.set_ylabel("accuracy minus natural's, points", fontsize=8)
        axes.legend(fontsize=7, frameon=False)

    return plot


def curves(rows: Iterable[Row], value: str) -> dict[str, list[tuple[float, float]]]:
    """For each policy its settings as (experts used, `value`), each the mean over the tasks."""
    settings: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        if row["experts_used"] is not None and row[value] is not None:
            key = (row["policy"], str(row["params"]))
            settings[key].append((row["experts_used"], row[value]))
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for (policy, _), points in settings.items():
        used, values = zip(*points, strict=True)
        found[policy].append((statistics.fmean(used), statistics.fmean(values)))
    return {policy: sorted(points) for policy, points in found.items()}


def _curve(axes: Axes, policy: str, points: Sequence[tuple[float, float]]) -> None:
    used, values = zip(*points, strict=True)
    is_ours = policy == DEFAULT_POLICY
    axes.plot(
        used,
        values,
        label=policy,
        color=COLOURS.get(policy, OTHER_COLOUR),
        marker=MARKERS.get(policy, "^"),
        markersize=5 if is_ours else 4,
        linewidth=1.8 if is_ours else 1.0,
        zorder=3 if is_ours else 2,
    )


def plot_lengths(rows: Sequence[Row]) -> Callable[[Axes], None]:
    """Accepted length of each policy's own setting, the mean over the tasks, as dots."""

    def plot(axes: Axes) -> None:
        lengths: dict[tuple[str, str], list[float]] = defaultdict(list)
        for row in rows:
            if row["accepted_length"] is not None:
                lengths[row["policy"], row_label(row)].append(row["accepted_length"])
        bars = [
            (label, statistics.fmean(found), COLOURS.get(policy, OTHER_COLOUR))
            for (policy, label), found in lengths.items()
        ]
        _dots(axes, [(label, value, value, value, colour) for label, value, colour in bars])
        _label_dots(axes, "tokens per verification pass")

    return plot


def plot_speed(rows: Sequence[Row]) -> Callable[[Axes], None]:
    """Tokens/s of every arm, median and quartiles over prompts."""

    def plot(axes: Axes) -> None:
        _dots(
            axes,
            [
                (
                    speed_label(row),
                    row["tokens_per_s"],
                    row["q1"],
                    row["q3"],
                    COLOURS.get(row["policy"], OTHER_COLOUR),
                )
                for row in sorted(rows, key=lambda row: row["tokens_per_s"] or 0.0)
                if row["tokens_per_s"] is not None
            ],
        )
        axes.set_xlim(left=0)
        _label_dots(axes, "tokens/s (median, quartiles)")

    return plot


def _dots(axes: Axes, dots: Sequence[tuple[str, float, float, float, str]]) -> None:
    """(label, middle, low, high, colour) from the bottom up."""
    for place, (_, middle, low, high, colour) in enumerate(dots):
        axes.plot([low, high], [place, place], color=colour, linewidth=2)
        axes.plot(middle, place, "o", color=colour, markersize=4)
    axes.set_yticks(
        range(len(dots)), [label_lines(label, LABEL_WIDTH) for label, *_ in dots], fontsize=7
    )


def _label_dots(axes: Axes, text: str) -> None:
    """Flush right: beside long names the axis can be shorter than its label."""
    axes.set_xlabel(text, fontsize=8, loc="right")


def plot_calibration(table: CommitmentTable) -> Callable[[Axes], None]:
    """The table's curve: the drafter's path probability against the commitment frequency."""

    def plot(axes: Axes) -> None:
        axes.plot([0, 1], [0, 1], color=OTHER_COLOUR, linewidth=0.8, linestyle="--")
        curve = table.curve
        axes.plot(curve.path_probabilities, curve.commitments, color=COLOURS[DEFAULT_POLICY])
        error = table.held_out_error
        axes.text(
            0.02,
            0.97,
            f"held-out error {error.curve:.4f}\nthe drafter's own {error.raw:.4f}",
            transform=axes.transAxes,
            fontsize=8,
            verticalalignment="top",
        )
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)
        axes.set_xlabel("path probability, as drafted", fontsize=8)
        axes.set_ylabel("committed", fontsize=8)

    return plot


def row_label(row: Row) -> str:
    """A policy with its settings."""
    return setting_label(row["policy"], row["params"])


def speed_label(row: Row) -> str:
    """A policy with its tree."""
    if row["num_nodes"] is None:
        return str(row["policy"])
    shape = f"chain of {row['num_nodes']}" if row["is_chain"] else f"{row['num_nodes']} nodes"
    return f"{row['policy']}, {shape}"
