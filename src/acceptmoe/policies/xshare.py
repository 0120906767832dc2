"""`xshare`: every row's best expert, then the most wanted (XShare, arXiv 2602.07265), a rival."""

from __future__ import annotations

from typing import Any

import torch

from acceptmoe.policies.policy import RoutingPolicy
from acceptmoe.policies.ranking import best_of, check_count, check_set_size
from acceptmoe.selection import RoutedBlock, Selection, best_of_rows


class XSharePolicy(RoutingPolicy):
    """The top-1 expert of every row, filled up to `size` experts by the sum of all rows' gates.

    Where the rows' top-1 experts alone are more than `size`, all of them stay eligible. `wrap`
    refuses a size below K or above E.
    """

    name = "xshare"

    def __init__(self, size: int) -> None:
        self.size = check_count("size", size)

    def check_model(self, num_experts: int, experts_per_token: int) -> None:
        check_set_size("size", self.size, num_experts, experts_per_token)

    def select(self, block: RoutedBlock) -> Selection:
        is_real = block.rows.is_real
        first = best_of_rows(block, 1)
        score = (block.gates * is_real[:, None]).sum(dim=0)
        size = max(self.size, block.natural_ids.shape[1])
        return Selection(first | best_of(torch.where(first, torch.inf, score), size))

    def params(self) -> dict[str, Any]:
        return {"size": self.size}
