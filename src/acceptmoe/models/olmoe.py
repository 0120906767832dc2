"""OLMoE: softmax, top-k, by default not renormalised."""

from acceptmoe.models.family import Family
from acceptmoe.models.scoring import SoftmaxTopK

FAMILY = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    scoring=SoftmaxTopK(),
)
