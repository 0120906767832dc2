"""`lynx`: drop the least used experts of the union (Lynx, arXiv 2411.08982), a rival."""

from __future__ import annotations

from typing import Any

import torch

from acceptmoe.errors import InvalidArgumentError
from acceptmoe.policies.policy import RoutingPolicy
from acceptmoe.policies.ranking import places_descending
from acceptmoe.selection import RoutedBlock, Selection


class LynxPolicy(RoutingPolicy):
    """The natural union without the `drop` share of its experts that fewest rows are routed to.

    Of experts with equal use the higher id is dropped first. At least K stay.
    """

    name = "lynx"

    def __init__(self, drop: float) -> None:
        is_number = isinstance(drop, (int, float)) and not isinstance(drop, bool)
        if not is_number or not 0 <= drop < 1:
            raise InvalidArgumentError(
                f"drop is {drop!r}; it must be a share of the union, from 0 to less than 1"
            )
        self.drop = float(drop)

    def select(self, block: RoutedBlock) -> Selection:
        uses = block.is_wanted.sum(dim=0)
        union_size = (uses > 0).sum()
        num_kept = union_size - torch.floor(union_size * self.drop)
        num_kept = num_kept.clamp_min(block.natural_ids.shape[1])
        return Selection(places_descending(uses) < num_kept)

    def params(self) -> dict[str, Any]:
        return {"drop": self.drop}
