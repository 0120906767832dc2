"""What audited blocks showed: running sums, and the report that follows from them.

Axes: T rows of a block, L sparse layers, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from acceptmoe.models.counters import RoutedLayer

MIN_ERROR_BLOCKS = 5  # of fewer a standard error says nothing: equal ones would look certain


@dataclass(frozen=True)
class DepthAudit:
    """One depth of the draft trees, 0 for the root.

    `num_tokens` committed rows of this depth, one for each block that reached it; `kl` and `top1`
    are over those. `excluded_mass` is that of all rows of this depth, weighted by commitment.
    """

    depth: int
    num_tokens: int
    kl: float | None
    kl_se: float | None
    top1: float | None
    top1_se: float | None
    excluded_mass: float | None
    excluded_mass_se: float | None


@dataclass(frozen=True)
class LayerAudit:
    """One sparse layer: `layer` counts the sparse layers, `name` is the block's module.

    `rows_moved` is the share of all rows whose experts are not the router's own top-k. A layer has
    no KL of its own: distributions of tokens exist behind the last layer only.
    """

    layer: int
    name: str
    excluded_mass: float | None
    excluded_mass_se: float | None
    rows_moved: float | None
    rows_moved_se: float | None


@dataclass(frozen=True)
class AuditReport:
    """What restricted routing did to the output, measured on `num_blocks` audited blocks.

    Of every audited block both passes read the same cache, so `kl` is what one block adds, not
    what drift of the cache adds over a text. It is KL(natural || constrained) in nats per token
    between the raw logits, before any logits processor, over the committed rows: the root and the
    accepted nodes, one for each of the `num_tokens` emitted tokens. `top1` is the share of them
    where both find the same token likeliest. `kl_all_rows` and `top1_all_rows` take all rows of the
    block, each weighted by its commitment probability: what the policy does to the tree, not to
    the text, and usually more, for drafts that fail are odd text. `excluded_mass` is defined as in
    the routing counters and averaged over the audited blocks. An `_se` is a standard error that
    takes blocks, not tokens, for independent; None stands for fewer than `MIN_ERROR_BLOCKS`.
    """

    num_blocks: int
    num_tokens: int
    kl: float | None
    kl_se: float | None
    top1: float | None
    top1_se: float | None
    kl_all_rows: float | None
    top1_all_rows: float | None
    excluded_mass: float | None
    excluded_mass_se: float | None
    by_depth: tuple[DepthAudit, ...]
    by_layer: tuple[LayerAudit, ...]


@dataclass(frozen=True)
class BlockDivergence:
    """One audited block, on the host, padding left out.

    `depths` and `nodes` (the committed rows, the root first) come from its tree; `commitment` [T],
    `kl` [T] in nats and `is_same` [T] (of the likeliest token) are fp64; `wanted`, `excluded` and
    `is_moved` [L, T] fp64 are what `row_masses` gives for each layer.
    """

    depths: Sequence[int]
    nodes: Sequence[int]
    commitment: Tensor
    kl: Tensor
    is_same: Tensor
    wanted: Tensor
    excluded: Tensor
    is_moved: Tensor

    @property
    def kl_sum(self) -> float:
        """Nats, summed over the committed rows."""
        return float(self.kl[list(self.nodes)].sum())


@dataclass
class BlockRatio:
    """The ratio of two quantities that are summed over blocks, and its standard error."""

    num_blocks: int = 0
    numerator: float = 0.0
    denominator: float = 0.0
    _squares: float = 0.0
    _products: float = 0.0
    _denominator_squares: float = 0.0

    def add(self, numerator: float, denominator: float = 1.0) -> None:
        """Count one block."""
        self.num_blocks += 1
        self.numerator += numerator
        self.denominator += denominator
        self._squares += numerator * numerator
        self._products += numerator * denominator
        self._denominator_squares += denominator * denominator

    @property
    def value(self) -> float | None:
        """The ratio, or None before there is anything."""
        return self.numerator / self.denominator if self.denominator else None

    @property
    def standard_error(self) -> float | None:
        """By linearisation of a ratio of sums (Cochran, Sampling Techniques, 6.3)."""
        ratio = self.value
        if ratio is None or self.num_blocks < MIN_ERROR_BLOCKS:
            return None
        residuals = (
            self._squares - 2 * ratio * self._products + ratio**2 * self._denominator_squares
        )
        variance = max(residuals, 0.0) * self.num_blocks / (self.num_blocks - 1)
        return math.sqrt(variance) / self.denominator


@dataclass
class _DepthSums:
    kl: BlockRatio = field(default_factory=BlockRatio)
    top1: BlockRatio = field(default_factory=BlockRatio)
    excluded: BlockRatio = field(default_factory=BlockRatio)


@dataclass
class _LayerSums:
    excluded: BlockRatio = field(default_factory=BlockRatio)
    moved: BlockRatio = field(default_factory=BlockRatio)


class AuditStatistics:
    """Sums over the audited blocks of a session, on the host: each of them was read anyway."""

    def __init__(self, layer_names: Sequence[str] = ()) -> None:
        self.layer_names = tuple(layer_names)
        self._kl, self._top1 = BlockRatio(), BlockRatio()
        self._kl_all_rows, self._top1_all_rows = BlockRatio(), BlockRatio()
        self._excluded = BlockRatio()
        self._by_depth: dict[int, _DepthSums] = {}
        self._by_layer = [_LayerSums() for _ in self.layer_names]

    def add(self, block: BlockDivergence) -> None:
        """Count one audited block."""
        nodes = list(block.nodes)
        self._kl.add(block.kl_sum, len(nodes))
        self._top1.add(float(block.is_same[nodes].sum()), len(nodes))
        total = float(block.commitment.sum())
        self._kl_all_rows.add(float((block.kl * block.commitment).sum()), total)
        self._top1_all_rows.add(float((block.is_same * block.commitment).sum()), total)
        by_layer = _excluded_share(block, slice(None))
        self._excluded.add(float(by_layer.mean()))
        moved = block.is_moved.sum(dim=1).tolist()
        for sums, excluded, num_moved in zip(self._by_layer, by_layer.tolist(), moved, strict=True):
            sums.excluded.add(excluded)
            sums.moved.add(num_moved, block.is_moved.shape[1])
        self._add_depths(block)

    def _add_depths(self, block: BlockDivergence) -> None:
        rows_of: dict[int, list[int]] = {}
        for row, depth in enumerate(block.depths):
            rows_of.setdefault(depth, []).append(row)
        for depth, rows in rows_of.items():
            if float(block.commitment[rows].sum()) > 0:
                sums = self._by_depth.setdefault(depth, _DepthSums())
                sums.excluded.add(float(_excluded_share(block, rows).mean()))
        for node in block.nodes:
            sums = self._by_depth.setdefault(block.depths[node], _DepthSums())
            sums.kl.add(float(block.kl[node]))
            sums.top1.add(float(block.is_same[node]))

    def read(self) -> AuditReport:
        """The ratios of the sums; None stands where there is nothing yet."""
        return AuditReport(
            num_blocks=self._kl.num_blocks,
            num_tokens=int(self._kl.denominator),
            kl=_positive(self._kl.value),
            kl_se=self._kl.standard_error,
            top1=self._top1.value,
            top1_se=self._top1.standard_error,
            kl_all_rows=_positive(self._kl_all_rows.value),
            top1_all_rows=self._top1_all_rows.value,
            excluded_mass=self._excluded.value,
            excluded_mass_se=self._excluded.standard_error,
            by_depth=tuple(
                DepthAudit(
                    depth=depth,
                    num_tokens=sums.kl.num_blocks,
                    kl=_positive(sums.kl.value),
                    kl_se=sums.kl.standard_error,
                    top1=sums.top1.value,
                    top1_se=sums.top1.standard_error,
                    excluded_mass=sums.excluded.value,
                    excluded_mass_se=sums.excluded.standard_error,
                )
                for depth, sums in sorted(self._by_depth.items())
            ),
            by_layer=tuple(
                LayerAudit(
                    layer=layer,
                    name=name,
                    excluded_mass=sums.excluded.value,
                    excluded_mass_se=sums.excluded.standard_error,
                    rows_moved=sums.moved.value,
                    rows_moved_se=sums.moved.standard_error,
                )
                for layer, (name, sums) in enumerate(
                    zip(self.layer_names, self._by_layer, strict=True)
                )
            ),
        )


def _excluded_share(block: BlockDivergence, rows: slice | list[int]) -> Tensor:
    """[L]: the commitment-weighted share of these rows' own gates outside the eligible set."""
    weights = block.commitment[rows]
    wanted = (block.wanted[:, rows] * weights).sum(dim=1)
    return (block.excluded[:, rows] * weights).sum(dim=1) / wanted


def _positive(divergence: float | None) -> float | None:
    # Rounding leaves the sum of identical distributions on either side of zero.
    return None if divergence is None else max(divergence, 0.0)


def row_divergence(natural: Tensor, constrained: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [T, V] twice -> KL(natural || constrained) [T] in nats, and [T] bool of equal top-1.

    Both on the logits' device, the first in fp64.
    """
    reference, own = natural.float().log_softmax(-1), constrained.float().log_softmax(-1)
    probabilities = reference.exp()
    # A token that the reference excludes contributes nothing, whatever its log probability.
    terms = torch.where(probabilities > 0, probabilities * (reference - own), 0.0)
    return terms.sum(dim=-1, dtype=torch.float64), natural.argmax(-1) == constrained.argmax(-1)


def row_masses(routed: RoutedLayer) -> Tensor:
    """[3, T] fp64 on the layer's device: each row's own gates, those excluded, and 1 if it moved.

    The first is the sum of gates over the row's natural top-k, the second its part outside the
    eligible set. A row moved when its experts are others than its natural top-k, in any order.
    """
    natural_ids = routed.natural_ids
    is_moved = (natural_ids.sort(-1).values != routed.used_ids.sort(-1).values).any(dim=-1)
    if routed.eligible is None:  # nothing was restricted, and nothing moved
        return torch.stack([torch.ones_like(is_moved), is_moved, is_moved]).double()
    assert routed.gates is not None  # whoever restricts hands both over
    gates = routed.gates.gather(1, natural_ids).double()
    excluded = gates.masked_fill(routed.eligible[natural_ids], 0.0)
    return torch.stack([gates.sum(dim=-1), excluded.sum(dim=-1), is_moved.double()])
