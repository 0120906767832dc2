"""Floors of passes and drafts: what is counted is what is read, and the larger bound holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from eagle3_fixtures import random_head, small_target

from acceptmoe.drafting import AssistantDrafter, Eagle3Drafter, NgramDrafter
from acceptmoe.tree import DraftTree
from bench_floor import parse_cells
from floor_rows import bound_of, bounds_up_to
from floors import TargetSizes, Work, compute_ms, counted_products, floor_ms, read_ms
from step_log import StepLog


def test_a_floor_is_the_larger_of_reads_and_arithmetic() -> None:
    work = Work(num_bytes=3e6, num_operations=8e6)
    assert (read_ms(work, 1e9), compute_ms(work, 1e9)) == (3.0, 8.0)
    assert floor_ms(work, 1e9, 1e9) == 8.0
    assert floor_ms(work, 1e9, 1e10) == 3.0


def test_a_pass_over_all_experts_reads_all_weights_but_the_embedding() -> None:
    model = small_target().bfloat16()
    sizes = TargetSizes.of(model)
    num_rows, num_layers, num_experts, experts_per_row = 7, 5, 6, 2
    work = sizes.pass_work(num_rows, num_layers * num_experts, num_layers * num_rows * 2)
    embedding = model.get_input_embeddings().weight
    numbers = sum(parameter.numel() for parameter in model.parameters()) - embedding.numel()
    assert work.num_bytes == 2 * numbers
    one_expert = 3 * 12 * 20  # gate, up and down
    assert sizes.expert == one_expert
    dense = numbers - num_layers * num_experts * one_expert
    a_row = dense + num_layers * experts_per_row * one_expert
    assert work.num_operations == 2 * num_rows * a_row


def test_a_pass_reads_a_tied_embedding_as_its_output_matrix() -> None:
    untied, tied = (
        TargetSizes.of(small_target(tie_word_embeddings=is_tied)) for is_tied in (False, True)
    )
    assert untied == tied


@pytest.mark.parametrize("max_depth", [1, 2, 4])
def test_a_draft_reads_the_layer_once_a_level(max_depth: int) -> None:
    drafter = Eagle3Drafter(random_head(), topk=3)
    target = small_target()
    drafter.check_target(target)
    head: Any = drafter.head
    size = head.config.feature_size
    drafter.start(torch.tensor([1, 2, 3]), 4, torch.zeros(3, size))
    with counted_products(drafter) as work:
        drafter.extend([5, 6], torch.zeros(2, size))
        drafter.propose(9, max_depth)
    layer = [head.qkv_proj, head.o_proj, head.gate_up_proj, head.down_proj]
    layer_numbers = sum(part.weight.numel() for part in layer)
    levels = max_depth * (layer_numbers + head.lm_head.weight.numel())
    assert work.num_bytes == 4 * (head.fc.weight.numel() + levels)
    # Two committed rows, then three rows a level; the root's children come of one row.
    committed = 2 * (head.fc.weight.numel() + layer_numbers) + head.lm_head.weight.numel()
    drafted = (max_depth - 1) * 3 * (layer_numbers + head.lm_head.weight.numel())
    assert work.num_operations == 2 * (committed + drafted)


def test_counting_changes_no_draft_and_ends() -> None:
    drafter = Eagle3Drafter(random_head(), topk=3)
    drafter.check_target(small_target())
    features = torch.zeros(3, drafter.head.config.feature_size)
    drafter.start(torch.tensor([1, 2, 3]), 4, features)
    expected = drafter.propose(9, 3)
    with counted_products(drafter) as work:
        assert drafter.propose(9, 3) == expected
    counted = work.num_bytes
    drafter.propose(9, 3)
    assert work.num_bytes == counted > 0


def test_an_assistant_reads_its_linear_layers_once_a_forward() -> None:
    model = small_target()
    drafter = AssistantDrafter(model, num_children=2, frontier=2)
    drafter.start(torch.tensor([1, 2, 3]), 4, None)
    with counted_products(drafter) as work:
        drafter.propose(9, 1)
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    assert work.num_bytes == 4 * sum(layer.weight.numel() for layer in linears)


def test_a_drafter_without_weights_reads_none() -> None:
    drafter = NgramDrafter()
    drafter.start(torch.tensor([1, 2, 1]), 2, None)
    with counted_products(drafter) as work:
        drafter.propose(5, 3)
    assert work == Work()


def test_a_step_log_splits_steps_by_the_sums_around_them(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    sums = SimpleNamespace(draft_s=0.0, verify_s=0.0)
    patch = SimpleNamespace(counters=None, reset_counters=lambda: None)
    session: Any = SimpleNamespace(observers=[], statistics=sums, patch=patch)
    log = StepLog(session, work=Work())
    tree = DraftTree(tokens=(3, 4), parents=(-1, 0), path_probabilities=(1.0, 0.5))
    for draft_s, pass_s, rest_s in ((9.0, 9.0, 9.0), (1.0, 2.0, 0.5), (3.0, 5.0, 0.25)):
        now[0] += draft_s + pass_s + rest_s  # a step is observed before its times are added
        assert log.work is not None
        log.work.num_bytes += 10
        session.observers[0](tree, (0,))
        sums.draft_s += draft_s
        sums.verify_s += pass_s
    found = [(s.num_nodes, s.draft_ms, s.pass_ms, s.rest_ms) for s in log.steps()]
    assert found == [(2, 1e3, 2e3, 500.0), (2, 3e3, 5e3, 250.0)]  # without the first
    assert log.drafted_after_first() == Work(num_bytes=20)
    log.clear()
    assert log.steps() == []


@pytest.mark.parametrize("text", ["accept", "accept@", "accept@1", "accept@many"])
def test_a_cell_is_a_policy_and_a_number_of_rows(text: str) -> None:
    with pytest.raises(SystemExit, match="it must be a policy and a number of rows"):
        parse_cells([text])


def test_passes_fall_into_the_smallest_range_that_holds_their_rows() -> None:
    assert [bound_of(n) for n in (2, 4, 5, 16, 17, 64, 65)] == [4, 4, 8, 16, 24, 64, 65]
    assert bounds_up_to(17) == [4, 8, 12, 16, 24]
