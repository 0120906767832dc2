"""The dense layers of passes that run uncompiled, through `acceptmoe::linear` where that is faster.

Compiled passes have their graph rewritten instead (`decoding/backend.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from acceptmoe.ops.linear import is_faster_than_stock, linear, suits_linear

LinearsMode = Callable[[], AbstractContextManager[Any]]
"""Gives the context in which a forward of the model runs."""


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
        if func is torch.nn.functional.linear and not kwargs and suits_linear(*args[:2]):
            states, weight, *rest = args
            product = linear(states.reshape(-1, weight.shape[1]), weight, rest[0] if rest else None)
            return product.view(*states.shape[:-1], weight.shape[0])
        return func(*args, **(kwargs or {}))


def linears_for(weight: Tensor, *, is_wanted: bool) -> LinearsMode:
    """The mode for a model of which `weight` is typical; none where torch's products are fast."""
    return CompiledLinears if is_wanted and is_faster_than_stock(weight) else nullcontext
