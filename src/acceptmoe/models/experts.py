"""`experts="acceptmoe"`: a model's expert layers computed by `acceptmoe::expert_mlp`.

The op is registered under its name in Transformers' registry of experts implementations, which a
layer looks up in its own configuration at every call. A patched layer gets a copy of the
configuration that names the op; the model's configuration and every other model that shares it stay
as they are. Weights stay where they are and as they are: `state_dict` and `save_pretrained` see the
original tensors.

Axes: T rows, E experts, K experts per row, H hidden, I inner.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from acceptmoe.errors import InvalidArgumentError, SelfCheckError, UnsupportedModelError
from acceptmoe.models.adapter import MoEAdapter, SparseLayer
from acceptmoe.ops import cpu_library, reference
from acceptmoe.ops.expert_mlp import ACTIVATIONS, expert_mlp

IMPLEMENTATION = "acceptmoe"
STOCK = "leave experts=None to keep Transformers' own computation"
# What rounding may do, relative to the largest output: stock layers round between the products.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def check_experts_name(experts: str | None) -> None:
    """Raise `InvalidArgumentError` unless `experts` is a value that `wrap` takes."""
    if experts is not None and experts != IMPLEMENTATION:
        raise InvalidArgumentError(
            f"experts is {experts!r}; it must be None (Transformers' own computation) or "
            f"{IMPLEMENTATION!r} (the compiled kernels)"
        )


@dataclass(frozen=True)
class Gating:
    """How an expert layer's gates and ups become activated units, in the op's terms."""

    activation: str
    limit: float = 0.0
    alpha: float = 0.0


class ExpertsPatch:
    """The expert layers of one model, switched to the op by `attach` and back by `detach`.

    Making one checks every layer, compiles the kernels where they are needed, and compares the
    first layer's output with its own; the model is left as it was.

    Raises `UnsupportedModelError` for layers that the op does not compute, `KernelBuildError` when
    the kernels cannot be compiled, `SelfCheckError` when the outputs differ.
    """

    def __init__(self, adapter: MoEAdapter) -> None:
        self._layers = adapter.layers
        self._gatings = [check_layer(layer) for layer in adapter.layers]
        self._configs: list[Any] = []  # the layers' own, while attached
        if any(layer.experts.down_proj.device.type == "cpu" for layer in self._layers):
            cpu_library.load()
        self._compare(self._layers[0])

    def attach(self) -> None:
        own = [layer.experts.config for layer in self._layers]
        named: Any = copy.deepcopy(own[0])
        named._experts_implementation = IMPLEMENTATION
        for layer, gating in zip(self._layers, self._gatings, strict=True):
            layer.experts.config = named
            layer.experts._acceptmoe_gating = gating  # type: ignore[assignment]
        self._configs = own

    def detach(self) -> None:
        for layer, config in zip(self._layers, self._configs, strict=True):
            layer.experts.config = config
            del layer.experts._acceptmoe_gating
        self._configs = []

    @contextmanager
    def attached(self) -> Iterator[None]:
        self.attach()
        try:
            yield
        finally:
            self.detach()

    @torch.no_grad()
    def _compare(self, layer: SparseLayer) -> None:
        experts: Any = layer.experts
        weight = experts.gate_up_proj
        hidden_size = weight.shape[1 if experts.is_transposed else 2]
        hidden = torch.randn(2, hidden_size, generator=torch.Generator().manual_seed(0))
        hidden = hidden.to(experts.down_proj.device, weight.dtype)
        ids = torch.arange(2, device=hidden.device).remainder(weight.shape[0])[:, None]
        weights = torch.ones(2, 1, dtype=hidden.dtype, device=hidden.device)
        if hidden.is_meta:  # offloaded: there is nothing to compare with before a forward
            return
        expected = experts(hidden, ids, weights).float()
        with self.attached():
            difference = (experts(hidden, ids, weights).float() - expected).abs().max()
        if not difference <= TOLERANCE[weight.dtype] * expected.abs().max():
            raise SelfCheckError(
                f"the compiled kernel's output for {layer.name} ({type(experts).__name__}) differs "
                f"from the layer's own by {float(difference):.2g}; {STOCK}, and please report the "
                "model and version"
            )


def check_layer(layer: SparseLayer) -> Gating:
    """The gating of a layer that the op computes; raise `UnsupportedModelError` for others."""
    experts: Any = layer.experts
    kind = f"{layer.name} ({type(experts).__name__})"
    if not hasattr(experts, "is_transposed") or not hasattr(experts, "config"):
        raise UnsupportedModelError(
            f"{kind} does not use Transformers' registry of experts implementations (quantised and "
            f"FP8 layers have others), so experts={IMPLEMENTATION!r} cannot enter; load the model "
            f"in torch.bfloat16, or {STOCK}"
        )
    if not experts.has_gate or experts.has_post_expert_norm:
        raise UnsupportedModelError(
            f"{kind} has {'a norm behind every expert' if experts.has_gate else 'no gates'}; the "
            f"compiled kernel computes gated experts without one; {STOCK}"
        )
    names = ["gate_up_proj", "down_proj"]
    names += ["gate_up_proj_bias", "down_proj_bias"] if experts.has_bias else []
    for name in names:
        _check_weight(f"{name} of {kind}", getattr(experts, name))
    return find_gating(layer)


def _check_weight(what: str, weight: Any) -> None:
    # Subclasses are quantised or distributed tensors, whose memory holds something else.
    if type(weight) not in (Tensor, nn.Parameter) or weight.dtype not in cpu_library.DTYPES:
        raise UnsupportedModelError(
            f"{what} is a {type(weight).__name__} in {getattr(weight, 'dtype', 'no dtype')}; the "
            "compiled kernel reads plain tensors in torch.float32, torch.bfloat16 or "
            f"torch.float16: load the model in one of these, or {STOCK}"
        )
    if not weight.is_contiguous():
        raise UnsupportedModelError(
            f"{what} has the strides {weight.stride()}; the compiled kernel reads it in place, so "
            f"it must be contiguous; {STOCK}"
        )
    device = weight.device.type
    key = {"cpu": "CPU", "cuda": "CUDA", "meta": "Meta"}.get(device, device)
    if not torch._C._dispatch_has_kernel_for_dispatch_key("acceptmoe::expert_mlp", key):
        raise UnsupportedModelError(
            f"{what} is on {weight.device}; there is no compiled kernel for that device. Move the "
            f"model to the CPU, or {STOCK}"
        )


@torch.no_grad()
def find_gating(layer: SparseLayer) -> Gating:
    """The op's activation that does what the layer's own `_apply_gate` does.

    It is recognised by its results, on inputs that reach past any clamp: classes and names of
    activations differ between families and versions.
    """
    experts: Any = layer.experts
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor([0.1, 1.0, 3.0, 30.0]).repeat_interleave(16)
    products = torch.randn(64, 2, generator=generator) * scales[:, None]  # T rows of one unit
    own = experts._apply_gate(products)[:, 0]
    limit, alpha = float(getattr(experts, "limit", 0.0)), float(getattr(experts, "alpha", 0.0))
    for activation in ACTIVATIONS:
        found = reference.activate(products[:, 0], products[:, 1], activation, limit, alpha)
        if torch.allclose(found, own, rtol=1e-5, atol=1e-6):
            return Gating(activation, limit, alpha)
    raise UnsupportedModelError(
        f"the gating of {layer.name} ({type(experts).__name__}) is none of those that the compiled "
        f"kernel computes ({', '.join(ACTIVATIONS)}); {STOCK}"
    )


def compiled_experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """What Transformers calls in a patched layer: [T, H], [T, K] and [T, K] to [T, H]."""
    gating: Gating = self._acceptmoe_gating
    result: Tensor = expert_mlp(
        hidden_states,
        top_k_index,
        top_k_weights,
        self.gate_up_proj,
        self.gate_up_proj_bias if self.has_bias else None,
        self.down_proj,
        self.down_proj_bias if self.has_bias else None,
        gating.activation,
        self.is_transposed,
        not self.is_concatenated,
        gating.limit,
        gating.alpha,
        min(top_k_index.numel(), self.down_proj.shape[0]),
    )
    return result


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, compiled_experts_forward)
