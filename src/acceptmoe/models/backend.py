"""The `torch.compile` backend of passes and drafts: Inductor, with linear layers of our own.

Stock low-precision products of a few rows run far below what some CPUs could do; there every
`F.linear` of the pass becomes `acceptmoe::linear`. This rewrite, and those in
`grouped_attention.py` and `merged_linears.py`, work on the graph that Dynamo hands to a backend,
before anything is lowered, so they need no private part of Inductor.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo import list_backends, lookup_backend
from transformers import PreTrainedModel

from acceptmoe.errors import InvalidArgumentError
from acceptmoe.models.grouped_attention import fold_query_heads
from acceptmoe.models.merged_linears import merge_int8_linears
from acceptmoe.ops.linear import suits_linear

MAX_LINEAR_ROWS = 64
# What F.linear is called in the graphs of Dynamo; nn.Linear is traced into.
_LINEAR_TARGETS = (torch.nn.functional.linear, torch._C._nn.linear)

Compiled = Callable[..., Any]


def check_backend(name: object) -> str:
    """`name`, or `InvalidArgumentError` when torch has no such backend."""
    if not isinstance(name, str) or name not in list_backends(()):
        raise InvalidArgumentError(
            f"compile is {name!r}; it must be True, False, or a backend of torch.compile: "
            f"{', '.join(list_backends(()))}"
        )
    return name


class PassBackend:
    """Compiles graphs with the backend `name`; counts them, and what is rewritten in them.

    `linear` is the op that takes the place of `F.linear` where it can, or None to leave all as
    they are.
    """

    def __init__(self, name: str, linear: Callable[..., Tensor] | None = None) -> None:
        self.name = name
        self.num_graphs = 0
        self.num_attentions_folded = self.num_linears_rewritten = self.num_linears_merged = 0
        self._linear = linear

    def compile(self, function: Compiled) -> Compiled:
        """`function` compiled as one graph for the shapes of its first call, by this backend.

        Axes that `torch._dynamo.mark_dynamic` has marked may have other sizes in later calls.

        Of Dynamo's guards only those on such sizes stay: checking those of every module and
        parameter would take longer than a small model's layer, in every step. So the result is
        right for as long as everything but the values of tensors stays as it was;
        `CompiledPasses` checks that before each text.
        """
        return torch.compile(
            _with_own_code(function),
            fullgraph=True,
            dynamic=False,
            backend=self,
            options={"guard_filter_fn": _guards_on_sizes},
        )

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Tensor]) -> Compiled:
        self.num_graphs += 1
        self.num_attentions_folded += fold_query_heads(module)
        self.num_linears_merged += merge_int8_linears(module)
        if self._linear is not None:
            self.num_linears_rewritten += rewrite_linears(module, self._linear)
        backend: Callable[..., Compiled] = lookup_backend(self.name)
        return backend(module, inputs)


def _with_own_code(function: Compiled) -> Compiled:
    """The same function with a code object of its own.

    Dynamo keeps what it compiled by code object and stops compiling after a few results for one;
    every pass is a result of its own, dropped with the pass.
    """
    code = function.__code__.replace()
    return types.FunctionType(code, function.__globals__, code.co_name, None, function.__closure__)


def _guards_on_sizes(guards: Sequence[Any]) -> list[bool]:
    return [guard.guard_type == "SHAPE_ENV" for guard in guards]


def rewrite_linears(module: fx.GraphModule, linear: Callable[..., Tensor]) -> int:
    """Make every low-precision `F.linear` of few rows in `module` a call of `linear`.

    `linear(input [T, H], weight [N, H], bias [N] | None) -> [T, N]`. Returns how many there were.
    """
    nodes = [
        node
        for node in module.graph.nodes
        if node.op == "call_function" and node.target in _LINEAR_TARGETS and _is_suitable(node)
    ]
    for node in nodes:
        _rewrite(module.graph, node, linear)
    if nodes:
        module.graph.lint()
        module.recompile()
    return len(nodes)


def _rewrite(graph: fx.Graph, node: fx.Node, linear: Callable[..., Tensor]) -> None:
    states, weight, bias = _operands(node)
    # A size that changes is no number; -1 stands for it.
    shape = [size if type(size) is int else -1 for size in _value(node).shape]
    with graph.inserting_before(node):
        flat = graph.call_function(torch.reshape, (states, (-1, _value(weight).shape[1])))
        product = graph.call_function(linear, (flat, weight, bias))
        result = graph.call_function(torch.reshape, (product, shape))
    result.meta["example_value"] = _value(node)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _is_suitable(node: fx.Node) -> bool:
    states, weight, _ = _operands(node)
    state, matrix = _value(states), _value(weight)
    if not isinstance(state, Tensor) or not isinstance(matrix, Tensor):
        return False
    num_unknown = sum(type(size) is not int for size in state.shape)
    is_small = state.numel() <= MAX_LINEAR_ROWS * state.shape[-1]
    return suits_linear(state, matrix) and num_unknown <= 1 and is_small


def _value(operand: Any) -> Any:
    """The fake tensor of a node; None for what is no node."""
    return operand.meta.get("example_value") if isinstance(operand, fx.Node) else None


def _operands(node: fx.Node) -> tuple[Any, Any, Any]:
    """Input, weight and bias of an `F.linear` call."""
    named = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | node.kwargs
    return named["input"], named["weight"], named.get("bias")


def model_state(model: PreTrainedModel) -> object:
    """Equal for two moments between which nothing that a captured pass reads has moved.

    Addresses of parameters and buffers, hooks, modes and implementations; not the values, which a
    pass reads anew.
    """
    tensors = [*model.parameters(), *model.buffers()]
    modules = [
        (
            type(module),
            vars(module).get("forward"),
            module.training,
            tuple(module._forward_hooks),
            tuple(module._forward_pre_hooks),
        )
        for module in model.modules()
    ]
    return (
        [(tensor.data_ptr(), tensor.dtype, tensor.shape) for tensor in tensors],
        modules,
        model.config._attn_implementation,
        model.config._experts_implementation,
    )
