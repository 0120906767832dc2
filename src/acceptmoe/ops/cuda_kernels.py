"""Compiles `cuda/*.cu` by CuPy and launches them on torch's current stream.

A kernel is compiled once for each (file, types, device architecture); CuPy keeps the result on disk
too. The first launch compiles and loads, which a graph capture does not allow: run a pass once
before capturing it. A launch itself allocates nothing and waits for nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from acceptmoe.assets import asset_dir
from acceptmoe.errors import InvalidArgumentError, KernelBuildError

Number = np.int32 | np.int64 | np.uint64 | np.float32
Argument = Tensor | Number | None  # a pointer, a number, a null pointer

# What the sources call the element types.
CUDA_TYPES = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Kernels(Protocol):
    """Something that can launch the kernels: CuPy on a device, a host build in the tests."""

    def launch(
        self,
        kernel: str,
        defines: Mapping[str, str],
        grid: int,
        block: int,
        arguments: Sequence[Argument],
    ) -> None:
        """Run `cuda/<kernel>.cu`, compiled with `defines`, on `grid` blocks of `block` threads."""
        ...


class CupyKernels:
    """Kernels on CUDA tensors."""

    def __init__(self) -> None:
        self._functions: dict[tuple[str, tuple[tuple[str, str], ...], int], Any] = {}
        self._lock = threading.Lock()

    def launch(
        self,
        kernel: str,
        defines: Mapping[str, str],
        grid: int,
        block: int,
        arguments: Sequence[Argument],
    ) -> None:
        cupy = import_cupy()
        device = next(argument.device for argument in arguments if isinstance(argument, Tensor))
        function = self._function(kernel, defines, device)
        stream = torch.cuda.current_stream(device)
        # CuPy has a current stream of its own; off torch's, a launch would be lost in a capture.
        with cupy.cuda.Device(device.index), _cupy_stream(stream):
            function((grid,), (block,), tuple(_kernel_argument(item) for item in arguments))

    def _function(self, kernel: str, defines: Mapping[str, str], device: torch.device) -> Any:
        # CuPy loads a module into each device on its own; a key for each keeps it out of our way.
        key = (kernel, tuple(sorted(defines.items())), device.index)
        with self._lock:
            if key not in self._functions:
                self._functions[key] = _compile(kernel, defines, device)
            return self._functions[key]


def import_cupy() -> Any:
    """CuPy, or `KernelBuildError` where it is not installed."""
    try:
        import cupy
    except ImportError as error:
        raise KernelBuildError(
            f"the CUDA kernels need CuPy, which cannot be imported ({error}); install "
            "acceptmoe[cuda12] or acceptmoe[cuda13], whichever CUDA torch was built for"
        ) from error
    return cupy


def compile_options(defines: Mapping[str, str]) -> tuple[str, ...]:
    """NVRTC's options for every kernel of ours, the architecture apart.

    Products and sums are not contracted: the results are then those of the references, in which
    each operation rounds, and these kernels wait for memory anyway.
    """
    return (
        "-std=c++17",
        "--fmad=false",
        f"-I{asset_dir('cuda') / 'include'}",
        *(f"-D{name}={value}" for name, value in sorted(defines.items())),
    )


def cuda_type(name: str, tensor: Tensor) -> str:
    """What the sources call the dtype of `tensor`, or `InvalidArgumentError`."""
    if tensor.dtype not in CUDA_TYPES:
        raise InvalidArgumentError(
            f"{name} is in {tensor.dtype}; the kernels take {', '.join(map(str, CUDA_TYPES))}"
        )
    return CUDA_TYPES[tensor.dtype]


@dataclass(frozen=True)
class _StreamHandle:
    """A stream as libraries hand it to each other; not every torch of ours does so itself."""

    pointer: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.pointer)  # version of the protocol, cudaStream_t


def _cupy_stream(stream: torch.cuda.Stream) -> Any:
    cupy = import_cupy()
    if hasattr(cupy.cuda.Stream, "from_external"):  # CuPy 14 and later
        return cupy.cuda.Stream.from_external(_StreamHandle(stream.cuda_stream))
    return cupy.cuda.ExternalStream(stream.cuda_stream, stream.device_index)


def _compile(kernel: str, defines: Mapping[str, str], device: torch.device) -> Any:
    cupy = import_cupy()
    source = (asset_dir("cuda") / f"{kernel}.cu").read_text(encoding="utf-8")
    with cupy.cuda.Device(device.index):
        module = cupy.RawModule(code=source, options=compile_options(defines), backend="nvrtc")
        return module.get_function(kernel)


def _kernel_argument(argument: Argument) -> Any:
    """As CuPy takes it: pointers are numbers of 64 bits."""
    if argument is None:
        return np.uint64(0)
    return np.uint64(argument.data_ptr()) if isinstance(argument, Tensor) else argument


CUPY_KERNELS = CupyKernels()
