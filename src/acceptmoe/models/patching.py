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

from acceptmoe.errors import InvalidArgumentError, SelfCheckError
from acceptmoe.models.adapter import MoEAdapter, SparseLayer
from acceptmoe.models.counters import RoutedLayer, RoutingCounters
from acceptmoe.models.scoring import RouterOutput, Scoring
from acceptmoe.ops.select_experts import select_experts
from acceptmoe.policies import POLICIES, FusedParams, RoutingPolicy
from acceptmoe.routing import NaturalRouting, RoutingRule
from acceptmoe.selection import BlockRows, RoutedBlock, Selection, demand


class RoutingPatch:
    """Forward hooks on the routers of one model; they act inside `verifying` only.

    Everywhere else, in other threads too, a forward of the model routes as if never patched.

    With `is_fused` the op `acceptmoe::select_experts` selects and routes, for policies that have
    `fused_params`; it marks padded rows by ids below 0, which only our own experts op skips.
    """

    def __init__(
        self, adapter: MoEAdapter, policy: RoutingPolicy, *, is_fused: bool = False
    ) -> None:
        self.adapter = adapter
        self.policy = policy
        self.is_fused = is_fused
        self.counters = RoutingCounters()
        self._local = _Local()
        self._handles: list[RemovableHandle] = []

    def attach(self) -> None:
        for layer in self.adapter.layers:
            rule = self.adapter.family.scoring.rule(layer.router)
            self._handles.append(layer.router.register_forward_hook(RouterHook(self, rule)))

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def reset_counters(self) -> None:
        self.counters = RoutingCounters()

    @contextmanager
    def verifying(
        self,
        rows: BlockRows,
        *,
        is_natural: bool = False,
        is_counted: bool = True,
        has_padding: bool = False,
    ) -> Iterator[list[RoutedLayer]]:
        """Route the forward inside, a verification block of these rows, under the policy.

        Gives the list that the forward fills, one entry for each sparse layer. With `is_natural`
        every row keeps its own experts, whatever the policy. `has_padding` says that rows may be
        padding; they are routed to the root's experts, so that they touch none beyond.
        """
        layers: list[RoutedLayer] = []
        is_natural = is_natural or self.policy.is_natural
        fused = None if is_natural else self._fused_rows(rows)
        self._local.block = _ActiveBlock(rows, layers, is_natural, has_padding, fused)
        try:
            yield layers
        finally:
            self._local.block = None
        if is_counted:
            self.counters.add_pass(rows, layers)

    def _fused_rows(self, rows: BlockRows) -> FusedRows | None:
        if not (self.is_fused and has_own_fused_params(self.policy)):
            return None
        params = self.policy.fused_params(rows)
        if params is None:
            return None
        return FusedRows(rows, params, torch.ones_like(rows.is_real[0]))

    @property
    def active_block(self) -> _ActiveBlock | None:
        """The verification block that this thread is in."""
        return self._local.block


def has_own_fused_params(policy: RoutingPolicy) -> bool:
    """Whether `fused_params` speaks for `select`: a subclass may have replaced `select` alone."""

    def definer(method: str) -> type:
        return next(kind for kind in type(policy).__mro__ if method in vars(kind))

    return issubclass(definer("fused_params"), definer("select"))


@dataclass(frozen=True)
class FusedRows:
    """What the fused op takes of a block beside a layer's routing: computed once for a pass."""

    rows: BlockRows
    params: FusedParams
    is_enabled: Tensor

    def to(self, device: torch.device) -> FusedRows:
        """The same on another device (a model spread over several)."""
        if self.rows.depths.device == device:
            return self
        return FusedRows(self.rows.to(device), self.params.to(device), self.is_enabled.to(device))


@dataclass(frozen=True)
class _ActiveBlock:
    rows: BlockRows
    layers: list[RoutedLayer]
    is_natural: bool
    has_padding: bool
    fused: FusedRows | None


class _Local(threading.local):
    """Each thread has its own block, so that a plain forward in another one stays natural."""

    block: _ActiveBlock | None = None

    def __reduce__(self) -> tuple[type[_Local], tuple[()]]:
        return (_Local, ())  # a copied model starts outside any block


class RouterHook:
    """A forward hook that replaces a router's weights and ids by those inside the eligible set."""

    def __init__(self, patch: RoutingPatch, rule: RoutingRule) -> None:
        self._patch = patch
        self._rule = rule

    def __call__(
        self, router: nn.Module, args: tuple[Any, ...], output: RouterOutput
    ) -> RouterOutput | None:
        active = self._patch.active_block
        if active is None:
            return None
        if active.fused is not None:
            return self._route_fused(router, output, active.fused, active.layers)
        num_experts, natural_ids = self._patch.adapter.num_experts, output[2]
        if active.is_natural:
            active.layers.append(RoutedLayer(num_experts, natural_ids, natural_ids, output[1]))
            return route_padding(output, active.rows) if active.has_padding else None
        scoring = self._patch.adapter.family.scoring
        block = read_block(scoring, router, output, active.rows)
        selection = select_inside_groups(scoring, router, block, self._patch.policy)
        routed = route_block(scoring, router, output, block, selection)
        active.layers.append(
            RoutedLayer(
                num_experts, natural_ids, routed[2], output[1], block.gates, selection.eligible
            )
        )
        return route_padding(routed, active.rows) if active.has_padding else routed

    def _route_fused(
        self, router: nn.Module, output: RouterOutput, fused: FusedRows, layers: list[RoutedLayer]
    ) -> RouterOutput:
        adapter, natural = self._patch.adapter, NaturalRouting(*output[:3])
        here = fused.to(natural.logits.device)
        weights, ids, eligible, counts = select_experts(
            natural,
            self._rule,
            here.params,
            path_commitment=here.rows.path_commitment,
            is_real=here.rows.is_real,
            is_enabled=here.is_enabled,
            correction_bias=adapter.family.scoring.correction_bias(router),
        )
        layers.append(
            RoutedLayer(
                adapter.num_experts,
                natural.ids,
                ids,
                natural.weights,
                eligible=eligible,
                counts=counts,
                logits=natural.logits,
                rule=self._rule,
            )
        )
        return (output[0], weights, ids, *output[3:])


def route_padding(output: RouterOutput, rows: BlockRows) -> RouterOutput:
    """The router's output with padded rows sent to the root's experts."""
    is_real = rows.to(output[2].device).is_real[:, None]
    return (*output[:2], torch.where(is_real, output[2], output[2][:1]), *output[3:])


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
    """The policy's selection, completed where a router picks groups of experts first.

    Raises `InvalidArgumentError` when a policy breaks its promise; anybody can write one.
    """
    selection = policy.select(block)
    is_ours = type(policy) in POLICIES.values()  # tested; checking values makes the host wait
    if not is_ours:
        check_selection(selection, block, policy)
    if scoring.needs_completion(router):
        expert_demand = demand(block, block.rows.path_commitment)
        eligible = scoring.complete(router, block, selection.eligible, expert_demand)
        selection = Selection(eligible, selection.choice_bias, selection.combine)
    if not is_ours and not torch.compiler.is_compiling():  # a traced pass has no values yet
        check_selected_values(selection, block, policy)
    return selection


def check_selection(selection: Selection, block: RoutedBlock, policy: RoutingPolicy) -> None:
    """Raise `InvalidArgumentError` unless `selection` is one of the block's shape and device."""
    promise = f"policy {policy.name!r} must return"
    if not isinstance(selection, Selection):
        raise InvalidArgumentError(f"{promise} a Selection; it is a {type(selection).__name__}")
    device = block.gates.device
    for name, value, shape in (
        ("eligible", selection.eligible, block.gates.shape[1:]),
        ("choice_bias", selection.choice_bias, block.gates.shape),
    ):
        if value is None and name == "choice_bias":
            continue
        if not isinstance(value, Tensor):
            raise InvalidArgumentError(
                f"{promise} {name} as a tensor; it is a {type(value).__name__}"
            )
        if value.shape != shape or value.device != device:
            raise InvalidArgumentError(
                f"{promise} {name} of shape {tuple(shape)} on {device}; it has "
                f"{tuple(value.shape)} on {value.device}"
            )
    if selection.eligible.dtype != torch.bool:
        raise InvalidArgumentError(
            f"{promise} eligible in torch.bool; it is {selection.eligible.dtype}"
        )
    if selection.combine not in ("router", "natural"):
        raise InvalidArgumentError(
            f"{promise} combine 'router' or 'natural'; it is {selection.combine!r}"
        )


def check_selected_values(selection: Selection, block: RoutedBlock, policy: RoutingPolicy) -> None:
    """Raise `InvalidArgumentError` unless every row finds its experts. Waits for the device."""
    num_needed, num_eligible = block.natural_ids.shape[1], int(selection.eligible.sum())
    if num_eligible < num_needed:
        raise InvalidArgumentError(
            f"policy {policy.name!r} made {num_eligible} experts eligible; a row is routed to "
            f"{num_needed}, so it must be at least as many"
        )
    if selection.choice_bias is not None and not selection.choice_bias.isfinite().all():
        raise InvalidArgumentError(
            f"choice_bias of policy {policy.name!r} holds numbers that are not finite; leave "
            "experts out by eligible instead"
        )


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
