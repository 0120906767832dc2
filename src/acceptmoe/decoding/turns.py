"""Who may use a wrapped model, or a drafter, at a time: threads wait, callbacks are refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

from acceptmoe.drafting.drafter import Drafter
from acceptmoe.errors import WrapStateError


class Turns:
    """A lock that refuses where waiting would never end: inside the turn of this very thread.

    A streamer, processor or criterion that calls back is such a place. `refusal` is what is said
    then, with what was called in place of `{what}`.
    """

    def __init__(self, refusal: str) -> None:
        self._refusal = refusal
        self._lock = threading.RLock()
        self._is_taken = False

    @contextmanager
    def taken(self, what: str) -> Iterator[None]:
        """Wait for the other threads, then keep them out. Raises `WrapStateError` inside itself."""
        with self.reserved(what):
            self._is_taken = True
            try:
                yield
            finally:
                self._is_taken = False

    @contextmanager
    def reserved(self, what: str) -> Iterator[None]:
        """Like `taken`, but this thread may take turns inside, as often as it likes."""
        with self._lock:
            if self._is_taken:
                raise WrapStateError(self._refusal.format(what=what))
            yield

    def __reduce__(self) -> tuple[type[Turns], tuple[str]]:
        return (Turns, (self._refusal,))  # a copy is nobody's yet


class _DrafterTurns(Turns):
    """The turns of one drafter; it is kept alive, or another could get its id."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(
            "{what} was called from inside a running generate of another model with the same "
            f"drafter, {drafter.name!r}, which keeps the state of one text; give each model a "
            "drafter of its own"
        )
        self._drafter = drafter


# By id: drafters can be written by anybody, and need be neither hashable nor weakly referable.
_OF_DRAFTERS: WeakValueDictionary[int, Turns] = WeakValueDictionary()
_LOOKING_UP = threading.Lock()


def turns_of(drafter: Drafter) -> Turns:
    """The turns of `drafter`, which models may share: the same object for as long as one is kept.

    A drafter keeps the state of one text, and what it reads of its target: whoever takes a turn
    calls `check_target` first.
    """
    with _LOOKING_UP:
        turns = _OF_DRAFTERS.get(id(drafter))
        if turns is None:
            turns = _OF_DRAFTERS[id(drafter)] = _DrafterTurns(drafter)
        return turns
