"""Which rule of `routing.py` a family's router follows, read off the router module itself.

Axes: T rows, E experts, K experts per row. `patching.self_check` holds every wrapped model to it:
with everything eligible the rule must give the router's own result bit for bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn

from acceptmoe import routing
from acceptmoe.routing import NaturalRouting, RoutingRule
from acceptmoe.selection import Combine, RoutedBlock

RouterOutput = tuple[Tensor, ...]  # logits [T, E], weights [T, K], ids [T, K], and more in places


class Scoring(ABC):
    """One way to score experts; stateless, the router module brings the parameters."""

    name: str

    @abstractmethod
    def rule(self, router: nn.Module) -> RoutingRule:
        """The rule with this router's numbers."""

    def correction_bias(self, router: nn.Module) -> Tensor | None:
        """[E]: what the router adds to its scores for the choice, where it does."""
        return None

    def gates(self, router: nn.Module, logits: Tensor) -> Tensor:
        """[T, E] fp32 scores that sum to 1 over the experts."""
        return routing.gates(self.rule(router), logits)

    def choice(self, router: nn.Module, logits: Tensor) -> Tensor:
        """[T, E]: what the router ranks, in the scale in which a `choice_bias` is added."""
        return routing.choice(self.rule(router), logits, self.correction_bias(router))

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
        return routing.route(
            self.rule(router),
            NaturalRouting(*output[:3]),
            is_eligible,
            correction_bias=self.correction_bias(router),
            choice_bias=choice_bias,
            combine=combine,
            known_gates=gates,
        )

    def needs_completion(self, router: nn.Module) -> bool:
        """Whether `complete` may change anything for this router."""
        return self.rule(router).is_group_limited

    def complete(
        self, router: nn.Module, block: RoutedBlock, eligible: Tensor, expert_demand: Tensor
    ) -> Tensor:
        """`eligible` [E] plus what this kind of router needs to stay inside it."""
        return routing.complete_groups(self.rule(router), block, eligible, expert_demand)


class SoftmaxTopK(Scoring):
    """Softmax over all experts, then top-k; weights renormalised or not."""

    name = "softmax_topk"

    def __init__(self, renormalize: bool | None = None) -> None:
        self.renormalize = renormalize  # None: the router's own `norm_topk_prob`

    def rule(self, router: Any) -> RoutingRule:
        renormalize = router.norm_topk_prob if self.renormalize is None else self.renormalize
        return RoutingRule("softmax_topk", router.top_k, bool(renormalize))


class TopKSoftmax(Scoring):
    """Top-k of the logits, then a softmax over the chosen ones (gpt-oss)."""

    name = "topk_softmax"

    def rule(self, router: Any) -> RoutingRule:
        return RoutingRule("topk_softmax", router.top_k)


class SigmoidBiasGroup(Scoring):
    """Sigmoid scores, a bias for the choice only, groups first, then top-k (DeepSeek-V3)."""

    name = "sigmoid_bias_group"

    def rule(self, router: Any) -> RoutingRule:
        return RoutingRule(
            "sigmoid_bias_group",
            router.top_k,
            bool(router.norm_topk_prob),
            float(router.routed_scaling_factor),
            int(router.num_group),
            int(router.topk_group),
        )

    def correction_bias(self, router: Any) -> Tensor:
        bias: Tensor = router.e_score_correction_bias
        return bias
