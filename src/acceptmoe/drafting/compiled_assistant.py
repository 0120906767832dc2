"""An assistant's forward compiled: one graph for all levels of all drafts.

A level is a forward over a few rows of a small model, which takes less time to compute than to call
as Transformers does. Compiled once, on a cache that stays where it is, it is one call.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from transformers import Cache, DynamicCache, PreTrainedModel

from acceptmoe.drafting.assistant_forward import AssistantForward, Masks
from acceptmoe.models.backend import Compiled, PassBackend, model_state
from acceptmoe.models.block_cache import BlockCache

MIN_SLOTS = 256
MIN_ROWS = 2  # torch would compile for one row alone; a second one costs nothing
ROOM = 64  # slots that are free in a new cache, at least
NUM_MOVES = 16  # that a forward makes; a longer path's are made outside it


def is_compilable(model: PreTrainedModel) -> bool:
    """Whether its forward traces: a dense model, whole, on a CPU."""
    tensors = [*model.parameters(), *model.buffers()]
    is_whole = not any(hasattr(module, "_hf_hook") for module in model.modules())
    is_dense = not any(isinstance(getattr(m, "experts", None), nn.Module) for m in model.modules())
    return is_whole and is_dense and all(tensor.device.type == "cpu" for tensor in tensors)


class CompiledAssistantForward(AssistantForward):
    """`AssistantForward` by one compiled graph, for levels of at most `max_rows` rows.

    The prompt is read uncompiled. Texts of another capacity, a power of two of slots, compile for
    themselves, and so does a model whose parameters or settings have changed. If the forward cannot
    be compiled as one graph, a warning says so, and it runs as it is from then on.
    """

    def __init__(self, model: PreTrainedModel, max_rows: int, backend: PassBackend) -> None:
        self.backend = backend
        self._max_rows = max(MIN_ROWS, max_rows)
        self._compiled: dict[int, _StaticForward] = {}  # by capacity
        self._state: object = None
        self._static: _StaticForward | None = None  # of the running text, once its prompt is read
        super().__init__(model)

    def forget(self) -> None:
        super().forget()
        self._static = None
        state = model_state(self.model)
        if state != self._state:
            self._compiled = {}
        self._state = state

    def keep(self, num_cached: int, rows: Sequence[int]) -> None:
        if self._static is None:
            super().keep(num_cached, rows)
            return
        self._static.cache.make_moves()  # of an earlier block, if nothing has run since
        self._static.cache.keep(num_cached, rows)

    def drop_drafted(self, num_cached: int) -> None:
        if self._static is None:  # slots of a static cache count only by the masks
            super().drop_drafted(num_cached)

    def read(self, tokens: list[int], num_cached: int) -> Tensor:
        if self._static is None:
            logits = super().read(tokens, num_cached)
            self._move_to_static(self.cache, num_cached + len(tokens))
            self.cache = DynamicCache()  # the prompt's keys and values need not be kept twice
            return logits
        for start in range(0, len(tokens), self._max_rows):
            chunk = tokens[start : start + self._max_rows]
            first = num_cached + start
            static = self._with_room(self._static, first)
            positions = torch.arange(first, first + len(chunk))
            masks = self.chain_masks(len(chunk), first, static.cache.num_slots)
            logits = static.run(torch.tensor(chunk), positions, masks, first)
        return logits[-1:]

    def expand(
        self, tokens: Tensor, sees: Tensor, num_committed: int, level_starts: list[int]
    ) -> Tensor:
        assert self._static is not None  # the root was read before
        first = num_committed - 1 + level_starts[-1]
        static = self._with_room(self._static, first)
        masks = self.level_masks(sees, num_committed, level_starts, static.cache.num_slots)
        position = num_committed + len(level_starts) - 2
        return static.run(tokens, torch.full((len(tokens),), position), masks, first)

    def __getstate__(self) -> dict[str, Any]:
        # A copy compiles for itself.
        return {**super().__getstate__(), "_compiled": {}, "_static": None, "_state": None}

    def _with_room(self, static: _StaticForward, first_slot: int) -> _StaticForward:
        """`static`, or where the next rows would not fit behind `first_slot`, a larger one."""
        if first_slot + self._max_rows <= static.cache.num_slots:
            return static
        static.cache.make_moves()
        return self._move_to_static(static.cache, first_slot)

    def _move_to_static(self, source: Cache, num_used: int) -> _StaticForward:
        """Go on in a static cache that begins with the first `num_used` slots of `source`."""
        num_slots = MIN_SLOTS
        while num_slots < num_used + self._max_rows + ROOM:
            num_slots *= 2
        if num_slots not in self._compiled:
            num_layers = sum(layer.is_initialized for layer in source.layers)
            cache = BlockCache(num_layers, num_slots, self.device)
            self._compiled[num_slots] = _StaticForward(self, cache, self._max_rows)
        self._static = self._compiled[num_slots]
        self._static.cache.load(source, torch.ones(num_used, dtype=torch.bool))
        return self._static


class _StaticForward:
    """The compiled forward on one static cache; it compiles when it first runs."""

    def __init__(self, forward: CompiledAssistantForward, cache: BlockCache, max_rows: int) -> None:
        model, keyword = forward.model, forward.cache_keyword

        def run(
            tokens: Tensor,
            positions: Tensor,
            masks: Masks,
            first_slot: Tensor,
            moves: Tensor,
            cache: BlockCache,
        ) -> Tensor:
            cache.begin_block(first_slot, moves)
            output = model(
                input_ids=tokens[None],
                attention_mask=masks,
                position_ids=positions[None],
                use_cache=True,
                **{keyword: cache},
            )
            logits: Tensor = output.logits[0].float()
            return logits

        self.cache = cache
        self._uncompiled: Compiled = run
        self._compiled: Compiled | None = None  # once it has run
        self._backend = forward.backend
        self._name = type(model).__name__
        self._max_rows = max_rows

    def run(self, tokens: Tensor, positions: Tensor, masks: Masks, first_slot: int) -> Tensor:
        """[R, V] fp32: the logits after `tokens` [R], in the slots from `first_slot` on."""
        num_rows = len(tokens)
        if self._compiled is None:
            self._compiled = self._compile(tokens, positions, masks, first_slot)
        moves = torch.tensor(self.cache.take_moves(NUM_MOVES))
        if num_rows < MIN_ROWS:
            tokens, positions, masks = _with_rows(tokens, positions, masks, MIN_ROWS)
        slot = torch.tensor([first_slot])
        logits: Tensor = self._compiled(tokens, positions, masks, slot, moves, self.cache)
        return logits[:num_rows]

    def _compile(
        self, tokens: Tensor, positions: Tensor, masks: Masks, first_slot: int
    ) -> Compiled:
        """The compiled forward, run once on as many rows as it ever will: they decide how it is
        parallelised. Its keys and values go where those of the next rows will."""
        self.cache.make_moves()
        rows = _with_rows(tokens, positions, masks, self._max_rows)
        for tensor in (rows[0], rows[1]):
            torch._dynamo.mark_dynamic(tensor, 0)
        for mask in rows[2].values() if isinstance(rows[2], dict) else [rows[2]]:
            torch._dynamo.mark_dynamic(mask, 2)
        moves = torch.tensor(self.cache.take_moves(NUM_MOVES))
        compiled = self._backend.compile(self._uncompiled)
        try:
            compiled(*rows, torch.tensor([first_slot]), moves, self.cache)
        except TorchDynamoException as error:
            reason = str(error).partition("\n")[0]
            warnings.warn(
                f"the assistant {self._name} cannot be compiled as one graph ({reason}); it drafts "
                "uncompiled",
                stacklevel=2,
            )
            return self._uncompiled
        return compiled


def _with_rows(
    tokens: Tensor, positions: Tensor, masks: Masks, num_rows: int
) -> tuple[Tensor, Tensor, Masks]:
    """The first of `num_rows` rows are those given, the others repeat the last one."""
    places = torch.arange(num_rows).clamp(max=len(tokens) - 1)

    def repeated(mask: Tensor) -> Tensor:
        return mask.index_select(2, places)

    repeated_masks: Masks
    if isinstance(masks, dict):
        repeated_masks = {name: repeated(mask) for name, mask in masks.items()}
    else:
        repeated_masks = repeated(masks)
    return tokens[places], positions[places], repeated_masks
