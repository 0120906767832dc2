"""Row-expert pairs sorted by expert on the device, and the copies into that order and out of it.

Axes: T rows, K experts per row, P = T K pairs, E experts, U = min(E, P) places of the union, H
hidden. Each function launches the kernel of its name in `cuda/`; none reads anything back.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from acceptmoe.ops.cuda_kernels import Kernels, cuda_type

MAX_EXPERTS = 512  # counters of route_rows in shared memory
NUM_THREADS = 256


@dataclass(frozen=True)
class RoutedPairs:
    """Which experts a block touches and which pairs are whose; all int32, on the device.

    `sorted_pairs` [P]: the pairs (row * K + slot), those of the union's first expert first, then -1
    for those without an expert. `pair_places` [P]: the reverse; -1 where the id is below 0, and -2
    where there is no such expert, for which `combine_rows` makes the row NaN. `union_experts` [U]:
    the touched experts in ascending order, then -1. `union_offsets` [U + 1]: where the pairs of
    each begin. `num_union` [1]: how many are touched.
    """

    sorted_pairs: Tensor
    pair_places: Tensor
    union_experts: Tensor
    union_offsets: Tensor
    num_union: Tensor


def route_rows(ids: Tensor, num_experts: int, kernels: Kernels) -> RoutedPairs:
    """Sorts the pairs of contiguous `ids` [T, K] int64, stably; ids below 0 are left out."""
    num_pairs = ids.numel()
    largest_union = min(num_experts, num_pairs)
    sizes = [num_pairs, num_pairs, largest_union, largest_union + 1, 1]
    parts = torch.split(ids.new_empty(sum(sizes), dtype=torch.int32), sizes)
    arguments = (ids, np.int32(num_pairs), np.int32(num_experts), *parts)
    kernels.launch("route_rows", {}, grid=1, block=NUM_THREADS, arguments=arguments)
    return RoutedPairs(*parts)


def gather_rows(rows: Tensor, routed: RoutedPairs, kernels: Kernels) -> Tensor:
    """[P, H]: contiguous `rows` [T, H] in the order of the sorted pairs."""
    num_pairs = routed.sorted_pairs.shape[0]
    sorted_rows = rows.new_empty(num_pairs, rows.shape[1])
    arguments = (
        rows,
        routed.sorted_pairs,
        np.int32(num_pairs),
        np.int32(num_pairs // rows.shape[0]),
        np.int64(rows.shape[1] * rows.element_size()),
        sorted_rows,
    )
    kernels.launch("gather_rows", {}, grid=num_pairs, block=NUM_THREADS, arguments=arguments)
    return sorted_rows


def combine_rows(
    results: Tensor, weights: Tensor, routed: RoutedPairs, output: Tensor, kernels: Kernels
) -> None:
    """Writes the weighted sums of `results` [P, H] fp32 into contiguous `output` [T, H].

    `weights` [T, K]. Each row adds up in the order of its slots.
    """
    num_rows, row_size = output.shape
    blocks_per_row = -(-row_size // NUM_THREADS)
    kernels.launch(
        "combine_rows",
        {"VALUE": cuda_type("hidden", output), "WEIGHT": cuda_type("weights", weights)},
        grid=num_rows * blocks_per_row,
        block=NUM_THREADS,
        arguments=(
            results,
            weights,
            routed.pair_places,
            np.int32(blocks_per_row),
            np.int32(weights.shape[1]),
            np.int32(row_size),
            output,
        ),
    )
