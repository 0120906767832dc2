"""Natural routing beside the policy's, on a sample of verification blocks; and a limit on its cost.

An audited block runs twice from the same cache: naturally, then rolled back, then as always. The
second pass writes every slot that the first one wrote, so neither the text, nor a bit of the cache,
nor the routing counters depend on what is audited.
"""

from __future__ import annotations

import numbers
import random
import sys
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from acceptmoe.decoding.audit_statistics import (
    AuditReport,
    AuditStatistics,
    BlockDivergence,
    row_divergence,
    row_masses,
)
from acceptmoe.decoding.verify import Prefix, VerifiedBlock, Verifier
from acceptmoe.errors import InvalidArgumentError
from acceptmoe.models.kv import keep_path
from acceptmoe.tree import DraftTree

SAMPLING_SEED = 0
# Divergences have a long tail: a mean over fewer blocks says little, and one over all blocks since
# the start would take as long again to notice that the prompts have changed.
MIN_BLOCKS = 16
WINDOW_BLOCKS = 64


class KLLimitWarning(UserWarning):
    """A wrapped model has switched to natural routing because its running KL passed `max_kl`."""


class KLLimit:
    """Trips when the mean KL per token of the last audited blocks passes `max_kl`, and stays so.

    The mean is over the last `WINDOW_BLOCKS` audited blocks and counts from the `MIN_BLOCKS`-th on.
    """

    def __init__(self, max_kl: float | None) -> None:
        self.max_kl = max_kl
        self.reset()

    def reset(self) -> None:
        """Forget the blocks and let the policy restrict again."""
        self._blocks: deque[tuple[float, int]] = deque(maxlen=WINDOW_BLOCKS)
        self.tripped_kl: float | None = None

    @property
    def is_tripped(self) -> bool:
        return self.tripped_kl is not None

    @property
    def running_kl(self) -> float | None:
        """Nats per token over the window; None before the first audited block."""
        num_tokens = sum(num for _, num in self._blocks)
        return max(sum(kl for kl, _ in self._blocks) / num_tokens, 0.0) if num_tokens else None

    def add(self, kl_sum: float, num_tokens: int) -> bool:
        """Count one audited block; True when the limit trips with it."""
        self._blocks.append((kl_sum, num_tokens))
        running = self.running_kl
        if self.max_kl is None or running is None or len(self._blocks) < MIN_BLOCKS:
            return False
        if running <= self.max_kl:
            return False
        self.tripped_kl = running
        return True


class BlockSampler:
    """Takes one of each 1 / `share` blocks in a row, at a random place among them.

    Strata keep the number of audited blocks at its share from the first few on; the random place
    keeps it from following a rhythm of the text. Its own generator starts at `SAMPLING_SEED`.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._random = random.Random(SAMPLING_SEED)
        self._num_strata = self._num_blocks = 0
        self._next = self._draw(at_least=0)

    def takes_next(self) -> bool:
        """Whether the next block is in the sample."""
        is_taken = self._num_blocks == self._next
        self._num_blocks += 1
        if is_taken:
            self._next = self._draw(at_least=self._num_blocks)
        return is_taken

    def _draw(self, at_least: int) -> int:
        """The block that the next stratum gives; two that share a block take it and the next."""
        place = (self._num_strata + self._random.random()) / self._share
        self._num_strata += 1
        return max(int(min(place, sys.maxsize)), at_least)  # inf for shares near 0


class Auditor:
    """Chooses blocks, runs them naturally too, and keeps what the comparison shows.

    Verification blocks (those with draft nodes) are sampled in strata: of each 1 / `share` of them
    in a row one is audited, at a place drawn by a `BlockSampler`. It starts with the session and
    goes on over calls and resets of the statistics, so the same calls after `wrap` audit the same
    blocks. After the limit has tripped all blocks are natural and none is audited.
    """

    def __init__(
        self, share: float = 0.0, max_kl: float | None = None, layer_names: Sequence[str] = ()
    ) -> None:
        self.share = float(share)
        self.limit = KLLimit(max_kl)
        self._layer_names = tuple(layer_names)
        self._sampler = BlockSampler(self.share) if share else None
        self._num_seen = 0  # verification blocks of the session
        self._tripped_at_block: int | None = None
        self.reset_statistics()

    def reset_statistics(self) -> None:
        """Begin counting anew; sampling, the limit and its window go on as they were."""
        self._statistics = AuditStatistics(self._layer_names)
        self._num_natural_blocks = 0

    def resume(self) -> None:
        """Let the policy restrict again after the limit has tripped; its window begins empty."""
        self.limit.reset()
        self._tripped_at_block = None

    @property
    def is_natural(self) -> bool:
        """Whether blocks must be routed naturally, because the limit has tripped."""
        return self.limit.is_tripped

    def natural_pass(
        self, verifier: Verifier, tree: DraftTree, cache: Cache, prefix: Prefix
    ) -> Tensor | None:
        """The logits [T, V] under natural routing if this block is audited, the cache as before."""
        if tree.num_nodes == 1 or self._sampler is None or self.is_natural:
            return None
        if not self._sampler.takes_next():
            return None
        block = verifier.verify(tree, cache, prefix, is_natural=True, is_counted=False)
        keep_path(cache, prefix.length, ())
        if block.logits.is_cuda:  # or its time would be taken for the next pass's
            torch.cuda.synchronize(block.logits.device)
        return block.logits

    def after_block(
        self, tree: DraftTree, block: VerifiedBlock, nodes: Sequence[int], natural: Tensor | None
    ) -> None:
        """Count a block whose rows `nodes` were committed; `natural` is what `natural_pass` gave.

        Warns with `KLLimitWarning` when the limit trips, once each time.
        """
        if tree.num_nodes == 1:
            return
        self._num_seen += 1
        self._num_natural_blocks += self.is_natural
        if natural is None:
            return
        divergence = compare(tree, block, nodes, natural)
        self._statistics.add(divergence)
        if self.limit.add(divergence.kl_sum, len(nodes)):
            self._tripped_at_block = self._num_seen
            warnings.warn(
                f"the KL of restricted routing is {self.limit.tripped_kl:.4g} nats per token over "
                f"the last audited blocks, above max_kl={self.limit.max_kl:g}; from here on this "
                "model routes naturally. model.acceptmoe.report()['audit'] has the figures, "
                "model.acceptmoe.resume_policy() restricts again",
                KLLimitWarning,
                stacklevel=2,
            )

    def read(self) -> AuditReport:
        """What the audited blocks showed since `wrap` or `reset_statistics`."""
        return self._statistics.read()

    def report(self) -> dict[str, Any] | None:
        """The audit's part of a session's report; None where nothing is audited."""
        if not self.share:
            return None
        return {
            "share": self.share,
            **asdict(self.read()),
            "running_kl": self.limit.running_kl,
            "max_kl": self.limit.max_kl,
            "max_kl_tripped": self.limit.is_tripped,
            "tripped_kl": self.limit.tripped_kl,
            "tripped_at_block": self._tripped_at_block,
            "num_natural_blocks": self._num_natural_blocks,
        }


def compare(
    tree: DraftTree, block: VerifiedBlock, nodes: Sequence[int], natural: Tensor
) -> BlockDivergence:
    """What the policy changed in one block, read to the host; `natural` [T, V] are the logits."""
    assert block.rows is not None  # a block with draft nodes has them
    num_rows = tree.num_nodes  # padding, if any, comes behind
    kl, is_same = row_divergence(natural[:num_rows], block.logits[:num_rows])
    masses = torch.stack([row_masses(routed)[:, :num_rows].cpu() for routed in block.layers])
    wanted, excluded, is_moved = masses.unbind(1)
    return BlockDivergence(
        depths=tree.shape.depths,
        nodes=nodes,
        commitment=block.rows.path_commitment[:num_rows].cpu().double(),
        kl=kl.cpu(),
        is_same=is_same.cpu().double(),
        wanted=wanted,
        excluded=excluded,
        is_moved=is_moved,
    )


def check_audit(audit: object, max_kl: object) -> None:
    """Raise `InvalidArgumentError` unless `audit` is a share and `max_kl` a limit that can act."""
    check_share("audit", audit)
    if max_kl is None:
        return
    if not _is_number(max_kl) or not 0.0 < max_kl <= sys.float_info.max:  # type: ignore[operator]
        raise InvalidArgumentError(
            f"max_kl is {max_kl!r}; it must be a number above 0, in nats per token (0.05, for "
            "instance), or None for no limit"
        )
    if not audit:
        raise InvalidArgumentError(
            f"max_kl is {max_kl!r} and audit is {audit!r}; the KL is known from audited blocks "
            "only, give audit=0.02 or more with it"
        )


def check_share(name: str, share: object) -> None:
    """Raise `InvalidArgumentError` unless `share` is a number from 0 to 1."""
    if not _is_number(share) or not 0.0 <= share <= 1.0:  # type: ignore[operator]
        raise InvalidArgumentError(
            f"{name} is {share!r}; it must be a number from 0 to 1, the share of verification "
            "blocks that are run naturally too (0.02 audits one in fifty)"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
