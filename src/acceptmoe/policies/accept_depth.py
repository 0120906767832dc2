"""`accept-depth`: the rule of the AcceptMoE paper to the letter (arXiv 2608.02989)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from acceptmoe.policies.policy import FusedParams, RoutingPolicy
from acceptmoe.policies.weighted import check_exponent, select_by_weight
from acceptmoe.selection import BlockRows, RoutedBlock, Selection, depth_counts


class AcceptDepthPolicy(RoutingPolicy):
    """Rows count by their depth: alpha = p(d)^beta / sqrt(N_d) (formula 2).

    p(d) is the table's probability that the output commits a node at depth d, N_d the number of
    the block's rows at that depth. The paper uses beta = 0.5.
    """

    name = "accept-depth"
    keeps_root = True
    reads_depths = True

    def __init__(self, beta: float = 0.5) -> None:
        self.beta = check_exponent("beta", beta)

    def select(self, block: RoutedBlock) -> Selection:
        return select_by_weight(block, self._row_weights(block.rows))

    def fused_params(self, rows: BlockRows) -> FusedParams:
        return FusedParams(
            self._row_weights(rows), torch.zeros_like(rows.is_real, dtype=torch.int32)
        )

    def _row_weights(self, rows: BlockRows) -> Tensor:
        return rows.depth_commitment**self.beta * depth_counts(rows).clamp_min(1).rsqrt()

    def params(self) -> dict[str, Any]:
        return {"beta": self.beta}
