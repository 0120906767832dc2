"""The dense layers of passes that run uncompiled, through `acceptmoe::linear` where that is faster.

Compiled passes have their graph rewritten instead (`models/backend.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from acceptmoe.ops.linear import is_faster_than_stock, linear, suits_linear

LinearsMode = Callable[[], AbstractContextManager[Any]]
"""Gives the context in which a forward of the model runs."""


Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""What `F.linear` computes: states [..., H], weight [N, H] and bias [N] or None to [..., N]."""


def own_product(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """By `acceptmoe::linear` where the weight is contiguous and of low precision on a CPU."""
    if not suits_linear(states, weight):
        return F.linear(states, weight, bias)
    product: Tensor = linear(states.reshape(-1, weight.shape[1]), weight, bias)
    return product.view(*states.shape[:-1], weight.shape[0])


class CompiledLinears(TorchFunctionMode):
    """Inside it, this thread's `F.linear` of contiguous low-precision weights is our own op.

    A mode, not a patch: no module changes, and forwards outside stay as they are.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is F.linear and not kwargs and suits_linear(*args[:2]):
            return own_product(*args)
        return func(*args, **(kwargs or {}))


def linears_for(weight: Tensor, *, is_wanted: bool) -> LinearsMode:
    """The mode for a model of which `weight` is typical; none where torch's products are fast."""
    return CompiledLinears if is_wanted and is_faster_than_stock(weight) else nullcontext
