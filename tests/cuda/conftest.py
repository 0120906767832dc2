"""Kernels built for the host once a run, whatever the number of test files that use them."""

from __future__ import annotations

import pytest
from host_kernels import HostKernels

NUM_THREADS = 64  # two warps: loops over experts, rows and pairs take several turns


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    return HostKernels(tmp_path_factory.mktemp("kernels"), num_threads=NUM_THREADS)
