"""Verification passes that are made once and replayed: found by shape, bounded, invalidated.

The pool knows nothing of models: it holds compiled callables, CUDA graphs, or, in tests, a fake.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from threading import RLock
from typing import Any, Generic, Protocol, TypeVar

import torch

from acceptmoe.errors import InvalidArgumentError


@dataclass(frozen=True)
class PassKey:
    """What a compiled or captured pass was made for; another value of any of these is another one.

    `num_rows` padding included; `num_slots` of the key-value cache; `policy` is its name and
    settings, "natural" where a restricted block is audited, "step" for ordinary decoding steps.
    """

    num_rows: int
    batch_size: int
    num_slots: int
    dtype: torch.dtype
    policy: str

    def of_any_rows(self) -> PassKey:
        """What passes that differ in their numbers of rows alone have in common."""
        return replace(self, num_rows=0)


class Pass(Protocol):
    """Something made for one `PassKey`; `num_bytes` is the memory that it alone holds."""

    @property
    def num_bytes(self) -> int: ...

    def release(self) -> None:
        """Give the memory back; the pass is not used again."""


P = TypeVar("P", bound=Pass)


class GraphPool(Generic[P]):
    """At most `max_passes` passes, the least recently used leaves first.

    `sizes` are the numbers of rows that passes are made for.
    """

    def __init__(self, sizes: Sequence[int], *, max_passes: int) -> None:
        if max_passes < max(1, len(sizes)):
            raise InvalidArgumentError(
                f"max_passes is {max_passes}; it must be at least {max(1, len(sizes))}, one for "
                "every size"
            )
        self.sizes = tuple(sorted(sizes))
        self.num_made = self.num_evicted = self.num_invalidated = 0
        self.last_invalidation: str | None = None
        self._max_passes = max_passes
        self._passes: OrderedDict[PassKey, P] = OrderedDict()
        self._lock = RLock()

    def find_size(self, num_nodes: int) -> int | None:
        """The rows of the smallest pass that holds `num_nodes`, or None when all are smaller."""
        return next((size for size in self.sizes if size >= num_nodes), None)

    def get(self, key: PassKey, make: Callable[[PassKey], P]) -> P:
        """The pass of `key`; `make(key)` makes it, under the pool's lock, unless it is there.

        What `make` raises leaves the pool without that pass. Raises `InvalidArgumentError` for a
        number of rows that is no size of the pool.
        """
        with self._lock:
            if key.num_rows not in self.sizes:
                raise InvalidArgumentError(
                    f"a pass over {key.num_rows} rows was asked for; there are passes over "
                    f"{', '.join(map(str, self.sizes))} rows, find_size gives the one that fits"
                )
            if key not in self._passes:
                self._make_room()
                self._passes[key] = make(key)
                self.num_made += 1
            self._passes.move_to_end(key)
            return self._passes[key]

    def prepare(self, keys: Sequence[PassKey], make: Callable[[PassKey], P]) -> None:
        """Make the passes of `keys` that are missing, the largest first.

        CUDA graphs share one memory pool: what the largest needs holds all smaller ones.
        """
        for key in sorted(keys, key=lambda key: key.num_rows, reverse=True):
            self.get(key, make)

    def invalidate(self, reason: str, *, only: Callable[[PassKey], bool] | None = None) -> None:
        """Drop every pass, or those whose key `only` picks: something they read has moved."""
        with self._lock:
            dropped = [key for key in self._passes if only is None or only(key)]
            for key in dropped:
                self._passes.pop(key).release()
            if dropped:
                self.num_invalidated += len(dropped)
                self.last_invalidation = reason

    def report(self) -> dict[str, Any]:
        """How many passes there are and have been, and the memory that they hold."""
        with self._lock:
            return {
                "num_passes": len(self._passes),
                "num_passes_made": self.num_made,
                "num_passes_evicted": self.num_evicted,
                "num_passes_invalidated": self.num_invalidated,
                "last_invalidation": self.last_invalidation,
                "pass_bytes": sum(made.num_bytes for made in self._passes.values()),
            }

    def __contains__(self, key: PassKey) -> bool:
        return key in self._passes

    def __len__(self) -> int:
        return len(self._passes)

    def _make_room(self) -> None:
        while len(self._passes) >= self._max_passes:
            self._passes.popitem(last=False)[1].release()
            self.num_evicted += 1
