"""What the decode loop must know of a model: sparse layers, masks, whether it can be wrapped."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from acceptmoe.errors import UnsupportedModelError
from acceptmoe.models.family import Family
from acceptmoe.models.kv import find_cache_keyword
from acceptmoe.models.refusals import check_kind
from acceptmoe.tree import block_attention_mask

FAMILIES = (
    "axk1",
    "deepseek_v3",
    "dots1",
    "exaone_moe",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_oss",
    "mimo_v2_flash",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
    "solar_open",
)


def load_family(model_type: str) -> Family:
    """The family of a `model_type` in `FAMILIES`."""
    family: Family = importlib.import_module(f"acceptmoe.models.{model_type}").FAMILY
    return family


@dataclass(frozen=True)
class SparseLayer:
    """One mixture-of-experts block: its place among the sparse layers and its two parts."""

    index: int
    name: str
    router: nn.Module
    experts: nn.Module


class MoEAdapter:
    """A model's sparse layers, attention masks and keyword names, checked to be wrappable.

    Raises `UnsupportedModelError` for a model that cannot be verified as a tree, saying why.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        check_kind(model, FAMILIES)
        self.family = load_family(model.config.model_type)
        if type(model).__name__ != self.family.architecture:
            raise UnsupportedModelError(
                f"got a {type(model).__name__}; of {self.family.model_type} only "
                f"{self.family.architecture} is supported, load the model with "
                "AutoModelForCausalLM"
            )
        self.check_attention(model)
        self.layers = find_sparse_layers(model, self.family)
        for layer in self.layers:
            _check_experts(layer)
        self.num_experts = int(self.layers[0].router.num_experts)  # type: ignore[arg-type]
        self.experts_per_token = int(self.layers[0].router.top_k)  # type: ignore[arg-type]
        self.num_token_ids = num_token_ids(model)
        self.cache_keyword = find_cache_keyword(model) or "past_key_values"
        self._mask_windows = _mask_windows(model, self.family)

    def check_attention(self, model: PreTrainedModel) -> None:
        """Raise `UnsupportedModelError` for an implementation that takes no tree mask."""
        implementation = model.config._attn_implementation
        if implementation not in self.family.attention:
            raise UnsupportedModelError(
                f"attn_implementation is {implementation!r}, which takes no tree mask; for "
                f"{self.family.model_type} use {' or '.join(map(repr, self.family.attention))}: "
                "from_pretrained(..., attn_implementation=...)"
            )

    def tree_masks(
        self,
        ancestry: Tensor,
        depths: Tensor,
        num_prefix: Tensor,
        slot_is_valid: Tensor,
        dtype: torch.dtype,
    ) -> Tensor | dict[str, Tensor]:
        """The `attention_mask` of a verification pass: one mask, or one for each layer type.

        The arguments are those of `block_attention_mask`.
        """
        masks = {
            layer_type: block_attention_mask(
                ancestry, depths, num_prefix, slot_is_valid, dtype, window=window
            )
            for layer_type, window in self._mask_windows.items()
        }
        return masks if self.family.masks == "by_layer_type" else masks["all"]


def num_token_ids(model: PreTrainedModel) -> int:
    """How many token ids the model can read; configurations sometimes name fewer than it has."""
    embeddings: Any = model.get_input_embeddings()
    return int(embeddings.weight.shape[0])


def find_sparse_layers(model: PreTrainedModel, family: Family) -> tuple[SparseLayer, ...]:
    """Every block with a router and experts, in the order of the decoder's layers."""
    layers: list[SparseLayer] = []
    for name, block in model.named_modules():
        router, experts = getattr(block, family.router, None), getattr(block, family.experts, None)
        if isinstance(router, nn.Module) and isinstance(experts, nn.Module):
            layers.append(SparseLayer(len(layers), name, router, experts))
    if not layers:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no sparse layer in this configuration; "
            "a dense model has no experts to restrict"
        )
    return tuple(layers)


def _check_experts(layer: SparseLayer) -> None:
    if type(layer.experts).__name__ == "Mxfp4GptOssExperts":
        raise UnsupportedModelError(
            f"{layer.name} holds MXFP4 experts, whose block never calls its router module; load "
            "the model dequantised: from_pretrained(..., quantization_config=Mxfp4Config("
            "dequantize=True))"
        )
    if getattr(layer.experts, "_is_expert_parallel", False):
        raise UnsupportedModelError(
            f"the experts of {layer.name} are spread over devices (expert parallelism); "
            "load the model on one device or with device_map"
        )


def _mask_windows(model: PreTrainedModel, family: Family) -> dict[str, int | None]:
    """The sliding window of each mask that the decoder takes; None is full attention."""
    config: Any = model.config
    if family.masks != "by_layer_type":
        return {"all": config.sliding_window if family.masks == "sliding" else None}
    windows = {"full_attention": None, "sliding_attention": config.sliding_window}
    unknown = set(config.layer_types) - set(windows)
    if unknown:
        raise UnsupportedModelError(
            f"layer_types has {sorted(unknown)}; a tree mask exists for {sorted(windows)}"
        )
    return {layer_type: windows[layer_type] for layer_type in sorted(set(config.layer_types))}
