"""A model whose dense layers multiply with weights of 8 bits, beside the model as it is.

For drafters on a CPU: what they say is verified, so it need not be exact, and drafting at batch one
waits for their weights. Everything but the rounded weights is shared with the original.
"""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor, nn

from acceptmoe.errors import InvalidArgumentError
from acceptmoe.ops.int8_linear import Int8Weight, multiply

Module = TypeVar("Module", bound=nn.Module)


class Int8Linear(nn.Module):
    """What `linear` computes, by `acceptmoe::int8_linears`.

    `weight` is still the original, for code that asks for its dtype or shape.
    """

    values: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = linear.weight
        rounded = Int8Weight.of(linear.weight.detach())
        self.register_buffer("values", rounded.values, persistent=False)
        self.register_buffer("scales", rounded.scales, persistent=False)
        bias = None if linear.bias is None else linear.bias.detach().float()
        self.register_buffer("bias", bias, persistent=False)

    @property
    def rounded(self) -> Int8Weight:
        """The weight that is multiplied with."""
        return Int8Weight(self.values, self.scales, (self.out_features, self.in_features))

    def forward(self, states: Tensor) -> Tensor:
        """[..., H] to [..., N]."""
        return multiply(states, self.rounded, self.bias)


def rounded_copy(model: Module) -> Module:
    """`model` with an `Int8Linear` for each of its `nn.Linear`, as they are now.

    Other modules are copies that share parameters, buffers, settings and hooks; `model` does not
    change. It costs as many bytes as the layers have weights.

    Raises `InvalidArgumentError` for a model without such layers, or with weights that cannot be
    rounded (see `Int8Weight.of`).
    """
    copied = _copy(model)
    if not any(isinstance(module, Int8Linear) for module in copied.modules()):
        raise InvalidArgumentError(
            f"{type(model).__name__} has no torch.nn.Linear layer whose weight could be rounded to "
            "8 bits; use it as it is"
        )
    return copied  # type: ignore[return-value]


def _copy(module: nn.Module) -> nn.Module:
    if type(module) is nn.Linear:
        return Int8Linear(module)
    copied: nn.Module = object.__new__(type(module))
    copied.__dict__.update(module.__dict__)
    children = {name: child and _copy(child) for name, child in module._modules.items()}
    copied.__dict__["_modules"] = children
    return copied
