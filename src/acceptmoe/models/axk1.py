"""A.X K1: the router and latent attention of DeepSeek-V3."""

from acceptmoe.models.family import Family
from acceptmoe.models.scoring import SigmoidBiasGroup

FAMILY = Family(
    model_type="axk1",
    architecture="AXK1ForCausalLM",
    scoring=SigmoidBiasGroup(),
)
