"""Kernels built for the host once a run, and outputs in which a gap shows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from host_kernels import HostKernels

NUM_THREADS = 64  # two warps: loops over experts, rows and pairs take several turns


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    return HostKernels(tmp_path_factory.mktemp("kernels"), num_threads=NUM_THREADS)


@pytest.fixture(autouse=True)
def _poisoned_outputs() -> Iterator[None]:
    """New tensors are NaN, or the largest integer: what a kernel leaves out shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
