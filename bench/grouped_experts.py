"""A Transformers experts implementation that trains fast on a CPU.

The stock loop indexes a stacked parameter once for each expert, and autograd then writes a
gradient of the full stack each time. Here the rows are sorted by expert once, every expert
multiplies its own slice into one output, and the backward pass writes each expert's gradient once.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

NAME = "acceptmoe_grouped"


class _GroupedLinear(torch.autograd.Function):
    """rows [N, in] sorted by expert, weight [E, out, in], rows of each expert -> [N, out]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
        out = rows.new_empty(rows.shape[0], weight.shape[1])
        start = 0
        for expert, count in enumerate(counts):
            if count:
                part = slice(start, start + count)
                torch.mm(rows[part], weight[expert].t(), out=out[part])
                start += count
        ctx.save_for_backward(rows, weight)
        ctx.counts = counts
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weight = ctx.saved_tensors
        grad = grad.contiguous()
        grad_rows = torch.empty_like(rows)
        grad_weight = torch.empty_like(weight)
        start = 0
        for expert, count in enumerate(ctx.counts):
            if count:
                part = slice(start, start + count)
                torch.mm(grad[part], weight[expert], out=grad_rows[part])
                torch.mm(grad[part].t(), rows[part], out=grad_weight[expert])
                start += count
            else:
                grad_weight[expert].zero_()
        return grad_rows, grad_weight, None


class _Dispatch(torch.autograd.Function):
    """hidden [T, H] -> rows [T * K, H] in expert order; backward gathers instead of scattering."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, order: Tensor, inverse: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.top_k = top_k
        return hidden.index_select(0, order // top_k)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        gathered = grad.index_select(0, inverse)
        return gathered.view(-1, ctx.top_k, grad.shape[-1]).sum(1), None, None, None


class _Collect(torch.autograd.Function):
    """rows [N, H] in expert order -> the same rows in the order of the tokens."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows.index_select(0, inverse)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return grad.index_select(0, order), None, None


def _bias_rows(bias: Tensor, counts: Tensor) -> Tensor:
    return bias.repeat_interleave(counts, dim=0)


def grouped_experts(module: Any, hidden: Tensor, top_ids: Tensor, top_weights: Tensor) -> Tensor:
    """The experts' computation for both stacked layouts of Transformers, with and without bias."""
    top_k = top_ids.shape[-1]
    flat = top_ids.reshape(-1)
    order = torch.argsort(flat, stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel())
    count_of = torch.bincount(flat, minlength=module.gate_up_proj.shape[0])
    counts = count_of.tolist()
    gate_up, down = module.gate_up_proj, module.down_proj
    if module.is_transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)

    rows = _Dispatch.apply(hidden, order, inverse, top_k)
    inner = _GroupedLinear.apply(rows, gate_up, counts)
    if module.has_bias:
        inner = inner + _bias_rows(module.gate_up_proj_bias, count_of)
    rows = _GroupedLinear.apply(module._apply_gate(inner), down, counts)
    if module.has_bias:
        rows = rows + _bias_rows(module.down_proj_bias, count_of)
    by_token = _Collect.apply(rows, order, inverse).view(-1, top_k, hidden.shape[-1])
    return torch.einsum("tk,tkh->th", top_weights.to(hidden.dtype), by_token)


def register() -> str:
    """Make the implementation known to Transformers and return its name."""
    ALL_EXPERTS_FUNCTIONS[NAME] = grouped_experts
    return NAME
