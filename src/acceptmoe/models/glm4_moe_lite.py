"""GLM-4.7-Flash: the router and latent attention of DeepSeek-V3."""

from acceptmoe.models.family import Family
from acceptmoe.models.scoring import SigmoidBiasGroup

FAMILY = Family(
    model_type="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    scoring=SigmoidBiasGroup(),
)
