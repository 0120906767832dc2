"""Every op in plain PyTorch: slow, obvious, and what is correct.

Axes: T rows, E experts, K experts per row, H hidden, I inner, N outputs. Sums are in fp32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`acceptmoe::linear`: [T, H] by [N, H] to [T, N]."""
    product = input.float() @ weight.float().T
    if bias is not None:
        product = product + bias.float()
    return product.to(input.dtype)


def expert_mlp(
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    activation: str,
    is_transposed: bool,
    is_interleaved: bool,
    limit: float,
    alpha: float,
    union_bound: int,
) -> Tensor:
    """`acceptmoe::expert_mlp`: one row and one expert after the other."""
    output = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    for row in range(ids.shape[0]):
        for column in range(ids.shape[1]):
            expert = int(ids[row, column])
            if expert < 0:
                continue
            products = project(
                hidden[row].float(), gate_up[expert], gate_up_bias, expert, is_transposed
            )
            gate, up = split(products, is_interleaved)
            inner = activate(gate, up, activation, limit, alpha)
            result = project(inner, down[expert], down_bias, expert, is_transposed)
            output[row] += weights[row, column].float() * result
    return output.to(hidden.dtype)


def project(
    x: Tensor, weight: Tensor, bias: Tensor | None, expert: int, is_transposed: bool
) -> Tensor:
    """One expert's product, plus its row of the biases."""
    matrix = weight.float() if is_transposed else weight.float().T
    return x @ matrix if bias is None else x @ matrix + bias[expert].float()


def split(products: Tensor, is_interleaved: bool) -> tuple[Tensor, Tensor]:
    """Gates [I] and ups [I] of gate-up products [2I]."""
    if is_interleaved:
        return products[0::2], products[1::2]
    gate, up = products.chunk(2)
    return gate, up


def activate(gate: Tensor, up: Tensor, activation: str, limit: float, alpha: float) -> Tensor:
    """The gated activation [I]; see `ops.expert_mlp.ACTIVATIONS`."""
    if activation == "clamped_swiglu":
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * gate * torch.sigmoid(alpha * gate)
    if activation == "gelu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    if activation == "gelu":
        return F.gelu(gate) * up
    return (F.silu(gate) if activation == "silu" else F.relu(gate)) * up
