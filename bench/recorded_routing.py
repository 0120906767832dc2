"""The routers' outputs of real verification passes, to time the selection on them alone."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from acceptmoe.decoding.session import Session
from acceptmoe.ops.select_experts import select_experts
from acceptmoe.routing import NaturalRouting
from acceptmoe.selection import BlockRows


class RecordedRouting:
    """What went into the selection of each layer, pass by pass, of an uncompiled wrapped model."""

    def __init__(self, model: Any) -> None:
        self._session: Session = model.acceptmoe
        self._blocks: list[tuple[BlockRows, list[NaturalRouting]]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Keep the routing of all passes inside."""
        layers = self._session.adapter.layers
        # Before the hook of the wrapping, which replaces the router's own choice.
        handles = [layer.router.register_forward_hook(self._keep, prepend=True) for layer in layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _keep(self, router: nn.Module, args: Any, output: tuple[torch.Tensor, ...]) -> None:
        active = self._session.patch.active_block
        if active is None:
            return
        num_layers = len(self._session.adapter.layers)
        if not self._blocks or len(self._blocks[-1][1]) == num_layers:
            self._blocks.append((copy.deepcopy(active.rows), []))
        self._blocks[-1][1].append(NaturalRouting(*(part.clone() for part in output[:3])))

    @torch.inference_mode()
    def time_selection_ms(self) -> float:
        """The median over passes of the selection's time in all layers; 0 for natural routing.

        Raises `ValueError` for a policy that the op does not cover.
        """
        policy, adapter = self._session.policy, self._session.adapter
        if policy.is_natural:
            return 0.0
        rules = [adapter.family.scoring.rule(layer.router) for layer in adapter.layers]
        biases = [adapter.family.scoring.correction_bias(layer.router) for layer in adapter.layers]
        times = []
        for rows, layers in self._blocks:
            start = time.perf_counter()
            params = policy.fused_params(rows)
            if params is None:
                raise ValueError(f"acceptmoe::select_experts does not cover {policy.name!r}")
            is_enabled = torch.ones_like(rows.is_real[0])
            for natural, rule, bias in zip(layers, rules, biases, strict=True):
                select_experts(
                    natural,
                    rule,
                    params,
                    path_commitment=rows.path_commitment,
                    is_real=rows.is_real,
                    is_enabled=is_enabled,
                    correction_bias=bias,
                )
            times.append(1e3 * (time.perf_counter() - start))
        return statistics.median(times)
