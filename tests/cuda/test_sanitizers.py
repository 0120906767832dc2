"""The kernels under AddressSanitizer, UBSan and ThreadSanitizer, and faults that these must see."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from host_kernels import SANITIZER_EXIT_CODE, HostKernelError, HostKernels
from test_routed_pairs import combined, make_ids

from acceptmoe.ops.routed_pairs import combine_rows, gather_rows, route_rows
from acceptmoe.ops.select_experts_cuda import select_experts_cuda
from select_experts_inputs import GROUPED, Case, check, make_inputs, run

NUM_THREADS = 64
# Together they enter every branch: padding, pruning, mass, groups, both combine rules.
SELECTIONS = [
    Case(9, 40, 3, num_resident=10, anchors=(2, 2), padded=2),
    Case(9, 40, 3, scoring="topk_softmax", sizing="mass", size=0.5, combine="natural"),
    Case(9, 48, 8, **GROUPED, groups=(4, 2), num_resident=9, size=0.2),
]


def move_rows(kernels: HostKernels) -> None:
    """A round trip: sorted, gathered, and added up again."""
    ids = make_ids(45, 10, 3, 0.2)  # several steps of each warp
    rows = torch.randn(45, 37, generator=torch.Generator().manual_seed(0))
    weights = torch.rand(45, 3, generator=torch.Generator().manual_seed(1))
    routed = route_rows(ids, 10, kernels)
    gathered = gather_rows(rows, routed, kernels)
    output = torch.full_like(rows, torch.nan)
    combine_rows(gathered, weights, routed, output, kernels)
    assert torch.equal(output, combined(gathered, weights, routed, torch.float32))


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_the_kernels_are_clean(sanitizer: str, tmp_path: Path) -> None:
    kernels = HostKernels(tmp_path, sanitizer, NUM_THREADS)
    select = functools.partial(select_experts_cuda, kernels=kernels)
    move_rows(kernels)
    for case in SELECTIONS:
        check(case, select)
    run(SELECTIONS[0], make_inputs(SELECTIONS[0]), select, is_enabled=False)


def removed(kernel: str, barrier: str, after: str) -> dict[str, str]:
    """The edit that takes the first `barrier` after the text `after` out of a kernel."""
    source = (HostKernels(Path()).sources / f"{kernel}.cu").read_text(encoding="utf-8")
    begin = source.index(after)
    end = source.index(barrier, begin)
    old = source[begin : end + len(barrier)]
    return {old: source[begin:end]}


@pytest.mark.parametrize(
    ("kernel", "barrier", "after"),
    [
        ("select_experts", "__syncthreads();", "  normalize_rows(layer, shared);"),
        ("select_experts", "__syncthreads();", "// Drops the least wanted"),
        ("route_rows", "__syncthreads();", "  if (warp_id() == 0) sum_counts"),
        ("route_rows", "__syncwarp();", "next[expert] += __popc"),
    ],
)
def test_a_removed_barrier_is_found(kernel: str, barrier: str, after: str, tmp_path: Path) -> None:
    kernels = HostKernels(tmp_path, "thread", NUM_THREADS, edits=removed(kernel, barrier, after))
    select = functools.partial(select_experts_cuda, kernels=kernels)
    with pytest.raises(HostKernelError, match="data race") as caught:
        move_rows(kernels) if kernel == "route_rows" else check(SELECTIONS[0], select)
    assert caught.value.returncode == SANITIZER_EXIT_CODE


def test_a_write_beyond_an_array_is_found(tmp_path: Path) -> None:
    edits = {"column < row_size; column": "column <= row_size; column"}
    kernels = HostKernels(tmp_path, "address", NUM_THREADS, edits=edits)
    with pytest.raises(HostKernelError, match="heap-buffer-overflow") as caught:
        move_rows(kernels)
    assert caught.value.returncode == SANITIZER_EXIT_CODE


def test_threads_at_different_barriers_are_found(tmp_path: Path) -> None:
    edits = {"  if (warp_id() == 0) sum_counts": "  if (warp_id() != 0) return;\n  sum_counts"}
    kernels = HostKernels(tmp_path, "none", NUM_THREADS, edits=edits)
    with pytest.raises(HostKernelError, match="deadlock"):
        move_rows(kernels)
