"""Products of the same rows with several rounded weights, in one call instead of one for each.

Query, key and value projections read the same rows, and so do gate and up. In a small model each is
done in about the time that it takes to call it and to wake the threads.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import chain
from typing import Any

import torch
from torch import fx

from acceptmoe.ops import int8_linear  # noqa: F401  (registers the op)

_INT8_LINEARS = torch.ops.acceptmoe.int8_linears.default


def merge_int8_linears(module: fx.GraphModule) -> int:
    """Make `acceptmoe::int8_linears` of the same rows one call in the graph that Dynamo has made.

    Bit for bit the same. Returns how many calls there are less.
    """
    of_rows: dict[Any, list[fx.Node]] = defaultdict(list)
    for node in module.graph.nodes:
        if (
            node.op == "call_function"
            and node.target is _INT8_LINEARS
            and _are_inputs(node.args[1:])
        ):
            of_rows[_rows(node.args[0])].append(node)
    groups = [nodes for nodes in of_rows.values() if len(nodes) > 1]
    for nodes in groups:
        _merge(module.graph, nodes)
    if groups:
        module.graph.lint()
        module.recompile()
    return sum(len(nodes) - 1 for nodes in groups)


def _merge(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    """One call in the place of the first of `nodes`, and a slice of it for each."""
    arguments: list[tuple[Any, ...]] = [node.args for node in nodes]
    rows = arguments[0][0]
    lists = [list(chain.from_iterable(each[place] for each in arguments)) for place in (1, 2, 3, 4)]
    start = 0
    with graph.inserting_before(nodes[0]):
        merged = graph.call_function(_INT8_LINEARS, (rows, *lists))
        for node, (*_, num_outputs) in zip(nodes, arguments, strict=True):
            part = graph.call_method("narrow", (merged, 1, start, sum(num_outputs)))
            part.meta["example_value"] = node.meta.get("example_value")
            node.replace_all_uses_with(part)
            start += sum(num_outputs)
    for node in nodes:
        graph.erase_node(node)


def _are_inputs(lists: tuple[Any, ...]) -> bool:
    """Whether weights, scales and biases are there from the beginning, wherever the call is."""
    nodes = [each for values in lists for each in values if isinstance(each, fx.Node)]
    return all(node.op in ("placeholder", "get_attr") for node in nodes)


def _rows(node: Any) -> Any:
    """What tells equal rows: of a `reshape`, which every layer makes for itself, its arguments."""
    if isinstance(node, fx.Node) and node.op == "call_method" and node.target == "reshape":
        return ("reshape", *node.args)
    return node
