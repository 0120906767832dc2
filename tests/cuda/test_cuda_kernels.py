"""How kernels reach CuPy, with a CuPy that only writes down what it is asked."""

from __future__ import annotations

import sys
import types
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from acceptmoe.errors import InvalidArgumentError, KernelBuildError
from acceptmoe.ops.cuda_kernels import CupyKernels, compile_options, cuda_type

STREAM = types.SimpleNamespace(cuda_stream=1234, device_index=0)


class FakeCupy(types.ModuleType):
    """`compiled`: options of each module; `launched`: stream, grid, block and arguments."""

    def __init__(self, *, is_recent: bool) -> None:
        super().__init__("cupy")
        self.compiled: list[tuple[str, ...]] = []
        self.launched: list[tuple[Any, ...]] = []
        self.streams: list[tuple[Any, ...]] = []
        self.cuda = types.SimpleNamespace(Device=lambda index: nullcontext())
        if is_recent:
            self.cuda.Stream = types.SimpleNamespace(from_external=self._from_external)
        else:
            self.cuda.Stream = object()
            self.cuda.ExternalStream = self._external_stream

    def _from_external(self, stream: Any) -> Any:
        self.streams.append(stream.__cuda_stream__()[1:])
        return nullcontext()

    def _external_stream(self, pointer: int, device: int) -> Any:
        self.streams.append((pointer, device))
        return nullcontext()

    def RawModule(self, *, code: str, options: tuple[str, ...], backend: str) -> Any:
        assert "gather_rows" in code
        assert backend == "nvrtc"
        self.compiled.append(options)
        return types.SimpleNamespace(get_function=lambda name: lambda *call: self._launch(*call))

    def _launch(self, *call: Any) -> None:
        self.launched.append(call)


def launch_twice(monkeypatch: pytest.MonkeyPatch, cupy: FakeCupy) -> torch.Tensor:
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: STREAM)
    rows = torch.zeros(3)
    kernels = CupyKernels()
    for _ in range(2):
        kernels.launch("gather_rows", {"TYPE": "bf16"}, 7, 32, (rows, None, np.int32(5)))
    return rows


def test_a_kernel_is_compiled_once_and_launched_on_the_stream_of_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cupy = FakeCupy(is_recent=True)
    rows = launch_twice(monkeypatch, cupy)
    assert cupy.compiled == [compile_options({"TYPE": "bf16"})]
    assert cupy.streams == [(1234,)] * 2
    (grid, block, arguments), _ = cupy.launched
    assert (grid, block) == ((7,), (32,))
    assert arguments == (rows.data_ptr(), 0, 5)
    assert [type(argument) for argument in arguments] == [np.uint64, np.uint64, np.int32]


def test_an_older_cupy_gets_the_stream_in_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = FakeCupy(is_recent=False)
    launch_twice(monkeypatch, cupy)
    assert cupy.streams == [(1234, 0)] * 2


def test_without_cupy_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(KernelBuildError, match=r"need CuPy.*install acceptmoe\[cuda12\]"):
        CupyKernels().launch("gather_rows", {}, 1, 32, (torch.zeros(1),))


def test_other_element_types_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"weights is in torch\.int8; the kernels take"):
        cuda_type("weights", torch.zeros(1, dtype=torch.int8))
