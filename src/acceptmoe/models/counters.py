"""Per-layer counts of a model's verification passes, kept on the device and read when asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from acceptmoe import routing
from acceptmoe.routing import RoutingRule
from acceptmoe.selection import BlockRows


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


@dataclass(frozen=True)
class RoutedLayer:
    """One layer's part in a verification pass.

    `natural_ids` and `used_ids` [T, K]: the router's own choice and the final one;
    `natural_weights` [T, K]: its own weights. `known_gates` [T, E] and `eligible` [E] are None when
    nothing was restricted; both ids are the same then. The fused op leaves `counts` [5] fp32, the
    values of `RoutingCounts`' fields, and instead of gates the `logits` [T, E] and the `rule` that
    makes them: only an audit needs them.
    """

    num_experts: int
    natural_ids: Tensor
    used_ids: Tensor
    natural_weights: Tensor
    known_gates: Tensor | None = None
    eligible: Tensor | None = None
    counts: Tensor | None = None
    logits: Tensor | None = None
    rule: RoutingRule | None = None

    @property
    def gates(self) -> Tensor | None:
        """[T, E] fp32, or None when nothing was restricted."""
        if self.rule is None or self.logits is None:
            return self.known_gates
        return routing.gates(self.rule, self.logits)


class RoutingCounters:
    """Sums over verification passes, on each layer's device; nothing is read before `read`.

    A pass is counted at its end, all layers of a device at once: layer by layer the counting took
    as many launches as the selection itself.
    """

    FIELDS = tuple(field.name for field in fields(RoutingCounts))

    def __init__(self) -> None:
        self._sums: dict[torch.device, Tensor] = {}  # [5] fp64, over passes and layers
        self._num_counted = 0  # passes times layers

    def add_pass(self, rows: BlockRows, layers: list[RoutedLayer]) -> None:
        """Count one finished pass over `rows`."""
        self.add(count_pass(rows, layers), len(layers))

    def add(self, counts: Sequence[Tensor], num_layers: int) -> None:
        """Add what `count_pass` gave for a pass of `num_layers` sparse layers."""
        for count in counts:
            total = self._sums.get(count.device)
            # Not in place: a captured pass writes its next counts to the same tensor, and sums
            # begun in inference mode could not be added to outside it.
            self._sums[count.device] = count.clone() if total is None else total + count
        self._num_counted += num_layers

    def read(self) -> RoutingCounts | None:
        """The averages, or None before the first counted pass. Waits for the device."""
        if not self._num_counted:
            return None
        total = sum((counts.cpu() for counts in self._sums.values()), torch.zeros(()))
        return RoutingCounts(*(total / self._num_counted).tolist())


def lost_shares(layers: Sequence[RoutedLayer]) -> Tensor | None:
    """[T] fp32: the share of a row's own routing weights that the eligible sets leave out.

    The mean over the sparse layers; None when nothing was restricted.
    """
    restricted = [routed for routed in layers if routed.eligible is not None]
    if not restricted:
        return None
    device = restricted[0].natural_ids.device
    ids = torch.stack([routed.natural_ids.to(device) for routed in restricted])  # [L, T, K]
    own = torch.stack([routed.natural_weights.to(device) for routed in restricted]).float()
    eligible = torch.stack([r.eligible.to(device) for r in restricted if r.eligible is not None])
    is_kept = eligible.gather(1, ids.flatten(1)).view_as(ids)
    lost = own.masked_fill(is_kept, 0.0).sum(dim=-1) / own.sum(dim=-1)
    return lost.mean(dim=0)


def count_pass(rows: BlockRows, layers: Sequence[RoutedLayer]) -> tuple[Tensor, ...]:
    """[5] fp64 for every device that has layers: the sums of `RoutingCounts`' fields over them."""
    devices = dict.fromkeys(routed.used_ids.device for routed in layers)
    return tuple(
        _count(rows.to(device), [r for r in layers if r.used_ids.device == device])
        for device in devices
    )


def _count(rows: BlockRows, layers: list[RoutedLayer]) -> Tensor:
    """[5] fp64: the sums of `RoutingCounts`' fields over `layers`, all on one device."""
    counted = [routed.counts for routed in layers if routed.counts is not None]
    if counted:
        return torch.stack(counted).sum(dim=0, dtype=torch.float64)
    num_experts = layers[0].num_experts
    natural = _routed(torch.stack([routed.natural_ids for routed in layers]), rows, num_experts)
    natural_union = natural.any(dim=1).sum()
    eligible = [routed.eligible for routed in layers if routed.eligible is not None]
    gates = [routed.known_gates for routed in layers if routed.known_gates is not None]
    if eligible:
        used = _routed(torch.stack([routed.used_ids for routed in layers]), rows, num_experts)
        num_used = used.any(dim=1).sum()
        is_eligible = torch.stack(eligible)
        num_eligible = is_eligible.sum()
        mass = (torch.stack(gates) * natural * rows.path_commitment[:, None]).sum(dim=1)  # [L, E]
        excluded = (mass.masked_fill(is_eligible, 0.0).sum(dim=1) / mass.sum(dim=1)).sum()
    else:
        num_used = natural_union
        num_eligible = torch.full_like(natural_union, len(layers) * num_experts)
        excluded = torch.zeros_like(natural_union)
    pairs = rows.is_real.sum() * sum(routed.used_ids.shape[1] for routed in layers)
    counts = (natural_union, num_eligible, num_used, excluded, pairs)
    return torch.stack([count.double() for count in counts])


def _routed(ids: Tensor, rows: BlockRows, num_experts: int) -> Tensor:
    """[L, T, E] bool from ids [L, T, K]; padded rows are all False."""
    mask = torch.zeros(*ids.shape[:2], num_experts, dtype=torch.bool, device=ids.device)
    return mask.scatter_(2, ids, rows.is_real[None, :, None].expand(ids.shape))
