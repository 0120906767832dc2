"""DeepSeek-V3 and R1: sigmoid with a choice bias, expert groups, latent attention."""

from acceptmoe.models.family import Family
from acceptmoe.models.scoring import SigmoidBiasGroup

FAMILY = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    scoring=SigmoidBiasGroup(),
)
