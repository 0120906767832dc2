"""Runs `expert_mlp_cuda` on the CPU: raw kernels in their host build, Triton's in its interpreter.

The interpreter is chosen when Triton is imported, for the whole process. So it has a process of its
own, and tests beside these see Triton as it is.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor


class Interpreter:
    """Calls of the op, one after another, in the process of the interpreter."""

    def __init__(self, pool: ProcessPoolExecutor, folder: Path) -> None:
        self._pool = pool
        self._folder = folder

    def expert_mlp(self, *arguments: Any) -> Tensor:
        done = self._pool.submit(_expert_mlp, self._folder, arguments)
        return torch.from_numpy(done.result()).to(arguments[0].dtype)


@contextmanager
def interpreter(folder: Path) -> Iterator[Interpreter]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")  # the new process inherits it
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context, initializer=_start) as pool:
            yield Interpreter(pool, folder)


_kernels: dict[Path, Any] = {}


def _start() -> None:
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _convert_float, tl

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # fills new tensors with NaN
    multiply = InterpreterBuilder.create_dot

    def widened(handle: TensorHandle) -> TensorHandle:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        values = _convert_float(handle.data, tl.bfloat16, tl.float32, None)
        return TensorHandle(values.view("float32"), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        # The interpreter keeps bfloat16 as raw bits and would multiply these as integers.
        return multiply(self, widened(a), widened(b), *rest)

    InterpreterBuilder.create_dot = create_dot


def _expert_mlp(folder: Path, arguments: tuple[Any, ...]) -> Any:
    from host_kernels import HostKernels

    from acceptmoe.ops.expert_mlp_cuda import expert_mlp_cuda

    if folder not in _kernels:
        _kernels[folder] = HostKernels(folder, num_threads=64)
    # As an array: a tensor would come back through shared memory that the process must keep alive.
    return expert_mlp_cuda(*arguments, kernels=_kernels[folder]).float().numpy()
