"""Ranking experts, with the project's order of ties: of equals the lower id is the better one."""

from __future__ import annotations

import torch
from torch import Tensor

from acceptmoe.errors import InvalidArgumentError


def best_of(score: Tensor, count: int) -> Tensor:
    """[E] bool: the `count` experts with the largest `score` [E] (all, where there are fewer)."""
    best = torch.sort(score, descending=True, stable=True).indices[:count]
    return torch.zeros_like(score, dtype=torch.bool).scatter_(0, best, True)


def places_descending(score: Tensor) -> Tensor:
    """[E] int64: the place of each expert from the largest `score` [E] down, 0 first."""
    order = torch.sort(score, descending=True, stable=True).indices
    places = torch.arange(score.shape[0], device=score.device)
    return torch.empty_like(places).scatter_(0, order, places)


def check_set_size(name: str, value: int, num_experts: int, experts_per_token: int) -> None:
    """Raise `InvalidArgumentError` unless `value` experts are a set that a layer can route to."""
    if not experts_per_token <= value <= num_experts:
        raise InvalidArgumentError(
            f"{name} is {value}; this model routes each token to {experts_per_token} of "
            f"{num_experts} experts, so it must be from {experts_per_token} to {num_experts}"
        )


def check_count(name: str, value: int, least: int = 1) -> int:
    """`value`, or `InvalidArgumentError` when it is no number of experts, `least` or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidArgumentError(
            f"{name} is {value!r}; it must be a whole number of experts, {least} or more"
        )
    return value
