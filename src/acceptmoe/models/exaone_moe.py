"""K-EXAONE: the router of DeepSeek-V3; alternating sliding windows."""

from acceptmoe.models.family import Family
from acceptmoe.models.scoring import SigmoidBiasGroup

FAMILY = Family(
    model_type="exaone_moe",
    architecture="ExaoneMoeForCausalLM",
    scoring=SigmoidBiasGroup(),
    masks="by_layer_type",
)
