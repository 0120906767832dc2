"""`oea`: rows share the union of their few best experts (OEA, arXiv 2511.02237), a rival."""

from __future__ import annotations

from typing import Any

import torch

from acceptmoe.errors import InvalidArgumentError
from acceptmoe.policies.policy import RoutingPolicy
from acceptmoe.policies.ranking import best_of, check_count
from acceptmoe.selection import RoutedBlock, Selection, best_of_rows


class OEAPolicy(RoutingPolicy):
    """The union of every row's `top` best experts; each row fills up to K from that union.

    Rows fill up in the router's own order and the router's rule weighs the result. Where the union
    has fewer than K experts (few rows, small `top`), it is filled by the sum of all rows' gates.
    `wrap` refuses a `top` above K.
    """

    name = "oea"

    def __init__(self, top: int) -> None:
        self.top = check_count("top", top)

    def check_model(self, num_experts: int, experts_per_token: int) -> None:
        if self.top > experts_per_token:
            raise InvalidArgumentError(
                f"top is {self.top}; this model routes each token to {experts_per_token} experts, "
                f"so it must be from 1 to {experts_per_token}"
            )

    def select(self, block: RoutedBlock) -> Selection:
        experts_per_row = block.natural_ids.shape[1]
        is_real = block.rows.is_real
        union = best_of_rows(block, self.top)
        score = (block.gates * is_real[:, None]).sum(dim=0)
        return Selection(union | best_of(torch.where(union, torch.inf, score), experts_per_row))

    def params(self) -> dict[str, Any]:
        return {"top": self.top}
