"""Compiled verification passes of one wrapped model, and the caches that they write to.

The forward is compiled once for one cache and one policy, whatever the number of rows; a pass is
this forward on buffers for one number of rows. On a GPU each pass is captured as a CUDA graph too,
so there are passes of a few sizes only, and trees are padded to them. Prefills, and trees larger
than every pass, run the model as it is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from acceptmoe.decoding.buffers import BlockBuffers, BlockInputs
from acceptmoe.decoding.cuda_graphs import CudaGraphs, Graph, GraphCapture
from acceptmoe.decoding.forward import BlockForward, BlockOutput, PassKind
from acceptmoe.decoding.graph_pool import GraphPool, PassKey
from acceptmoe.decoding.graph_shapes import load_graph_shapes, sizes_for
from acceptmoe.decoding.verify import Prefix
from acceptmoe.errors import InvalidArgumentError
from acceptmoe.models.adapter import MoEAdapter
from acceptmoe.models.backend import Compiled, PassBackend, check_backend, model_state
from acceptmoe.models.block_cache import BlockCache
from acceptmoe.models.counters import RoutedLayer
from acceptmoe.ops.linear import is_faster_than_stock
from acceptmoe.policies import RoutingPolicy
from acceptmoe.table import CommitmentTable
from acceptmoe.tree import DraftTree

MIN_SLOTS = 256
MAX_CACHES = 2  # of different capacity; each holds the keys and values of a whole text
MAX_PASSES_PER_SIZE = 4
# Ordinary steps are a forward of their own. Compiling it would take longer than the few steps that
# end a text, where nothing can be drafted any more.
STEPS_BEFORE_COMPILING = 16
TRACEABLE_EXPERTS = ("grouped_mm", "batched_mm")

# Logits, features, counts, trusted rows, and the tensors of each layer's `RoutedLayer`.
ROUTED_FIELDS = tuple(
    field.name for field in fields(RoutedLayer) if field.name not in ("num_experts", "rule")
)
RoutedTensors = tuple[Tensor | None, ...]
PassOutput = tuple[
    Tensor, Tensor | None, tuple[Tensor, ...], Tensor | None, tuple[RoutedTensors, ...]
]


class CompiledForward:
    """The forward of one kind on one cache, compiled when it first runs, for all numbers of rows.

    It must first run on as many rows as it ever will: how it is parallelised is decided by them.
    """

    def __init__(
        self,
        forward: BlockForward,
        cache: BlockCache,
        kind: PassKind,
        backend: PassBackend,
        *,
        keeps_layers: bool,
    ) -> None:
        def run(inputs: Any, cache: BlockCache, slot_is_valid: Tensor) -> PassOutput:
            output = forward(inputs, cache, slot_is_valid, kind, has_padding=True)
            routed = tuple(map(routed_tensors, output.layers)) if keeps_layers else ()
            return output.logits, output.features, output.counts, output.is_trusted, routed

        self.adapter = forward.adapter
        self.device = forward.model.device
        self._cache = cache
        self._compiled: Compiled = backend.compile(run)

    def __call__(self, inputs: BlockInputs) -> PassOutput:
        output: PassOutput = self._compiled(inputs, self._cache, self._cache.slot_is_valid)
        return output


class CompiledPass:
    """A compiled forward on buffers for `num_rows` rows."""

    def __init__(self, forward: CompiledForward, num_rows: int, num_moves: int) -> None:
        self.buffers = BlockBuffers(num_rows, num_moves, forward.device)
        self.buffers.mark_rows_dynamic()
        self._forward = forward
        self._graph: Graph[PassOutput] | None = None

    def capture(self, graphs: GraphCapture) -> None:
        """Capture the pass, as the buffers are filled; the cache must have room for its rows."""
        self._graph = graphs.capture(self.run)

    def replay(self) -> BlockOutput:
        """Run on what is in `buffers`; a captured pass overwrites its result with the next one."""
        if self._graph is None:
            output = self.run()
        else:
            self._graph.replay()
            output = self._graph.output
        logits, features, counts, is_trusted, routed = output
        rows, layers = self.buffers.inputs.rows(), routed_layers(self._forward.adapter, routed)
        return BlockOutput(logits, features, counts, rows, layers, is_trusted)

    @property
    def num_bytes(self) -> int:
        return self.buffers.num_bytes + (self._graph.num_bytes if self._graph else 0)

    def release(self) -> None:
        if self._graph is not None:
            self._graph.reset()

    def run(self) -> PassOutput:
        """Run the forward itself, graph or not."""
        return self._forward(self.buffers.inputs)


def routed_tensors(layer: RoutedLayer) -> RoutedTensors:
    """The tensors of `layer`, in the order of its fields."""
    return tuple(getattr(layer, name) for name in ROUTED_FIELDS)


def routed_layers(adapter: MoEAdapter, routed: tuple[RoutedTensors, ...]) -> list[RoutedLayer]:
    """What `routed_tensors` gave, layer by layer, with what is no tensor and never changes."""
    layers = []
    for layer, tensors in zip(adapter.layers, routed, strict=False):
        found: dict[str, Any] = dict(zip(ROUTED_FIELDS, tensors, strict=True))
        if found["logits"] is not None:
            found["rule"] = adapter.family.scoring.rule(layer.router)
        layers.append(RoutedLayer(num_experts=adapter.num_experts, **found))
    return layers


class CompiledPasses:
    """The pool of a model's passes and its caches, by capacity.

    `num_moves` is the largest number of slots that a committed path moves: the nodes of a path.
    While `keeps_layers` is set, passes give what every layer did, for an audit; those made without
    it are others, and are kept.
    """

    def __init__(
        self,
        sizes: tuple[int, ...],
        num_moves: int,
        policy: RoutingPolicy,
        backend: PassBackend,
        *,
        keeps_layers: bool = False,
        graphs: GraphCapture | None = None,
        steps_before_compiling: int = STEPS_BEFORE_COMPILING,
    ) -> None:
        self.backend = backend
        self.num_compiled_passes = self.num_uncompiled_passes = self.num_padded_rows = 0
        self._sizes = sizes
        self._num_moves = num_moves
        self._policy = policy
        self.keeps_layers = keeps_layers
        self._graphs = graphs
        self._num_steps_to_wait = steps_before_compiling
        self._caches: OrderedDict[int, BlockCache] = OrderedDict()
        self._forwards: dict[PassKey, CompiledForward] = {}
        self._model_state: object = None
        self._pool = self._empty_pool()

    def _empty_pool(self) -> GraphPool[CompiledPass]:
        max_passes = MAX_PASSES_PER_SIZE * max(1, len(self._sizes))
        return GraphPool[CompiledPass](self._sizes, max_passes=max_passes)

    @contextmanager
    def working_cache(
        self, model: PreTrainedModel, cache: Cache, prefix: Prefix, max_length: int
    ) -> Iterator[BlockCache]:
        """A cache for passes over a text of up to `max_length` tokens; it begins with `cache`.

        What is committed to it goes into `cache` at the end, unless the body raises.
        """
        self.check_unmoved(model)
        with torch.inference_mode(False), torch.no_grad():
            num_layers = sum(layer.is_initialized for layer in cache.layers)
            working = self._find_cache(model, num_layers, max_length + max(self._sizes))
            working.load(cache, prefix.is_valid)
        yield working
        with torch.no_grad():
            working.store(cache, prefix.length)

    def run(
        self,
        forward: BlockForward,
        kind: PassKind,
        tree: DraftTree,
        cache: BlockCache,
        prefix: Prefix,
        table: CommitmentTable | None,
    ) -> BlockOutput | None:
        """The pass over `tree`, or None, counted, where it is to run uncompiled."""
        size = self._pool.find_size(tree.num_nodes)
        is_waiting = kind is PassKind.STEP and self._num_steps_to_wait > 0
        if size is None or prefix.length + size > cache.num_slots or is_waiting:
            self._num_steps_to_wait -= is_waiting
            self.num_uncompiled_passes += 1
            return None
        # Tensors made inside inference mode could not be written to outside it.
        with torch.inference_mode(False), torch.no_grad():
            made = self._get(size, forward, kind, tree, cache, prefix)
            made.buffers.fill(
                tree,
                prefix.length,
                prefix.next_position,
                table,
                cache.take_moves(self._num_moves),
            )
            self.num_compiled_passes += 1
            self.num_padded_rows += size - tree.num_nodes
            return made.replay()

    def check_unmoved(self, model: PreTrainedModel) -> None:
        """Drop every pass and cache if anything that one reads has moved since the last call.

        Caches too: keys and values may have another dtype or device from here on.
        """
        state = model_state(model)
        if state != self._model_state and self._model_state is not None:
            self._drop_all("the model's parameters, hooks or settings changed")
        self._model_state = state

    def release(self) -> None:
        """Drop every pass and cache."""
        self._drop_all("the model was unwrapped")

    def _drop_all(self, reason: str) -> None:
        self._pool.invalidate(reason)
        self._forwards.clear()
        self._caches.clear()

    def report(self) -> dict[str, Any]:
        """Counts of passes since `wrap`, and the memory that passes and caches hold."""
        return {
            "backend": self.backend.name,
            "sizes": list(self._sizes),
            "num_compiled_passes": self.num_compiled_passes,
            "num_uncompiled_passes": self.num_uncompiled_passes,
            "num_padded_rows": self.num_padded_rows,
            "num_compilations": self.backend.num_graphs,
            "num_linears_rewritten": self.backend.num_linears_rewritten,
            "num_attentions_folded": self.backend.num_attentions_folded,
            "cache_bytes": sum(cache.num_bytes for cache in self._caches.values()),
            **self._pool.report(),
        }

    def __getstate__(self) -> dict[str, Any]:
        # A copy compiles for itself: passes read the original's weights and caches.
        dropped = ("_pool", "_caches", "_forwards", "_model_state", "_graphs")
        return {name: value for name, value in vars(self).items() if name not in dropped}

    def __setstate__(self, state: dict[str, Any]) -> None:
        fresh: dict[str, Any] = {
            "_caches": OrderedDict(),
            "_forwards": {},
            "_model_state": None,
            "_graphs": None,
        }
        vars(self).update(state, **fresh)
        self._pool = self._empty_pool()

    def _get(
        self,
        size: int,
        forward: BlockForward,
        kind: PassKind,
        tree: DraftTree,
        cache: BlockCache,
        prefix: Prefix,
    ) -> CompiledPass:
        restricted = kind is PassKind.RESTRICTED
        policy = f"{self._policy.name} {self._policy.params()}" if restricted else kind.value
        if self.keeps_layers and kind is not PassKind.STEP:
            policy += ", with layers"

        def key(num_rows: int) -> PassKey:
            return PassKey(num_rows, 1, cache.num_slots, forward.model.dtype, policy)

        room = cache.num_slots - prefix.length
        sizes = [rows for rows in self._sizes if (rows == 1) == (size == 1) and rows <= room]
        compiled = self._forwards.get(key(size).of_any_rows())
        if compiled is None:
            compiled = CompiledForward(
                forward, cache, kind, self.backend, keeps_layers=self.keeps_layers
            )
            largest = CompiledPass(compiled, max(sizes), self._num_moves)
            self._fill_idle(largest, tree, cache, prefix)
            largest.run()
            self._forwards[key(size).of_any_rows()] = compiled

        def make(key: PassKey) -> CompiledPass:
            made = CompiledPass(compiled, key.num_rows, self._num_moves)
            if self._graphs is not None:
                self._fill_idle(made, tree, cache, prefix)
                made.capture(self._graphs)
            return made

        if self._graphs is not None:
            # All at once: graphs share one memory pool, which the largest lays out for all.
            self._pool.prepare([key(rows) for rows in sizes], make)
        return self._pool.get(key(size), make)

    def _fill_idle(
        self, made: CompiledPass, tree: DraftTree, cache: BlockCache, prefix: Prefix
    ) -> None:
        """Inputs with which `made` writes where the block's rows will lie, and moves nothing."""
        cache.make_moves()  # what the last block has committed may lie there yet
        idle = [cache.num_slots - 1] * self._num_moves
        root = DraftTree.root_only(tree.tokens[0])
        made.buffers.fill(root, prefix.length, prefix.next_position, None, (idle, idle))

    def _find_cache(self, model: PreTrainedModel, num_layers: int, num_needed: int) -> BlockCache:
        """The cache of the capacity for `num_needed` slots: powers of two, so that few exist."""
        num_slots = MIN_SLOTS
        while num_slots < num_needed:
            num_slots *= 2
        if num_slots not in self._caches:
            while len(self._caches) >= MAX_CACHES:
                self._drop_cache(next(iter(self._caches)))
            self._caches[num_slots] = BlockCache(num_layers, num_slots, model.device)
        self._caches.move_to_end(num_slots)
        return self._caches[num_slots]

    def _drop_cache(self, num_slots: int) -> None:
        del self._caches[num_slots]
        self._pool.invalidate(
            f"the cache of {num_slots} slots made room for another",
            only=lambda key: key.num_slots == num_slots,
        )
        for key in [key for key in self._forwards if key.num_slots == num_slots]:
            del self._forwards[key]


def make_compiled_passes(
    model: PreTrainedModel,
    adapter: MoEAdapter,
    policy: RoutingPolicy,
    compile: bool | str,
    num_nodes: int,
    max_depth: int,
    *,
    experts: str | None,
    keeps_layers: bool,
) -> CompiledPasses | None:
    """What `wrap(..., compile=compile)` compiles with; None where it is False.

    Raises `InvalidArgumentError` for an unknown backend and for a model whose forward cannot be
    compiled as one graph.
    """
    if compile is False:
        return None
    name = "inductor" if compile is True else check_backend(compile)
    check_compilable(model, adapter, experts)
    weight: Any = model.get_output_embeddings().weight
    uses_own_linear = experts is not None and is_faster_than_stock(weight)
    backend = PassBackend(name, torch.ops.acceptmoe.linear.default if uses_own_linear else None)
    # A graph is captured for one number of rows; a compiled forward takes any.
    is_captured = model.device.type == "cuda"
    every_size = tuple(range(1, num_nodes + 1))
    return CompiledPasses(
        sizes_for(num_nodes, load_graph_shapes()) if is_captured else every_size,
        min(max_depth + 1, num_nodes),
        policy,
        backend,
        keeps_layers=keeps_layers,
        graphs=CudaGraphs(model.device) if is_captured else None,
    )


def check_compilable(model: PreTrainedModel, adapter: MoEAdapter, experts: str | None) -> None:
    """Raise `InvalidArgumentError` unless the model's forward traces as one graph.

    `experts` is that of `wrap`: our own op traces, whatever the model computes experts by itself.
    """
    for layer in adapter.layers:
        own: Any = layer.experts
        implementation = own.config._experts_implementation
        if experts is None and implementation not in TRACEABLE_EXPERTS:
            raise InvalidArgumentError(
                f"compile is on and the experts of {layer.name} are computed by "
                f"{implementation!r}, whose loop over experts cannot be compiled; call "
                "model.set_experts_implementation('grouped_mm') first, or wrap with "
                "experts='acceptmoe'"
            )
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) > 1 or any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise InvalidArgumentError(
            f"compile is on and the model is spread over {', '.join(sorted(devices))} by "
            "accelerate, whose hooks cannot be compiled; load it on one device, or wrap it with "
            "compile=False"
        )
