"""Muon (momentum, orthogonalised by Newton-Schulz steps) for matrices and stacks of matrices.

torch.optim.Muon takes matrices only; the experts' parameters are stacks [E, out, in], which are
orthogonalised expert by expert in one batched product.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def orthogonalise(update: Tensor, steps: int = 4) -> Tensor:
    """Move the singular values of each matrix of the stack [..., m, n] to about one."""
    a, b, c = 3.4445, -4.7750, 2.0315  # the quintic of the reference implementation
    is_tall = update.shape[-2] > update.shape[-1]
    x = update.mT if is_tall else update
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum, scaled so that a step is about as large as one of Adam."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        boost: float = 1.0,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "boost": boost}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        assert closure is None
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(param)
                average = state["momentum"]
                average.lerp_(param.grad, 1 - group["momentum"])
                # Nesterov: look ahead along the average before orthogonalising.
                ahead = param.grad.lerp(average, group["momentum"])
                scale = 0.2 * group["boost"] * max(param.shape[-2:]) ** 0.5
                mine = _share(param)
                part = param[mine]
                part.mul_(1 - group["lr"] * group["weight_decay"])
                part.add_(orthogonalise(ahead[mine]), alpha=-group["lr"] * scale)
                if mine != slice(None):
                    dist.all_gather(list(param.chunk(dist.get_world_size())), part.clone())


def _share(param: Tensor) -> slice:
    """The matrices of a stack that this worker updates; single matrices are updated by all."""
    if not dist.is_initialized() or param.dim() < 3:
        return slice(None)
    size = param.shape[0] // dist.get_world_size()
    return slice(dist.get_rank() * size, (dist.get_rank() + 1) * size)
