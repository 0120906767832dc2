"""Registers the ops; everything here needs a device."""

import acceptmoe.ops.expert_mlp
import acceptmoe.ops.select_experts

__all__ = ["acceptmoe"]
