"""The selection that all commitment-weighted policies share, and the checks of their settings."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from acceptmoe.errors import InvalidArgumentError
from acceptmoe.selection import (
    Combine,
    RoutedBlock,
    Selection,
    Sizing,
    anchors,
    demand,
    prune_nonresident,
    select_eligible,
    select_eligible_by_mass,
)

MAX_EXPONENT = 16.0  # beyond it only the root counts, in fp32
MAX_SIZE = {"effective-rank": 16.0, "mass": 1.0}


def select_by_weight(
    block: RoutedBlock,
    weights: Tensor,
    num_anchored: Tensor | None = None,
    *,
    sizing: Sizing = "effective-rank",
    size: float = 1.0,
    combine: Combine = "router",
) -> Selection:
    """Demand under `weights` [T], anchors, size, pruning: formulas 3 to 5 and 7.

    `num_anchored` [T] int32 as in `anchors`.
    """
    expert_demand = demand(block, weights)
    anchored = anchors(block, num_anchored)
    size_set = select_eligible if sizing == "effective-rank" else select_eligible_by_mass
    eligible = size_set(expert_demand, anchored, size)
    experts_per_row = block.natural_ids.shape[1]
    kept = prune_nonresident(block, eligible, anchored, expert_demand, experts_per_row)
    return Selection(kept, combine=combine)


def check_number(name: str, value: float, low: float, high: float, hint: str) -> float:
    """`value` as a float, or `InvalidArgumentError` when it is not in [low, high]."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # Not isfinite, which cannot take whole numbers beyond the largest float.
    if not is_number or not -math.inf < value < math.inf:
        raise InvalidArgumentError(f"{name} is {value!r}; it must be a number ({hint})")
    if not low <= value <= high:
        raise InvalidArgumentError(
            f"{name} is {value}; it must be from {low:g} to {high:g} ({hint})"
        )
    return float(value)


def check_exponent(name: str, value: float) -> float:
    """`value` as a float, or `InvalidArgumentError` when it is not in [0, 16]."""
    return check_number(name, value, 0, MAX_EXPONENT, "the paper uses 0.5")


def check_size(sizing: Sizing, value: float) -> float:
    """The size parameter of `sizing`, or `InvalidArgumentError`; it must be above 0."""
    hint = "1 is the effective rank" if sizing == "effective-rank" else "a share of the demand"
    size = check_number("size", value, 0, MAX_SIZE[sizing], hint)
    if size == 0:
        raise InvalidArgumentError(f"size is 0; it must be above 0 ({hint})")
    return size


def check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    """Raise `InvalidArgumentError` unless `value` is one of `allowed`."""
    if value not in allowed:
        raise InvalidArgumentError(
            f"{name} is {value!r}; it must be {' or '.join(map(repr, allowed))}"
        )
