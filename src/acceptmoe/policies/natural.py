"""`natural`: every row keeps its own experts; ordinary, lossless tree verification."""

from __future__ import annotations

import torch

from acceptmoe.policies.policy import RoutingPolicy
from acceptmoe.selection import RoutedBlock, Selection


class NaturalPolicy(RoutingPolicy):
    """Restricts nothing. Greedy output equals plain `generate` token for token in fp32."""

    name = "natural"
    is_natural = True

    def select(self, block: RoutedBlock) -> Selection:
        return Selection(torch.ones_like(block.gates[0], dtype=torch.bool))
