"""Give a small trained target the matrix shapes of a large one, without changing what it computes.

A benchmark needs matrices of real sizes, and the tokens, routes and acceptance of a trained model.
Every hidden feature is repeated f times and every inner feature of an MLP or expert g times; a
weight that reads repeated features is divided by their number, so every sum stays what it was. RMS
norms stay too: repetition leaves the mean of squares alone. The widened residual stream is that
of the original, f times in a row.

Query heads are repeated f times as well, each next to its copies, so that the attention
projections grow with the model; key and value heads and the head dimension stay, and with them the
rotary embedding and the grouping of queries onto keys.

Factors that are powers of two make the divisions exact in every float type.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from acceptmoe.errors import DrafterError, InvalidArgumentError, UnsupportedModelError
from acceptmoe.table import PRESERVED_FINGERPRINT, config_fingerprint

MAX_FACTOR = 256  # hidden 64 becomes 16384, the largest of today's open models


@dataclass(frozen=True)
class _Axis:
    """How one axis of a weight grows: each of `groups` equal parts is repeated `factor` times.

    `is_read` axes are summed over by the product with this weight, so it is divided by the factor.
    """

    factor: int = 1
    groups: int = 1
    is_read: bool = False


_KEPT = _Axis()
_Axes = tuple[_Axis, ...]


def widen(model: PreTrainedModel, hidden_factor: int, inner_factor: int) -> PreTrainedModel:
    """A model that computes what `model` does, with larger matrices; `model` is left alone.

    Hidden size and query heads are multiplied by `hidden_factor`, the inner size of MLPs and
    experts by `inner_factor`. Logits differ by rounding only, and routes and tokens not at all,
    unless two of them are as close as that. Tied embeddings come out untied, because only the
    reading side is divided. The widened configuration keeps the original's fingerprint, so that a
    commitment table of the original serves both.

    Takes the families qwen3_moe, olmoe, gpt_oss, qwen3 and llama. Raises `UnsupportedModelError`
    for others (quantised and wrapped models among them), and `InvalidArgumentError` for factors
    that are not whole numbers from 1 to 256, or not powers of two where the model's float type
    would round the division.
    """
    _check_factors(hidden_factor, inner_factor)
    config = model.config
    if config.model_type not in _FAMILIES:
        raise UnsupportedModelError(
            f"a model of type {config.model_type!r} cannot be widened; "
            f"supported: {', '.join(sorted(_FAMILIES))}"
        )
    if hasattr(model, "acceptmoe"):
        raise UnsupportedModelError(
            "a wrapped model cannot be widened; call acceptmoe.unwrap(model) first"
        )
    state = model.state_dict()
    _check_exact(state, hidden_factor, inner_factor)
    axes = _FAMILIES[config.model_type](config.num_attention_heads, hidden_factor, inner_factor)
    widened = {name: _widen_tensor(_find(axes, name), tensor) for name, tensor in state.items()}
    return _build(model, _widen_config(config, hidden_factor, inner_factor), widened)


def widen_eagle3_head(
    state: Mapping[str, Tensor],
    config: Mapping[str, Any],
    hidden_factor: int,
    inner_factor: int,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the configuration of an EAGLE-3 head for a target widened by `hidden_factor`.

    It proposes what `state` does on the original target: its features are the original's, each
    `hidden_factor` times in a row. Takes and returns the published layouts, flat (SafeAILab,
    SpecForge) and nested (speculators), whatever the prefix of the names.

    Raises `DrafterError` for tensors that no such head has, or that do not fit the configuration,
    and `InvalidArgumentError` for bad factors, as `widen`.
    """
    _check_factors(hidden_factor, inner_factor)
    _check_exact(state, hidden_factor, inner_factor)
    layer_config = config.get("transformer_layer_config", config)
    missing = [key for key in _HEAD_SIZES if not isinstance(layer_config.get(key), int)]
    if missing:
        raise DrafterError(f"the head's configuration has no {', '.join(missing)}; is it EAGLE-3?")
    hidden_size, num_heads = layer_config["hidden_size"], layer_config["num_attention_heads"]
    target_size = config.get("target_hidden_size") or hidden_size
    axes = _eagle3_axes(num_heads, hidden_factor, inner_factor)
    widened: dict[str, Tensor] = {}
    for name, tensor in state.items():
        short = re.sub(r"^(model\.)?(midlayer\.|layers\.0\.)?", "", name)
        if short in _FEATURE_TENSORS:  # their features come from several layers of the target
            num_layers, rest = divmod(tensor.shape[-1], target_size)
            if rest:
                raise DrafterError(
                    f"{name} reads {tensor.shape[-1]} features; it must be a multiple of the "
                    f"target's hidden size {target_size}"
                )
            is_read = short == "fc.weight"
            features = _Axis(hidden_factor, groups=num_layers, is_read=is_read)
            tensor_axes = (_Axis(hidden_factor), features)[-tensor.dim() :]
        elif short in axes:
            tensor_axes = axes[short]
        else:
            raise DrafterError(f"{name} is no tensor of an EAGLE-3 head; it cannot be widened")
        if tensor.dim() != len(tensor_axes):
            raise DrafterError(
                f"{name} has the shape {list(tensor.shape)}; "
                f"it must have {len(tensor_axes)} dimensions"
            )
        widened[name] = _widen_tensor(tensor_axes, tensor)
    return widened, _widen_head_config(config, hidden_factor, inner_factor)


_HEAD_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads")
_FEATURE_TENSORS = ("fc.weight", "input_norm.weight")


def _decoder_axes(num_heads: int, hidden: int, inner: int) -> dict[str, _Axes]:
    """The axes of what all decoders share: embeddings, attention, norms, a dense MLP."""
    write, read = _Axis(hidden), _Axis(hidden, is_read=True)
    query_write = _Axis(hidden, groups=num_heads)
    query_read = _Axis(hidden, groups=num_heads, is_read=True)
    inner_write, inner_read = _Axis(inner), _Axis(inner, is_read=True)
    return {
        "embed_tokens.weight": (_KEPT, write),
        "lm_head.weight": (_KEPT, read),
        "norm.weight": (write,),
        "input_layernorm.weight": (write,),
        "post_attention_layernorm.weight": (write,),
        "self_attn.q_proj.weight": (query_write, read),
        "self_attn.q_proj.bias": (query_write,),
        "self_attn.k_proj.weight": (_KEPT, read),
        "self_attn.k_proj.bias": (_KEPT,),
        "self_attn.v_proj.weight": (_KEPT, read),
        "self_attn.v_proj.bias": (_KEPT,),
        "self_attn.o_proj.weight": (write, query_read),
        "self_attn.o_proj.bias": (write,),
        "self_attn.q_norm.weight": (_KEPT,),  # one weight for all heads
        "self_attn.k_norm.weight": (_KEPT,),
        "mlp.gate_proj.weight": (inner_write, read),
        "mlp.gate_proj.bias": (inner_write,),
        "mlp.up_proj.weight": (inner_write, read),
        "mlp.up_proj.bias": (inner_write,),
        "mlp.down_proj.weight": (write, inner_read),
        "mlp.down_proj.bias": (write,),
    }


def _moe_axes(num_heads: int, hidden: int, inner: int) -> dict[str, _Axes]:
    """As `_decoder_axes`, with stacked experts [E, gate then up, H] and [E, H, I]."""
    write, read = _Axis(hidden), _Axis(hidden, is_read=True)
    return _decoder_axes(num_heads, hidden, inner) | {
        "mlp.gate.weight": (_KEPT, read),
        "mlp.experts.gate_up_proj": (_KEPT, _Axis(inner, groups=2), read),
        "mlp.experts.down_proj": (_KEPT, write, _Axis(inner, is_read=True)),
    }


def _olmoe_axes(num_heads: int, hidden: int, inner: int) -> dict[str, _Axes]:
    # OLMoE normalises all query heads together. The key heads, which stay, likewise.
    query_write = _Axis(hidden, groups=num_heads)
    return _moe_axes(num_heads, hidden, inner) | {"self_attn.q_norm.weight": (query_write,)}


def _gpt_oss_axes(num_heads: int, hidden: int, inner: int) -> dict[str, _Axes]:
    """Experts are transposed, [E, H, 2I] and [E, I, H].

    Gate and up alternate, so repeating the whole axis keeps every pair together.
    """
    write, read = _Axis(hidden), _Axis(hidden, is_read=True)
    inner_write, inner_read = _Axis(inner), _Axis(inner, is_read=True)
    return _decoder_axes(num_heads, hidden, inner) | {
        "self_attn.sinks": (_Axis(hidden, groups=num_heads),),
        "mlp.router.weight": (_KEPT, read),
        "mlp.router.bias": (_KEPT,),
        "mlp.experts.gate_up_proj": (_KEPT, read, inner_write),
        "mlp.experts.gate_up_proj_bias": (_KEPT, inner_write),
        "mlp.experts.down_proj": (_KEPT, inner_read, write),
        "mlp.experts.down_proj_bias": (_KEPT, write),
    }


def _eagle3_axes(num_heads: int, hidden: int, inner: int) -> dict[str, _Axes]:
    """As `_decoder_axes`; attention reads the embedding, then the hidden state."""
    write, read_both = _Axis(hidden), _Axis(hidden, groups=2, is_read=True)
    feature_norms = [f"fc_norm.{part}.weight" for part in range(3)]
    feature_norms += [f"aux_norm_{part}.weight" for part in ("low", "mid", "high")]
    return _decoder_axes(num_heads, hidden, inner) | {
        "self_attn.q_proj.weight": (_Axis(hidden, groups=num_heads), read_both),
        "self_attn.k_proj.weight": (_KEPT, read_both),
        "self_attn.v_proj.weight": (_KEPT, read_both),
        "hidden_norm.weight": (write,),
        "fc.bias": (write,),
        "d2t": (_KEPT,),
        "t2d": (_KEPT,),
        **dict.fromkeys(feature_norms, (write,)),
    }


_FAMILIES = {
    "gpt_oss": _gpt_oss_axes,
    "llama": _decoder_axes,
    "olmoe": _olmoe_axes,
    "qwen3": _decoder_axes,
    "qwen3_moe": _moe_axes,
}


def _find(axes: Mapping[str, _Axes], name: str) -> _Axes:
    short = re.sub(r"^(model\.)?(layers\.\d+\.)?", "", name)
    if short not in axes:
        raise UnsupportedModelError(
            f"the weight {name} is none of this family's own; the model cannot be widened. "
            "Is it quantised, or does it carry an adapter?"
        )
    return axes[short]


def _widen_tensor(axes: _Axes, tensor: Tensor) -> Tensor:
    divisor = 1
    split, grown, final = [], [], []
    for size, axis in zip(tensor.shape, axes, strict=True):
        divisor *= axis.factor if axis.is_read else 1
        split += [axis.groups, 1, size // axis.groups]
        grown += [axis.groups, axis.factor, size // axis.groups]
        final.append(size * axis.factor)
    if divisor > 1:
        tensor = tensor / divisor  # while it is small
    # All axes in one copy, and always a copy: the original's weights are not shared.
    return tensor.reshape(split).expand(grown).clone().reshape(final)


def _widen_config(config: Any, hidden_factor: int, inner_factor: int) -> Any:
    widened = copy.deepcopy(config)
    widened.hidden_size *= hidden_factor
    widened.num_attention_heads *= hidden_factor
    widened.intermediate_size *= inner_factor
    if hasattr(widened, "moe_intermediate_size"):
        widened.moe_intermediate_size *= inner_factor
    widened.tie_word_embeddings = False
    setattr(widened, PRESERVED_FINGERPRINT, config_fingerprint(config))
    return widened


def _widen_head_config(
    config: Mapping[str, Any], hidden_factor: int, inner_factor: int
) -> dict[str, Any]:
    widened = copy.deepcopy(dict(config))
    layer = widened.get("transformer_layer_config", widened)
    # The quotient of the two sizes where it is not given, so it must be before they grow.
    layer["head_dim"] = layer.get("head_dim") or (
        layer["hidden_size"] // layer["num_attention_heads"]
    )
    layer["num_key_value_heads"] = layer.get("num_key_value_heads") or layer["num_attention_heads"]
    layer["hidden_size"] *= hidden_factor
    layer["num_attention_heads"] *= hidden_factor
    layer["intermediate_size"] *= inner_factor
    if widened.get("target_hidden_size"):
        widened["target_hidden_size"] *= hidden_factor
    return widened


def _build(model: PreTrainedModel, config: Any, state: dict[str, Tensor]) -> PreTrainedModel:
    with torch.device("meta"):  # no memory and no random numbers for weights that are given
        widened = type(model)(config)
    widened.load_state_dict(state, assign=True)
    for name, buffer in model.named_buffers():  # rotary tables: heads keep their dimension
        parent, _, leaf = name.rpartition(".")
        setattr(widened.get_submodule(parent), leaf, buffer.clone())
    widened.generation_config = copy.deepcopy(model.generation_config)
    for name, parameter in widened.named_parameters():
        parameter.requires_grad_(model.get_parameter(name).requires_grad)
    widened.train(model.training)
    return widened


def _check_factors(hidden_factor: int, inner_factor: int) -> None:
    for name, factor in (("hidden_factor", hidden_factor), ("inner_factor", inner_factor)):
        is_whole = isinstance(factor, int) and not isinstance(factor, bool)
        if not is_whole or not 1 <= factor <= MAX_FACTOR:
            raise InvalidArgumentError(
                f"{name} is {factor!r}; it must be a whole number from 1 to {MAX_FACTOR}"
            )


def _check_exact(state: Mapping[str, Tensor], hidden_factor: int, inner_factor: int) -> None:
    short_types = {t.dtype for t in state.values() if t.is_floating_point() and t.itemsize < 4}
    for name, factor in (("hidden_factor", hidden_factor), ("inner_factor", inner_factor)):
        if short_types and factor & (factor - 1):
            dtype = str(min(short_types, key=str)).removeprefix("torch.")
            raise InvalidArgumentError(
                f"{name} is {factor} and the weights are {dtype}, in which dividing by it rounds "
                "and would change the function; use a power of two, or fp32 weights"
            )
