"""Everything that `wrap` puts together for one model; `unwrap` takes it off again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import Cache, PreTrainedModel

from acceptmoe.decoding.audit import Auditor
from acceptmoe.decoding.compiled import CompiledPasses
from acceptmoe.decoding.statistics import DecodingStatistics
from acceptmoe.decoding.steering import Steering, guard_report
from acceptmoe.decoding.turns import Turns, turns_of
from acceptmoe.decoding.verify import Prefix
from acceptmoe.drafting import AssistantDrafter, Drafter, Eagle3Drafter
from acceptmoe.models.adapter import MoEAdapter
from acceptmoe.models.dense import LinearsMode, linears_for
from acceptmoe.models.experts import ExpertsPatch
from acceptmoe.models.features import FeatureTap
from acceptmoe.models.patching import RoutingPatch
from acceptmoe.policies import RoutingPolicy
from acceptmoe.policies.history import StepHistory
from acceptmoe.table import CommitmentTable
from acceptmoe.tree import DraftTree

REFUSAL = (
    "{what} was called from inside a running generate of the same model; call it after that has "
    "returned"
)

BlockObserver = Callable[[DraftTree, tuple[int, ...]], None]


@dataclass
class Session:
    """One wrapped model: its policy, table and drafter, the hooks, the counts.

    `observers` are called after every verification block with the tree and the committed nodes.
    One `generate` at a time is let in (`exclusive`), and has the drafter alone (`drafting`). With
    `guard` drafts are made only while they pay; `history`, what steps cost and yield, outlives a
    `generate`.
    """

    adapter: MoEAdapter
    policy: RoutingPolicy
    table: CommitmentTable | None
    drafter: Drafter
    num_nodes: int
    max_depth: int
    patch: RoutingPatch
    tap: FeatureTap
    compiled: CompiledPasses | None = None
    statistics: DecodingStatistics = field(default_factory=DecodingStatistics)
    observers: list[BlockObserver] = field(default_factory=list)
    auditor: Auditor = field(default_factory=Auditor)
    guard: bool = False
    history: StepHistory = field(default_factory=StepHistory)
    clock: Callable[[], float] = time.perf_counter  # seconds; tests bring their own
    _steering: Steering | None = None  # of the latest `generate`
    experts_patch: ExpertsPatch | None = None
    linears: LinearsMode = nullcontext
    _turns: Turns = field(default_factory=lambda: Turns(REFUSAL))

    @classmethod
    def attach(
        cls,
        model: PreTrainedModel,
        adapter: MoEAdapter,
        policy: RoutingPolicy,
        table: CommitmentTable | None,
        drafter: Drafter,
        num_nodes: int,
        max_depth: int,
        compiled: CompiledPasses | None = None,
    ) -> Session:
        """Put the hooks on `model`; all checks must have passed."""
        tap = FeatureTap(model, drafter.feature_boundaries)
        patch = RoutingPatch(adapter, policy)
        patch.attach()
        return cls(adapter, policy, table, drafter, num_nodes, max_depth, patch, tap, compiled)

    @contextmanager
    def working_cache(
        self, model: PreTrainedModel, cache: Cache, prefix: Prefix, max_length: int
    ) -> Iterator[Cache]:
        """The cache that a text of up to `max_length` tokens is decoded with; it ends in `cache`.

        Compiled passes need one that stays where it is; else it is `cache` itself.
        """
        if self.compiled is None:
            yield cache
            return
        with self.compiled.working_cache(model, cache, prefix, max_length) as working:
            yield working

    def use_experts(self, experts_patch: ExpertsPatch | None, weight: Tensor) -> None:
        """Route and compute the experts by the compiled kernels from here on, until `detach`.

        So are the dense layers, in this session's passes, where the kernels are faster than torch
        for a model with weights like `weight`.
        """
        self.experts_patch = experts_patch
        self.linears = linears_for(weight, is_wanted=experts_patch is not None)
        self.patch.is_fused = experts_patch is not None
        if experts_patch is not None:
            experts_patch.attach()

    def exclusive(self, what: str) -> AbstractContextManager[None]:
        """Wait for the other threads' `generate`, then keep them out.

        Raises `WrapStateError` when this thread is inside `generate` itself: a streamer, processor
        or criterion called back, and waiting would never end.
        """
        return self._turns.taken(what)

    def reserved(self, what: str) -> AbstractContextManager[None]:
        """Like `exclusive`, but this thread may call `generate` inside, as often as it likes."""
        return self._turns.reserved(what)

    @contextmanager
    def drafting(self, model: PreTrainedModel, what: str) -> Iterator[None]:
        """Have the drafter to ourselves, ready for `model`: another one may share it.

        Waits and raises as `exclusive` does, and as the drafter's `check_target`.
        """
        with turns_of(self.drafter).taken(what):
            self.drafter.check_target(model)
            is_wanted = self.experts_patch is not None
            if isinstance(self.drafter, AssistantDrafter):
                backend = None if self.compiled is None else self.compiled.backend.name
                self.drafter.use_kernels(is_wanted=is_wanted, backend=backend)
            elif isinstance(self.drafter, Eagle3Drafter):
                self.drafter.use_kernels(is_wanted=is_wanted)
            yield

    def begin_text(self) -> Steering:
        """The decisions of one `generate` about its drafts, which begin anew with it."""
        self._steering = Steering(
            self.policy, self.table, self.num_nodes, self.history, guard=self.guard
        )
        if hasattr(self.drafter, "min_probability"):
            self.drafter.min_probability = self._steering.min_probability
        return self._steering

    def detach(self) -> None:
        """Take every hook off the model."""
        self.patch.detach()
        self.tap.detach()
        if self.compiled is not None:
            self.compiled.release()
        if self.experts_patch is not None:
            self.experts_patch.detach()

    def reset_statistics(self) -> None:
        """Begin counting anew.

        Which blocks are audited, the running KL behind `max_kl` and a tripped limit are no
        statistics: they go on as they were.
        """
        self.statistics = DecodingStatistics()
        self.history.num_guarded_steps = 0
        self.patch.reset_counters()
        self.auditor.reset_statistics()

    def resume_policy(self) -> None:
        """Restrict again after `max_kl` has switched to natural routing.

        The running KL begins anew, so the limit can trip again. Where it has not tripped, the
        running KL is forgotten and nothing else changes.
        """
        self.auditor.resume()

    def report(self) -> dict[str, Any]:
        """What has been counted since `wrap` or `reset_statistics`; reads the device once."""
        counts = self.patch.counters.read()
        routing = vars(counts) if counts else dict.fromkeys(type(self.patch.counters).FIELDS)
        return {
            "policy": self.policy.name,
            "policy_params": self.policy.params(),
            "drafter": self.drafter.name,
            "draft_weights": getattr(self.drafter, "weights", None),
            "num_nodes": self.num_nodes,
            "max_depth": self.max_depth,
            "num_experts": self.adapter.num_experts,
            "experts_per_token": self.adapter.experts_per_token,
            "num_sparse_layers": len(self.adapter.layers),
            **self.statistics.read(),
            **routing,
            "compiled": self._report_compiled(),
            "audit": self.auditor.report(),
            **guard_report(None if self._steering is None else self._steering.gate, self.history),
        }

    def _report_compiled(self) -> dict[str, Any] | None:
        if self.compiled is None:
            return None
        of_drafts = getattr(self.drafter, "num_compilations", 0)
        return {**self.compiled.report(), "num_draft_compilations": of_drafts}

    def __repr__(self) -> str:
        return (
            f"<AcceptMoE session: policy {self.policy.name}, drafter {self.drafter.name}, trees of "
            f"{self.num_nodes} nodes and depth {self.max_depth}; report() has the counts>"
        )
