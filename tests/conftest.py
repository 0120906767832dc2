"""Settings of every test: one thread, no network, and the gate of the GPU tests."""

import os

# Must come before torch: OpenMP reads it once. Its threads spin between the many tiny operations of
# a tiny model by default; on a machine with other work that makes each of them up to 60 times
# slower than the operation itself.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded, whatever a test asks for

import pytest
import torch

# One thread also fixes the order of additions, so that a test sees the same logits on any machine
# with the same instruction set. Tiny matrices would not gain from a second one.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu",
        action="store_true",
        help="fail instead of skipping the tests marked gpu when there is no usable CUDA device",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items and not config.getoption("--require-gpu"):
        return
    from acceptmoe.ops.devices import missing_gpu

    reason = missing_gpu()
    if config.getoption("--require-gpu"):
        if reason is not None:
            raise pytest.UsageError(f"--require-gpu: {reason}")
        if not gpu_items:
            raise pytest.UsageError("--require-gpu: no test marked gpu was collected")
    if reason is not None:
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=reason))
