"""In which precision a drafter multiplies: its weights as they are, or rounded to 8 bits.

At batch one drafting waits for the drafter's weights, as a pass for the target's. A draft may
be wrong without harm, every token of it is verified, so its weights need not be exact: rounded to
8 bits (`acceptmoe::int8_linears`) they are half of bfloat16's bytes. What a lossless policy emits
stays the same text; the accepted length hardly changes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from acceptmoe.errors import DrafterError, InvalidArgumentError
from acceptmoe.ops.cpu_library import DTYPES
from acceptmoe.ops.int8_linear import Int8Weight, multiply, weight_state

DRAFT_WEIGHTS = ("int8",)


def check_draft_weights(weights: str | None) -> None:
    """Raise `InvalidArgumentError` unless `weights` is None, as they are, or a known precision."""
    if weights is not None and weights not in DRAFT_WEIGHTS:
        raise InvalidArgumentError(
            f"weights is {weights!r:.80}; it must be None, the drafter's own precision, or "
            f"{' or '.join(map(repr, DRAFT_WEIGHTS))}"
        )


def check_can_round(weights: str | None, device: torch.device, dtype: torch.dtype) -> None:
    """Raise `DrafterError` where the kernels for `weights` do not run."""
    if weights is not None and (device.type != "cpu" or dtype not in DTYPES):
        raise DrafterError(
            f"the drafter has weights={weights!r} and would run on {device} in {dtype}; drafts in "
            "8 bits are for a CPU only, in torch.float32, torch.bfloat16 or torch.float16; make "
            "the drafter without weights="
        )


class Int8Product:
    """`F.linear` by `acceptmoe::int8_linears`.

    A weight is rounded when it is first met, and again after it has changed; its rounded form is
    kept as long as the weight and this object are.
    """

    def __init__(self) -> None:
        # Of each weight: its state when it was rounded, and its rounded form.
        self._rounded = WeakTensorKeyDictionary()

    def __call__(self, states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        floats = None if bias is None else bias.float()
        return multiply(states, self.rounded(weight), floats)

    def rounded(self, weight: Tensor) -> Int8Weight:
        """`weight` in 8 bits, as it is now."""
        state = weight_state(weight)
        known: tuple[object, Int8Weight] | None = self._rounded.get(weight)  # type: ignore[no-untyped-call]
        if known is None or known[0] != state:
            known = self._rounded[weight] = state, Int8Weight.of(weight.detach())
        return known[1]

    def __reduce__(self) -> tuple[type[Int8Product], tuple[()]]:
        return type(self), ()  # a copy rounds for itself
