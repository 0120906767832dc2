"""Per-layer counts of a model's verification passes, kept on the device and read when asked."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from acceptmoe.selection import BlockRows, RoutedBlock, routed_mask


@dataclass(frozen=True)
class RoutingCounts:
    """Averages over passes, then over layers; experts per layer, masses as shares in [0, 1].

    `natural_union` experts that the rows' own top-k touch, `eligible` the size of the eligible set,
    `experts_used` those finally routed to, `excluded_mass` the commitment-weighted share of the
    rows' own gates that lies outside the eligible set, `routed_pairs` row-expert pairs.
    """

    natural_union: float
    eligible: float
    experts_used: float
    excluded_mass: float
    routed_pairs: float


class RoutingCounters:
    """Sums over verification passes, one device-side vector a layer; nothing is read in between."""

    FIELDS = tuple(field.name for field in fields(RoutingCounts))

    def __init__(self, num_layers: int) -> None:
        self._sums: list[Tensor | None] = [None] * num_layers
        self.num_passes = 0

    def add(
        self, layer: int, block: RoutedBlock, eligible: Tensor | None, used_ids: Tensor
    ) -> None:
        """Count one layer of one pass; `eligible` [E] is None when nothing was restricted."""
        rows = block.rows
        natural = routed_mask(block.natural_ids, rows.is_real, block.num_experts)
        natural_union = natural.any(dim=0).sum()
        if eligible is None:
            num_eligible = torch.full_like(natural_union, block.num_experts)
            used, excluded = natural_union, torch.zeros_like(natural_union)
        else:
            num_eligible = eligible.sum()
            used = routed_mask(used_ids, rows.is_real, block.num_experts).any(dim=0).sum()
            excluded = _excluded_mass(block, natural, eligible, rows)
        pairs = rows.is_real.sum() * used_ids.shape[1]
        counts = torch.stack(
            [value.double() for value in (natural_union, num_eligible, used, excluded, pairs)]
        )
        total = self._sums[layer]
        self._sums[layer] = counts if total is None else total.add_(counts)

    def read(self) -> RoutingCounts | None:
        """The averages, or None before the first counted pass. Waits for the device."""
        totals = [total.cpu() for total in self._sums if total is not None]
        if not totals or not self.num_passes:
            return None
        means = torch.stack(totals).mean(dim=0) / self.num_passes
        return RoutingCounts(*means.tolist())


def _excluded_mass(
    block: RoutedBlock, natural: Tensor, eligible: Tensor, rows: BlockRows
) -> Tensor:
    mass = (block.gates * natural).T @ rows.path_commitment  # [E]
    return torch.where(eligible, 0.0, mass).sum() / mass.sum()
