"""MiMo-V2-Flash: the router of DeepSeek-V3; attention sinks and alternating sliding windows."""

from acceptmoe.models.family import Family
from acceptmoe.models.scoring import SigmoidBiasGroup

FAMILY = Family(
    model_type="mimo_v2_flash",
    architecture="MiMoV2FlashForCausalLM",
    scoring=SigmoidBiasGroup(),
    masks="by_layer_type",
    attention=("eager",),  # its attention sinks have no sdpa form in Transformers
)
