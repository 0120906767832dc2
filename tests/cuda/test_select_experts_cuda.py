"""`cuda/select_experts.cu` on the host against the op in plain PyTorch."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from host_kernels import HostKernels

from acceptmoe.errors import InvalidArgumentError
from acceptmoe.ops.select_experts_cuda import select_experts_cuda
from acceptmoe.routing import NaturalRouting
from acceptmoe.selection import BlockRows, routed_mask
from select_experts_inputs import (
    CASES,
    TYPED_CASES,
    Case,
    Inputs,
    SelectExperts,
    check,
    make_inputs,
    run,
)


@pytest.fixture(scope="module")
def select(kernels: HostKernels) -> SelectExperts:
    return functools.partial(select_experts_cuda, kernels=kernels)


@pytest.mark.parametrize("case", CASES + TYPED_CASES, ids=lambda case: case.name)
def test_the_kernel_selects_and_routes_as_the_reference(case: Case, select: SelectExperts) -> None:
    check(case, select)


def test_a_disabled_kernel_leaves_natural_routing(select: SelectExperts) -> None:
    case = Case(31, 64, 4, num_resident=10, padded=2)
    inputs = make_inputs(case)
    weights, ids, eligible, counts = run(case, inputs, select, is_enabled=False)
    assert torch.equal(weights[:29], inputs.natural.weights[:29])
    assert torch.equal(ids[:29], inputs.natural.ids[:29])
    assert eligible.all()
    union = routed_mask(inputs.natural.ids, inputs.rows.is_real, 64).any(dim=0).sum()
    assert counts.tolist() == [union, 64, union, 0, 29 * 4]


def test_padded_rows_change_nothing(select: SelectExperts) -> None:
    padded = Case(20, 64, 4, padded=7)
    inputs = make_inputs(padded)
    noise = make_inputs(dataclasses.replace(padded, seed=1))
    other = dataclasses.replace(
        inputs,
        logits=torch.cat([inputs.logits[:13], noise.logits[13:]]),
        num_anchored=torch.where(torch.arange(20) >= 13, 4, 0).int(),
        row_weights=torch.cat([inputs.row_weights[:13], noise.row_weights[13:]]),
    )
    first, second = run(padded, inputs, select), run(padded, other, select)
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))
    assert (first[0][13:] == 0).all()
    assert (first[1][13:] == -1).all()


def test_of_equal_experts_the_lower_id_is_taken(select: SelectExperts) -> None:
    # Four rows want a pair of experts each, all with the same score; the root anchors 0 and 1.
    # The demand of 2..7 is even, so its effective rank is 6; at a quarter of it 2 experts enter.
    case = Case(4, 12, 2, size=0.25)
    ids = torch.tensor([[0, 1], [6, 7], [4, 5], [2, 3]])
    logits = torch.zeros(4, 12).scatter_(1, ids, 1.0)
    weights = torch.full((4, 2), 0.5)
    rows = BlockRows(torch.arange(4), torch.ones(4), torch.ones(4), torch.ones(4) > 0)
    inputs = Inputs(
        logits,
        NaturalRouting(logits, weights, ids),
        rows,
        torch.ones(4),
        torch.zeros(4) > 0,
        None,
        None,
    )
    _, new_ids, eligible, _ = run(case, inputs, select)
    assert eligible.nonzero().flatten().tolist() == [0, 1, 2, 3]
    # Rows 1 and 2 see four equal experts and take the lowest two.
    assert new_ids.tolist() == [[0, 1], [0, 1], [0, 1], [2, 3]]


def test_a_block_of_padding_touches_no_expert(select: SelectExperts) -> None:
    case = Case(5, 16, 4, padded=5)
    weights, ids, eligible, counts = run(case, make_inputs(case), select)
    assert (ids == -1).all()
    assert (weights == 0).all()
    assert not eligible.any()
    assert counts.tolist() == [0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("case", "text"),
    [
        (Case(257, 8, 2), "257 rows in a verification block; .* takes 1 to 256"),
        (Case(2, 513, 2), "513 experts; .* takes 1 to 512"),
        (Case(2, 32, 17), "17 experts per row; .* takes 1 to 16"),
        (Case(2, 72, 2, groups=(36, 2)), "36 groups of experts; .* takes 1 to 32"),
    ],
    ids=["rows", "experts", "experts per row", "groups"],
)
def test_sizes_beyond_the_kernel_are_refused(case: Case, text: str, select: SelectExperts) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        run(case, make_inputs(case), select)


def test_other_dtypes_are_refused(select: SelectExperts) -> None:
    case = Case(2, 8, 2, dtype=torch.float64)
    with pytest.raises(
        InvalidArgumentError, match=r"logits is in torch\.float64; the kernels take"
    ):
        run(case, make_inputs(case), select)
