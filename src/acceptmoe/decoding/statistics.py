"""Tokens, passes and seconds of a wrapped model's decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class DecodingStatistics:
    """Running sums over all `generate` calls; times are wall-clock seconds on the host.

    A verification pass is one with draft nodes; a pass of the root alone is an ordinary step and
    counts in `num_plain_steps`. `num_prompts` counts calls, `num_tokens` emitted tokens, the first
    of each call, which the prefill gives, included. `num_cut_paths` counts accepted paths that
    ended before a drafted node because it had lost too many of its experts. `audit_s` is spent on
    the second passes of audited blocks and their comparison; no other time and no rate has it in.
    """

    num_prompts: int = 0
    num_tokens: int = 0
    num_verifications: int = 0
    num_verified_tokens: int = 0
    num_verified_nodes: int = 0
    num_plain_steps: int = 0
    num_cut_paths: int = 0
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    commit_s: float = 0.0
    audit_s: float = 0.0

    def count_block(self, num_nodes: int, num_tokens: int) -> None:
        """Count one pass over `num_nodes` rows that emitted `num_tokens` tokens."""
        self.num_tokens += num_tokens
        if num_nodes == 1:
            self.num_plain_steps += 1
            return
        self.num_verifications += 1
        self.num_verified_tokens += num_tokens
        self.num_verified_nodes += num_nodes

    @property
    def decode_s(self) -> float:
        """Seconds of drafting, verifying and committing, without the prefill."""
        return self.draft_s + self.verify_s + self.commit_s

    def read(self) -> dict[str, Any]:
        """The sums, and the rates that follow from them (None before there is anything)."""
        num_decoded = self.num_tokens - self.num_prompts  # the prefill gave one token each
        return {
            **vars(self),
            "accepted_length": _ratio(self.num_verified_tokens, self.num_verifications),
            "nodes_per_verification": _ratio(self.num_verified_nodes, self.num_verifications),
            "tokens_per_s": _ratio(num_decoded, self.decode_s),
        }


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
