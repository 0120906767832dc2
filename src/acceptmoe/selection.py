"""Which experts a layer may use for one verification block: the paper's rule as pure functions.

Axes: T rows of the block (row 0 is the root), E experts, K experts per row. Every function takes
tensors and returns tensors, reads nothing back to the host, and leaves padded rows out.

The numbered steps are those of arXiv 2608.02989: natural top-k, commitment weights (a policy's
business), demand, anchors, effective rank, eligible set, constrained routing (`routing.py`: it
follows each family's own router), residency-aware pruning.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal, cast, get_args

import torch
from torch import Tensor

# In fp32 exp(entropy) of n equal demands can land just above n, and ceil would make it n + 1.
RANK_TOLERANCE = 1e-3
# The mass of n equal demands out of m can land just below n / m, and one expert more would enter.
MASS_TOLERANCE = 1e-6

Sizing = Literal["effective-rank", "mass"]
SIZINGS: tuple[Sizing, ...] = get_args(Sizing)
Combine = Literal["router", "natural"]
COMBINES: tuple[Combine, ...] = get_args(Combine)


@dataclass(frozen=True)
class BlockRows:
    """What the rows of one verification block have in common in every layer.

    `depths` [T] int64, 0 for the root. `depth_commitment` [T] fp32: the probability that the output
    commits some node of this row's depth. `path_commitment` [T] fp32: the calibrated probability
    that it commits this very node. Both are 1 for the root. `is_real` [T] bool is False for
    padding.
    """

    depths: Tensor
    depth_commitment: Tensor
    path_commitment: Tensor
    is_real: Tensor

    def to(self, device: torch.device) -> BlockRows:
        """The same rows on another device (a model spread over several)."""
        if self.depths.device == device:
            return self
        return BlockRows(
            **{field.name: getattr(self, field.name).to(device) for field in fields(self)}
        )


@dataclass(frozen=True)
class RoutedBlock:
    """One layer's natural routing of one verification block of one request.

    `gates` [T, E] fp32: the router's scores normalised over all experts (softmax; for sigmoid
    routers the sigmoid without bias divided by its sum). `choice` [T, E]: what the router ranks
    (logits, or scores plus bias). `natural_ids` [T, K] int64: the router's own top-k. `resident`
    [E] bool: the experts already in fast memory, or None when all are.
    """

    gates: Tensor
    choice: Tensor
    natural_ids: Tensor
    rows: BlockRows
    resident: Tensor | None = None
    _is_wanted: Tensor | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def num_experts(self) -> int:
        return self.gates.shape[1]

    @property
    def is_wanted(self) -> Tensor:
        """[T, E] bool: whether the expert is in the row's own top-k; False for padded rows."""
        # Not a cached_property, whose lock (before Python 3.12) torch.compile cannot trace.
        if self._is_wanted is None:
            mask = routed_mask(self.natural_ids, self.rows.is_real, self.num_experts)
            object.__setattr__(self, "_is_wanted", mask)
        return cast(Tensor, self._is_wanted)


@dataclass(frozen=True)
class Selection:
    """A policy's answer for one layer and block.

    `eligible` [E] bool: the experts that rows may be routed to, at least K of them. `choice_bias`
    [T, E]: added to what the router ranks, for selection only, never to the weights. `combine`:
    "router" applies the model's own rule to the new top-k; "natural" keeps the denominator of the
    natural top-k, so that a substitute does not inherit a displaced expert's weight.
    """

    eligible: Tensor
    choice_bias: Tensor | None = None
    combine: Combine = "router"


def best_first(values: Tensor, count: int) -> Tensor:
    """Indices [..., count] of the largest `values` [..., N], the lower index first among equals."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def depth_counts(rows: BlockRows) -> Tensor:
    """[T] int64: how many real rows share each row's depth (the paper's N_d)."""
    same_depth = rows.depths[:, None] == rows.depths[None, :]
    return (same_depth & rows.is_real[None, :]).sum(dim=1)


def routed_mask(ids: Tensor, is_real: Tensor, num_experts: int) -> Tensor:
    """[T, E] bool: which experts each real row is routed to; padded rows are all False."""
    mask = torch.zeros(ids.shape[0], num_experts, dtype=torch.bool, device=ids.device)
    return mask.scatter_(1, ids, is_real[:, None].expand(ids.shape))


def demand(block: RoutedBlock, weights: Tensor) -> Tensor:
    """[E] fp32: u_e, the sum over rows of weight times gate, where e is in the row's own top-k.

    `weights` [T] fp32 says how much each row counts. Experts outside a row's natural top-k get
    nothing from it (formula 3).
    """
    # In fp64 the sum does not depend on the order of the rows, so that every implementation agrees
    # on it and experts with equal demand tie exactly.
    contributions = block.gates * block.is_wanted * weights[:, None]
    return contributions.sum(dim=0, dtype=torch.float64).float()


def anchors(block: RoutedBlock, num_anchored: Tensor | None = None) -> Tensor:
    """[E] bool: the natural top-k of the root, always eligible (formula 4).

    `num_anchored` [T] int32 says how many of each row's own best experts, as the router ranks them,
    are anchored besides; more than K means all of them. The root keeps all in any case.
    """
    anchored = block.is_wanted[0]
    if num_anchored is None:
        return anchored
    return anchored | best_of_rows(block, num_anchored[:, None])


def best_of_rows(block: RoutedBlock, count: int | Tensor) -> Tensor:
    """[E] bool: each real row's `count` best experts, as the router ranks its natural top-k.

    `count` is one number for all, or [T, 1]; more than K means all K. Of equals the lower id is the
    better one.
    """
    places = places_of(block.choice.gather(1, block.natural_ids), block.natural_ids)
    is_best = (places < count) & block.rows.is_real[:, None]
    return torch.zeros_like(block.is_wanted).scatter_(1, block.natural_ids, is_best).any(dim=0)


def places_of(values: Tensor, ids: Tensor) -> Tensor:
    """[T, K] int64: each slot's place in its row by falling `values`, the lower of `ids` first."""
    # Counted, not sorted: K is small, and routers may leave their top-k in any order.
    own, other = (values[:, :, None], ids[:, :, None]), (values[:, None, :], ids[:, None, :])
    is_ahead = (other[0] > own[0]) | ((other[0] == own[0]) & (other[1] < own[1]))
    return is_ahead.sum(dim=2)


def effective_rank(mass: Tensor) -> Tensor:
    """Scalar fp32: exp of the entropy of `mass` [E] >= 0 normalised to 1; 1 where all is 0.

    n experts with equal mass have effective rank n (formula 5).
    """
    share = mass / mass.sum().clamp_min(torch.finfo(mass.dtype).tiny)
    entropy: Tensor = torch.special.entr(share).sum()
    return entropy.exp()


def select_eligible(expert_demand: Tensor, anchored: Tensor, scale: float = 1.0) -> Tensor:
    """[E] bool: the anchors and the n others in most demand, n their effective rank (formula 5).

    `expert_demand` [E] fp32, `anchored` [E] bool. `scale` multiplies the effective rank before it
    is rounded up. n never exceeds the experts with positive demand.
    """
    rest = expert_demand.masked_fill(anchored, 0.0)
    size = torch.ceil(scale * effective_rank(rest) - RANK_TOLERANCE)
    # Stable, so that the lower id wins a tie.
    ordered = torch.sort(rest, descending=True, stable=True)
    place = torch.arange(rest.shape[0], device=rest.device)
    return anchored | _scatter(ordered.indices, (place < size) & (ordered.values > 0))


def select_eligible_by_mass(expert_demand: Tensor, anchored: Tensor, share: float) -> Tensor:
    """[E] bool: the anchors and the fewest others that hold `share` of the others' demand.

    The others enter by descending demand; of equals the lower id is first. `expert_demand` [E]
    fp32, `anchored` [E] bool, `share` in (0, 1] (met to within 1e-6). Experts without demand never
    enter.
    """
    rest = expert_demand.masked_fill(anchored, 0.0)
    ordered = torch.sort(rest, descending=True, stable=True)
    masses = ordered.values.double()
    before = masses.cumsum(0) - masses
    enters = before < (share - MASS_TOLERANCE) * masses.sum()
    return anchored | _scatter(ordered.indices, enters & (masses > 0))


def _scatter(indices: Tensor, values: Tensor) -> Tensor:
    return torch.zeros_like(values).scatter_(0, indices, values)


def prune_nonresident(
    block: RoutedBlock, eligible: Tensor, anchored: Tensor, expert_demand: Tensor, min_experts: int
) -> Tensor:
    """[E] bool: `eligible` without the least wanted experts that would have to be fetched.

    Formula 7: the candidates are eligible, not anchored and not resident, least demand first (of
    equals the higher id leaves first). The longest prefix goes whose natural assignments together
    do not exceed those that forming the eligible set has displaced already, while at least
    `min_experts` stay. Without `block.resident` nothing is pruned.
    """
    if block.resident is None:
        return eligible
    assigned = block.is_wanted.sum(dim=0)
    budget = torch.where(eligible, 0, assigned).sum()
    is_candidate = eligible & ~anchored & ~block.resident
    # Candidates first and by ascending demand; flipping makes the higher id first among equals.
    order_key = torch.where(is_candidate, expert_demand, torch.inf).flip(0)
    order = (block.num_experts - 1) - torch.argsort(order_key, stable=True)
    spent = torch.where(is_candidate, assigned, 0)[order].cumsum(0)
    fits = is_candidate[order] & (spent <= budget)
    position = torch.arange(block.num_experts, device=eligible.device)
    is_pruned = torch.zeros_like(eligible).scatter_(
        0, order, fits & (position < eligible.sum() - min_experts)
    )
    return eligible & ~is_pruned


def group_floor(
    block: RoutedBlock,
    eligible: Tensor,
    expert_demand: Tensor,
    *,
    num_groups: int,
    groups_per_row: int,
    min_group_experts: int,
) -> Tensor:
    """[E] bool: `eligible` enlarged so that a group-limited router never needs an outsider.

    Such a router (DeepSeek-V3) first picks `groups_per_row` of `num_groups` groups of neighbouring
    experts by the sum of their two best scores, then its top-k inside them. Two additions:

    - the root's two best experts of each group it chose itself, so that masking cannot move its
      group choice away from its natural one;
    - where the `groups_per_row` poorest choosable groups (two or more eligible) hold fewer than K
      eligible experts together, each choosable group is filled to `min_group_experts`
      (ceil(K / groups_per_row)) by demand.
    """
    num_experts = block.num_experts
    group_size = num_experts // num_groups
    root_choice = block.choice[0].view(num_groups, group_size)
    best_two = best_first(root_choice, min(2, group_size))
    group_scores = root_choice.gather(1, best_two).sum(dim=-1)
    chosen_groups = best_first(group_scores, groups_per_row)
    in_groups = eligible.view(num_groups, group_size).clone()
    in_groups[chosen_groups[:, None], best_two[chosen_groups]] = True

    num_eligible = in_groups.sum(dim=-1)
    is_choosable = num_eligible >= min(2, group_size)
    poorest = torch.where(is_choosable, num_eligible, num_experts).sort().values[:groups_per_row]
    is_starved = poorest.sum() < block.natural_ids.shape[1]
    # Members rank before all outsiders, so a filled group only ever gains experts.
    ranking = expert_demand.view(num_groups, group_size) + in_groups * (expert_demand.sum() + 1.0)
    order = torch.argsort(ranking, dim=-1, descending=True, stable=True)
    places = torch.arange(group_size, device=order.device).expand(num_groups, -1)
    ranks = torch.empty_like(order).scatter_(1, order, places)
    is_filled = (ranks < min_group_experts) & is_choosable[:, None] & is_starved
    return (in_groups | is_filled).view(num_experts)
