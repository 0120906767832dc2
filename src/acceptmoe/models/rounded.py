"""A model whose dense layers multiply with weights of 8 bits, beside the model as it is.

For drafters on a CPU: what they say is verified, so it need not be exact, and drafting at batch one
waits for their weights. Everything but the rounded weights is shared with the original.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

from acceptmoe.errors import InvalidArgumentError
from acceptmoe.ops.int8_linear import Int8Weight, multiply, weight_state

Module = TypeVar("Module", bound=nn.Module)


class Int8Linear(nn.Module):
    """What `linear` computes, by `acceptmoe::int8_linears`.

    `weight` and `bias` are always the original's, also for code that asks for dtype or shape.
    """

    values: Tensor
    scales: Tensor
    weight: Tensor
    bias: Tensor | None
    bias_floats: Tensor | None  # an input of the graph like the others, so that calls can be merged

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        # The same dictionary: a parameter that is replaced in the original is replaced here.
        self.__dict__["_parameters"] = linear._parameters
        self._round()

    @property
    def rounded(self) -> Int8Weight:
        """The weight that is multiplied with."""
        num_outputs, num_inputs = self.weight.shape
        return Int8Weight(self.values, self.scales, (num_outputs, num_inputs))

    def forward(self, states: Tensor) -> Tensor:
        """[..., H] to [..., N]."""
        return multiply(states, self.rounded, self.bias_floats)

    def round_again(self) -> None:
        """Round the weight as it is now, if it or the bias has changed."""
        if self._state() != self._rounded_state:
            self._round()

    def _state(self) -> object:
        return weight_state(self.weight), None if self.bias is None else weight_state(self.bias)

    def _round(self) -> None:
        # Compiled forwards may not read tensors that were made in inference mode.
        with torch.inference_mode(False), torch.no_grad():
            rounded = Int8Weight.of(self.weight.detach())
            floats = None if self.bias is None else self.bias.detach().float().clone()
        self.register_buffer("values", rounded.values, persistent=False)
        self.register_buffer("scales", rounded.scales, persistent=False)
        self.register_buffer("bias_floats", floats, persistent=False)
        self._rounded_state = self._state()


def rounded_copy(model: Module) -> Module:
    """`model` with an `Int8Linear` for each `nn.Linear`; `round_again` follows later changes.

    Other modules are copies that share parameters, buffers, settings and hooks; `model` does not
    change. Buffers that a forward replaces, as some rotary embeddings do, are replaced in the copy
    alone. It costs as many bytes as the layers have weights.

    Raises `InvalidArgumentError` for a model without such layers, with weights that cannot be
    rounded (see `Int8Weight.of`), or with forwards that were replaced in the modules themselves,
    as by accelerate: those of a copy would still run the original.
    """
    replaced = next((name for name, each in model.named_modules() if "forward" in vars(each)), None)
    if replaced is not None:
        raise InvalidArgumentError(
            f"the forward of {replaced or 'the model'} ({type(model).__name__}) was replaced, so a "
            "copy in 8 bits would still run the original; load the model whole, on one device and "
            "without hooks of accelerate, or use it as it is"
        )
    copied = _copy(model)
    if not any(isinstance(module, Int8Linear) for module in copied.modules()):
        raise InvalidArgumentError(
            f"{type(model).__name__} has no torch.nn.Linear layer whose weight could be rounded to "
            "8 bits; use it as it is"
        )
    return copied  # type: ignore[return-value]


def round_again(copied: nn.Module) -> None:
    """Round those weights of a `rounded_copy` again that have changed in the original."""
    for module in copied.modules():
        if isinstance(module, Int8Linear):
            module.round_again()


def _copy(module: nn.Module) -> nn.Module:
    if type(module) is nn.Linear:
        return Int8Linear(module)
    copied: nn.Module = object.__new__(type(module))
    copied.__dict__.update(module.__dict__)
    children = {name: child and _copy(child) for name, child in module._modules.items()}
    copied.__dict__["_modules"] = children
    copied.__dict__["_buffers"] = dict(module._buffers)
    return copied
