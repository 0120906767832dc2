"""Capture of CUDA graphs, all into one memory pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

# Compilation, autotuning and the libraries' handles must be done before a capture begins.
NUM_WARM_UPS = 3

R = TypeVar("R")


@dataclass(frozen=True)
class Graph(Generic[R]):
    """A captured function: `replay` runs it again, and `output` then holds its result.

    The result lies in the same tensors after every replay. `num_bytes` is what the capture took.
    """

    replay: Callable[[], None]
    output: R
    num_bytes: int
    reset: Callable[[], None]


class GraphCapture(Protocol):
    """Makes graphs of functions that read and write tensors which stay where they are."""

    def capture(self, function: Callable[[], R]) -> Graph[R]:
        """Run `function` to warm up, then capture it."""


class CudaGraphs:
    """Captures on one device; `torch.cuda.graph` says what a captured function must not do."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def capture(self, function: Callable[[], R]) -> Graph[R]:
        with torch.cuda.device(self._device):
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(NUM_WARM_UPS):
                    function()
            torch.cuda.current_stream().wait_stream(stream)
            torch.cuda.synchronize()
            before = torch.cuda.memory_reserved()
            graph = torch.cuda.CUDAGraph()
            # Thread-local: other threads may use the device during a capture.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
            ):
                output = function()
            if self._pool is None:
                self._pool = graph.pool()
            num_bytes = torch.cuda.memory_reserved() - before
        return Graph(graph.replay, output, num_bytes, graph.reset)
