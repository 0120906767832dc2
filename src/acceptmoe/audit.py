"""What a wrapped model's policy costs on given prompts, measured block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from acceptmoe.decoding.audit import Auditor, check_share
from acceptmoe.decoding.audit_statistics import AuditReport, DepthAudit, LayerAudit
from acceptmoe.decoding.session import Session
from acceptmoe.decoding.statistics import DecodingStatistics
from acceptmoe.errors import InvalidArgumentError, WrapStateError
from acceptmoe.models.counters import RoutingCounters

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class PromptAudit:
    """The outcome of `audit_prompts`.

    `audit` says what the policy changed; `report` is the session's report of this run alone, with
    tokens/s, accepted length and experts; `outputs` are the new tokens of each prompt.
    """

    audit: AuditReport
    report: dict[str, Any]
    outputs: list[list[int]]


def audit_prompts(
    model: PreTrainedModel,
    prompts: Sequence[Tensor],
    *,
    share: float = 1.0,
    max_new_tokens: int = 128,
    progress: Progress | None = None,
    **settings: Any,
) -> PromptAudit:
    """Continue `prompts` with a wrapped model and measure what its policy changes on them.

    The policy restricts throughout, also where `max_kl` has made the model natural: that limit, the
    counts and the running audit of the session are put aside and come back unchanged. Other threads
    wait with `generate` until the end.

    Args:
        model: A model that `acceptmoe.wrap` has wrapped.
        prompts: Token ids, one int tensor [P] or [1, P] for each prompt.
        share: Of the verification blocks, the share that is run naturally too. Less than 1 is
            faster and less exact.
        max_new_tokens: Largest number of tokens to continue each prompt by.
        progress: Called with the numbers of finished and of all prompts.
        settings: Further keywords of `generate`, the same for all prompts.

    Raises:
        WrapStateError: The model is not wrapped, or this is inside a `generate` of its own.
        InvalidArgumentError: The share, a prompt or their number is out of range.
        AcceptMoEError: What a wrapped model's `generate` raises for its keywords.
    """
    session = getattr(model, "acceptmoe", None)
    if not isinstance(session, Session):
        raise WrapStateError(
            "the model is not wrapped and an audit measures a wrapped one; call "
            "acceptmoe.wrap(model, table) first"
        )
    check_share("share", share)
    rows = _check_prompts(prompts, model, session)
    outputs = []
    with session.reserved("audit_prompts"), _set_aside(session, share) as auditor:
        for done, prompt in enumerate(rows):
            if progress is not None:
                progress(done, len(rows))
            sequence = model.generate(
                prompt,
                **{
                    "attention_mask": torch.ones_like(prompt),
                    "max_new_tokens": max_new_tokens,
                    "do_sample": False,
                    **settings,
                },
            )
            outputs.append(sequence[0, prompt.shape[1] :].tolist())
        report = session.report()
    if progress is not None:
        progress(len(rows), len(rows))
    return PromptAudit(auditor.read(), report, outputs)


@contextmanager
def _set_aside(session: Session, share: float) -> Iterator[Auditor]:
    """Give the session empty counts and an audit of its own; what it had comes back at the end."""
    kept = session.statistics, session.patch.counters, session.auditor
    num_guarded_steps, passes = session.history.num_guarded_steps, session.compiled
    keeps_layers = passes is not None and passes.keeps_layers
    names = [layer.name for layer in session.adapter.layers]
    auditor = Auditor(share, None, names)
    session.statistics, session.auditor = DecodingStatistics(), auditor
    session.patch.counters = RoutingCounters()
    session.history.num_guarded_steps = 0
    if passes is not None:
        passes.keeps_layers = share > 0
    try:
        yield auditor
    finally:
        session.statistics, session.patch.counters, session.auditor = kept
        session.history.num_guarded_steps = num_guarded_steps
        if passes is not None:
            passes.keeps_layers = keeps_layers


def _check_prompts(
    prompts: Sequence[Tensor], model: PreTrainedModel, session: Session
) -> list[Tensor]:
    """The prompts as [1, P] on the model's device, or `InvalidArgumentError` before any work."""
    if not len(prompts):
        raise InvalidArgumentError("there are no prompts to audit; give at least one")
    rows = []
    for index, prompt in enumerate(prompts):
        is_ids = isinstance(prompt, Tensor) and prompt.dtype in (torch.int64, torch.int32)
        is_row = is_ids and (prompt.dim() == 1 or (prompt.dim() == 2 and prompt.shape[0] == 1))
        if not is_row or prompt.numel() == 0:
            got = (
                f"{prompt.dtype} {list(prompt.shape)}"
                if isinstance(prompt, Tensor)
                else type(prompt).__name__
            )
            raise InvalidArgumentError(
                f"prompts[{index}] is {got}; it must be a tensor of token ids, int64 of the shape "
                "[length], with at least one token"
            )
        lowest, highest = int(prompt.min()), int(prompt.max())
        num_ids = session.adapter.num_token_ids
        if lowest < 0 or highest >= num_ids:
            raise InvalidArgumentError(
                f"prompts[{index}] has token {lowest if lowest < 0 else highest}; this model's "
                f"tokens are 0 to {num_ids - 1}. Was it made with another tokenizer?"
            )
        rows.append(prompt.reshape(1, -1).to(model.device))
    return rows


__all__ = ["AuditReport", "DepthAudit", "LayerAudit", "PromptAudit", "audit_prompts"]
