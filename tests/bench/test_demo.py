"""What the demo measures, against slow oracles and on models that are known to agree or not."""

from __future__ import annotations

import math

import pytest
import torch

from acceptmoe import CommitmentTable, unwrap, wrap
from acceptmoe.bench.demo import (
    AUTOREGRESSIVE,
    Arm,
    Fidelity,
    accuracy,
    compare_distributions,
    decode_timed,
    have_ended,
    make_arms,
    measure_fidelity,
    run_demo,
    twin_of,
)
from acceptmoe.bench.workloads import encode, end_token_ids, mixed_problems
from acceptmoe.drafting import load_drafter
from acceptmoe.errors import InvalidArgumentError
from acceptmoe.targets import assistant_folder, load_target

SETTINGS = {"max_new_tokens": 12, "do_sample": False}


def test_fidelity_equals_a_slow_sum() -> None:
    generator = torch.Generator().manual_seed(0)
    reference = torch.randn(5, 7, generator=generator).log_softmax(-1)
    own = torch.randn(5, 7, generator=generator).log_softmax(-1)
    kl_sum, num_agreeing = 0.0, 0
    for p, q in zip(reference.tolist(), own.tolist(), strict=True):
        kl_sum += sum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))
        num_agreeing += p.index(max(p)) == q.index(max(q))
    found = compare_distributions(reference, own)
    assert (found.num_tokens, found.num_agreeing) == (5, num_agreeing)
    assert found.kl_sum == pytest.approx(kl_sum, abs=1e-5)  # fp32 sums of 7 terms


def test_a_token_that_the_reference_excludes_adds_nothing() -> None:
    reference = torch.tensor([[0.0, -torch.inf]])
    assert compare_distributions(reference, torch.tensor([[0.5, 0.5]]).log()).kl == pytest.approx(
        math.log(2)
    )


def test_fidelities_add_up_and_no_tokens_give_no_rate() -> None:
    total = Fidelity(2, 0.5, 1) + Fidelity(2, 0.1, 2)
    assert (total.kl, total.top1) == (pytest.approx(0.15), 0.75)
    assert (Fidelity().kl, Fidelity().top1) == (None, None)
    assert Fidelity(1, -1e-9, 1).kl == 0.0


def test_a_twin_shares_weights_and_nothing_else(bundled: str) -> None:
    model, tokenizer = load_target(bundled)
    twin = twin_of(model)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert ours is theirs
    wrap(twin, policy="natural")
    assert not hasattr(model, "acceptmoe")
    prompt = encode(tokenizer, "abc", model.device)
    expected = model.generate(prompt, **SETTINGS)
    assert torch.equal(twin.generate(prompt, **SETTINGS), expected)
    unwrap(twin)
    assert torch.equal(twin.generate(prompt, **SETTINGS), expected)


@pytest.fixture
def arms(bundled: str, table_file: str) -> list[Arm]:
    model, _ = load_target(bundled)
    drafter = load_drafter(assistant_folder(bundled))
    return make_arms(model, drafter, CommitmentTable.load(table_file), 8, 3)


def test_natural_trees_agree_with_the_unwrapped_model(arms: list[Arm]) -> None:
    prompt = torch.arange(1, 20)[None]
    found = measure_fidelity(arms[1].model, arms[0].model, prompt, SETTINGS)
    assert found.num_tokens == 11  # the first token comes from the prefill
    assert found.top1 == 1.0
    assert found.kl == pytest.approx(0.0, abs=1e-6)  # rounding of fp32


def test_fidelity_sees_a_model_that_differs(arms: list[Arm]) -> None:
    other = twin_of(arms[0].model)
    other.model.norm.weight = torch.nn.Parameter(other.model.norm.weight * 0.5)
    prompt = torch.arange(1, 20)[None]
    found = measure_fidelity(arms[1].model, other, prompt, SETTINGS)
    assert found.kl_sum / found.num_tokens > 1e-3


def test_outputs_are_the_new_tokens_only(arms: list[Arm]) -> None:
    prompt = torch.arange(1, 20)[None]
    for arm in arms[:2]:
        decode_timed(arm, prompt, SETTINGS)
    assert len(arms[0].outputs[0]) == 12
    assert arms[0].outputs == arms[1].outputs


def test_every_arm_takes_every_turn(
    bundled: str, table_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def watched(arm: Arm, prompt: torch.Tensor, settings: dict[str, object]) -> None:
        order.append(arm.mode)
        decode_timed(arm, prompt, settings)

    monkeypatch.setattr("acceptmoe.bench.demo.decode_timed", watched)
    model, tokenizer = load_target(bundled)
    steps: list[tuple[int, int]] = []
    result = run_demo(
        model,
        tokenizer,
        mixed_problems("test", 2),
        target=bundled,
        drafter=load_drafter(assistant_folder(bundled)),
        table=CommitmentTable.load(table_file),
        num_nodes=8,
        max_depth=3,
        max_new_tokens=6,
        progress=lambda done, total: steps.append((done, total)),
    )
    assert order[:4] == [AUTOREGRESSIVE, "natural", "accept-depth", "accept"]
    assert order[4:] == ["natural", "accept-depth", "accept", AUTOREGRESSIVE]
    assert steps == [(done, 12) for done in range(1, 13)]  # a warm-up and two prompts for each
    assert [row["mode"] for row in result] == order[:4]
    assert not hasattr(model, "acceptmoe")


def test_no_problems_are_refused(bundled: str, table_file: str) -> None:
    model, tokenizer = load_target(bundled)
    with pytest.raises(InvalidArgumentError, match="no problems to decode"):
        run_demo(
            model,
            tokenizer,
            [],
            target=bundled,
            drafter=load_drafter("ngram"),
            table=CommitmentTable.load(table_file),
        )


def test_accuracy_needs_the_right_answer_and_an_end(bundled: str) -> None:
    _, tokenizer = load_target(bundled)
    end = tokenizer.eos_token_id
    problem = mixed_problems("test", 1, tasks=("algebra",))[0]
    right = tokenizer(problem.solution)["input_ids"]
    wrong = tokenizer("Answer: 123456")["input_ids"]
    found = accuracy([problem] * 4, tokenizer, [[*right, end], right, [*wrong, end], []], [end])
    assert found == 0.25


def test_texts_without_an_end_were_cut_off() -> None:
    assert have_ended([[5, 9], [9, 5], []], [9]) == [True, False, False]


def test_end_tokens_come_from_the_model_before_the_tokenizer(bundled: str) -> None:
    model, tokenizer = load_target(bundled)
    assert end_token_ids(model, tokenizer) == [tokenizer.eos_token_id]
    for configured, expected in (([3, 5], [3, 5]), (7, [7]), (None, [tokenizer.eos_token_id])):
        model.generation_config.eos_token_id = configured
        assert end_token_ids(model, tokenizer) == expected
    model.generation_config.eos_token_id = tokenizer.eos_token = None
    assert end_token_ids(model, tokenizer) == []
