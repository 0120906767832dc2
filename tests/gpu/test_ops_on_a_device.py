"""The CUDA kernels on a device: against the references, in graphs, on streams, without waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import device_calls
import pytest
import torch
from torch import Tensor

from acceptmoe.ops.reference import expert_mlp as expert_mlp_reference
from expert_mlp_inputs import CASES as MLP_CASES
from expert_mlp_inputs import Case as MlpCase
from expert_mlp_inputs import relative_error
from select_experts_inputs import CASES, GROUPED, TYPED_CASES, Case, check, make_inputs, run

pytestmark = pytest.mark.gpu

# Sizes of real layers, and one beyond the rows that are computed together.
LARGE_CASES = [
    MlpCase(32, 16, 8, hidden=2048, inner=768, dtype=torch.bfloat16),
    MlpCase(8, 32, 4, hidden=2880, inner=2880, dtype=torch.bfloat16),
    MlpCase(64, 24, 8, hidden=1000, inner=333, dtype=torch.float16),
    MlpCase(33, 8, 4, hidden=520, inner=250, dtype=torch.float32),
    MlpCase(4099, 4, 2, hidden=64, inner=32, dtype=torch.float32),
]
# Of the root of the mean square. fp32: other orders of sums, of up to 2048 products. 16 bits: the
# activations between the products, and the result, are rounded to 2^-9 and 2^-12 of themselves.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}

Call = Callable[..., Any]


def large_reference(case: MlpCase, arguments: tuple[Any, ...]) -> Tensor:
    """The reference row by row on the device, in fp32: thousands of rows take too long on a CPU."""
    return expert_mlp_reference(*device_calls.to_device(arguments)).cpu()


@pytest.mark.parametrize("case", CASES + TYPED_CASES, ids=lambda case: case.name)
def test_selection_equals_the_reference(case: Case) -> None:
    check(case, device_calls.select_experts)


@pytest.mark.parametrize("case", MLP_CASES + LARGE_CASES, ids=str)
def test_experts_equal_the_reference(case: MlpCase) -> None:
    arguments = case.arguments()
    expected = large_reference(case, arguments)
    assert relative_error(device_calls.expert_mlp(*arguments), expected) <= TOLERANCES[case.dtype]


def device_arguments(name: str) -> tuple[Any, ...]:
    """Arguments of either op, on the device, in the sizes of a real layer."""
    if name == "expert_mlp":
        case = MlpCase(32, 64, 8, hidden=512, inner=256, dtype=torch.bfloat16)
        return device_calls.to_device(case.arguments())
    captured: list[tuple[Any, ...]] = []

    def keep(*arguments: Any) -> Any:
        captured.append(arguments)

    case = Case(33, 256, 8, **GROUPED, groups=(8, 4), num_resident=100, padded=2)
    run(case, make_inputs(case), keep)
    return device_calls.to_device(captured[0])


def op(name: str) -> Call:
    overload: Call = getattr(torch.ops.acceptmoe, name).default
    return overload


def tensors(outputs: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def same_bits(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tensors(one), tensors(other), strict=True))


both_ops = pytest.mark.parametrize("name", ["expert_mlp", "select_experts"])


@both_ops
def test_the_same_call_gives_the_same_bits(name: str) -> None:
    arguments = device_arguments(name)
    first = op(name)(*arguments)
    assert all(same_bits(first, op(name)(*arguments)) for _ in range(20))


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@both_ops
def test_a_call_waits_for_nothing(name: str) -> None:
    arguments = device_arguments(name)
    expected = op(name)(*arguments)
    torch.cuda.synchronize()
    with no_waiting():
        outputs = op(name)(*arguments)
    assert same_bits(outputs, expected)


@both_ops
def test_a_call_is_ordered_on_the_stream_of_torch(name: str) -> None:
    arguments = device_arguments(name)
    expected = op(name)(*arguments)
    values = arguments[0].clone()
    arguments[0].zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # tens of milliseconds: on another stream the op would win
        arguments[0].copy_(values)
        outputs = op(name)(*arguments)
    stream.synchronize()
    assert same_bits(outputs, expected)


def captured(function: Call) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of `function()` after a warm-up, and its outputs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = function()
    return graph, outputs


@both_ops
def test_a_replayed_graph_follows_its_inputs(name: str) -> None:
    arguments = device_arguments(name)
    graph, outputs = captured(lambda: op(name)(*arguments))
    for seed in range(3):
        generator = torch.Generator("cuda").manual_seed(seed)
        order = torch.randperm(arguments[0].shape[0], generator=generator, device="cuda")
        for place in (0, 1, 2):  # hidden, ids, weights; or logits, natural weights and ids
            arguments[place].copy_(arguments[place][order].clone())
        graph.replay()
        assert same_bits(outputs, op(name)(*arguments))


def test_a_replayed_graph_follows_its_switch() -> None:
    arguments = device_arguments("select_experts")
    is_enabled = arguments[9]
    graph, outputs = captured(lambda: op("select_experts")(*arguments))
    for switch in (False, True, False):
        is_enabled.fill_(switch)
        graph.replay()
        assert same_bits(outputs, op("select_experts")(*arguments))
        assert bool(outputs[2].all()) is not switch


def test_a_graph_captured_for_few_experts_stays_right_with_many() -> None:
    arguments = list(device_arguments("expert_mlp"))
    everywhere = arguments[1].clone()
    arguments[1].copy_(everywhere % 8)
    arguments[-1] = 8  # the union bound; the ids below touch up to 64
    graph, output = captured(lambda: op("expert_mlp")(*arguments))
    arguments[1].copy_(everywhere)
    graph.replay()
    assert same_bits(output, op("expert_mlp")(*arguments[:-1], 64))


@both_ops
def test_the_op_keeps_its_promises_to_torch(name: str) -> None:
    promises = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(op(name), device_arguments(name), test_utils=promises)
