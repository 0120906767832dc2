"""`s2` against a case computed by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from acceptmoe.errors import InvalidArgumentError
from acceptmoe.models.patching import route_block
from acceptmoe.models.scoring import SoftmaxTopK
from acceptmoe.policies import S2Policy, load_policy
from acceptmoe.selection import BlockRows, RoutedBlock

# Row 0 wants 0 and 1, row 1 wants 3 and 2. Gaps top1 - top3: 4 - 1 = 3 and 3 - 2.5 = 0.5.
LOGITS = torch.tensor([[4.0, 2.0, 1.0, 0.0, -3.0], [2.5, 0.0, 2.75, 3.0, -3.0]])
NATURAL_IDS = torch.tensor([[0, 1], [3, 2]])


def make_block(is_real: list[bool] | None = None) -> RoutedBlock:
    rows = BlockRows(
        torch.tensor([0, 1]),
        torch.ones(2),
        torch.ones(2),
        torch.tensor([True, True] if is_real is None else is_real),
    )
    return RoutedBlock(LOGITS.softmax(-1), LOGITS, NATURAL_IDS, rows)


def test_the_bias_is_the_gap_between_the_best_and_the_first_left_out():
    """Gate sums: expert 0 by far the first, then 3 (.47 + .02) before 2 (.36 + .04)."""
    selection = S2Policy(2).select(make_block())
    assert selection.eligible.all()
    torch.testing.assert_close(
        selection.choice_bias, torch.tensor([[3.0, 0, 0, 3.0, 0], [0.5, 0, 0, 0.5, 0]])
    )


def test_the_bias_moves_the_choice_and_leaves_the_weights_unbiased():
    """Row 0 ranks 7, 2, 1, 3, -3: expert 3 replaces 1. Row 1 ranks 3, 0, 2.75, 3.5, -3."""
    block = make_block()
    router = nn.Module()
    router.top_k, router.norm_topk_prob = 2, True
    gates = block.gates
    natural_weights = gates.gather(1, NATURAL_IDS)
    output = (LOGITS, natural_weights, NATURAL_IDS)
    _, weights, ids = route_block(SoftmaxTopK(), router, output, block, S2Policy(2).select(block))
    assert ids.tolist() == [[0, 3], [3, 0]]
    kept = gates.gather(1, ids)
    torch.testing.assert_close(weights, kept / kept.sum(-1, keepdim=True))


def test_a_strength_of_zero_is_natural_and_a_smaller_one_moves_less():
    assert not S2Policy(2, strength=0).select(make_block()).choice_bias.any()
    bias = S2Policy(2, strength=0.5).select(make_block()).choice_bias
    # Expert 3 then ranks 1.5 in row 0, below expert 1's 2.
    assert (LOGITS + bias)[0].topk(2).indices.tolist() == [0, 1]


def test_padded_rows_prefer_nothing_and_a_small_set_is_raised_to_k():
    bias = S2Policy(1).select(make_block([True, False])).choice_bias
    assert (bias[0] > 0).tolist() == [True, True, False, False, False]


def test_where_a_row_uses_every_expert_nothing_is_biased():
    block = make_block()
    everything = torch.arange(5).expand(2, 5)
    block = RoutedBlock(block.gates, block.choice, everything, block.rows)
    assert not S2Policy(2).select(block).choice_bias.any()


@pytest.mark.parametrize("strength", [-1, math.nan, math.inf, True, "1", 1e39, 10**400])
def test_an_absurd_strength_is_refused(strength):
    with pytest.raises(InvalidArgumentError, match=r"strength is .*; it must be a number, 0 or la"):
        S2Policy(4, strength=strength)


def test_it_loads_by_name():
    assert load_policy("s2:size=16").params() == {"size": 16, "strength": 1.0}
    with pytest.raises(InvalidArgumentError, match="'s2' needs size; write for instance 's2:size"):
        load_policy("s2")
