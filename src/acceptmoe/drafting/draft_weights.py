"""In which precision a drafter multiplies: its weights as they are, or rounded to 8 bits.

At batch one drafting waits for the drafter's weights, as a pass for the target's. A draft may
be wrong without harm, every token of it is verified, so its weights need not be exact: rounded to
8 bits (`acceptmoe::int8_linears`) they are half of bfloat16's bytes. What a lossless policy emits
stays the same text; the accepted length hardly changes.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from acceptmoe.errors import DrafterError, InvalidArgumentError
from acceptmoe.ops.int8_linear import Int8Weight, multiply

DRAFT_WEIGHTS = ("int8",)


def check_draft_weights(weights: str | None) -> None:
    """Raise `InvalidArgumentError` unless `weights` is None, as they are, or a known precision."""
    if weights is not None and weights not in DRAFT_WEIGHTS:
        raise InvalidArgumentError(
            f"weights is {weights!r:.80}; it must be None, the drafter's own precision, or "
            f"{' or '.join(map(repr, DRAFT_WEIGHTS))}"
        )


def check_draft_device(weights: str | None, device: torch.device) -> None:
    """Raise `DrafterError` where the kernels for `weights` do not run."""
    if weights is not None and device.type != "cpu":
        raise DrafterError(
            f"the drafter has weights={weights!r} and would run on {device}; drafts in 8 bits are "
            "for a CPU only; make the drafter without weights="
        )


def int8_product(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` by `acceptmoe::int8_linears`.

    A weight is rounded when it is first met, and again after it was changed in place; its rounded
    form is kept as long as the weight.
    """
    return multiply(states, rounded_weight(weight), None if bias is None else bias.float())


_rounded_weights = WeakTensorKeyDictionary()  # of each weight: its version, its `Int8Weight`
_lock = threading.Lock()


def rounded_weight(weight: Tensor) -> Int8Weight:
    """The rounded form of `weight` [N, H] that `int8_product` multiplies with."""
    version = -1 if weight.is_inference() else weight._version
    with _lock:
        known: tuple[int, Int8Weight] | None = _rounded_weights.get(weight)  # type: ignore[no-untyped-call]
        if known is None or known[0] != version:
            known = _rounded_weights[weight] = version, Int8Weight.of(weight.detach())
    return known[1]
