"""Restricted routing on one model instance: a hook on every router, and off again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from acceptmoe.errors import SelfCheckError
from acceptmoe.models.adapter import MoEAdapter, SparseLayer
from acceptmoe.models.counters import RoutedLayer, RoutingCounters
from acceptmoe.models.scoring import RouterOutput, Scoring
from acceptmoe.policies import RoutingPolicy
from acceptmoe.selection import BlockRows, RoutedBlock, Selection, demand


class RoutingPatch:
    """Forward hooks on the routers of one model; they act inside `verifying` only.

    Everywhere else, in other threads too, a forward of the model routes as if never patched.
    """

    def __init__(self, adapter: MoEAdapter, policy: RoutingPolicy) -> None:
        self.adapter = adapter
        self.policy = policy
        self.counters = RoutingCounters()
        self._local = _Local()
        self._handles: list[RemovableHandle] = []

    def attach(self) -> None:
        for layer in self.adapter.layers:
            self._handles.append(layer.router.register_forward_hook(RouterHook(self)))

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def reset_counters(self) -> None:
        self.counters = RoutingCounters()

    @contextmanager
    def verifying(self, rows: BlockRows, *, is_counted: bool = True) -> Iterator[None]:
        """Route the forward inside, a verification block of these rows, under the policy."""
        layers: list[RoutedLayer] = []
        self._local.block = _ActiveBlock(rows, layers)
        try:
            yield
        finally:
            self._local.block = None
        if is_counted:
            self.counters.add_pass(rows, layers)

    @property
    def active_block(self) -> _ActiveBlock | None:
        """The verification block that this thread is in."""
        return self._local.block


@dataclass(frozen=True)
class _ActiveBlock:
    rows: BlockRows
    layers: list[RoutedLayer]


class _Local(threading.local):
    """Each thread has its own block, so that a plain forward in another one stays natural."""

    block: _ActiveBlock | None = None

    def __reduce__(self) -> tuple[type[_Local], tuple[()]]:
        return (_Local, ())  # a copied model starts outside any block


class RouterHook:
    """A forward hook that replaces a router's weights and ids by those inside the eligible set."""

    def __init__(self, patch: RoutingPatch) -> None:
        self._patch = patch

    def __call__(
        self, router: nn.Module, args: tuple[Any, ...], output: RouterOutput
    ) -> RouterOutput | None:
        active = self._patch.active_block
        if active is None:
            return None
        num_experts, natural_ids = self._patch.adapter.num_experts, output[2]
        if self._patch.policy.is_natural:
            active.layers.append(RoutedLayer(num_experts, natural_ids, natural_ids))
            return None
        scoring = self._patch.adapter.family.scoring
        block = read_block(scoring, router, output, active.rows)
        selection = select_inside_groups(scoring, router, block, self._patch.policy)
        routed = route_block(scoring, router, output, block, selection)
        active.layers.append(
            RoutedLayer(num_experts, natural_ids, routed[2], block.gates, selection.eligible)
        )
        return routed


def read_block(
    scoring: Scoring, router: nn.Module, output: RouterOutput, rows: BlockRows
) -> RoutedBlock:
    """The natural routing of one layer, as policies see it."""
    logits, _, natural_ids = output[:3]
    return RoutedBlock(
        gates=scoring.gates(router, logits),
        choice=scoring.choice(router, logits),
        natural_ids=natural_ids,
        rows=rows.to(logits.device),
    )


def select_inside_groups(
    scoring: Scoring, router: nn.Module, block: RoutedBlock, policy: RoutingPolicy
) -> Selection:
    """The policy's selection, completed where a router picks groups of experts first."""
    selection = policy.select(block)
    if not scoring.needs_completion(router):
        return selection
    expert_demand = demand(block, block.rows.path_commitment)
    eligible = scoring.complete(router, block, selection.eligible, expert_demand)
    return Selection(eligible, selection.choice_bias, selection.combine)


def route_block(
    scoring: Scoring,
    router: nn.Module,
    output: RouterOutput,
    block: RoutedBlock,
    selection: Selection,
) -> RouterOutput:
    """The router's output with every row routed inside the eligible set.

    A row whose own experts are all eligible keeps the router's weights and ids untouched, unless a
    bias asks for others.
    """
    weights, ids = scoring.route(
        router,
        output,
        selection.eligible[None, :],
        selection.choice_bias,
        selection.combine,
        block.gates,
    )
    if selection.choice_bias is None:
        is_moved = (block.is_wanted & ~selection.eligible).any(dim=-1, keepdim=True)
        is_moved = is_moved | ~block.rows.is_real[:, None]  # padding must touch no expert either
        weights = torch.where(is_moved, weights, output[1])
        ids = torch.where(is_moved, ids, output[2])
    return (output[0], weights, ids, *output[3:])


@torch.no_grad()
def self_check(model: PreTrainedModel, adapter: MoEAdapter) -> None:
    """Raise `SelfCheckError` unless every router can be recomputed exactly and is really called.

    With all experts eligible, `Scoring.route` must give each router's own weights and ids bit for
    bit on random hidden states, and one forward must call each router once.
    """
    generator = torch.Generator().manual_seed(0)
    for layer in adapter.layers:
        _check_recomputation(layer, adapter.family.scoring, model, generator)
    calls = [0] * len(adapter.layers)

    def count(layer: SparseLayer) -> RemovableHandle:
        def hook(*_: object) -> None:
            calls[layer.index] += 1

        return layer.router.register_forward_hook(hook)

    handles = [count(layer) for layer in adapter.layers]
    try:
        model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    for layer in adapter.layers:
        if calls[layer.index] != 1:
            raise SelfCheckError(
                f"one forward called the router of {layer.name} {calls[layer.index]} times instead "
                "of once; another patch (use_kernels=True, for instance) seems to replace the "
                "block, so its routing cannot be restricted"
            )


def _check_recomputation(
    layer: SparseLayer, scoring: Scoring, model: PreTrainedModel, generator: torch.Generator
) -> None:
    router: Any = layer.router
    hidden = torch.randn(8, router.hidden_dim, generator=generator)
    output: RouterOutput = router(hidden.to(model.device, model.dtype))
    everything = torch.ones(1, router.num_experts, dtype=torch.bool, device=output[0].device)
    weights, ids = scoring.route(router, output, everything)
    if not (_same_bits(weights, output[1]) and _same_bits(ids, output[2])):
        raise SelfCheckError(
            f"the router of {layer.name} ({type(router).__name__}) does not score as "
            f"{scoring.name} does in this Transformers version; its routing cannot be restricted. "
            "Please report the model and version"
        )


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)
