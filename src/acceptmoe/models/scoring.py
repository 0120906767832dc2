"""How routers turn logits into experts and weights: three kinds cover the supported families.

Axes: T rows, E experts, K experts per row. A scoring kind reads a router's own output and routes
again inside an eligible set. With everything eligible it must give the router's own result bit for
bit, so each method uses the same operations in the same order and dtypes as Transformers does;
`patching.self_check` holds it to that on every wrapped model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal

import torch
from torch import Tensor, nn

from acceptmoe.selection import RoutedBlock, group_floor

Combine = Literal["router", "natural"]
RouterOutput = tuple[Tensor, ...]  # logits [T, E], weights [T, K], ids [T, K], and more in places


class Scoring(ABC):
    """One way to score experts; stateless, the router module brings the parameters."""

    name: str

    @abstractmethod
    def gates(self, router: nn.Module, logits: Tensor) -> Tensor:
        """[T, E] fp32 scores that sum to 1 over the experts."""

    @abstractmethod
    def choice(self, router: nn.Module, logits: Tensor) -> Tensor:
        """[T, E]: what the router ranks, in the scale in which a `choice_bias` is added."""

    @abstractmethod
    def route(
        self,
        router: nn.Module,
        output: RouterOutput,
        is_eligible: Tensor,
        choice_bias: Tensor | None = None,
        combine: Combine = "router",
        gates: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Weights [T, K] and ids [T, K] of the best K experts among `is_eligible` (T or 1, E).

        `gates`, where the caller has them already, spare computing them again.
        """

    def complete(
        self, router: nn.Module, block: RoutedBlock, eligible: Tensor, expert_demand: Tensor
    ) -> Tensor:
        """`eligible` [E] plus what this kind of router needs to stay inside it."""
        return eligible

    def needs_completion(self, router: nn.Module) -> bool:
        """Whether `complete` may change anything for this router."""
        return False


def _rank_offset(values: Tensor, bias: Tensor | None) -> Tensor:
    return values if bias is None else values + bias.to(values.dtype)


class SoftmaxTopK(Scoring):
    """Softmax over all experts, then top-k; weights renormalised or not.

    The scores are masked, not the logits: where a router does not renormalise (OLMoE), a softmax
    over the eligible experts alone would inflate the weights that remain.
    """

    name = "softmax_topk"

    def __init__(self, renormalize: bool | None = None) -> None:
        self.renormalize = renormalize  # None: the router's own `norm_topk_prob`

    def gates(self, router: nn.Module, logits: Tensor) -> Tensor:
        return torch.softmax(logits, dim=-1, dtype=torch.float32)

    def choice(self, router: nn.Module, logits: Tensor) -> Tensor:
        return logits

    def route(
        self,
        router: Any,
        output: RouterOutput,
        is_eligible: Tensor,
        choice_bias: Tensor | None = None,
        combine: Combine = "router",
        gates: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        logits, natural_weights, natural_ids = output[:3]
        scores = self.gates(router, logits) if gates is None else gates
        if choice_bias is None:
            # Scores are positive, so -1 ranks below every eligible one, also an underflowed 0.
            weights, ids = scores.masked_fill(~is_eligible, -1.0).topk(router.top_k, dim=-1)
        else:
            ranked = _rank_offset(logits.float(), choice_bias).masked_fill(~is_eligible, -torch.inf)
            ids = ranked.topk(router.top_k, dim=-1).indices
            weights = scores.gather(1, ids)
        renormalize = router.norm_topk_prob if self.renormalize is None else self.renormalize
        if renormalize:
            kept = weights if combine == "router" else scores.gather(1, natural_ids)
            weights = weights / kept.sum(dim=-1, keepdim=True)
        return weights.to(natural_weights.dtype), ids


class TopKSoftmax(Scoring):
    """Top-k of the logits, then a softmax over the chosen ones (gpt-oss)."""

    name = "topk_softmax"

    def gates(self, router: nn.Module, logits: Tensor) -> Tensor:
        return torch.softmax(logits, dim=-1, dtype=torch.float32)

    def choice(self, router: nn.Module, logits: Tensor) -> Tensor:
        return logits

    def route(
        self,
        router: Any,
        output: RouterOutput,
        is_eligible: Tensor,
        choice_bias: Tensor | None = None,
        combine: Combine = "router",
        gates: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        logits, natural_weights, natural_ids = output[:3]
        ranked = _rank_offset(logits, choice_bias).masked_fill(~is_eligible, -torch.inf)
        values, ids = ranked.topk(router.top_k, dim=-1)
        if choice_bias is not None:
            values = logits.gather(1, ids)
        if combine == "router":
            weights = torch.softmax(values, dim=-1, dtype=values.dtype)
        else:
            natural_values = logits.gather(1, natural_ids).float()
            weights = torch.exp(values.float() - natural_values.logsumexp(dim=-1, keepdim=True))
        return weights.to(natural_weights.dtype), ids


class SigmoidBiasGroup(Scoring):
    """Sigmoid scores, a bias for the choice only, groups first, then top-k (DeepSeek-V3)."""

    name = "sigmoid_bias_group"
    epsilon = 1e-20  # Transformers adds it to the denominator of the kept weights

    def gates(self, router: nn.Module, logits: Tensor) -> Tensor:
        scores = logits.float().sigmoid()
        return scores / scores.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).tiny)

    def choice(self, router: Any, logits: Tensor) -> Tensor:
        choice: Tensor = logits.sigmoid() + router.e_score_correction_bias
        return choice

    def route(
        self,
        router: Any,
        output: RouterOutput,
        is_eligible: Tensor,
        choice_bias: Tensor | None = None,
        combine: Combine = "router",
        gates: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        logits, natural_weights, natural_ids = output[:3]
        scores = logits.sigmoid()
        ranked = _rank_offset(scores + router.e_score_correction_bias, choice_bias)
        ranked = ranked.masked_fill(~is_eligible, -torch.inf)
        in_groups = ranked.view(ranked.shape[0], router.num_group, -1)
        group_scores = in_groups.topk(2, dim=-1).values.sum(dim=-1)
        chosen = group_scores.topk(router.topk_group, dim=-1, sorted=False).indices
        is_in_group = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, chosen, True)
        ranked = in_groups.masked_fill(~is_in_group[..., None], -torch.inf).view_as(ranked)
        ids = ranked.topk(router.top_k, dim=-1, sorted=False).indices
        weights = scores.gather(1, ids)
        if router.norm_topk_prob:
            kept = weights if combine == "router" else scores.gather(1, natural_ids)
            weights = weights / (kept.sum(dim=-1, keepdim=True) + self.epsilon)
        weights = weights * router.routed_scaling_factor
        return weights.to(natural_weights.dtype), ids

    def needs_completion(self, router: Any) -> bool:
        return bool(router.topk_group < router.num_group)

    def complete(
        self, router: Any, block: RoutedBlock, eligible: Tensor, expert_demand: Tensor
    ) -> Tensor:
        return group_floor(
            block,
            eligible,
            expert_demand,
            num_groups=router.num_group,
            groups_per_row=router.topk_group,
            min_group_experts=-(-router.top_k // router.topk_group),
        )
