"""The forward of the target over one verification block: the same code run eagerly or compiled."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers import Cache, PreTrainedModel

from acceptmoe.decoding.buffers import BlockInputs
from acceptmoe.models.adapter import MoEAdapter
from acceptmoe.models.block_cache import BlockCache
from acceptmoe.models.counters import count_pass
from acceptmoe.models.features import FeatureTap
from acceptmoe.models.patching import RoutingPatch


@dataclass(frozen=True)
class BlockOutput:
    """What a pass over T rows gives, padding included.

    `logits` [T, V], `features` [T, F] where the drafter feeds on them, `counts` the sums that
    `RoutingCounters.add` takes, empty where the pass routed naturally because it is an ordinary
    decoding step.
    """

    logits: Tensor
    features: Tensor | None
    counts: tuple[Tensor, ...]


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
        *,
        is_restricted: bool,
        has_padding: bool,
    ) -> BlockOutput:
        """One pass; keys and values are written to `cache`.

        `slot_is_valid` [C] bool says which cache slots are no padding of the prompt. Without
        `is_restricted` every row routes naturally and nothing is counted.
        """
        num_prefix = inputs.num_prefix
        if isinstance(cache, BlockCache):
            cache.begin_block(num_prefix, inputs.moves)
        masks = self.adapter.tree_masks(
            inputs.ancestry, inputs.depths, num_prefix, slot_is_valid, self.model.dtype
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
        counts: tuple[Tensor, ...] = ()
        with self.tap.recording():
            if is_restricted:
                rows = inputs.rows()
                with self.patch.verifying(
                    rows, is_counted=False, has_padding=has_padding
                ) as layers:
                    output = self.model(**keywords)
                counts = count_pass(rows, layers)
            else:
                output = self.model(**keywords)
        return BlockOutput(output.logits[0], self.tap.features, counts)
