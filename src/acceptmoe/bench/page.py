"""The report as one HTML page that needs nothing beside itself: style and pictures are inside."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

# One column on a phone, as many as fit on a screen. Wide tables scroll by themselves, and their
# first column stays, so that the page never does.
STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1240px; padding: 1rem; color: #1b1b1b; background: #fff;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: .5rem 0; }
h2 { font-size: 1.25rem; margin: 2.2rem 0 .4rem; border-bottom: 1px solid #ddd; }
h3 { font-size: 1rem; margin: 1.4rem 0 .3rem; }
p, li { max-width: 75ch; overflow-wrap: anywhere; }
ul { padding-left: 1.2rem; }
.figures { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 330px), 1fr)); }
figure { margin: 0; }
img { width: 100%; max-width: 560px; height: auto; display: block; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .82rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .55rem; text-align: right; white-space: nowrap; }
thead th { border-bottom: 2px solid #888; vertical-align: bottom; }
tbody tr:nth-child(odd) td { background: #f5f5f5; }
tbody tr.ours td { background: #fdeadd; font-weight: 600; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: #fff; }
.worse { color: #a11; }
footer { margin-top: 2rem; font-size: .82rem; color: #444; }
@media (max-width: 600px) { body { padding: .7rem; } table { font-size: .75rem; }
  th, td { padding: .2rem .4rem; }
  td:first-child { max-width: 11rem; white-space: normal; overflow-wrap: anywhere; } }
@media print { .scroll { overflow: visible; } }
"""


@dataclass(frozen=True)
class Figure:
    """A picture: its file's name, the PNG, and what it shows, for those who cannot see it."""

    name: str
    png: bytes
    description: str


@dataclass(frozen=True)
class Column:
    """A table's heading, the row's key, how a value is written, and what it means."""

    heading: str
    key: str
    layout: str
    meaning: str = ""


def page(title: str, parts: Iterable[str]) -> str:
    """The whole document."""
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<h1>{escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def heading(text: str, level: int = 2) -> str:
    """A section's heading."""
    return f"<h{level}>{escape(text)}</h{level}>"


def paragraph(text: str) -> str:
    """Running text."""
    return f"<p>{escape(text)}</p>"


def bullets(items: Iterable[tuple[str, bool]]) -> str:
    """A list; what is marked False is not as one would wish and is set apart."""
    lines = (
        f"<li>{escape(text)}</li>" if is_good else f'<li class="worse">{escape(text)}</li>'
        for text, is_good in items
    )
    return "<ul>\n" + "\n".join(lines) + "\n</ul>"


def figures(found: Sequence[Figure]) -> str:
    """Pictures side by side, or one below the other where there is no room."""
    cells = (
        f'<figure><img alt="{escape(figure.description)}" '
        f'src="data:image/png;base64,{base64.b64encode(figure.png).decode()}"></figure>'
        for figure in found
    )
    return '<div class="figures">\n' + "\n".join(cells) + "\n</div>"


def table(
    rows: Sequence[dict[str, Any]],
    labels: Sequence[str],
    columns: Sequence[Column],
    is_ours: Sequence[bool],
) -> str:
    """Rows with a label each; a value that a row does not have is a dash."""
    heads = "".join(
        f'<th title="{escape(column.meaning)}">{escape(column.heading)}</th>' for column in columns
    )
    lines = []
    for row, label, ours in zip(rows, labels, is_ours, strict=True):
        cells = "".join(f"<td>{escape(cell(row, column))}</td>" for column in columns)
        marked = ' class="ours"' if ours else ""
        lines.append(f"<tr{marked}><td>{escape(label)}</td>{cells}</tr>")
    return (
        f'<div class="scroll"><table>\n<thead><tr><th>policy</th>{heads}</tr></thead>\n'
        "<tbody>\n" + "\n".join(lines) + "\n</tbody>\n</table></div>"
    )


def cell(row: dict[str, Any], column: Column) -> str:
    """One value as text."""
    value = row.get(column.key)
    return "-" if value is None else column.layout.format(value)


def facts(values: dict[str, Any]) -> str:
    """Names and values in small print, at the end."""
    lines = (
        f"{escape(name.replace('_', ' '))}: {escape(str(value))}"
        for name, value in values.items()
        if value is not None
    )
    return "<footer>" + "<br>\n".join(lines) + "</footer>"
