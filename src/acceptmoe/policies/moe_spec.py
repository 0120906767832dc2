"""`moe-spec`: a fixed budget of experts for each layer (MoE-Spec, arXiv 2602.16052), a rival."""

from __future__ import annotations

from typing import Any

from acceptmoe.policies.policy import RoutingPolicy
from acceptmoe.policies.ranking import best_of, check_count, check_set_size
from acceptmoe.selection import RoutedBlock, Selection


class MoeSpecPolicy(RoutingPolicy):
    """The `budget` experts with the largest sum of gates over all rows and all experts.

    Rows count alike, whether they are likely to be committed or not, and the root has no anchors.
    Substitutes take the places of experts outside the budget. `wrap` refuses a budget below
    K or above E; `select` takes K and E instead. The paper's grid for 128 experts is 16, 24, 32,
    48, 64.
    """

    name = "moe-spec"

    def __init__(self, budget: int) -> None:
        self.budget = check_count("budget", budget)

    def check_model(self, num_experts: int, experts_per_token: int) -> None:
        check_set_size("budget", self.budget, num_experts, experts_per_token)

    def select(self, block: RoutedBlock) -> Selection:
        score = (block.gates * block.rows.is_real[:, None]).sum(dim=0)
        return Selection(best_of(score, max(self.budget, block.natural_ids.shape[1])))

    def params(self) -> dict[str, Any]:
        return {"budget": self.budget}
