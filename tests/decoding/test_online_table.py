"""A table that learns online: towards what is committed, the same for equal calls, and cold."""

from __future__ import annotations

import math

import pytest
import torch

import acceptmoe
from acceptmoe.decoding.online_table import WARM_UP_BLOCKS, OnlineCommitmentTable
from acceptmoe.errors import InvalidArgumentError, TableError
from acceptmoe.table import CommitmentTable
from acceptmoe.tree import DraftTree
from drafters import OracleDrafter
from tables import make_table_for
from tiny_models import VOCAB_SIZE, make_model

TREE = DraftTree((1, 2, 3), (-1, 0, 0), (1.0, 0.5, 0.1))
PROMPT = torch.randint(VOCAB_SIZE, (1, 8), generator=torch.Generator().manual_seed(7))


def make_table(**keywords) -> CommitmentTable:
    model = make_model("qwen3_moe")
    return make_table_for(
        model, **{"num_nodes": 8, "max_depth": 3, "drafter": "oracle", **keywords}
    )


def commitment(table: CommitmentTable) -> list[float]:
    return table.path_commitment(torch.tensor(TREE.path_probabilities)).tolist()


def test_before_anything_is_seen_it_is_the_table() -> None:
    table = make_table()
    online = OnlineCommitmentTable(table)
    probabilities = torch.tensor([1.0, 0.9, 0.3, 0.1, 0.05, 0.0])
    # The correction's knots are the table's and more, so only rounding differs.
    torch.testing.assert_close(
        online.path_commitment(probabilities), table.path_commitment(probabilities)
    )
    depths = torch.arange(4)
    torch.testing.assert_close(online.depth_commitment(depths), table.depth_commitment(depths))
    assert online.is_warm


def test_it_moves_to_the_observed_share_as_far_as_observations_outweigh_the_table() -> None:
    """The table says .4 and .05; 32 blocks commit node 1 each time and node 2 never.

    With 32 nodes of trust in the table a bin without decay would be at (32 + 32 * .4) / 64 = .7
    and 32 * .05 / 64 = .025; the half life is so long that decay is under a thousandth.
    """
    online = OnlineCommitmentTable(make_table(), half_life=1e6)
    for _ in range(32):
        online.observe(TREE, (0, 1))
    root, likely, unlikely = commitment(online)
    assert root == 1.0
    assert likely == pytest.approx(0.7, abs=1e-3)
    assert unlikely == pytest.approx(0.025, abs=1e-3)
    # By depth: (32 + 16 * .4) / 48.
    assert online.depth_commitment(torch.tensor([0, 1])).tolist() == pytest.approx(
        [1.0, 0.8], abs=1e-3
    )


def test_what_was_seen_long_ago_fades() -> None:
    online = OnlineCommitmentTable(make_table(), half_life=4)
    for _ in range(40):
        online.observe(TREE, (0, 1))
    high = commitment(online)[1]
    for _ in range(40):
        online.observe(TREE, (0,))
    assert commitment(online)[1] < 0.4 < high


def test_the_curve_never_descends_whatever_is_observed() -> None:
    online = OnlineCommitmentTable(make_table())
    for _ in range(50):
        online.observe(TREE, (0, 2))  # the unlikely node, against its rank
    curve = online.path_commitment(torch.linspace(0, 1, 101))[1:]
    assert (curve.diff() >= 0).all()


def test_a_block_without_a_draft_teaches_nothing() -> None:
    online = OnlineCommitmentTable(make_table())
    before = commitment(online)
    online.observe(DraftTree.root_only(3), (0,))
    assert commitment(online) == before


def test_a_new_text_forgets_unless_it_carries_over() -> None:
    table = make_table()
    for carries_over in (False, True):
        online = OnlineCommitmentTable(table, carries_over=carries_over)
        before = commitment(online)
        for _ in range(8):
            online.observe(TREE, (0, 1))
        online.begin_text()
        assert (commitment(online) == before) is not carries_over


def generate(model) -> list[int]:
    output = model.generate(
        PROMPT,
        attention_mask=torch.ones_like(PROMPT),
        do_sample=False,
        pad_token_id=0,
        max_new_tokens=64,
    )
    return output[0, PROMPT.shape[1] :].tolist()


def oracle_for(text: list[int]) -> OracleDrafter:
    return OracleDrafter([*PROMPT[0].tolist(), *text], VOCAB_SIZE)


def test_the_loop_teaches_it_and_equal_calls_give_equal_texts() -> None:
    model = make_model("qwen3_moe")
    online = OnlineCommitmentTable(make_table())
    drafter = oracle_for(generate(model))
    acceptmoe.wrap(model, online, policy="accept", drafter=drafter, num_nodes=8, max_depth=3)
    first = generate(model)
    learnt = commitment(online)
    assert learnt != commitment(OnlineCommitmentTable(make_table()))
    assert generate(model) == first
    assert commitment(online) == learnt


def test_without_a_table_blocks_route_naturally_until_it_is_warm() -> None:
    model = make_model("qwen3_moe")
    text = generate(model)
    online = OnlineCommitmentTable.without_table(model, "oracle", num_nodes=8, max_depth=3)
    assert not online.is_warm
    acceptmoe.wrap(
        model, online, policy="accept", drafter=oracle_for(text), num_nodes=8, max_depth=3
    )
    restricted = []
    patch = model.acceptmoe.patch
    verifying = patch.verifying

    def spy(rows, *, is_natural=False, **keywords):
        restricted.append(not is_natural)
        return verifying(rows, is_natural=is_natural, **keywords)

    patch.verifying = spy
    generate(model)
    assert restricted[:WARM_UP_BLOCKS] == [False] * WARM_UP_BLOCKS
    assert restricted[WARM_UP_BLOCKS:]
    assert all(restricted[WARM_UP_BLOCKS:])


def test_it_is_checked_against_target_and_drafter_like_any_table() -> None:
    model = make_model("olmoe")
    with pytest.raises(TableError, match="a table serves one target only"):
        acceptmoe.wrap(model, OnlineCommitmentTable(make_table()), drafter="ngram")


@pytest.mark.parametrize("value", [0.5, 0, -1, math.inf, math.nan, True, "64", 10**400])
def test_an_absurd_half_life_is_refused(value: object) -> None:
    with pytest.raises(InvalidArgumentError, match=r"half_life is .*; it must be a number of blo"):
        OnlineCommitmentTable(make_table(), half_life=value)
