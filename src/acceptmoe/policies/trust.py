"""Which rows of a restricted pass are near enough to natural to speak for the target."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Trust:
    """How much of its own routing weights a row may have lost and still be accepted.

    Lost shares are averages over the sparse layers, in [0, 1]. A row that gives its likeliest token
    less than the probability `sure_above` may lose `max_lost_unsure`, any other one `max_lost`: a
    sure row stays right when it loses experts, an unsure one may tip over. Acceptance stops before
    a row that is not trusted. Its token stands, its parent's logits chose it; what follows is left
    to the next block, whose root it is and which keeps all of its experts.
    """

    max_lost: float
    max_lost_unsure: float
    sure_above: float

    @property
    def is_everything(self) -> bool:
        """Whether every row is trusted, so that nothing need be measured."""
        return self.max_lost >= 1 and (self.max_lost_unsure >= 1 or self.sure_above == 0)

    def trusted(self, lost: Tensor, logits: Tensor) -> Tensor:
        """[T] bool from the lost shares [T] and the logits [T, V]; no read back to the host."""
        # The likeliest token's probability: exp(max - logsumexp).
        values = logits.float()
        sureness = (values.amax(dim=-1) - values.logsumexp(dim=-1)).exp()
        limit = torch.where(sureness < self.sure_above, self.max_lost_unsure, self.max_lost)
        return lost.to(limit.device) <= torch.clamp(limit, max=self.max_lost)
