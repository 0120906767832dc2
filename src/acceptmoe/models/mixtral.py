"""Mixtral: softmax, top-k, always renormalised; an optional sliding window in all layers."""

from acceptmoe.models.family import Family
from acceptmoe.models.scoring import SoftmaxTopK

FAMILY = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    scoring=SoftmaxTopK(renormalize=True),
    masks="sliding",
)
