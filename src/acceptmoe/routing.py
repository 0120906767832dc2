"""How a router turns logits into experts and weights inside an eligible set: three rules.

Axes: T rows, E experts, K experts per row. Tensors in, tensors out; `models/scoring.py` says which
rule a family's router follows. With everything eligible `route` gives the router's own result bit
for bit, so it uses the same operations in the same order and dtypes as Transformers does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from acceptmoe.selection import Combine, RoutedBlock, best_first, group_floor

ScoringName = Literal["softmax_topk", "topk_softmax", "sigmoid_bias_group"]
SCORINGS: tuple[ScoringName, ...] = get_args(ScoringName)
EPSILON = 1e-20  # Transformers adds it to the denominator of kept sigmoid weights


@dataclass(frozen=True)
class RoutingRule:
    """A router's rule; its correction bias, a tensor, goes beside it.

    `scoring` is "softmax_topk" (softmax over all experts, then top-k), "topk_softmax" (top-k of the
    logits, then a softmax over the chosen: gpt-oss) or "sigmoid_bias_group" (sigmoid scores, a
    bias for the choice only, `groups_per_row` of `num_groups` first: DeepSeek-V3). `renormalize`
    divides the weights by their sum, `scale` multiplies them after that; "topk_softmax" does
    neither.
    """

    scoring: ScoringName
    experts_per_row: int
    renormalize: bool = True
    scale: float = 1.0
    num_groups: int = 1
    groups_per_row: int = 1

    @property
    def is_group_limited(self) -> bool:
        return self.groups_per_row < self.num_groups


@dataclass(frozen=True)
class NaturalRouting:
    """A router's own output: `logits` [T, E], `weights` [T, K] and `ids` [T, K] int64."""

    logits: Tensor
    weights: Tensor
    ids: Tensor


def gates(rule: RoutingRule, logits: Tensor) -> Tensor:
    """[T, E] fp32 scores that sum to 1 over the experts."""
    if rule.scoring != "sigmoid_bias_group":
        return torch.softmax(logits, dim=-1, dtype=torch.float32)
    scores = logits.float().sigmoid()
    return scores / scores.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).tiny)


def choice(rule: RoutingRule, logits: Tensor, correction_bias: Tensor | None) -> Tensor:
    """[T, E]: what the router ranks, in the scale in which a `choice_bias` is added."""
    if rule.scoring != "sigmoid_bias_group":
        return logits
    scores = logits.sigmoid()
    return scores if correction_bias is None else scores + correction_bias


def complete_groups(
    rule: RoutingRule, block: RoutedBlock, eligible: Tensor, expert_demand: Tensor
) -> Tensor:
    """`eligible` [E] plus what a group-limited router needs to stay inside it."""
    if not rule.is_group_limited:
        return eligible
    return group_floor(
        block,
        eligible,
        expert_demand,
        num_groups=rule.num_groups,
        groups_per_row=rule.groups_per_row,
        min_group_experts=-(-rule.experts_per_row // rule.groups_per_row),
    )


def route(
    rule: RoutingRule,
    natural: NaturalRouting,
    is_eligible: Tensor,
    *,
    correction_bias: Tensor | None = None,
    choice_bias: Tensor | None = None,
    combine: Combine = "router",
    known_gates: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Weights [T, K] and ids [T, K] of the best K experts among `is_eligible` (T or 1, E).

    `choice_bias` [T, E] is added to what the router ranks, for the choice only. `known_gates`,
    where the caller has the gates already, spare computing them again. Of equal scores it takes
    those that `torch.topk` takes, as the router does.
    """
    if rule.scoring == "softmax_topk":
        scores = gates(rule, natural.logits) if known_gates is None else known_gates
        weights, ids = _softmax_topk(rule, natural, scores, is_eligible, choice_bias, combine)
    elif rule.scoring == "topk_softmax":
        weights, ids = _topk_softmax(rule, natural, is_eligible, choice_bias, combine)
    else:
        ranked = _offset(choice(rule, natural.logits, correction_bias), choice_bias)
        ranked = ranked.masked_fill(~is_eligible, -torch.inf)
        ids = _inside_groups(rule, ranked).topk(rule.experts_per_row, sorted=False).indices
        weights = _sigmoid_weights(rule, natural.logits.sigmoid(), ids, natural.ids, combine)
    return weights.to(natural.weights.dtype), ids


def route_stably(
    rule: RoutingRule,
    natural: NaturalRouting,
    is_eligible: Tensor,
    *,
    correction_bias: Tensor | None = None,
    combine: Combine = "router",
) -> tuple[Tensor, Tensor]:
    """As `route`, but of equals the lower id is the better one, and ids come best first.

    Ranks by what the router ranks, so that no rounding of a softmax makes ties. This is what the
    fused kernels do; `torch.topk` leaves open which of equals it takes.
    """
    ranked = choice(rule, natural.logits, correction_bias).float()
    ranked = ranked.masked_fill(~is_eligible, -torch.inf)
    if rule.is_group_limited:
        ranked = _inside_groups(rule, ranked, is_stable=True)
    ids = best_first(ranked, rule.experts_per_row)
    if rule.scoring == "softmax_topk":
        weights = gates(rule, natural.logits).gather(1, ids)
        if rule.renormalize:
            kept = ids if combine == "router" else natural.ids
            weights = weights / gates(rule, natural.logits).gather(1, kept).sum(-1, keepdim=True)
    elif rule.scoring == "topk_softmax":
        weights = _softmax_of_few(natural, natural.logits.gather(1, ids), combine)
    else:
        scores = natural.logits.sigmoid().float()
        weights = _sigmoid_weights(rule, scores, ids, natural.ids, combine)
    return weights.to(natural.weights.dtype), ids


def _offset(values: Tensor, bias: Tensor | None) -> Tensor:
    return values if bias is None else values + bias.to(values.dtype)


def _softmax_topk(
    rule: RoutingRule,
    natural: NaturalRouting,
    scores: Tensor,
    is_eligible: Tensor,
    choice_bias: Tensor | None,
    combine: Combine,
) -> tuple[Tensor, Tensor]:
    # The scores are masked, not the logits: where a router does not renormalise (OLMoE), a softmax
    # over the eligible experts alone would inflate the weights that remain.
    if choice_bias is None:
        # Scores are positive, so -1 ranks below every eligible one, also an underflowed 0.
        ranked = scores.masked_fill(~is_eligible, -1.0)
        weights, ids = ranked.topk(rule.experts_per_row, dim=-1)
    else:
        ranked = _offset(natural.logits.float(), choice_bias)
        ranked = ranked.masked_fill(~is_eligible, -torch.inf)
        ids = ranked.topk(rule.experts_per_row, dim=-1).indices
        weights = scores.gather(1, ids)
    if rule.renormalize:
        kept = weights if combine == "router" else scores.gather(1, natural.ids)
        weights = weights / kept.sum(dim=-1, keepdim=True)
    return weights, ids


def _topk_softmax(
    rule: RoutingRule,
    natural: NaturalRouting,
    is_eligible: Tensor,
    choice_bias: Tensor | None,
    combine: Combine,
) -> tuple[Tensor, Tensor]:
    ranked = _offset(natural.logits, choice_bias).masked_fill(~is_eligible, -torch.inf)
    values, ids = ranked.topk(rule.experts_per_row, dim=-1)
    if choice_bias is not None:
        values = natural.logits.gather(1, ids)
    return _softmax_of_few(natural, values, combine), ids


def _softmax_of_few(natural: NaturalRouting, values: Tensor, combine: Combine) -> Tensor:
    if combine == "router":
        return torch.softmax(values, dim=-1, dtype=values.dtype)
    natural_values = natural.logits.gather(1, natural.ids).float()
    return torch.exp(values.float() - natural_values.logsumexp(dim=-1, keepdim=True))


def _inside_groups(rule: RoutingRule, ranked: Tensor, is_stable: bool = False) -> Tensor:
    """`ranked` [T, E] with -inf outside each row's best groups, by the sum of their two best."""
    in_groups = ranked.view(ranked.shape[0], rule.num_groups, -1)
    group_scores = in_groups.topk(2, dim=-1).values.sum(dim=-1)
    if is_stable:
        chosen = best_first(group_scores, rule.groups_per_row)
    else:
        chosen = group_scores.topk(rule.groups_per_row, dim=-1, sorted=False).indices
    is_in_group = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, chosen, True)
    return in_groups.masked_fill(~is_in_group[..., None], -torch.inf).view_as(ranked)


def _sigmoid_weights(
    rule: RoutingRule, scores: Tensor, ids: Tensor, natural_ids: Tensor, combine: Combine
) -> Tensor:
    weights = scores.gather(1, ids)
    if rule.renormalize:
        kept = weights if combine == "router" else scores.gather(1, natural_ids)
        weights = weights / (kept.sum(dim=-1, keepdim=True) + EPSILON)
    return weights * rule.scale
