"""What distinguishes one model family from another, as far as verification is concerned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from acceptmoe.models.scoring import Scoring


@dataclass(frozen=True)
class Family:
    """A supported `model_type` of Transformers.

    `architecture` is the causal language model's class name. `router` and `experts` are the names
    of the two children by which a sparse block is found. `masks` says what the decoder takes as
    `attention_mask`: "full" (one 4-D mask without a window, whatever the configuration holds),
    "sliding" (one with the configuration's window, if it has one) or "by_layer_type" (a dict of
    them).
    """

    model_type: str
    architecture: str
    scoring: Scoring
    router: str = "gate"
    experts: str = "experts"
    masks: Literal["full", "sliding", "by_layer_type"] = "full"
    attention: tuple[str, ...] = ("sdpa", "eager")
