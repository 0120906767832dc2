"""The report: one page with everything inside, pictures beside it, and what it says."""

from __future__ import annotations

import json
import re
import shutil
import struct
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.text import Text
from result_files import quality_row, save_quality, save_speed, speed_row

from acceptmoe.bench.page import Column, bullets, table
from acceptmoe.bench.plots import (
    COLOURS,
    MissingPlotExtraError,
    curves,
    make_figure,
    plot_accuracy,
    plot_kl,
    plot_lengths,
    plot_speed,
    row_label,
    speed_label,
)
from acceptmoe.bench.report import prompts_behind, write_report
from acceptmoe.errors import InvalidArgumentError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    save_quality(
        folder / "quality.json",
        [
            quality_row("natural", "1111", kl=0.0, experts_used=40.0),
            quality_row("accept", "1110"),
            quality_row("moe-spec", "1100", params={"budget": 8}),
        ],
    )
    save_speed(
        folder / "speed.json",
        [speed_row("transformers-generate", [20.0], None), speed_row("accept", [30.0, 35.0])],
    )
    write_report(folder)
    return folder


class Tags(HTMLParser):
    """Checks that tags close in order, and keeps those with attributes."""

    VOID = frozenset({"meta", "img", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_needs_nothing_beside_itself(folder: Path) -> None:
    text = (folder / "report.html").read_text(encoding="utf-8")
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert not {"script", "link", "iframe"} & {tag for tag, _ in tags.found}
    assert not re.search(r"https?:|url\(|@import", text)
    images = [attributes for tag, attributes in tags.found if tag == "img"]
    assert len(images) == 3 + 1 + 3  # three of quality, one of speed, a curve for each table
    for attributes in images:
        assert str(attributes["src"]).startswith("data:image/png;base64,")
        assert attributes["alt"]
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in (
        tags.found
    )


def test_every_figure_is_a_png_file_too(folder: Path) -> None:
    names = {path.stem for path in folder.glob("*.png")}
    assert {"quality-kl-tiny-qwen3-moe", "speed-tiny-qwen3-moe"} <= names
    assert "calibration-tiny-qwen3-moe__eagle3" in names
    for path in folder.glob("*.png"):
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG\r\n\x1a\n")
        width, height = struct.unpack(">II", content[16:24])
        assert (width, height) == (936, 744)


def test_the_page_says_what_the_files_say(folder: Path) -> None:
    text = (folder / "report.html").read_text(encoding="utf-8")
    for found in (
        "accept: -0.10 points from natural over 1 pairs",
        "20.0 experts used at KL 0.00100; the paper&#x27;s rule 25.0 at 0.00200",
        "Of 1 budgets of MoE-Spec over all targets, 0 are dominated",
        "1.30 times natural-32 (1.20 to 1.40)",
        "0.98 times plain decoding (0.97 to 0.99): drafting does not pay.",
        "moe-spec:budget=8",
        "75.0%",
        "Each point stands on 4 prompts a task.",
        "by trees</th>",
        "<td>25.5</td>",
        "accept, 32 nodes",
    ):
        assert found in text


def test_equal_results_give_equal_pages(folder: Path) -> None:
    before = (folder / "report.html").read_text(encoding="utf-8")
    write_report(folder)
    assert (folder / "report.html").read_text(encoding="utf-8") == before


def test_names_cannot_break_the_page() -> None:
    text = table([{"a": None}], ["<b>"], [Column("<i>", "a", "{}", '"')], [False])
    assert "<td>&lt;b&gt;</td><td>-</td>" in text
    assert bullets([("a & b", False)]) == '<ul>\n<li class="worse">a &amp; b</li>\n</ul>'


def test_a_curve_has_a_point_for_each_setting() -> None:
    rows = [
        quality_row("moe-spec", "1", params={"budget": budget}, task=task, experts_used=used, kl=kl)
        for budget, used, kl in ((8, 8.0, 0.2), (4, 4.0, 0.5))
        for task in ("algebra", "python-asserts")
    ]
    rows[0]["kl"] = 0.4
    rows.append(quality_row("natural", "1", experts_used=None))
    assert curves(rows, "kl") == {"moe-spec": [(4.0, 0.5), (8.0, pytest.approx(0.3))]}


def test_labels_name_settings_and_trees() -> None:
    assert row_label({"policy": "evict", "params": {"costs": "measured"}}) == "evict:costs=measured"
    assert row_label({"policy": "accept-depth", "params": {"beta": 0.5}}) == "accept-depth"
    assert row_label({"policy": "accept-depth", "params": {"beta": 1.5}}) == "accept-depth:beta=1.5"
    row = {"policy": "natural", "num_nodes": 6, "is_chain": True}
    assert speed_label(row) == "natural, chain of 6"
    assert len(set(COLOURS.values())) == len(COLOURS)


def test_captions_say_how_many_prompts_are_behind_the_points() -> None:
    rows = [
        quality_row("natural", "1111", num_prompts_by_trees=2),
        quality_row("accept", "1110"),
        quality_row("moe-spec", "11", params={"budget": 8}),
    ]
    assert prompts_behind(rows) == (
        "The points of accept stand on 4 prompts a task, all others on the first 2 of them."
    )
    rows[2]["num_prompts_by_trees"] = 3
    assert "all others on the first 2 to 3 of them" in prompts_behind(rows)


def test_every_label_is_inside_its_figure() -> None:
    settings = {"exponent": 16.0, "top": 0, "size": 1e-6, "min_commitment": 0.15}
    rows = [quality_row("accept", "1", params=settings), quality_row("natural", "1")]
    speeds = [speed_row("transformers-prompt-lookup", [20.0], None), speed_row("accept", [1000.0])]
    plots = (plot_kl(rows), plot_accuracy(rows), plot_lengths(rows), plot_speed(speeds))
    for plot in plots:
        figure = make_figure(plot, "tiny-qwen3-moe", 2)
        figure.draw_without_rendering()
        (axes,) = figure.axes
        width, height = figure.bbox.size
        labels = (axes.xaxis.label, axes.yaxis.label, axes._left_title)
        for text in filter(Text.get_text, labels):
            box = text.get_window_extent()
            assert min(box.x0, box.y0) >= -1, text  # a pixel of rounding
            assert box.x1 <= width + 1, text
            assert box.y1 <= height + 1, text
        for text in axes.get_yticklabels():  # those outside the limits are not drawn
            assert text.get_window_extent().x0 >= -1, text


def test_the_shipped_results_make_a_page(tmp_path: Path) -> None:
    shipped = Path(__file__).parents[2] / "bench" / "results"
    for name in ("quality.json", "speed.json"):
        shutil.copy(shipped / name, tmp_path)
    page, *figures = write_report(tmp_path)
    text = page.read_text(encoding="utf-8")
    assert len(figures) > 10
    for target in ("tiny-qwen3-moe", "tiny-olmoe", "tiny-gpt-oss"):
        assert target in text


def test_a_file_of_another_version_is_named(folder: Path, tmp_path: Path) -> None:
    content = json.loads((folder / "quality.json").read_text(encoding="utf-8"))
    del content["summary"]
    (tmp_path / "quality.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(InvalidArgumentError, match=r"json has no 'summary'; another version"):
        write_report(tmp_path)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="measure first: acceptmoe bench run"):
        write_report(tmp_path)


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_speed(tmp_path / "speed.json", [speed_row("accept", [1.0])])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingPlotExtraError, match=r"pip install 'acceptmoe\[plot\]'"):
        write_report(tmp_path)
