"""`s2`: a bias toward preferred experts in the choice only (S2-MoE, arXiv 2608.15018), a rival."""

from __future__ import annotations

from typing import Any

import torch

from acceptmoe.errors import InvalidArgumentError
from acceptmoe.policies.policy import RoutingPolicy
from acceptmoe.policies.ranking import best_of, check_count
from acceptmoe.selection import RoutedBlock, Selection

MAX_STRENGTH = 1e6  # a bias far beyond any logits, and far from the end of fp32


class S2Policy(RoutingPolicy):
    """Rows lean toward `size` preferred experts of the layer, and are forced to none.

    Each row adds lambda = strength * (its largest score - its largest score outside its own top-k)
    to the preferred experts before it ranks; the weights come from the scores without the bias.
    With strength 1, the rule of the paper, the best expert that a row left out would just reach the
    row's top-1 if it is preferred, and a preferred expert that lies further below than lambda stays
    out. Strength 0 is natural routing.

    The preferred set is that of a whole block: the experts with the largest sum of gates over its
    rows, of equals the lower id. A size below K is raised to K. Scores are what the router ranks:
    logits, or sigmoids with their correction.
    """

    name = "s2"

    def __init__(self, size: int, strength: float = 1.0) -> None:
        self.size = check_count("size", size)
        is_number = isinstance(strength, (int, float)) and not isinstance(strength, bool)
        if not is_number or not 0 <= strength <= MAX_STRENGTH:
            raise InvalidArgumentError(
                f"strength is {strength!r}; it must be a number, 0 or larger (the paper uses 1), "
                f"at most {MAX_STRENGTH:g}"
            )
        self.strength = float(strength)

    def select(self, block: RoutedBlock) -> Selection:
        experts_per_row = block.natural_ids.shape[1]
        score = (block.gates * block.rows.is_real[:, None]).sum(dim=0)
        preferred = best_of(score, max(self.size, experts_per_row))
        choice = block.choice.float()
        own = choice.gather(1, block.natural_ids).amax(dim=1)
        outside = choice.scatter(1, block.natural_ids, -torch.inf).amax(dim=1)
        # No gap where nobody is left out, nor where a router left a better expert's group out.
        gap = torch.where(outside.isfinite(), own - outside, 0.0).clamp_min(0.0)
        bias = self.strength * gap[:, None] * preferred
        return Selection(torch.ones_like(preferred), choice_bias=bias)

    def params(self) -> dict[str, Any]:
        return {"size": self.size, "strength": self.strength}
