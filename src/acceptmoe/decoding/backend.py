"""The `torch.compile` backend of verification passes: Inductor, with linear layers of our own.

Stock low-precision products of a few rows run far below what some CPUs could do; there every
`F.linear` of the pass becomes `acceptmoe::linear`. The rewrite works on the graph that Dynamo hands
to a backend, before anything is lowered, so it needs no private part of Inductor.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo import list_backends, lookup_backend

from acceptmoe.errors import InvalidArgumentError
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
    """Compiles graphs with the backend `name`; counts them, and the linear layers rewritten.

    `linear` is the op that takes the place of `F.linear` where it can, or None to leave all as
    they are.
    """

    def __init__(self, name: str, linear: Callable[..., Tensor] | None = None) -> None:
        self.name = name
        self.num_graphs = 0
        self.num_linears_rewritten = 0
        self._linear = linear

    def compile(self, function: Compiled) -> Compiled:
        """`function` compiled as one graph for the shapes of its first call, by this backend.

        Without Dynamo's guards: checking those of every module and parameter would take longer than
        a small model's layer, in every step. So the result is right for as long as everything but
        the values of tensors stays as it was; `CompiledPasses` checks that before each text.
        """
        return torch.compile(
            _with_own_code(function),
            fullgraph=True,
            dynamic=False,
            backend=self,
            options={"guard_filter_fn": _no_guards},
        )

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Tensor]) -> Compiled:
        self.num_graphs += 1
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


def _no_guards(guards: Sequence[Any]) -> list[bool]:
    return [False] * len(guards)


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
    shape = states.meta["example_value"].shape
    with graph.inserting_before(node):
        flat = graph.call_function(torch.reshape, (states, (-1, shape[-1])))
        product = graph.call_function(linear, (flat, weight, bias))
        result = graph.call_function(
            torch.reshape, (product, (*shape[:-1], weight.meta["example_value"].shape[0]))
        )
    result.meta["example_value"] = node.meta["example_value"]
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _is_suitable(node: fx.Node) -> bool:
    states, weight, _ = _operands(node)
    if not isinstance(states, fx.Node) or not isinstance(weight, fx.Node):
        return False
    state, matrix = states.meta.get("example_value"), weight.meta.get("example_value")
    if not isinstance(state, Tensor) or not isinstance(matrix, Tensor):
        return False
    return suits_linear(state, matrix) and state.numel() <= MAX_LINEAR_ROWS * state.shape[-1]


def _operands(node: fx.Node) -> tuple[Any, Any, Any]:
    """Input, weight and bias of an `F.linear` call."""
    named = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | node.kwargs
    return named["input"], named["weight"], named.get("bias")
