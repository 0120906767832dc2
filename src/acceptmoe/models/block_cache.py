"""A key-value cache of fixed size and place, for verification passes that are compiled or captured.

Slots 0..P-1 hold the committed text, the block's rows go into the slots behind it. The accepted
path of a block is moved together at the beginning of the next pass, inside the compiled forward:
done by itself it would be four launches for every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import StaticLayer


class _Place:
    """Where the block of the running pass begins; one for all layers of a cache."""

    first_slot: Tensor  # [1] int64


class BlockLayer(StaticLayer):  # type: ignore[misc]
    """Keys and values [1, heads, C, dim]; an update writes behind the committed text, in place.

    Transformers' static layer counts for itself where to write, each layer in a tensor of its own,
    and every block would have to set all of them back.
    """

    def __init__(self, num_slots: int, place: _Place) -> None:
        super().__init__(max_cache_len=num_slots)
        self._place = place

    def allocate(self, keys: Tensor, values: Tensor) -> None:
        """Make room for states like `keys` and `values`."""
        num_slots = self.max_cache_len
        self.keys = keys.new_zeros(*keys.shape[:2], num_slots, keys.shape[-1])
        self.values = values.new_zeros(*values.shape[:2], num_slots, values.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        num_rows = key_states.shape[2]
        slots = self._place.first_slot + torch.arange(num_rows, device=key_states.device)
        self.keys.index_copy_(2, slots, key_states)
        self.values.index_copy_(2, slots, value_states)
        return self.keys, self.values


class BlockCache(Cache):  # type: ignore[misc]
    """A cache that many texts use one after another, so that what reads it stays compiled.

    `slot_is_valid` [C] bool leaves out padding of the prompt. `num_committed` tokens are in it,
    once the moves of the last block are made.
    """

    def __init__(self, num_layers: int, num_slots: int, device: torch.device) -> None:
        self._place = _Place()
        super().__init__(layers=[BlockLayer(num_slots, self._place) for _ in range(num_layers)])
        self.num_slots = num_slots
        self.slot_is_valid = torch.ones(num_slots, dtype=torch.bool, device=device)
        self.num_committed = 0
        self._moves: list[tuple[int, int]] = []  # of slots, not made yet

    @property
    def num_bytes(self) -> int:
        """Memory of all keys and values."""
        layers = [layer for layer in self.layers if layer.is_initialized]
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)

    def load(self, source: Cache, is_valid: Tensor) -> None:
        """Begin with the tokens of `source`; `is_valid` [P] bool says which are no padding."""
        num_tokens = is_valid.shape[0]
        for layer, other in zip(self.layers, source.layers, strict=False):
            if not layer.is_initialized:
                layer.allocate(other.keys, other.values)
            for states, given in ((layer.keys, other.keys), (layer.values, other.values)):
                states[:, :, :num_tokens] = given[:, :, :num_tokens]
                # Masked keys weigh 0, but 0 times a NaN of the last text would be NaN.
                states[:, :, num_tokens:] = 0
        self.slot_is_valid.fill_(True)
        self.slot_is_valid[:num_tokens] = is_valid
        self.num_committed = num_tokens
        self._moves = []

    def store(self, target: Cache, num_tokens: int) -> None:
        """Append what has been committed behind the first `num_tokens` slots to `target`."""
        self.make_moves()
        new = slice(num_tokens, self.num_committed)
        for layer, other in zip(self.layers, target.layers, strict=False):
            if type(other) is StaticLayer:
                other.keys[:, :, new] = layer.keys[:, :, new]
                other.values[:, :, new] = layer.values[:, :, new]
                other.cumulative_length.fill_(self.num_committed)
            else:
                other.keys = torch.cat([other.keys[:, :, :num_tokens], layer.keys[:, :, new]], 2)
                other.values = torch.cat(
                    [other.values[:, :, :num_tokens], layer.values[:, :, new]], 2
                )

    def keep(self, num_prefix: int, nodes: Sequence[int]) -> None:
        """Commit the `nodes` of the block behind the first `num_prefix` slots, drop the rest.

        The next pass moves them together: it takes `moves` and calls `begin_block`.
        """
        self._moves = [
            (num_prefix + node, num_prefix + place)
            for place, node in enumerate(nodes)
            if node != place
        ]
        self.num_committed = num_prefix + len(nodes)

    def take_moves(self, num_moves: int) -> tuple[list[int], list[int]]:
        """Slots to read and slots to write, `num_moves` of each; the caller makes the moves.

        What there is not to move is the last slot, to itself. More moves than `num_moves` are made
        at once, and those returned move nothing.
        """
        if len(self._moves) > num_moves:
            self.make_moves()
        moves, self._moves = self._moves, []
        idle = self.num_slots - 1
        padding = [idle] * (num_moves - len(moves))
        return [move[0] for move in moves] + padding, [move[1] for move in moves] + padding

    def begin_block(self, num_prefix: Tensor, moves: Tensor) -> None:
        """Make `moves` [2, M] int64, then let updates write behind `num_prefix` [1] int64 slots.

        Only tensor operations: it is a part of the compiled pass.
        """
        source, target = moves.unbind(0)
        for layer in self.layers:
            if layer.is_initialized:  # there may be one more than the model has layers
                layer.keys.index_copy_(2, target, layer.keys.index_select(2, source))
                layer.values.index_copy_(2, target, layer.values.index_select(2, source))
        self._place.first_slot = num_prefix

    def make_moves(self) -> None:
        """Make the moves that are left, outside a pass."""
        if self._moves:
            moves = torch.tensor(self._moves, device=self.slot_is_valid.device).T
            self._moves = []
            self.begin_block(moves[0, :1], moves)
