"""The forward of the target over one verification block: the same code run eagerly or compiled."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor
from transformers import Cache, PreTrainedModel

from acceptmoe.decoding.buffers import BlockInputs
from acceptmoe.models.adapter import MoEAdapter
from acceptmoe.models.block_cache import BlockCache
from acceptmoe.models.counters import RoutedLayer, count_pass, lost_shares
from acceptmoe.models.features import FeatureTap
from acceptmoe.models.patching import RoutingPatch
from acceptmoe.policies.trust import Trust
from acceptmoe.selection import BlockRows
from acceptmoe.tree import DraftTree


class PassKind(Enum):
    """How the rows of a pass are routed."""

    STEP = "step"  # an ordinary decoding step: naturally, and nothing is counted
    NATURAL = "natural"
    RESTRICTED = "restricted"

    @classmethod
    def of(cls, tree: DraftTree, *, is_natural: bool) -> PassKind:
        """The kind of the pass over `tree`; its root alone is an ordinary step."""
        if tree.num_nodes == 1:
            return cls.STEP
        return cls.NATURAL if is_natural else cls.RESTRICTED


@dataclass(frozen=True)
class BlockOutput:
    """What a pass over T rows gives, padding included.

    `logits` [T, V], `features` [T, F] where the drafter feeds on them, `counts` the sums that
    `RoutingCounters.add` takes. `rows` and `layers` are what was counted; an ordinary step has
    none of the three. `is_trusted` [T] bool: which rows may be accepted, None where all may.
    """

    logits: Tensor
    features: Tensor | None
    counts: tuple[Tensor, ...] = ()
    rows: BlockRows | None = None
    layers: list[RoutedLayer] = field(default_factory=list)
    is_trusted: Tensor | None = None


@dataclass(frozen=True)
class BlockForward:
    """Calls the target; its hooks route and record.

    Nothing here reads a value back to the host or depends on one, so that it can be traced, and
    captured, once for all blocks of as many rows.
    """

    model: PreTrainedModel
    adapter: MoEAdapter
    patch: RoutingPatch
    tap: FeatureTap

    def __call__(
        self,
        inputs: BlockInputs,
        cache: Cache,
        slot_is_valid: Tensor,
        kind: PassKind,
        *,
        has_padding: bool,
    ) -> BlockOutput:
        """One pass; keys and values are written to `cache`.

        `slot_is_valid` [C] bool says which cache slots are no padding of the prompt.
        """
        if isinstance(cache, BlockCache):
            cache.begin_block(inputs.num_prefix, inputs.moves)
        masks = self.adapter.tree_masks(
            inputs.ancestry, inputs.depths, inputs.num_prefix, slot_is_valid, self.model.dtype
        )
        keywords = {
            "input_ids": inputs.tokens[None],
            "attention_mask": masks,
            "position_ids": (inputs.next_position + inputs.depths)[None],
            self.adapter.cache_keyword: cache,
            "use_cache": True,
            "output_router_logits": False,  # its loss cannot read a 4-D mask
            "return_dict": True,
        }
        if kind is PassKind.STEP:
            with self.tap.recording():
                output = self.model(**keywords)
            return BlockOutput(output.logits[0], self.tap.features)
        rows = inputs.rows()
        with (
            self.tap.recording(),
            self.patch.verifying(
                rows,
                is_natural=kind is PassKind.NATURAL,
                is_counted=False,
                has_padding=has_padding,
            ) as layers,
        ):
            output = self.model(**keywords)
        counts = count_pass(rows, layers)
        logits = output.logits[0]
        is_trusted = trusted_rows(self.patch.policy.trust, layers, logits)
        return BlockOutput(logits, self.tap.features, counts, rows, layers, is_trusted)


def trusted_rows(trust: Trust | None, layers: list[RoutedLayer], logits: Tensor) -> Tensor | None:
    """[T] bool: which rows may be accepted; None where all may."""
    lost = None if trust is None else lost_shares(layers)
    return None if trust is None or lost is None else trust.trusted(lost, logits)
