"""The whole CUDA path of `acceptmoe::expert_mlp` on the CPU against the op in plain PyTorch."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from interpreter import Interpreter, interpreter

import acceptmoe.ops
from acceptmoe.errors import InvalidArgumentError, KernelBuildError
from acceptmoe.ops.expert_mlp_cuda import expert_mlp_cuda
from acceptmoe.ops.reference import expert_mlp as reference
from expert_mlp_inputs import CASES, TOLERANCES, Case, relative_error


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interpreter]:
    with interpreter(tmp_path_factory.mktemp("interpreter")) as running:
        yield running


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_cuda_path_computes_what_the_reference_does(case: Case, triton: Interpreter) -> None:
    arguments = case.arguments()
    error = relative_error(triton.expert_mlp(*arguments), reference(*arguments))
    assert error <= TOLERANCES[case.dtype]


def test_an_expert_that_a_row_names_twice_counts_twice(triton: Interpreter) -> None:
    # 36 pairs of one expert where a tile has 16 rows for a block of 9.
    arguments = list(Case(9, 3, 2).arguments())
    arguments[1] = torch.ones(9, 4, dtype=torch.int64)
    arguments[2] = torch.rand(9, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(triton.expert_mlp(*arguments), reference(*arguments))


def test_a_row_without_experts_is_zero(triton: Interpreter) -> None:
    arguments = list(Case(3, 4, 2).arguments())
    arguments[1] = torch.tensor([[0, 1], [-1, -1], [2, 3]])
    output = triton.expert_mlp(*arguments)
    assert (output[1] == 0).all()
    assert (output[0] != 0).any()


def test_other_dtypes_of_weights_are_refused() -> None:
    arguments = list(Case(1, 4, 2).arguments())
    arguments[0] = arguments[0].bfloat16()
    with pytest.raises(InvalidArgumentError, match=r"bfloat16 and the experts' .*float32; on CUDA"):
        expert_mlp_cuda(*arguments)


def test_more_experts_than_the_kernels_count_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"513 experts; the CUDA .* up to 512"):
        expert_mlp_cuda(*Case(1, 513, 2, hidden=2, inner=1).arguments())


def test_without_triton_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "acceptmoe.ops.expert_mlp_triton", raising=False)
    monkeypatch.delattr(acceptmoe.ops, "expert_mlp_triton", raising=False)
    with pytest.raises(KernelBuildError, match=r"need Triton.*install acceptmoe\[cuda12\]"):
        expert_mlp_cuda(*Case(1, 4, 2).arguments())
