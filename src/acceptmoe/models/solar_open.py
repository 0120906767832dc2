"""Solar Open: the router of DeepSeek-V3."""

from acceptmoe.models.family import Family
from acceptmoe.models.scoring import SigmoidBiasGroup

FAMILY = Family(
    model_type="solar_open",
    architecture="SolarOpenForCausalLM",
    scoring=SigmoidBiasGroup(),
)
