"""`audit_prompts` measures the policy on prompts and leaves the session as it was."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import acceptmoe
from acceptmoe import InvalidArgumentError, UnsupportedGenerateError, WrapStateError
from acceptmoe.audit import AuditReport, PromptAudit, audit_prompts
from acceptmoe.decoding.audit_statistics import MIN_ERROR_BLOCKS
from passes import wrap_with_passes
from tiny_models import NUM_LAYERS, VOCAB_SIZE, make_model

HARSH = "moe-spec:budget=2"


def make_prompts(count: int = 3) -> list[Tensor]:
    """Each a random start and most of it again, so that the n-gram drafter finds something."""
    generator = torch.Generator().manual_seed(1)
    starts = [torch.randint(VOCAB_SIZE, (9 + i,), generator=generator) for i in range(count)]
    return [torch.cat([start, start[:-1]]) for start in starts]


@pytest.fixture
def wrapped() -> PreTrainedModel:
    return acceptmoe.wrap(make_model("qwen3_moe"), policy=HARSH, num_nodes=8, max_depth=3)


def audit(model: PreTrainedModel, prompts: Any = None, **keywords: Any) -> PromptAudit:
    prompts = make_prompts() if prompts is None else prompts
    return audit_prompts(model, prompts, max_new_tokens=16, pad_token_id=0, **keywords)


def test_the_outputs_are_those_of_generate_and_the_figures_cover_them(
    wrapped: PreTrainedModel,
) -> None:
    found = audit(wrapped)
    for prompt, output in zip(make_prompts(), found.outputs, strict=True):
        ids = prompt[None]
        mask = torch.ones_like(ids)
        text = wrapped.generate(ids, attention_mask=mask, max_new_tokens=16, pad_token_id=0)
        assert text[0, len(prompt) :].tolist() == output
    assert isinstance(found.audit, AuditReport)
    assert found.audit.num_blocks == found.report["num_verifications"] > 0
    assert found.audit.num_tokens == found.report["num_verified_tokens"]
    assert found.audit.kl is not None
    assert found.audit.kl > 0.0
    assert found.audit.kl_se is not None
    assert len(found.audit.by_layer) == NUM_LAYERS
    assert found.report["audit"]["kl"] == found.audit.kl
    assert found.report["num_prompts"] == 3
    assert found.report["num_tokens"] == 48


def test_a_share_audits_some_blocks_and_changes_no_output(wrapped: PreTrainedModel) -> None:
    whole, part = audit(wrapped), audit(wrapped, share=0.3)
    assert part.outputs == whole.outputs
    assert 0 < part.audit.num_blocks < whole.audit.num_blocks
    assert audit(wrapped, share=0.3).audit == part.audit
    assert audit(wrapped, share=0).audit.num_blocks == 0


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_compiled_passes_give_it_what_they_give_an_audit_of_their_own(share: float) -> None:
    model = make_model("qwen3_moe")
    settings = {"policy": HARSH, "num_nodes": 8, "max_depth": 3}
    expected = audit(acceptmoe.wrap(model, **settings)).audit
    acceptmoe.unwrap(model)
    wrap_with_passes(model, (1, 4, 8), audit=share, **settings)
    found = audit(model)
    assert found.report["compiled"]["num_compiled_passes"] > 0
    assert found.audit.num_blocks == expected.num_blocks
    assert found.audit.kl == pytest.approx(expected.kl, abs=1e-5)  # fp32 sums over other shapes
    assert found.audit.excluded_mass == pytest.approx(expected.excluded_mass, abs=1e-5)
    assert model.acceptmoe.compiled.keeps_layers == (share > 0)


def test_guarded_steps_are_counted_apart() -> None:
    model = make_model("qwen3_moe")
    acceptmoe.wrap(model, policy="natural", guard=True, num_nodes=8, max_depth=3)
    ids = make_prompts()[0][None]
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, pad_token_id=0)
    before = model.acceptmoe.report()["num_guarded_steps"]
    model.acceptmoe.history.num_guarded_steps += 1000
    assert 0 <= audit(model).report["num_guarded_steps"] < 1000
    assert model.acceptmoe.report()["num_guarded_steps"] == before + 1000


def test_prompts_come_as_rows_too_and_progress_is_told(wrapped: PreTrainedModel) -> None:
    steps: list[tuple[int, int]] = []
    rows = [prompt[None].to(torch.int32) for prompt in make_prompts()]
    found = audit(wrapped, rows, progress=lambda *step: steps.append(step))
    assert found.outputs == audit(wrapped).outputs
    assert steps == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_counts_and_running_audit_of_the_session_come_back_unchanged() -> None:
    model = acceptmoe.wrap(
        make_model("qwen3_moe"), policy=HARSH, num_nodes=8, max_depth=3, audit=0.5, max_kl=100.0
    )
    ids = make_prompts()[0][None]
    mask = torch.ones_like(ids)
    model.generate(ids, attention_mask=mask, max_new_tokens=16, pad_token_id=0)
    before = model.acceptmoe.report()
    audit(model)
    assert model.acceptmoe.report() == before

    def fail(*_: Any) -> None:
        raise RuntimeError("observer")

    model.acceptmoe.observers.append(fail)
    with pytest.raises(RuntimeError, match="observer"):
        audit(model)
    assert model.acceptmoe.report() == before


def test_a_tripped_limit_is_put_aside_and_comes_back(wrapped: PreTrainedModel) -> None:
    restricted = audit(wrapped)
    wrapped.acceptmoe.auditor.limit.tripped_kl = 1.0
    found = audit(wrapped)
    assert found.outputs == restricted.outputs
    assert found.audit == restricted.audit
    assert wrapped.acceptmoe.auditor.is_natural


def test_a_natural_policy_costs_exactly_nothing() -> None:
    model = acceptmoe.wrap(make_model("qwen3_moe"), policy="natural", num_nodes=8, max_depth=3)
    found = audit(model).audit
    assert found.num_blocks > 0
    assert (found.kl, found.kl_se, found.top1, found.excluded_mass) == (0.0, 0.0, 1.0, 0.0)


# Bad input


def test_a_model_that_is_not_wrapped_is_refused() -> None:
    with pytest.raises(WrapStateError, match="the model is not wrapped and an audit measures"):
        audit(make_model("qwen3_moe"))


@pytest.mark.parametrize(
    ("prompts", "text"),
    [
        ([], "there are no prompts to audit; give at least one"),
        (["abc"], "prompts[0] is str; it must be a tensor of token ids"),
        ([torch.zeros(3)], "prompts[0] is torch.float32 [3]; it must be"),
        ([torch.ones(2, 3).long()], "prompts[0] is torch.int64 [2, 3]; it must be"),
        ([torch.ones(3).long(), torch.ones(0).long()], "prompts[1] is torch.int64 [0]; it must"),
        ([torch.tensor([1, VOCAB_SIZE])], f"prompts[0] has token {VOCAB_SIZE}; this model's"),
        ([torch.tensor([-1, 2])], "prompts[0] has token -1; this model's tokens are 0 to 127"),
    ],
)
def test_bad_prompts_are_refused_before_any_work(
    wrapped: PreTrainedModel, prompts: list[Any], text: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=re.escape(text)):
        audit(wrapped, prompts)
    assert wrapped.acceptmoe.report()["num_prompts"] == 0


@pytest.mark.parametrize("share", [True, float("nan"), -0.5, 2, None])
def test_a_bad_share_is_refused(wrapped: PreTrainedModel, share: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=f"share is {share!r}; it must be a number from"):
        audit(wrapped, share=share)


def test_settings_that_generate_refuses_are_refused(wrapped: PreTrainedModel) -> None:
    before = wrapped.acceptmoe.report()
    with pytest.raises(UnsupportedGenerateError, match="do_sample is True"):
        audit(wrapped, do_sample=True)
    assert wrapped.acceptmoe.report() == before


def test_an_audit_inside_generate_is_refused(wrapped: PreTrainedModel) -> None:
    wrapped.acceptmoe.observers.append(lambda *_: audit(wrapped))
    ids = make_prompts()[0][None]
    with pytest.raises(WrapStateError, match="audit_prompts was called from inside a running gen"):
        wrapped.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, pad_token_id=0)


def test_a_few_blocks_give_no_standard_errors(wrapped: PreTrainedModel) -> None:
    prompts = make_prompts(1)
    found = audit_prompts(wrapped, prompts, max_new_tokens=9, pad_token_id=0, share=1.0)
    assert 2 <= found.audit.num_blocks < MIN_ERROR_BLOCKS
    parts = [found.audit, *found.audit.by_depth, *found.audit.by_layer]
    errors = [value for part in parts for name, value in vars(part).items() if name.endswith("_se")]
    assert set(errors) == {None}
    assert found.report["audit"]["kl_se"] is None
    assert found.report["audit"]["by_layer"][0]["rows_moved_se"] is None
    assert found.audit.kl is not None
