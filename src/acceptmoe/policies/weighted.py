"""The selection that all commitment-weighted policies share, and the check of their exponents."""

from __future__ import annotations

import math

from torch import Tensor

from acceptmoe.errors import InvalidArgumentError
from acceptmoe.selection import (
    RoutedBlock,
    Selection,
    anchors,
    demand,
    prune_nonresident,
    select_eligible,
)

MAX_EXPONENT = 16.0  # beyond it only the root counts, in fp32


def select_by_weight(block: RoutedBlock, weights: Tensor) -> Selection:
    """Demand under `weights` [T], anchors, effective rank, pruning: formulas 3 to 5 and 7."""
    expert_demand = demand(block, weights)
    anchored = anchors(block)
    eligible = select_eligible(expert_demand, anchored)
    experts_per_row = block.natural_ids.shape[1]
    return Selection(prune_nonresident(block, eligible, anchored, expert_demand, experts_per_row))


def check_exponent(name: str, value: float) -> float:
    """`value` as a float, or `InvalidArgumentError` when it is not in [0, 16]."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InvalidArgumentError(f"{name} is {value!r}; it must be a number (the paper uses 0.5)")
    if not 0 <= value <= MAX_EXPONENT:
        raise InvalidArgumentError(
            f"{name} is {value}; it must be from 0 to {MAX_EXPONENT:g} (the paper uses 0.5)"
        )
    return float(value)
