"""The routing hook with the fused op against the same hook without it, on real models."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import acceptmoe
from acceptmoe.decoding.audit_statistics import row_masses
from acceptmoe.models import patching
from acceptmoe.models.adapter import MoEAdapter
from acceptmoe.models.patching import RoutingPatch
from acceptmoe.policies import POLICIES, AcceptPolicy, NaturalPolicy, RoutingPolicy, load_policy
from acceptmoe.selection import BlockRows, Selection
from acceptmoe.tree import DraftTree, TreeShape
from drafters import ScriptedDrafter
from tables import make_table_for
from tiny_models import CONFIGS, VOCAB_SIZE, is_available, make_model

NUM_NODES, MAX_DEPTH = 10, 3
# Enough experts that the rows of a block want more of them than are eligible.
NUM_EXPERTS = {"num_experts": 24, "num_local_experts": 24, "n_routed_experts": 24}
OTHER_POLICIES = (
    "accept-depth",
    "accept:anchor_above=0.3,sizing=mass,size=0.7,combine=natural",
    "accept:exponent=0.5,top=0,size=0.6",
)


def make_large_model(family: str):
    changes = {name: count for name, count in NUM_EXPERTS.items() if name in CONFIGS[family][1]}
    model = make_model(family, **changes)
    adapter = MoEAdapter(model)
    for layer in adapter.layers:
        with torch.no_grad():
            # Even gates have an effective rank that rounds up to all wanted experts.
            layer.router.weight.mul_(3)
    return model, adapter


@dataclass
class Run:
    """What one decoding did: its text, and of each layer of each pass the ids and the set."""

    text: list[int]
    report: dict
    ids: list[Tensor] = field(default_factory=list)
    eligible: list[Tensor] = field(default_factory=list)


def decode(model, monkeypatch: pytest.MonkeyPatch, *, is_fused: bool) -> Run:
    session = model.acceptmoe
    session.patch.is_fused = is_fused
    session.drafter.script = random_tree(torch.Generator().manual_seed(13))
    session.reset_statistics()
    run = Run([], {})
    fused, unfused = patching.select_experts, patching.route_block

    def spy_fused(*arguments, **keywords):
        outputs = fused(*arguments, **keywords)
        run.eligible.append(outputs[2])
        return outputs

    def spy_unfused(scoring, router, output, block, selection):
        run.eligible.append(selection.eligible)
        return unfused(scoring, router, output, block, selection)

    def spy_router(router, args, output) -> None:  # hooks run in order: after the restriction
        if session.patch.active_block is not None:
            run.ids.append(output[2])

    handles = [layer.router.register_forward_hook(spy_router) for layer in session.adapter.layers]
    with monkeypatch.context() as patch:
        patch.setattr(patching, "select_experts", spy_fused)
        patch.setattr(patching, "route_block", spy_unfused)
        prompt = torch.randint(VOCAB_SIZE, (1, 12), generator=torch.Generator().manual_seed(12))
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=8,
            pad_token_id=0,
        )
    for handle in handles:
        handle.remove()
    run.text, run.report = output[0].tolist(), session.report()
    return run


def random_tree(generator: torch.Generator):
    """A script that proposes random tokens in one bushy shape."""

    def propose(text: list[int], num_nodes: int, max_depth: int) -> DraftTree:
        if num_nodes < NUM_NODES or max_depth < MAX_DEPTH:
            return DraftTree.root_only(text[-1])
        tokens = torch.randperm(VOCAB_SIZE, generator=generator)[: NUM_NODES - 1].tolist()
        shape = TreeShape((-1, 0, 0, 0, 1, 1, 2, 4, 4, 6))
        probabilities = (1.0, 0.6, 0.3, 0.2, 0.4, 0.1, 0.2, 0.3, 0.1, 0.05)
        return DraftTree((text[-1], *tokens), shape.parents, probabilities)

    return propose


def check_arms(family: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_available(family):
        pytest.skip(f"this Transformers version has no {family}")
    model, adapter = make_large_model(family)
    table = make_table_for(model, num_nodes=NUM_NODES, max_depth=MAX_DEPTH, drafter="scripted")
    acceptmoe.wrap(
        model,
        table,
        drafter=ScriptedDrafter(lambda *_: None),
        policy=policy,
        num_nodes=NUM_NODES,
        max_depth=MAX_DEPTH,
    )
    plain = decode(model, monkeypatch, is_fused=False)
    fused = decode(model, monkeypatch, is_fused=True)
    assert fused.text == plain.text
    assert len(fused.ids) == len(fused.eligible) == len(plain.ids) == len(plain.eligible)
    assert len(fused.ids) >= 4 * len(adapter.layers)
    for a, b in zip(fused.eligible, plain.eligible, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(fused.ids, plain.ids, strict=True):
        # A group-limited router does not sort its ids, the op does.
        assert torch.equal(a.sort(dim=1).values, b.sort(dim=1).values)
    for name in ("natural_union", "eligible", "experts_used", "routed_pairs"):
        assert fused.report[name] == plain.report[name]
    assert fused.report["excluded_mass"] == pytest.approx(plain.report["excluded_mass"], rel=1e-5)
    assert fused.report["eligible"] < adapter.num_experts
    assert fused.report["excluded_mass"] > 0


@pytest.mark.parametrize("family", CONFIGS)
def test_fused_and_unfused_routing_give_the_same_sets_ids_and_texts(family, monkeypatch):
    check_arms(family, "accept", monkeypatch)


@pytest.mark.parametrize("policy", OTHER_POLICIES)
@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "olmoe"])
def test_every_setting_of_our_policies_gives_the_same(family, policy, monkeypatch):
    check_arms(family, policy, monkeypatch)


def test_our_experts_bring_the_fused_op_and_unwrap_takes_it_off():
    model, adapter = make_large_model("olmoe")
    table = make_table_for(model, num_nodes=NUM_NODES, max_depth=MAX_DEPTH, drafter="scripted")
    drafter = ScriptedDrafter(random_tree(torch.Generator().manual_seed(13)))
    size = {"num_nodes": NUM_NODES, "max_depth": MAX_DEPTH}
    acceptmoe.wrap(model, table, drafter=drafter, experts="acceptmoe", **size)
    session = model.acceptmoe
    assert session.patch.is_fused
    model.generate(torch.arange(8)[None], max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert session.report()["eligible"] < adapter.num_experts
    acceptmoe.unwrap(model)
    acceptmoe.wrap(model, table, drafter=drafter, **size)
    assert not model.acceptmoe.patch.is_fused


def make_rows(num_rows: int, num_padded: int = 0) -> BlockRows:
    depths = torch.arange(num_rows).clamp_max(3)
    is_real = torch.arange(num_rows) < num_rows - num_padded
    return BlockRows(depths, 0.6**depths, 0.4**depths, is_real)


def attach(family: str, policy: RoutingPolicy | str = "accept"):
    """A patched model's router and its patch, with the fused op."""
    _, adapter = make_large_model(family)
    patch = RoutingPatch(adapter, load_policy(policy), is_fused=True)
    patch.attach()
    return adapter.layers[-1].router, patch


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "olmoe", "qwen3_moe"])
@torch.no_grad()
def test_padded_rows_are_marked_for_the_experts_op(family):
    router, patch = attach(family)
    hidden = torch.randn(7, router.hidden_dim, generator=torch.Generator().manual_seed(1))
    natural = router(hidden)
    with patch.verifying(make_rows(7, num_padded=2)):
        _, weights, ids = router(hidden)
    assert (ids[5:] == -1).all()
    assert (weights[5:] == 0).all()
    assert (ids[:5] >= 0).all()
    assert torch.equal(ids[0], natural[2][0])
    assert torch.equal(weights[0], natural[1][0])
    counts = patch.counters.read()
    assert counts.routed_pairs == 5 * router.top_k


class OwnPolicy(RoutingPolicy):
    """A policy of somebody else, who knows nothing of the op."""

    name = "own"

    def select(self, block):
        return load_policy("accept").select(block)


class DerivedPolicy(AcceptPolicy):
    """Ours with another selection; the parameters it inherits are not its own."""

    name = "derived"

    def select(self, block):
        return Selection(torch.ones_like(super().select(block).eligible))


@pytest.mark.parametrize(
    "policy",
    [NaturalPolicy(), OwnPolicy(), DerivedPolicy(), load_policy("xshare:size=6")],
    ids=lambda policy: policy.name,
)
@torch.no_grad()
def test_policies_without_fused_parameters_keep_the_plain_path(policy, monkeypatch):
    router, patch = attach("qwen3_moe", policy)
    monkeypatch.setattr(patching, "select_experts", None)
    hidden = torch.randn(7, router.hidden_dim, generator=torch.Generator().manual_seed(1))
    with patch.verifying(make_rows(7)):
        router(hidden)
    assert patch.counters.read() is not None


@torch.no_grad()
def test_a_pass_that_is_to_be_natural_is_natural():
    router, patch = attach("qwen3_moe")
    hidden = torch.randn(7, router.hidden_dim, generator=torch.Generator().manual_seed(1))
    natural = router(hidden)
    with patch.verifying(make_rows(7), is_natural=True):
        got = router(hidden)
    for a, b in zip(got, natural, strict=True):
        assert torch.equal(a, b)


@torch.no_grad()
def test_an_audit_finds_the_same_gates_and_sets_behind_both_paths():
    router, patch = attach("deepseek_v3")
    hidden = torch.randn(7, router.hidden_dim, generator=torch.Generator().manual_seed(1))
    with patch.verifying(make_rows(7)) as fused:
        router(hidden)
    patch.is_fused = False
    with patch.verifying(make_rows(7)) as unfused:
        router(hidden)
    assert torch.equal(fused[0].gates, unfused[0].gates)
    assert torch.equal(fused[0].eligible, unfused[0].eligible)
    assert torch.equal(row_masses(fused[0]), row_masses(unfused[0]))


def test_which_policies_the_op_covers():
    rows = make_rows(4)
    ours = {name for name, kind in POLICIES.items() if "fused_params" in vars(kind)}
    assert ours == {"accept", "accept-depth"}
    for name in ours:
        assert load_policy(name).fused_params(rows) is not None
    assert load_policy("xshare:size=6").fused_params(rows) is None


def test_fused_parameters_are_computed_once_for_a_pass(monkeypatch):
    router, patch = attach("qwen3_moe")
    calls = []
    fused_params = patch.policy.fused_params
    monkeypatch.setattr(
        patch.policy, "fused_params", lambda rows: calls.append(rows) or fused_params(rows)
    )
    with torch.no_grad(), patch.verifying(make_rows(5)):
        for layer in patch.adapter.layers:
            layer.router(torch.zeros(5, router.hidden_dim))
    assert len(calls) == 1


@pytest.mark.parametrize("policy", ["accept", *OTHER_POLICIES])
@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "olmoe"])
@torch.no_grad()
def test_the_hook_reads_nothing_back_to_the_host(family, policy):
    """Under a fake device any read of a value fails."""
    router, patch = attach(family, policy)
    state = {**dict(router.named_parameters()), **dict(router.named_buffers())}
    with FakeTensorMode() as mode:
        fake_state = {name: mode.from_tensor(value) for name, value in state.items()}
        rows = BlockRows(*(mode.from_tensor(value) for value in vars(make_rows(7, 1)).values()))
        hidden = mode.from_tensor(torch.zeros(7, router.hidden_dim))
        with patch.verifying(rows):
            _, weights, ids = torch.func.functional_call(router, fake_state, (hidden,))
        assert weights.shape == ids.shape == (7, router.top_k)
        assert ids.dtype == torch.int64


@pytest.mark.parametrize("is_fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "olmoe", "qwen3_moe"])
@torch.no_grad()
def test_a_router_with_its_hook_compiles_into_one_graph(family, is_fused):
    router, patch = attach(family)
    patch.is_fused = is_fused
    hidden = torch.randn(7, router.hidden_dim, generator=torch.Generator().manual_seed(1))
    with patch.verifying(make_rows(7)):
        expected = router(hidden)
    counts = patch.counters.read()
    patch.reset_counters()
    torch._dynamo.reset()
    compiled = torch.compile(router, fullgraph=True, backend="aot_eager")
    with patch.verifying(make_rows(7)):
        got = compiled(hidden)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)
    assert patch.counters.read() == counts
