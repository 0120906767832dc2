"""Qwen2-MoE: as Qwen3-MoE, not renormalised by default, with a gated shared expert."""

from acceptmoe.models.family import Family
from acceptmoe.models.scoring import SoftmaxTopK

FAMILY = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    scoring=SoftmaxTopK(),
    masks="by_layer_type",
)
