"""Time that passes only when a test says so."""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedModel


class FakeClock:
    """Seconds that each pass of a wrapped model takes, by its number of rows.

    It replaces the clock of the model's session, so that decisions by time can be repeated. Only
    the model's own forwards take time, the prefill's too.
    """

    def __init__(self, pass_s: Callable[[int], float]) -> None:
        self.now_s = 0.0
        self.pass_s = pass_s

    def __call__(self) -> float:
        return self.now_s

    def drive(self, model: PreTrainedModel) -> FakeClock:
        """Time `model`, which is wrapped, by this clock."""

        def advance(module, args, kwargs) -> None:
            self.now_s += self.pass_s(kwargs["input_ids"].shape[1])

        model.register_forward_pre_hook(advance, with_kwargs=True)
        model.acceptmoe.clock = self
        return self
