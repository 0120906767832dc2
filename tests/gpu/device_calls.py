"""Moves a call's tensors to the device and its results back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def to_device(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        argument.cuda() if isinstance(argument, Tensor) else argument for argument in arguments
    )


def expert_mlp(*arguments: Any) -> Tensor:
    return torch.ops.acceptmoe.expert_mlp.default(*to_device(arguments)).cpu()


def select_experts(*arguments: Any) -> tuple[Tensor, ...]:
    outputs = torch.ops.acceptmoe.select_experts.default(*to_device(arguments))
    return tuple(output.cpu() for output in outputs)
