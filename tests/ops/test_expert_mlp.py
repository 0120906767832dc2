"""`acceptmoe::expert_mlp` on the CPU equals its reference, and reads nothing that it should not."""

from __future__ import annotations

import pytest
import torch
from expert_mlp_cases import (
    GPT_OSS,
    LAYOUTS,
    STANDARD,
    TOLERANCE,
    Layout,
    make_arguments,
    relative_error,
)

from acceptmoe.errors import InvalidArgumentError
from acceptmoe.ops import reference
from acceptmoe.ops.expert_mlp import ACTIVATIONS, expert_mlp

# T, K, E, H, I: one of everything; below, at and beyond vectors and cache lines; more rows for an
# expert than a tile has; reductions longer than what the kernel takes at once.
SIZES = [
    (1, 1, 1, 1, 1),
    (1, 2, 4, 37, 21),
    (5, 3, 5, 64, 32),
    (13, 2, 3, 65, 129),
    (9, 2, 3, 1100, 530),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_kernel_equals_the_reference(layout: str, sizes, dtype: torch.dtype) -> None:
    arguments = make_arguments(*sizes, dtype, LAYOUTS[layout])
    result = expert_mlp(**arguments)
    assert result.dtype == dtype
    expected = reference.expert_mlp(**arguments)
    assert relative_error(result, expected, arguments["down_bias"]) <= TOLERANCE[dtype]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_equals_the_reference(activation: str) -> None:
    layout = Layout(activation=activation)
    arguments = make_arguments(7, 2, 4, 33, 50, layout=layout)
    # Gates and ups far beyond the clamps, and far into both tails of an exponential.
    arguments["gate_up"] = arguments["gate_up"] * 20
    expected = reference.expert_mlp(**arguments)
    assert relative_error(expert_mlp(**arguments), expected) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("num_rows", range(1, 14))
def test_every_number_of_rows_on_one_expert_is_right(num_rows: int) -> None:
    for layout in (STANDARD, GPT_OSS):
        arguments = make_arguments(num_rows, 1, 1, 70, 35, torch.bfloat16, layout)
        expected = reference.expert_mlp(**arguments)
        assert relative_error(expert_mlp(**arguments), expected) <= TOLERANCE[torch.bfloat16]


def test_hidden_states_and_weights_may_differ_in_dtype() -> None:
    arguments = make_arguments(4, 2, 4, 40, 24, torch.bfloat16)
    arguments["hidden"] = arguments["hidden"].float()
    arguments["weights"] = arguments["weights"].double()
    result = expert_mlp(**arguments)
    assert result.dtype == torch.float32
    expected = reference.expert_mlp(**arguments)
    assert relative_error(result, expected) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("layout", [STANDARD, GPT_OSS], ids=["standard", "gpt_oss"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts_outside_the_union_are_not_read(layout: Layout, dtype: torch.dtype) -> None:
    # Odd sizes: a vector that reached beyond a row would reach into the poison.
    arguments = make_arguments(3, 2, 7, 45, 27, dtype, layout)
    union = [1, 3, 5]
    arguments["ids"] = torch.tensor([[1, 3], [5, 1], [3, 5]])
    expected = expert_mlp(**arguments)
    others = [expert for expert in range(7) if expert not in union]
    for name in ("gate_up", "down", "gate_up_bias", "down_bias"):
        if arguments[name] is not None:
            arguments[name][others] = torch.nan
    assert torch.equal(expert_mlp(**arguments), expected)


def test_negative_ids_add_nothing_and_read_nothing() -> None:
    arguments = make_arguments(4, 3, 5, 30, 20)
    arguments["ids"][:, 1] = -1
    arguments["ids"][2] = -7
    arguments["weights"][2] = torch.nan
    result = expert_mlp(**arguments)
    assert result[2].abs().max() == 0
    rest = [0, 1, 3]
    expected = reference.expert_mlp(**arguments)
    assert relative_error(result[rest], expected[rest]) <= TOLERANCE[torch.float32]


def test_an_expert_named_twice_counts_twice() -> None:
    arguments = make_arguments(2, 2, 3, 16, 8)
    arguments["ids"][:] = 1
    expected = reference.expert_mlp(**arguments)
    assert relative_error(expert_mlp(**arguments), expected) <= TOLERANCE[torch.float32]


def test_no_rows_and_no_experts_per_row_are_fine() -> None:
    assert expert_mlp(**make_arguments(0, 2, 4, 16, 8)).shape == (0, 16)
    assert torch.equal(expert_mlp(**make_arguments(3, 0, 4, 16, 8)), torch.zeros(3, 16))


def test_a_nan_stays_in_its_row() -> None:
    arguments = make_arguments(5, 2, 3, 40, 24)
    expected = expert_mlp(**arguments)
    arguments["hidden"][2, 7] = torch.nan
    result = expert_mlp(**arguments)
    assert result[2].isnan().all()
    rest = [0, 1, 3, 4]
    assert torch.equal(result[rest], expected[rest])


@pytest.mark.parametrize("layout", [STANDARD, GPT_OSS], ids=["standard", "gpt_oss"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_are_the_same_bits_for_any_number_of_threads(layout, dtype) -> None:
    arguments = make_arguments(11, 3, 6, 300, 130, dtype, layout)
    before = torch.get_num_threads()
    results = []
    try:
        for num_threads in (1, 2, 3, 5):
            torch.set_num_threads(num_threads)
            results.append(expert_mlp(**arguments))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("layout", [STANDARD, GPT_OSS], ids=["standard", "gpt_oss"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_the_same_bits_alone_and_among_others(layout, dtype) -> None:
    arguments = make_arguments(17, 2, 2, 1100, 530, dtype, layout)
    together = expert_mlp(**arguments)
    for row in range(17):
        names = ("hidden", "ids", "weights")
        alone = {name: arguments[name][row : row + 1] for name in names}
        assert torch.equal(expert_mlp(**{**arguments, **alone})[0], together[row])


@pytest.mark.parametrize("layout", [STANDARD, GPT_OSS], ids=["standard", "gpt_oss"])
def test_the_op_passes_opcheck(layout: Layout) -> None:
    arguments = make_arguments(3, 2, 4, 12, 8, torch.bfloat16, layout)
    torch.library.opcheck(expert_mlp, (), arguments)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("activation", "tanh", "activation is 'tanh'; it must be one of 'silu', 'gelu'"),
        ("hidden", torch.zeros(3), "hidden, gate_up and down have 1, 3 and 3 axes"),
        ("hidden", torch.zeros(3, 16).double(), "hidden is in torch.float64; it must be in"),
        ("hidden", torch.zeros(3, 9), r"gate_up has shape \(4, 16, 16\); with hidden \(3, 9\)"),
        ("ids", torch.zeros(2, 2).long(), r"ids has shape \(2, 2\).*it must be \(3, 2\)"),
        ("ids", torch.zeros(3, 2).int(), "ids is in torch.int32; it must be in torch.int64"),
        ("ids", torch.full((3, 2), 4), "ids names an expert that there is not"),
        ("weights", torch.zeros(3, 1), r"weights has shape \(3, 1\).*it must be \(3, 2\)"),
        ("down", torch.zeros(4, 16, 8).half(), "down is in torch.float16; it must be in the dtype"),
        ("down_bias", torch.zeros(4, 8), r"down_bias has shape \(4, 8\).*it must be \(4, 16\)"),
        (
            "gate_up",
            torch.zeros(4, 16, 16).transpose(1, 2),
            "gate_up has the strides.*it must be contiguous",
        ),
    ],
)
def test_what_does_not_fit_is_refused(name: str, value, message: str) -> None:
    arguments = make_arguments(3, 2, 4, 16, 8)
    with pytest.raises(InvalidArgumentError, match=message):
        expert_mlp(**{**arguments, name: value})
