"""The guard: drafts are made only while they pay, and the text is the same either way."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import acceptmoe
from acceptmoe.bench.useless_drafter import RandomDrafter
from acceptmoe.decoding.steering import GUARD_FIELDS
from acceptmoe.errors import InvalidArgumentError
from acceptmoe.policies.utility import TRIAL_CREDIT_TOKENS, TRIAL_SHARE
from drafters import OracleDrafter
from fake_clock import FakeClock
from tables import make_table_for
from tiny_models import VOCAB_SIZE, make_model

NUM_TOKENS = 64
PROMPT = torch.randint(VOCAB_SIZE, (1, 9), generator=torch.Generator().manual_seed(0))


def generate(model, prompt: Tensor = PROMPT, num_tokens: int = NUM_TOKENS) -> list[int]:
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        pad_token_id=0,
        max_new_tokens=num_tokens,
    )
    return output[0, prompt.shape[1] :].tolist()


def pass_s(num_rows: int) -> float:
    """A step takes a hundredth of a second, each row more a twentieth of that."""
    return 0.01 * (1 + 0.05 * (num_rows - 1))


def wrap(model, drafter, **keywords) -> FakeClock:
    keywords = {"policy": "natural", "num_nodes": 24, "max_depth": 6, "guard": True, **keywords}
    acceptmoe.wrap(model, drafter=drafter, **keywords)
    return FakeClock(pass_s).drive(model)


class TestUselessDrafts:
    def test_cost_no_more_than_the_budget_for_trials(self) -> None:
        model = make_model("qwen3_moe")
        text = generate(model)
        clock = wrap(model, RandomDrafter())
        num_texts, start = 4, clock.now_s
        for _ in range(num_texts):
            assert generate(model) == text
        plain_s = num_texts * (NUM_TOKENS - 1) * pass_s(1)
        prefill_s = num_texts * pass_s(PROMPT.shape[1])
        # One trial step may overshoot the budget, and the very first pass is charged less.
        slack_s = pass_s(1) * TRIAL_CREDIT_TOKENS + 2 * pass_s(24)
        assert clock.now_s - start - prefill_s <= (1 + TRIAL_SHARE) * plain_s + slack_s

    def test_are_switched_off_and_the_report_says_why(self) -> None:
        model = make_model("qwen3_moe")
        wrap(model, RandomDrafter())
        for _ in range(2):
            generate(model)
        report = model.acceptmoe.report()
        assert report["guard_state"] == "plain"
        assert report["num_guarded_steps"] > 1.9 * (NUM_TOKENS - 8)
        assert report["plain_tokens_per_s"] == pytest.approx(100.0)
        assert report["drafted_tokens_per_s"] == pytest.approx(1 / pass_s(24))
        assert report["guard_reason"] == (
            "drafting does not pay: drafts of 24 nodes give 46.5 tokens/s, plain decoding 100.0; "
            "it is tried again now and then"
        )

    def test_leave_the_drafter_alone_meanwhile(self) -> None:
        model = make_model("qwen3_moe")
        drafter = RandomDrafter()
        calls = []
        for name in ("start", "extend", "propose"):
            method = getattr(drafter, name)
            setattr(drafter, name, lambda *args, n=name, m=method: (calls.append(n), m(*args))[1])
        wrap(model, drafter)
        for _ in range(3):
            generate(model)
        calls.clear()
        generate(model, num_tokens=14)  # shorter than the back-off: nothing is tried
        assert calls == []


class TestGoodDrafts:
    def test_are_made_all_the_time(self) -> None:
        model = make_model("qwen3_moe")
        text = generate(model)
        drafter = OracleDrafter([*PROMPT[0].tolist(), *text], VOCAB_SIZE)
        wrap(model, drafter)
        assert generate(model) == text
        model.acceptmoe.reset_statistics()
        assert generate(model) == text
        report = model.acceptmoe.report()
        assert report["guard_state"] == "speculating"
        assert report["guard_reason"].startswith("drafting pays: drafts of 24 nodes give ")
        assert report["num_guarded_steps"] <= 1  # a plain step now and then keeps its time fresh
        assert report["num_verifications"] >= 10

    def test_step_in_again_after_useless_ones(self) -> None:
        model = make_model("qwen3_moe")
        text = generate(model)
        oracle, useless = OracleDrafter([*PROMPT[0].tolist(), *text], VOCAB_SIZE), RandomDrafter()
        wrap(model, oracle)
        useless.check_target(model)
        generate(model)
        good_propose = oracle.propose
        oracle.propose = lambda *limits: _with_root(useless.propose(*limits), oracle.text[-1])
        assert generate(model) == text
        assert model.acceptmoe.report()["guard_state"] == "plain"
        oracle.propose = good_propose
        for _ in range(2):
            assert generate(model) == text
        assert model.acceptmoe.report()["guard_state"] == "speculating"


def _with_root(tree, root: int):
    return acceptmoe.DraftTree((root, *tree.tokens[1:]), tree.parents, tree.path_probabilities)


def test_a_hiccup_of_the_clock_changes_no_decision() -> None:
    model = make_model("qwen3_moe")
    text = generate(model)
    clock = wrap(model, OracleDrafter([*PROMPT[0].tolist(), *text], VOCAB_SIZE))
    generate(model)
    count = 0

    def jerky(num_rows: int) -> float:
        nonlocal count
        count += 1
        return pass_s(num_rows) * (200 if count % 7 == 0 else 1)

    clock.pass_s = jerky
    generate(model)
    assert model.acceptmoe.report()["guard_state"] == "speculating"


@pytest.mark.parametrize("policy", ["evict", "utility", "accept"])
def test_the_guard_goes_with_every_policy(policy: str) -> None:
    model = make_model("qwen3_moe")
    table = make_table_for(model, num_nodes=24, max_depth=6, drafter="random")
    wrap(model, RandomDrafter(), table=table, policy=policy)
    for _ in range(2):
        generate(model)
    report = model.acceptmoe.report()
    assert report["guard_state"] == "plain"
    assert report["num_guarded_steps"] > NUM_TOKENS


def test_without_a_guard_the_report_has_its_fields_empty() -> None:
    model = make_model("olmoe")
    acceptmoe.wrap(model, policy="natural", num_nodes=4, max_depth=2)
    generate(model, num_tokens=5)
    report = model.acceptmoe.report()
    assert [report[name] for name in GUARD_FIELDS] == [None] * len(GUARD_FIELDS)


@pytest.mark.parametrize("value", [1, "yes", None])
def test_a_guard_that_is_no_bool_is_refused(value: object) -> None:
    with pytest.raises(InvalidArgumentError, match=r"guard is .*; it must be True or False"):
        acceptmoe.wrap(make_model("olmoe"), policy="natural", guard=value)
