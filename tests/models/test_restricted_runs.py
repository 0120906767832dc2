"""Real decoding under a restricting policy: who is routed where, and the counts of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

import acceptmoe
from acceptmoe.models.patching import select_inside_groups
from acceptmoe.policies import AcceptDepthPolicy, AcceptPolicy, NaturalPolicy, RoutingPolicy
from acceptmoe.selection import RoutedBlock, Selection
from acceptmoe.tree import DraftTree, TreeShape
from drafters import ScriptedDrafter
from tables import make_table_for
from tiny_models import VOCAB_SIZE, make_model

NUM_NODES, MAX_DEPTH = 10, 3
# Enough experts that the rows of a block want more of them than their effective rank.
MANY_EXPERTS = {
    "deepseek_v3": {"n_routed_experts": 32, "num_hidden_layers": 3},
    "glm4_moe": {"n_routed_experts": 24, "num_hidden_layers": 3},
    "gpt_oss": {"num_local_experts": 24},
    "mixtral_sliding": {"num_local_experts": 24},
    "olmoe": {"num_experts": 24},
    "qwen3_moe": {"num_experts": 24, "num_hidden_layers": 3},
}


class SpyPolicy(RoutingPolicy):
    """Another policy that remembers every block and the selection it gave for it."""

    def __init__(self, policy: RoutingPolicy) -> None:
        self.policy = policy
        self.name = policy.name
        self.reads_depths, self.reads_paths = policy.reads_depths, policy.reads_paths
        self.blocks: list[tuple[RoutedBlock, Selection]] = []

    def select(self, block: RoutedBlock) -> Selection:
        selection = self.policy.select(block)
        self.blocks.append((block, selection))
        return selection


@dataclass
class RoutingLog:
    """What left the routers, in the order of their calls; (router, ids) of every verified layer."""

    calls: list[tuple[torch.nn.Module, Tensor]] = field(default_factory=list)


def random_tree(generator: torch.Generator):
    """A script that proposes random tokens in one bushy shape: rows of every kind, few accepted."""

    def propose(text: list[int], num_nodes: int, max_depth: int) -> DraftTree:
        if num_nodes < NUM_NODES or max_depth < MAX_DEPTH:
            return DraftTree.root_only(text[-1])
        tokens = torch.randperm(VOCAB_SIZE, generator=generator)[: NUM_NODES - 1].tolist()
        shape = TreeShape((-1, 0, 0, 0, 1, 1, 2, 4, 4, 6))
        probabilities = tuple(0.4**depth for depth in shape.depths)
        return DraftTree((text[-1], *tokens), shape.parents, probabilities)

    return propose


def run(family: str, policy: RoutingPolicy):
    """Decode a random text; the wrapped model, the spy and what left its routers."""
    model = make_model(family, **MANY_EXPERTS[family])
    spy = SpyPolicy(policy)
    table = make_table_for(model, num_nodes=NUM_NODES, max_depth=MAX_DEPTH, drafter="scripted")
    drafter = ScriptedDrafter(random_tree(torch.Generator().manual_seed(13)))
    acceptmoe.wrap(
        model, table, drafter=drafter, policy=spy, num_nodes=NUM_NODES, max_depth=MAX_DEPTH
    )
    session, log = model.acceptmoe, RoutingLog()

    def record(router, args, output) -> None:  # hooks run in order: after the restriction
        if session.patch.active_block is not None:
            log.calls.append((router, output[2].clone()))

    for layer in session.adapter.layers:
        with torch.no_grad():
            # Even gates have an effective rank that rounds up to all wanted experts.
            layer.router.weight.mul_(3)
        layer.router.register_forward_hook(record)
    generator = torch.Generator().manual_seed(12)
    prompt = torch.randint(VOCAB_SIZE, (1, 12), generator=generator)
    model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=10,
        pad_token_id=0,
    )
    return model, spy, log


@pytest.mark.parametrize("policy", [AcceptDepthPolicy(), AcceptPolicy()], ids=lambda p: p.name)
@pytest.mark.parametrize("family", MANY_EXPERTS)
def test_rows_stay_inside_and_counters_equal_a_slow_recount(
    family: str, policy: RoutingPolicy
) -> None:
    model, spy, log = run(family, policy)
    adapter = model.acceptmoe.adapter
    scoring = adapter.family.scoring
    num_layers = len(adapter.layers)
    report = model.acceptmoe.report()
    num_passes = report["num_verifications"]
    assert num_passes >= 4
    assert len(spy.blocks) == len(log.calls) == num_passes * num_layers

    sums = dict.fromkeys(("natural_union", "eligible", "experts_used", "excluded_mass"), 0.0)
    num_restricted_rows = 0
    for (block, selection), (router, ids) in zip(list(spy.blocks), log.calls, strict=True):
        eligible = select_inside_groups(scoring, router, block, _Answers(selection)).eligible
        inside = set(eligible.nonzero().flatten().tolist())
        rows = range(block.natural_ids.shape[0])
        natural = [set(block.natural_ids[row].tolist()) for row in rows]
        used = [set(ids[row].tolist()) for row in rows]
        assert all(len(experts) == adapter.experts_per_token for experts in used)
        assert set().union(*used) <= inside
        assert used[0] == natural[0]
        for row in rows:
            if natural[row] <= inside:
                assert used[row] == natural[row]
            else:
                num_restricted_rows += 1
        commitment = block.rows.path_commitment.tolist()
        wanted = excluded = 0.0
        for row in rows:
            for expert in natural[row]:
                mass = commitment[row] * float(block.gates[row, expert])
                wanted += mass
                excluded += mass * (expert not in inside)
        sums["natural_union"] += len(set().union(*natural))
        sums["eligible"] += len(inside)
        sums["experts_used"] += len(set().union(*used))
        sums["excluded_mass"] += excluded / wanted
    assert num_restricted_rows > 0
    for name, total in sums.items():
        # fp32 sums against double ones
        assert report[name] == pytest.approx(total / (num_passes * num_layers), rel=1e-4), name
    assert report["experts_used"] <= report["eligible"] < adapter.num_experts


class _Answers(RoutingPolicy):
    name = "answers"

    def __init__(self, selection: Selection) -> None:
        self.selection = selection

    def select(self, block: RoutedBlock) -> Selection:
        return self.selection


def test_natural_counts_the_union_and_leaves_out_prefill_and_plain_steps() -> None:
    model, _, log = run("qwen3_moe", NaturalPolicy())
    report = model.acceptmoe.report()
    num_layers = len(model.acceptmoe.adapter.layers)
    unions = [len(set(ids.flatten().tolist())) for _, ids in log.calls]
    assert len(unions) == report["num_verifications"] * num_layers
    assert report["natural_union"] == pytest.approx(sum(unions) / len(unions))
