"""Tokens/s of one policy beside plain decoding and natural trees, on the same prompts in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from acceptmoe.api import wrap
from acceptmoe.bench.demo import AUTOREGRESSIVE, Arm, decode_timed, twin_of, warm_up
from acceptmoe.drafting import Drafter
from acceptmoe.policies import NaturalPolicy, RoutingPolicy
from acceptmoe.table import CommitmentTable

Progress = Callable[[int, int], None]


def compare_speed(
    model: PreTrainedModel,
    prompts: Sequence[Tensor],
    *,
    policy: RoutingPolicy,
    table: CommitmentTable | None,
    drafter: Drafter,
    num_nodes: int,
    max_depth: int,
    settings: dict[str, Any],
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Rows of `mode`, `tokens_per_s`, `accepted_length`, `same_as_autoregressive`; plain is first.

    Speed is the wall time of whole `generate` calls, prompt included, after a warm-up; the modes
    take turns prompt by prompt, each turn beginning with another one. Nothing is audited meanwhile.

    Args:
        model: The target, not wrapped; it comes out as it went in.
        prompts: Token ids [1, P], at least one prompt.
        policy: What is compared; a natural one has no row beside that of natural trees.
        table: The commitment table, where the policy reads one.
        drafter: One for all modes, which take turns: it forgets everything with each prompt.
        num_nodes: Largest number of nodes of a draft tree, the root included.
        max_depth: Largest number of drafted tokens on one path.
        settings: Keywords of `generate`.
        progress: Called with the numbers of finished and of all steps.
    """
    arms = [Arm(AUTOREGRESSIVE, model)]
    for rule in [NaturalPolicy(), *([] if policy.is_natural else [policy])]:
        wrapped = wrap(
            twin_of(model),
            table,
            drafter=drafter,
            policy=rule,
            num_nodes=num_nodes,
            max_depth=max_depth,
            allow_table_mismatch=rule is not policy,
        )
        arms.append(Arm(rule.name, wrapped))
    num_steps = len(arms) * (len(prompts) + 1)
    for index, arm in enumerate(arms):
        if progress is not None:
            progress(index, num_steps)
        warm_up(arm, prompts[0], settings)
    for turn, prompt in enumerate(prompts, start=1):
        first = turn % len(arms)
        for index, arm in enumerate([*arms[first:], *arms[:first]]):
            if progress is not None:
                progress(turn * len(arms) + index, num_steps)
            decode_timed(arm, prompt, settings)
    if progress is not None:
        progress(num_steps, num_steps)
    return [_row(arm, arms[0]) for arm in arms]


def _row(arm: Arm, plain: Arm) -> dict[str, Any]:
    same = [a == b for a, b in zip(arm.outputs, plain.outputs, strict=True)]
    return {
        "mode": arm.mode,
        "tokens_per_s": sum(map(len, arm.outputs)) / sum(arm.seconds),
        "accepted_length": 1.0 if arm.is_baseline else arm.report["accepted_length"],
        "same_as_autoregressive": sum(same) / len(same),
    }
