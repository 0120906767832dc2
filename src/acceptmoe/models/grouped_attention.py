"""Attention of a traced graph on the keys and values of the cache, instead of copies of them.

Where several query heads share a key-value head, Transformers repeats keys and values for each of
them as soon as there is a mask: a copy of the whole cache, in every layer and pass, larger than the
experts' weights when the text is long. Here the query heads of a group become rows of one head.

Axes: T rows, C key-value heads, G query heads of each, S slots, d their dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

# What it is called in the graphs of Dynamo.
_ATTENTION = torch.nn.functional.scaled_dot_product_attention


def fold_query_heads(module: fx.GraphModule) -> int:
    """Make every masked attention on repeated keys and values one on those that are repeated.

    On the CPU, bit for bit the same. Returns how many there were.
    """
    masks: dict[fx.Node, fx.Node] = {}  # by the mask that they repeat
    num_folded = 0
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.target is _ATTENTION:
            num_folded += _fold(node, masks)
    if num_folded:
        module.graph.lint()
        module.recompile()
    return num_folded


def _fold(node: fx.Node, masks: dict[fx.Node, fx.Node]) -> bool:
    """Fold the attention `node`, [1, C * G, T, d], if it is of that kind."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    named: dict[str, Any] = dict(zip(names, node.args, strict=False)) | node.kwargs
    keys, values = _repeated(named["key"]), _repeated(named["value"])
    queries, mask = named["query"], named.get("attn_mask")
    is_plain = not named.get("dropout_p") and not named.get("is_causal")
    if keys is None or values is None or not isinstance(mask, fx.Node) or not is_plain:
        return False
    shape, mask_shape = _value(queries).shape, _value(mask).shape
    num_kv_heads = _value(keys).shape[1]
    num_repeats = shape[1] // num_kv_heads
    if len(mask_shape) != 4 or mask_shape[1] != 1 or _value(values).shape[1] != num_kv_heads:
        return False
    graph = node.graph
    with graph.inserting_before(node):
        if mask not in masks:
            masks[mask] = graph.call_method("repeat", (mask, 1, 1, num_repeats, 1))
        rows = graph.call_method("reshape", (queries, 1, num_kv_heads, -1, shape[-1]))
        settings = {name: node.kwargs[name] for name in ("scale",) if name in node.kwargs}
        attended = graph.call_function(
            _ATTENTION, (rows, keys, values), {"attn_mask": masks[mask], **settings}
        )
        width = _value(values).shape[-1]
        result = graph.call_method("reshape", (attended, 1, shape[1], -1, width))
    result.meta["example_value"] = _value(node)
    node.replace_all_uses_with(result)
    graph.erase_node(node)
    return True


def _repeated(node: Any) -> fx.Node | None:
    """[1, C, S, d] on the CPU that Transformers' `repeat_kv` has made `node` from, if it has."""
    expanded = _argument_of(node, "reshape")
    inserted = _argument_of(expanded, "expand")
    if inserted is None or inserted.op != "call_function":
        return None
    source = inserted.args[0]
    if not isinstance(source, fx.Node):
        return None
    before, after = _value(source), _value(node)
    is_repetition = (
        before.dim() == after.dim() == 4
        and before.shape[0] == 1
        and _value(inserted).shape == (*before.shape[:2], 1, *before.shape[2:])
        and after.shape[1] % before.shape[1] == 0
        and after.shape[2:] == before.shape[2:]
    )
    return source if is_repetition and before.device.type == "cpu" else None


def _argument_of(node: Any, method: str) -> fx.Node | None:
    """What the method is called on, if `node` is such a call."""
    if not isinstance(node, fx.Node) or node.op != "call_method" or node.target != method:
        return None
    argument = node.args[0]
    return argument if isinstance(argument, fx.Node) else None


def _value(node: fx.Node) -> Tensor:
    value = node.meta["example_value"]
    assert isinstance(value, Tensor)
    return value
