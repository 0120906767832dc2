"""Floors of passes and drafts: what is counted is what is read, and the larger bound holds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from eagle3_fixtures import random_head, small_target
from test_assistant import VOCAB, llama
from torch import nn

import acceptmoe
import bench_floor
from acceptmoe.drafting import AssistantDrafter, Eagle3Drafter, NgramDrafter
from acceptmoe.drafting.compiled_assistant import CompiledAssistantForward
from acceptmoe.ops.int8_linear import Int8Weight
from acceptmoe.tree import DraftTree
from bench_floor import parse_cells
from floor_rows import bound_of, bounds_up_to
from floors import (
    INT8_PRODUCT,
    TargetSizes,
    Work,
    best_rate,
    compute_ms,
    counted_products,
    floor_ms,
    matrix_rates,
    read_ms,
)
from step_log import StepLog
from tiny_models import make_model

BACKEND = "aot_eager"  # traces as Inductor does, and compiles in no time


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


@pytest.mark.parametrize("weights", [None, "int8"])
@pytest.mark.parametrize("backend", [None, BACKEND])
def test_every_level_of_an_assistant_counts_compiled_and_rounded(
    backend: str | None, weights: str | None
) -> None:
    model, max_depth = llama(), 3
    drafter = AssistantDrafter(model, num_children=2, frontier=2, min_reach=0.0, weights=weights)
    drafter.use_kernels(is_wanted=False, backend=backend)
    drafter.start(torch.tensor([1, 2, 3]), 4, None)
    with counted_products(drafter) as prompt:
        drafter.propose(9, max_depth)
    drafter.extend([VOCAB - 1], None)  # the root alone stays to be read
    with counted_products(drafter) as work:
        drafter.propose(9, max_depth)
    assert isinstance(drafter._forward, CompiledAssistantForward) == (backend is not None)
    linears = {n: m.weight for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    num_bytes = sum(bytes_of(weight, weights) for weight in linears.values())
    assert work.num_bytes == prompt.num_bytes == max_depth * num_bytes
    # The root in one row, then two rows a level; of the prompt only the last row has logits.
    numbers = sum(weight.numel() for weight in linears.values())
    drafted = (max_depth - 1) * 2 * numbers
    assert work.num_operations == 2 * (numbers + drafted)
    without_logits = numbers - linears["lm_head"].numel()
    assert prompt.num_operations == 2 * (3 * without_logits + numbers + drafted)


def bytes_of(weight: torch.Tensor, weights: str | None) -> int:
    if weights is None:
        return weight.nbytes
    rounded = Int8Weight.of(weight.detach())
    return rounded.values.numel() + 4 * rounded.scales.numel()


def test_counting_an_assistant_compiles_nothing_anew_and_ends() -> None:
    drafter = AssistantDrafter(llama(), min_reach=0.0)
    drafter.use_kernels(is_wanted=False, backend=BACKEND)
    drafts = []
    for is_counted in (False, True, False):
        drafter.start(torch.tensor([1, 2, 3]), 4, None)
        if is_counted:
            with counted_products(drafter) as work:
                drafts.append(drafter.propose(9, 3))
            counted = work.num_bytes
        else:
            drafts.append(drafter.propose(9, 3))
    assert drafts[0] == drafts[1] == drafts[2]
    assert drafter.num_compilations == 1
    assert work.num_bytes == counted > 0
    assert not {"read", "expand"} & vars(drafter._forward).keys()
    assert "use_kernels" not in vars(drafter)


@pytest.mark.parametrize("weights", [None, "int8"])
def test_a_head_reads_its_weights_in_their_precision(weights: str | None) -> None:
    drafter = Eagle3Drafter(random_head(), topk=3, weights=weights)
    drafter.check_target(small_target())
    head: Any = drafter.head
    drafter.start(torch.tensor([1, 2, 3]), 4, torch.zeros(3, head.config.feature_size))
    with counted_products(drafter) as work:
        drafter.propose(9, 1)
    assert work.num_bytes == bytes_of(head.lm_head.weight, weights)
    assert work.num_operations == 2 * head.lm_head.weight.numel()


@pytest.mark.parametrize("name", ["assistant", "eagle3"])
def test_a_text_that_chooses_the_products_itself_is_counted(name: str) -> None:
    target = small_target() if name == "eagle3" else make_model("qwen3_moe")
    if name == "eagle3":
        drafter: Any = Eagle3Drafter(random_head(), topk=3, weights="int8")
    else:
        assistant = llama(vocab_size=target.config.vocab_size)
        drafter = AssistantDrafter(assistant, min_reach=0.0, weights="int8")
    compiles = BACKEND if name == "assistant" else False
    if compiles:
        target.set_experts_implementation("grouped_mm")
    acceptmoe.wrap(target, drafter=drafter, policy="natural", num_nodes=8, compile=compiles)
    ids = torch.tensor([[3, 4, 5, 6]])
    with counted_products(drafter) as work:
        target.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    counted = work.num_bytes
    assert counted > 0
    target.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert work.num_bytes == counted


def test_products_with_rounded_weights_have_a_rate_of_their_own() -> None:
    rates = matrix_rates(2)
    assert best_rate(rates, "int8") == rates[INT8_PRODUCT] > 0
    assert best_rate({INT8_PRODUCT: 5.0, "torch_bfloat16": 2.0, "torch_float32": 1.0}) == 2.0


def test_a_run_that_is_cut_short_keeps_the_cells_that_are_done(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def cells(options: Any, drafter: str) -> Iterator[dict[str, Any]]:
        for number in (1, 2):
            yield {"rows": [{"T": number}], "read_bytes_per_s": {f"cell {number}": 1.0}}
        raise KeyboardInterrupt

    out = tmp_path / "floor.json"
    monkeypatch.setattr("bench_floor.measure", cells)
    monkeypatch.setattr("bench_floor.print_tables", lambda result: None)
    monkeypatch.setattr("sys.argv", ["bench_floor.py", "--draft-weights=int8", f"--out={out}"])
    monkeypatch.setattr(torch, "set_num_threads", lambda num: None)
    with pytest.raises(KeyboardInterrupt):
        bench_floor.main()
    content = json.loads(out.read_text())
    assert content["rows"] == [{"T": 1}, {"T": 2}]
    assert content["draft_weights"] == "int8"
    assert content["read_bytes_per_s"] == {"cell 1": 1.0, "cell 2": 1.0}


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
