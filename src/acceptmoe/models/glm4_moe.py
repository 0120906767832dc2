"""GLM-4.5 and 4.6: the router of DeepSeek-V3."""

from acceptmoe.models.family import Family
from acceptmoe.models.scoring import SigmoidBiasGroup

FAMILY = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    scoring=SigmoidBiasGroup(),
)
