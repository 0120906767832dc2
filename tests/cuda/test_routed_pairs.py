"""`cuda/route_rows.cu`, `gather_rows.cu` and `combine_rows.cu` on the host against plain loops."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
import torch
from host_kernels import HostKernels
from torch import Tensor

from acceptmoe.ops.routed_pairs import RoutedPairs, combine_rows, gather_rows, route_rows

# Rows, experts, experts per row, share of pairs without an expert.
SHAPES = [
    (1, 1, 1, 0.0),
    (1, 128, 8, 0.0),
    (7, 5, 3, 0.3),
    (33, 61, 5, 0.1),
    (64, 512, 16, 0.0),
    (300, 40, 2, 0.5),
    (5, 9, 4, 1.0),
]


def make_ids(num_rows: int, num_experts: int, top: int, skipped: float) -> Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    ids = torch.rand(num_rows, num_experts, generator=generator).argsort(dim=1)[:, :top]
    is_skipped = torch.rand(ids.shape, generator=generator) < skipped
    return ids.masked_fill(is_skipped, -1).contiguous()


def pairs_by_expert(ids: Tensor) -> dict[int, list[int]]:
    pairs = defaultdict(list)
    for pair, expert in enumerate(ids.flatten().tolist()):
        if expert >= 0:
            pairs[expert].append(pair)
    return dict(sorted(pairs.items()))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pairs_are_sorted_by_expert_and_then_by_row(
    shape: tuple[int, int, int, float], kernels: HostKernels
) -> None:
    ids = make_ids(*shape)
    num_experts = shape[1]
    routed = route_rows(ids, num_experts, kernels)
    expected = pairs_by_expert(ids)
    order = [pair for pairs in expected.values() for pair in pairs]
    num_pairs, union_size = ids.numel(), min(num_experts, ids.numel())
    assert routed.sorted_pairs.tolist() == order + [-1] * (num_pairs - len(order))
    places = {pair: place for place, pair in enumerate(order)}
    assert routed.pair_places.tolist() == [places.get(pair, -1) for pair in range(num_pairs)]
    assert routed.num_union.tolist() == [len(expected)]
    assert routed.union_experts.tolist() == [*expected, *[-1] * (union_size - len(expected))]
    offsets = np.cumsum([0, *map(len, expected.values())]).tolist()
    assert routed.union_offsets.tolist() == offsets + [len(order)] * (union_size - len(expected))


# Sizes in bytes that are and are not multiples of 16.
@pytest.mark.parametrize(
    ("width", "dtype"), [(72, torch.bfloat16), (37, torch.float16), (33, None)]
)
def test_gathered_rows_are_the_rows_of_the_pairs(
    width: int, dtype: torch.dtype | None, kernels: HostKernels
) -> None:
    ids = make_ids(9, 6, 3, 0.2)
    rows = torch.randn(9, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    routed = route_rows(ids, 6, kernels)
    gathered = gather_rows(rows, routed, kernels)
    pairs = routed.sorted_pairs[routed.sorted_pairs >= 0].long()
    assert torch.equal(gathered[: len(pairs)], rows[pairs // 3])


def combined(results: Tensor, weights: Tensor, routed: RoutedPairs, dtype: torch.dtype) -> Tensor:
    sums = torch.zeros(weights.shape[0], results.shape[1])
    for pair, place in enumerate(routed.pair_places.tolist()):
        if place >= 0:
            sums[pair // weights.shape[1]] += weights.flatten()[pair].float() * results[place]
    return sums.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_add_up_in_the_order_of_their_slots(dtype: torch.dtype, kernels: HostKernels) -> None:
    ids = make_ids(11, 20, 4, 0.3)
    generator = torch.Generator().manual_seed(0)
    routed = route_rows(ids, 20, kernels)
    results = torch.randn(44, 301, generator=generator)
    results[int(routed.union_offsets[-1]) :] = torch.nan  # nobody may read beyond the last pair
    weights = torch.rand(11, 4, generator=generator).to(dtype)
    output = torch.full((11, 301), torch.nan, dtype=dtype)
    combine_rows(results, weights, routed, output, kernels)
    # The same operations in the same order: the same bits.
    assert torch.equal(output, combined(results, weights, routed, dtype))


def test_an_expert_that_does_not_exist_makes_its_row_nan(kernels: HostKernels) -> None:
    ids = torch.tensor([[0, 1], [7, 1], [-5, -1]])
    routed = route_rows(ids, 2, kernels)
    output = torch.zeros(3, 5)
    combine_rows(torch.ones(6, 5), torch.ones(3, 2), routed, output, kernels)
    assert output[0].tolist() == [2] * 5
    assert output[1].isnan().all()
    assert output[2].tolist() == [0] * 5
