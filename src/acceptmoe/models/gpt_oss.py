"""gpt-oss: top-k, then softmax; attention sinks and alternating sliding windows."""

from acceptmoe.models.family import Family
from acceptmoe.models.scoring import TopKSoftmax

FAMILY = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    scoring=TopKSoftmax(),
    router="router",
    masks="by_layer_type",
    attention=("eager",),  # its attention sinks have no sdpa form in Transformers
)
