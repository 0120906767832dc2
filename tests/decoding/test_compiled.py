"""Passes on static buffers change nothing: not by padding, not by replay, not over many calls.

The compiler and CUDA graphs are replaced by stand-ins here; `test_compiled_families` compiles.
"""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import StaticLayer

import acceptmoe
from acceptmoe.decoding.compiled import MIN_SLOTS, CompiledPasses
from acceptmoe.decoding.verify import Prefix, Verifier
from acceptmoe.errors import InvalidArgumentError, UnsupportedGenerateError
from acceptmoe.models.adapter import MoEAdapter
from acceptmoe.models.backend import PassBackend
from acceptmoe.models.features import FeatureTap
from acceptmoe.models.kv import find_cache_keyword, keep_path, make_cache
from acceptmoe.models.patching import RoutingPatch, route_padding
from acceptmoe.policies import RoutingPolicy, load_policy
from acceptmoe.selection import BlockRows, RoutedBlock, Selection
from acceptmoe.tree import DraftTree
from drafters import OracleDrafter, ScriptedDrafter
from passes import FakeGraphs, Uncompiled, greedy, wrap_with_passes
from tiny_models import CONFIGS, NUM_LAYERS, VOCAB_SIZE, is_available, make_model

# fp32 sums over other numbers of slots and rows; logits are of order 1.
TOLERANCE = 2e-5
NUM_PROMPT = 20
KEYWORD = find_cache_keyword(make_model("qwen3_moe")) or ""
TREES = (
    (DraftTree((5, 6, 7, 8, 9), (-1, 0, 0, 2, 0), (1.0, 0.5, 0.4, 0.3, 0.1)), (0, 2, 3)),
    (DraftTree((9, 1, 2, 3), (-1, 0, 1, 2), (1.0, 0.9, 0.5, 0.5)), (0, 1)),
    (DraftTree.root_only(4), (0,)),
    (DraftTree((8, 3, 4, 5, 6, 7), (-1, 0, 0, 0, 3, 4), (1.0, 0.3, 0.2, 0.2, 0.1, 0.1)), (0, 3, 4)),
    (DraftTree((8, 3), (-1, 0), (1.0, 0.7)), (0,)),
)


class Pair:
    """The same passes padded in static buffers and by the model as it is, on a cache each."""

    def __init__(self, name: str, policy: str, sizes: tuple[int, ...]) -> None:
        self.model = make_model(name)
        adapter = MoEAdapter(self.model)
        self.patches = [RoutingPatch(adapter, load_policy(policy)) for _ in range(2)]
        self.passes = CompiledPasses(sizes, 4, self.patches[0].policy, Uncompiled())
        tap = FeatureTap(self.model, (0, NUM_LAYERS))
        self.verifiers = [
            Verifier(self.model, adapter, patch, tap, None, pool)
            for patch, pool in zip(self.patches, (self.passes, None), strict=True)
        ]
        generator = torch.Generator().manual_seed(3)
        prompt = torch.randint(VOCAB_SIZE, (1, NUM_PROMPT), generator=generator)
        self.caches = [make_cache(None, self.model.config, 0) for _ in range(2)]
        for cache in self.caches:
            self.model(prompt, use_cache=True, **{adapter.cache_keyword: cache})

    def verify(self, tree: DraftTree, working: Cache, prefix: Prefix):
        """The block of both ways, padded first."""
        blocks = []
        for patch, verifier, cache in zip(
            self.patches, self.verifiers, (working, self.caches[1]), strict=True
        ):
            patch.attach()
            blocks.append(verifier.verify(tree, cache, prefix))
            patch.detach()
        return blocks


@pytest.mark.parametrize("policy", ["natural", "accept"])
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_padding_changes_nothing(name: str, policy: str) -> None:
    if not is_available(name):
        pytest.skip(f"this Transformers version has no {name}")
    pair = Pair(name, policy, (4, 11))
    # A hole in the prompt, as left padding makes one.
    is_valid = torch.ones(NUM_PROMPT, dtype=torch.bool)
    is_valid[1] = False
    prefix = Prefix(is_valid, NUM_PROMPT)
    with pair.passes.working_cache(pair.model, pair.caches[0], prefix, 64) as working:
        for tree, nodes in TREES:
            padded, plain = pair.verify(tree, working, prefix)
            assert padded.logits.shape == plain.logits.shape
            torch.testing.assert_close(padded.logits, plain.logits, rtol=0, atol=TOLERANCE)
            torch.testing.assert_close(padded.features, plain.features, rtol=0, atol=TOLERANCE)
            for cache in (working, pair.caches[1]):
                keep_path(cache, prefix.length, nodes)
            prefix = prefix.extended(len(nodes))
    for layer, other in zip(*(cache.layers for cache in pair.caches), strict=True):
        torch.testing.assert_close(layer.keys, other.keys, rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(layer.values, other.values, rtol=0, atol=TOLERANCE)
    counts = [patch.counters.read() for patch in pair.patches]
    assert vars(counts[0]) == pytest.approx(vars(counts[1]), abs=1e-5)


def test_padded_rows_are_sent_to_the_roots_experts() -> None:
    is_real = torch.tensor([True, True, False, False])
    rows = BlockRows(torch.zeros(4, dtype=torch.int64), torch.ones(4), torch.ones(4), is_real)
    ids = torch.tensor([[4, 1], [2, 3], [5, 6], [7, 0]])
    output = route_padding((torch.zeros(4, 8), torch.ones(4, 2), ids, "more"), rows)
    assert output[2].tolist() == [[4, 1], [2, 3], [4, 1], [4, 1]]
    assert output[3] == "more"


@pytest.fixture(scope="module")
def target() -> tuple[PreTrainedModel, list[Tensor], list[list[int]]]:
    """A model, prompts of several lengths, and a longer text than is asked for after each."""
    model = make_model("qwen3_moe")
    generator = torch.Generator().manual_seed(5)
    prompts = [
        torch.randint(VOCAB_SIZE, (1, length), generator=generator) for length in (3, 30, 11)
    ]
    return model, prompts, [greedy(model, prompt, max_new_tokens=40) for prompt in prompts]


class Oracle(ScriptedDrafter):
    """An `OracleDrafter` of several texts: it finds the one that has begun."""

    def __init__(self, futures: list[list[int]]) -> None:
        self.futures = futures
        super().__init__(self._propose)

    def _propose(self, text: list[int], num_nodes: int, max_depth: int) -> DraftTree:
        future = next(future for future in self.futures if future[: len(text)] == text)
        oracle = OracleDrafter(future, VOCAB_SIZE)
        oracle.text = text
        return oracle.propose(num_nodes, max_depth)


@pytest.fixture
def wrapped(target, request):
    """The model with passes of 1, 4 and 8 rows; `Uncompiled`, or with fake graphs."""
    model, _, futures = target
    wrap_with_passes(
        model,
        (1, 4, 8),
        graphs=FakeGraphs() if getattr(request, "param", False) else None,
        policy="natural",
        drafter=Oracle(futures),
        num_nodes=7,
        max_depth=3,
    )
    yield model
    acceptmoe.unwrap(model)


def check_all(model: PreTrainedModel, target, **keywords) -> None:
    """Every prompt in turn gives its own text."""
    for prompt, future in zip(*target[1:], strict=True):
        assert greedy(model, prompt, **keywords) == future[: prompt.shape[1] + 24]


class TestATextWithPasses:
    @pytest.mark.parametrize("wrapped", [False, True], indirect=True, ids=["plain", "graphs"])
    def test_is_plain_greedy_for_prompts_of_all_lengths(self, wrapped, target) -> None:
        check_all(wrapped, target)
        check_all(wrapped, target)
        report = wrapped.acceptmoe.report()["compiled"]
        # Passes of 4 and 8 rows share a forward; steps of 1 have their own.
        assert report["num_compilations"] == 2
        assert report["num_passes"] == 3
        assert report["num_uncompiled_passes"] == 0
        assert report["num_compiled_passes"] > 30

    @pytest.mark.parametrize("wrapped", [True], indirect=True)
    def test_replays_graphs_and_counts_their_memory(self, wrapped, target) -> None:
        check_all(wrapped, target)
        passes = wrapped.acceptmoe.compiled
        report = passes.report()
        assert passes._graphs.num_replays == report["num_compiled_passes"]
        assert report["pass_bytes"] > 3 * 1000
        assert report["cache_bytes"] > 0

    def test_continues_the_callers_dynamic_cache(self, wrapped, target) -> None:
        prompt, future = target[1][1], target[2][1]
        cache = DynamicCache()
        first = greedy(wrapped, prompt, **{KEYWORD: cache}, max_new_tokens=9)
        assert cache.get_seq_length() == len(first) - 1
        again = greedy(wrapped, torch.tensor([first]), **{KEYWORD: cache}, max_new_tokens=15)
        assert again == future[: prompt.shape[1] + 24]

    def test_fills_the_callers_static_cache(self, wrapped, target) -> None:
        prompt, future = target[1][1], target[2][1]
        cache = Cache(layers=[StaticLayer(max_cache_len=90) for _ in range(NUM_LAYERS)])
        text = greedy(wrapped, prompt, **{KEYWORD: cache})
        assert text == future[: prompt.shape[1] + 24]
        assert int(cache.get_seq_length()) == len(text) - 1
        # What it holds continues plainly.
        with torch.no_grad():
            last = torch.tensor([text[-1:]])
            logits = target[0].forward(last, **{KEYWORD: cache}).logits
        assert int(logits[0, -1].argmax()) == future[len(text)]

    def test_is_the_same_inside_inference_mode_and_after_it(self, wrapped, target) -> None:
        with torch.inference_mode():
            check_all(wrapped, target)
        check_all(wrapped, target)
        with torch.inference_mode():
            check_all(wrapped, target)

    def test_leaves_other_forwards_as_they_are(self, wrapped, target) -> None:
        prompt = target[1][1]
        with torch.no_grad():
            before = wrapped(prompt).logits
            check_all(wrapped, target)
            assert torch.equal(wrapped(prompt).logits, before)

    def test_of_two_threads_is_each_its_own(self, wrapped, target) -> None:
        texts: dict[int, list[int]] = {}

        def run(number: int) -> None:
            texts[number] = greedy(wrapped, target[1][number])

        threads = [threading.Thread(target=run, args=(number,)) for number in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for number in (0, 1):
            assert texts[number] == target[2][number][: target[1][number].shape[1] + 24]

    def test_takes_its_first_steps_uncompiled(self, target) -> None:
        model, prompts, futures = target
        wrap_with_passes(model, (1, 8), policy="natural", num_nodes=7, steps_before_compiling=3)
        model.acceptmoe.drafter = ScriptedDrafter(
            lambda text, num_nodes, max_depth: DraftTree.root_only(text[-1])
        )
        try:
            assert greedy(model, prompts[1]) == futures[1][: prompts[1].shape[1] + 24]
            report = model.acceptmoe.report()
        finally:
            acceptmoe.unwrap(model)
        assert report["compiled"]["num_uncompiled_passes"] == 3
        assert report["compiled"]["num_compiled_passes"] == report["num_plain_steps"] - 3 == 20

    def test_is_not_sampled(self, wrapped, target) -> None:
        with pytest.raises(UnsupportedGenerateError, match="do_sample is True"):
            wrapped.generate(target[1][0], do_sample=True, max_new_tokens=4)


class TestAfterAnInterrupt:
    @pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
    def test_inside_a_pass_the_next_text_is_exact(self, wrapped, target, error) -> None:
        handle = self.interrupt(wrapped.model.layers[1], error, after=5)
        cache = DynamicCache()
        prompt = target[1][1]
        with pytest.raises(error):
            greedy(wrapped, prompt, **{KEYWORD: cache})
        handle.remove()
        assert cache.get_seq_length() == prompt.shape[1]  # no draft, and what the prefill gave
        check_all(wrapped, target)

    @staticmethod
    def interrupt(module: nn.Module, error: type[BaseException], after: int):
        calls = iter(range(after))

        def hook(*_: object) -> None:
            if next(calls, None) is None:
                raise error

        return module.register_forward_hook(hook)


class TestPassesAreDropped:
    def test_when_a_parameter_moves(self, wrapped, target) -> None:
        check_all(wrapped, target)
        weight = wrapped.model.layers[0].self_attn.q_proj.weight
        weight.data = weight.data.clone()
        check_all(wrapped, target)
        report = wrapped.acceptmoe.report()["compiled"]
        assert report["num_passes_invalidated"] == 3
        assert "parameters, hooks or settings changed" in report["last_invalidation"]

    def test_but_not_when_only_values_change(self, wrapped, target) -> None:
        check_all(wrapped, target)
        wrapped.model.layers[0].self_attn.q_proj.weight.data.mul_(1.0)
        check_all(wrapped, target)
        assert wrapped.acceptmoe.report()["compiled"]["num_passes_invalidated"] == 0

    def test_when_a_hook_is_added(self, wrapped, target) -> None:
        check_all(wrapped, target)
        handle = wrapped.model.norm.register_forward_hook(lambda *_: None)
        check_all(wrapped, target)
        handle.remove()
        assert wrapped.acceptmoe.report()["compiled"]["num_passes_invalidated"] == 3

    def test_and_caches_with_them_when_the_dtype_changes(self, target) -> None:
        model = wrap_with_passes(make_model("mixtral"), (8,), policy="natural", num_nodes=7)
        greedy(model, target[1][0])
        model.to(torch.bfloat16)
        greedy(model, target[1][0])
        assert {
            layer.keys.dtype for layer in model.acceptmoe.compiled._caches[MIN_SLOTS].layers
        } == {torch.bfloat16}

    def test_with_the_least_recently_used_cache(self, wrapped, target) -> None:
        for num_slots in (1, 2, 4):  # capacities of the first bucket, the next, and the one after
            greedy(
                wrapped,
                target[1][0],
                max_new_tokens=num_slots * MIN_SLOTS - 20,
                eos_token_id=[*range(VOCAB_SIZE)],
            )
        passes = wrapped.acceptmoe.compiled
        assert list(passes._caches) == [2 * MIN_SLOTS, 4 * MIN_SLOTS]

    def test_by_unwrap(self, target) -> None:
        graphs = FakeGraphs()
        model = wrap_with_passes(target[0], (8,), graphs=graphs, policy="natural", num_nodes=7)
        passes = model.acceptmoe.compiled
        greedy(model, target[1][1])
        num_passes = passes.report()["num_passes"]
        acceptmoe.unwrap(model)
        assert graphs.num_reset == num_passes > 0
        assert passes.report()["num_passes"] == passes.report()["cache_bytes"] == 0


class TestATreeLargerThanEveryPass:
    def test_runs_uncompiled_and_is_counted(self, target) -> None:
        model, _, futures = target
        wrap_with_passes(
            model, (1, 4), policy="natural", drafter=Oracle(futures), num_nodes=7, max_depth=3
        )
        try:
            check_all(model, target)
            report = model.acceptmoe.report()
        finally:
            acceptmoe.unwrap(model)
        assert report["compiled"]["num_uncompiled_passes"] > 10
        assert report["compiled"]["num_compiled_passes"] > 0
        assert report["compiled"]["num_compilations"] <= 2


class TestACopy:
    @pytest.mark.parametrize(
        "duplicate",
        [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
        ids=["deepcopy", "pickle"],
    )
    def test_makes_passes_of_its_own(
        self, target, duplicate: Callable[[PreTrainedModel], PreTrainedModel]
    ) -> None:
        model = target[0]
        acceptmoe.wrap(model, policy="natural", num_nodes=7, max_depth=3, compile="eager")
        model.acceptmoe.compiled.backend = Uncompiled()
        try:
            check_all(model, target)
            other = duplicate(model)
            assert other.acceptmoe.report()["compiled"]["num_passes"] == 0
            with torch.no_grad():
                model.model.layers[0].self_attn.q_proj.weight.mul_(-1.0)
            check_all(other, target)
        finally:
            with torch.no_grad():
                model.model.layers[0].self_attn.q_proj.weight.mul_(-1.0)
            acceptmoe.unwrap(model)


class TestAnAudit:
    def test_sees_the_same_through_passes(self, target) -> None:
        model, prompts, _ = target
        reports = []
        for wrap in (acceptmoe.wrap, lambda model, **k: wrap_with_passes(model, (4, 8), **k)):
            wrap(
                model,
                policy="moe-spec:budget=3",
                drafter="ngram",
                num_nodes=7,
                max_depth=3,
                audit=0.5,
            )
            for prompt in prompts:
                greedy(model, torch.cat([prompt, prompt], dim=-1))
            reports.append(model.acceptmoe.report())
            acceptmoe.unwrap(model)
        plain, passes = reports
        assert plain["audit"]["share"] == 0.5
        assert plain["num_verifications"] == passes["num_verifications"] > 0
        assert passes["excluded_mass"] == pytest.approx(plain["excluded_mass"], abs=1e-6)
        numbers = {k: v for k, v in plain["audit"].items() if isinstance(v, float)}
        assert {k: passes["audit"][k] for k in numbers} == pytest.approx(numbers, abs=1e-5)


class TestWrapWithCompile:
    def test_reports_nothing_without_it(self, target) -> None:
        model = acceptmoe.wrap(target[0], policy="natural")
        assert model.acceptmoe.report()["compiled"] is None
        acceptmoe.unwrap(model)

    def test_takes_the_sizes_that_its_trees_need(self, target) -> None:
        model = acceptmoe.wrap(target[0], policy="natural", num_nodes=10, compile=True)
        report = model.acceptmoe.report()["compiled"]
        assert report["sizes"] == list(range(1, 11))  # no graph, so no padding
        assert report["backend"] == "inductor"
        acceptmoe.unwrap(model)

    def test_refuses_experts_that_do_not_trace(self) -> None:
        model = make_model("qwen3_moe")
        model.set_experts_implementation("eager")
        with pytest.raises(
            InvalidArgumentError, match=r"'eager', whose loop.*'grouped_mm'\) first"
        ):
            acceptmoe.wrap(model, policy="natural", compile=True)
        assert not hasattr(model, "acceptmoe")

    @pytest.mark.parametrize("value", [1, None, "inductors"])
    def test_refuses_what_is_no_backend(self, value: object) -> None:
        with pytest.raises(InvalidArgumentError, match=r"compile is .*must be True, False, or a"):
            acceptmoe.wrap(make_model("qwen3_moe"), policy="natural", compile=value)


class EvenExperts(RoutingPolicy):
    """What somebody else may write: the experts with even numbers."""

    name = "even"

    def select(self, block: RoutedBlock) -> Selection:
        return Selection(torch.arange(block.num_experts) % 2 == 0)


@pytest.mark.parametrize(
    "policy",
    [
        "accept",
        "accept-depth",
        "natural",
        "moe-spec:budget=3",
        "xshare:size=3",
        "lynx:drop=0.4",
        "oea:top=1",
        EvenExperts(),
    ],
    ids=lambda policy: policy if isinstance(policy, str) else policy.name,
)
def test_the_selection_of_a_policy_traces(policy: str | RoutingPolicy) -> None:
    model = make_model("olmoe")
    adapter = MoEAdapter(model)
    patch = RoutingPatch(adapter, load_policy(policy))
    router = adapter.layers[0].router
    patch.attach()
    backend = PassBackend("eager")

    def route(hidden: Tensor, rows: BlockRows) -> tuple[Tensor, ...]:
        with patch.verifying(rows, is_counted=False, has_padding=True):
            return router(hidden)

    compiled = backend.compile(route)
    generator = torch.Generator().manual_seed(7)
    for num_real in (5, 3):
        hidden = torch.randn(5, 48, generator=generator)
        rows = BlockRows(
            depths=torch.tensor([0, 1, 1, 2, 2]),
            depth_commitment=torch.tensor([1.0, 0.6, 0.6, 0.3, 0.3]),
            path_commitment=torch.tensor([1.0, 0.5, 0.2, 0.3, 0.1]),
            is_real=torch.arange(5) < num_real,
        )
        with torch.no_grad():
            for got, expected in zip(compiled(hidden, rows), route(hidden, rows), strict=True):
                assert torch.equal(got, expected)
    assert backend.num_graphs == 1
