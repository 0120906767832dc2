"""The share of its own routing weights that a row loses to the restriction."""

from __future__ import annotations

import pytest
import torch

from acceptmoe.decoding.acceptance import accept_greedy
from acceptmoe.models.counters import RoutedLayer, lost_shares
from acceptmoe.tree import DraftTree


def make_layer(
    ids: list[list[int]], weights: list[list[float]], eligible: list[int]
) -> RoutedLayer:
    mask = torch.zeros(4, dtype=torch.bool)
    mask[eligible] = True
    natural_ids = torch.tensor(ids)
    return RoutedLayer(4, natural_ids, natural_ids, torch.tensor(weights), eligible=mask)


def test_lost_shares_are_the_mean_over_layers_of_what_lies_outside():
    first = make_layer([[0, 1], [2, 3]], [[0.6, 0.2], [0.3, 0.1]], [0, 1, 2])
    second = make_layer([[0, 2], [1, 3]], [[0.5, 0.5], [0.9, 0.1]], [0, 2])
    shares = lost_shares([first, second])
    assert shares is not None
    assert shares.tolist() == pytest.approx([0.0, (0.25 + 1.0) / 2])


def test_a_natural_pass_has_no_lost_shares():
    ids = torch.tensor([[0, 1]])
    assert lost_shares([RoutedLayer(4, ids, ids, torch.ones(1, 2))]) is None


def test_acceptance_stops_before_a_row_that_is_not_trusted_but_emits_its_token():
    tree = DraftTree((5, 6, 7, 8), (-1, 0, 1, 2), (1.0, 0.9, 0.8, 0.7))
    emitted: list[int] = []

    def accept(is_trusted: list[bool] | None):
        emitted.clear()

        def emit(token: int) -> bool:
            emitted.append(token)
            return False

        return accept_greedy(tree, [6, 7, 8, 9].__getitem__, emit, is_trusted)

    whole = accept(None)
    assert (whole.nodes, whole.tokens, whole.is_cut) == ((0, 1, 2, 3), (6, 7, 8, 9), False)
    cut = accept([True, True, False, True])
    assert (cut.nodes, cut.tokens, cut.is_cut) == ((0, 1), (6, 7), True)
    assert emitted == [6, 7]
    assert accept([True] * 4) == whole
