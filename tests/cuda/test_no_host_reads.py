"""On CUDA the ops read no value back: traced with tensors that have none, a read would fail."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from acceptmoe.ops import expert_mlp_cuda as expert_mlp_module
from acceptmoe.ops.expert_mlp_cuda import expert_mlp_cuda
from acceptmoe.ops.select_experts_cuda import select_experts_cuda
from expert_mlp_inputs import Case as MlpCase
from select_experts_inputs import GROUPED, Case, make_inputs, run


class Launches:
    """Writes down the kernels that would run."""

    def __init__(self) -> None:
        self.kernels: list[str] = []

    def launch(self, kernel: str, *_: Any, **__: Any) -> None:
        self.kernels.append(kernel)


@pytest.fixture(autouse=True)
def _plain_new_tensors(_poisoned_outputs: None) -> None:
    torch.use_deterministic_algorithms(False)  # filling new tensors is no part of the ops


def without_values(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments as tensors of a CUDA device that hold nothing."""
    return tuple(
        torch.empty(argument.shape, dtype=argument.dtype, device="cuda")
        if isinstance(argument, Tensor)
        else argument
        for argument in arguments
    )


def test_such_a_tensor_refuses_to_be_read() -> None:
    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        torch.empty(1, device="cuda").item()


def test_selection_reads_nothing() -> None:
    case = Case(9, 48, 4, **GROUPED, groups=(4, 2), num_resident=9)
    calls: list[tuple[Any, ...]] = []
    run(case, make_inputs(case), lambda *arguments: calls.append(arguments))
    launches = Launches()
    with FakeTensorMode():
        outputs = select_experts_cuda(*without_values(calls[0]), kernels=launches)
    assert launches.kernels == ["select_experts"]
    assert [tuple(output.shape) for output in outputs] == [(9, 4), (9, 4), (48,), (5,)]


def test_experts_read_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches()

    def product(name: str, num_columns: int) -> Any:
        def launch(rows: Tensor, *_: Any, **__: Any) -> Tensor:
            launches.kernels.append(name)
            return rows.new_empty(rows.shape[0], num_columns)

        return launch

    products = types.SimpleNamespace(
        Grid=lambda *sizes: sizes, gate_up=product("gate_up", 40), down=product("down", 72)
    )
    monkeypatch.setattr(expert_mlp_module, "_import_products", lambda: products)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    arguments = MlpCase(6, 9, 3, bound=5).arguments()
    with FakeTensorMode():
        output = expert_mlp_cuda(*without_values(arguments), kernels=launches)
    assert output.shape == (6, 72)
    order = ["route_rows", "gather_rows", "gate_up", "down", "combine_rows"]
    assert launches.kernels == order
