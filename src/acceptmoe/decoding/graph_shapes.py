"""The sizes of verification passes that are captured as CUDA graphs, from `graphs/*.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from acceptmoe.assets import asset_dir
from acceptmoe.errors import TreeError
from acceptmoe.tree import MAX_NODES


@dataclass(frozen=True)
class GraphShape:
    """A pass over `padded_nodes` rows. Raises `TreeError` for an impossible number."""

    name: str
    padded_nodes: int

    def __post_init__(self) -> None:
        rows = self.padded_nodes
        if isinstance(rows, bool) or not isinstance(rows, int) or not 1 <= rows <= MAX_NODES:
            raise TreeError(
                f"padded_nodes of the graph shape {self.name!r} is {rows!r}; it must be a whole "
                f"number from 1 to {MAX_NODES}"
            )


def load_graph_shapes(folder: Path | None = None) -> tuple[GraphShape, ...]:
    """All shapes of `folder`, by default those that come with the package, smallest first.

    Raises `TreeError` naming the file that is unreadable or contradicts another.
    """
    files = sorted((folder or asset_dir("graphs")).glob("*.json"))
    shapes = sorted((_load(file) for file in files), key=lambda shape: shape.padded_nodes)
    for shape, following in pairwise(shapes):
        if shape.padded_nodes == following.padded_nodes:
            raise TreeError(
                f"the graph shapes {shape.name!r} and {following.name!r} both have "
                f"{shape.padded_nodes} padded_nodes; remove one"
            )
    return tuple(shapes)


def sizes_for(num_nodes: int, shapes: tuple[GraphShape, ...]) -> tuple[int, ...]:
    """The sizes that trees of up to `num_nodes` nodes need: all below, and the first that fits."""
    sizes = [shape.padded_nodes for shape in shapes]
    largest = next((size for size in sizes if size >= num_nodes), max(sizes, default=0))
    return tuple(size for size in sizes if size <= largest)


def _load(file: Path) -> GraphShape:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TreeError(f"{file} is no graph shape: {error}; see graphs/README.md") from None
    if not isinstance(content, dict) or set(content) != {"name", "padded_nodes"}:
        got = sorted(content) if isinstance(content, dict) else type(content).__name__
        raise TreeError(f"{file} holds {got}; it must hold name and padded_nodes")
    if content["name"] != file.stem:
        raise TreeError(f"{file} has the name {content['name']!r}; it must be {file.stem!r}")
    return GraphShape(content["name"], content["padded_nodes"])
