"""Qwen3-MoE: softmax, top-k, renormalised where the configuration says so."""

from acceptmoe.models.family import Family
from acceptmoe.models.scoring import SoftmaxTopK

FAMILY = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    scoring=SoftmaxTopK(),
    masks="sliding",
)
