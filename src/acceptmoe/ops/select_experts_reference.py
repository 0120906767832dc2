"""`acceptmoe::select_experts` in plain PyTorch: what is correct.

Axes: T rows, E experts, K experts per row. It is composed of the pure functions that policies and
the routing hook use, so the fused kernels are compared with the rule itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from acceptmoe import routing
from acceptmoe.policies import FusedParams
from acceptmoe.policies.weighted import select_by_weight
from acceptmoe.routing import NaturalRouting, RoutingRule
from acceptmoe.selection import BlockRows, RoutedBlock, demand


def select_experts(
    natural: NaturalRouting,
    rule: RoutingRule,
    params: FusedParams,
    *,
    path_commitment: Tensor,
    is_real: Tensor,
    is_enabled: Tensor,
    correction_bias: Tensor | None = None,
    resident: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights [T, K], ids [T, K], eligible [E] and counts [5], as the op returns them.

    Reads nothing back to the host.
    """
    gates = routing.gates(rule, natural.logits)
    block = RoutedBlock(
        gates=gates,
        choice=routing.choice(rule, natural.logits, correction_bias).float(),
        natural_ids=natural.ids,
        rows=BlockRows(torch.zeros_like(natural.ids[:, 0]), gates[:, 0], path_commitment, is_real),
        resident=resident,
    )
    selection = select_by_weight(
        block,
        params.row_weights,
        params.num_anchored,
        sizing=params.sizing,
        size=params.size_parameter,
    )
    mass = demand(block, path_commitment)
    eligible = routing.complete_groups(rule, block, selection.eligible, mass) | ~is_enabled
    weights, ids = routing.route_stably(
        rule, natural, eligible[None], correction_bias=correction_bias, combine=params.combine
    )
    is_moved = (block.is_wanted & ~eligible).any(dim=-1, keepdim=True)
    weights = torch.where(is_moved, weights, natural.weights)
    ids = torch.where(is_moved, ids, natural.ids)
    counts = _count(block, eligible, ids, mass)
    is_padding = ~is_real[:, None]
    return weights.masked_fill(is_padding, 0.0), ids.masked_fill(is_padding, -1), eligible, counts


def _count(block: RoutedBlock, eligible: Tensor, ids: Tensor, mass: Tensor) -> Tensor:
    """[5] fp32 in the order of `RoutingCounts`' fields, over the real rows."""
    is_real = block.rows.is_real
    used = torch.zeros_like(block.is_wanted).scatter_(1, ids, is_real[:, None].expand(ids.shape))
    excluded = mass.masked_fill(eligible, 0.0).sum() / mass.sum().clamp_min(1e-30)
    counts = (
        block.is_wanted.any(dim=0).sum(),
        eligible.sum(),
        used.any(dim=0).sum(),
        excluded,
        is_real.sum() * ids.shape[1],
    )
    return torch.stack([count.float() for count in counts])
