"""Reads the target's residual streams while it runs, for drafters that feed on them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from acceptmoe.errors import DrafterError


class FeatureTap:
    """Records the residual stream entering layer b for each b of `boundaries`.

    Boundary L, the number of layers, is what enters the final norm. Nothing is recorded outside
    `recording()` nor of other threads' forwards, and `detach` removes every hook.
    """

    def __init__(self, model: PreTrainedModel, boundaries: tuple[int, ...]) -> None:
        self.boundaries = boundaries
        self._local = _Local()
        self._features: Tensor | None = None
        self._handles: list[RemovableHandle] = []
        if boundaries:
            modules = decoder_modules(model)
            if not all(0 <= boundary < len(modules) for boundary in boundaries):
                raise DrafterError(
                    f"the drafter reads the target at layer boundaries {boundaries}; this target "
                    f"has boundaries 0 to {len(modules) - 1}"
                )
            for boundary in dict.fromkeys(boundaries):  # one named twice is recorded once
                self._handles.append(
                    modules[boundary].register_forward_pre_hook(
                        _Recorder(self, boundary), with_kwargs=True
                    )
                )

    def record(self, boundary: int, states: Tensor) -> None:
        if self._local.recorded is not None:
            self._local.recorded[boundary].append(states)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the forwards inside; `features` then gives them until the next `recording`."""
        recorded: dict[int, list[Tensor]] = {boundary: [] for boundary in self.boundaries}
        self._local.recorded = recorded
        try:
            yield
        finally:
            self._local.recorded = None
        self._features = (
            torch.cat([torch.cat(recorded[b], dim=1)[0] for b in self.boundaries], dim=-1)
            if self.boundaries
            else None
        )

    @property
    def features(self) -> Tensor | None:
        """[rows, len(boundaries) * H] of the last recording, or None without boundaries."""
        return self._features

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _Local(threading.local):
    """What this thread records, if it does."""

    recorded: dict[int, list[Tensor]] | None = None

    def __reduce__(self) -> tuple[type[_Local], tuple[()]]:
        return (_Local, ())


class _Recorder:
    """A forward pre-hook that hands the incoming residual stream [1, rows, H] to its tap."""

    def __init__(self, tap: FeatureTap, boundary: int) -> None:
        self._tap, self._boundary = tap, boundary

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._tap.record(self._boundary, args[0] if args else kwargs["hidden_states"])


def decoder_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder's layers, then its final norm: module b is entered by boundary b."""
    decoder: Any = model.base_model
    return [*decoder.layers, decoder.norm]
