"""`moe_spec`: a fixed number of experts, those with the largest gates in sum (arXiv 2602.16052)."""

from __future__ import annotations

from typing import Any

import torch

from acceptmoe.errors import InvalidArgumentError
from acceptmoe.policies.policy import RoutingPolicy
from acceptmoe.selection import RoutedBlock, Selection


class MoESpecPolicy(RoutingPolicy):
    """The fixed-budget rival: every row and every expert counts, likely to be committed or not.

    `budget` is the number of eligible experts of each layer and block; None takes a quarter of
    them. It is never smaller than the number of experts that a row is routed to.
    """

    name = "moe-spec"

    def __init__(self, budget: int | None = None) -> None:
        if budget is not None and budget < 1:
            raise InvalidArgumentError(
                f"budget is {budget}; it must be 1 or larger, or None for a quarter of the experts"
            )
        self.budget = budget

    def select(self, block: RoutedBlock) -> Selection:
        budget = block.num_experts // 4 if self.budget is None else self.budget
        size = min(max(budget, block.natural_ids.shape[1]), block.num_experts)
        score = (block.gates * block.rows.is_real[:, None]).sum(dim=0)
        # Stable, so that the lower id wins a tie.
        order = torch.sort(score, descending=True, stable=True).indices
        eligible = torch.zeros_like(score, dtype=torch.bool)
        return Selection(eligible.scatter(0, order[:size], True))

    def params(self) -> dict[str, Any]:
        return {"budget": self.budget}
