"""Real decoding under a restricting policy: who is routed where, and whether it is counted right."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

import acceptmoe
from acceptmoe.models.patching import select_inside_groups
from acceptmoe.policies import AcceptDepthPolicy, AcceptPolicy, RoutingPolicy
from acceptmoe.selection import RoutedBlock, Selection
from tables import make_table_for
from tiny_models import VOCAB_SIZE, make_model

NUM_NODES, MAX_DEPTH = 10, 3
FAMILIES = ("qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3", "glm4_moe", "mixtral_sliding")


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


def run(family: str, policy: RoutingPolicy):
    """Decode a repeating text; the wrapped model, the spy and what left its routers."""
    model = make_model(family, num_hidden_layers=3, **_three_layers(family))
    spy = SpyPolicy(policy)
    table = make_table_for(model, num_nodes=NUM_NODES, max_depth=MAX_DEPTH, drafter="ngram")
    acceptmoe.wrap(model, table, policy=spy, num_nodes=NUM_NODES, max_depth=MAX_DEPTH)
    session, log = model.acceptmoe, RoutingLog()

    def record(router, args, output) -> None:  # hooks run in order: after the restriction
        if session.patch.active_block is not None:
            log.calls.append((router, output[2].clone()))

    for layer in session.adapter.layers:
        layer.router.register_forward_hook(record)
    generator = torch.Generator().manual_seed(12)
    prompt = torch.randint(VOCAB_SIZE, (1, 5), generator=generator).repeat(1, 4)
    model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=30,
        pad_token_id=0,
    )
    return model, spy, log


def _three_layers(family: str) -> dict:
    if family == "gpt_oss":
        return {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    return {}


@pytest.mark.parametrize("policy", [AcceptDepthPolicy, AcceptPolicy])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_stay_inside_and_counters_equal_a_slow_recount(family: str, policy) -> None:
    model, spy, log = run(family, policy())
    adapter = model.acceptmoe.adapter
    scoring = adapter.family.scoring
    num_layers = len(adapter.layers)
    report = model.acceptmoe.report()
    num_passes = report["num_verifications"]
    assert num_passes > 5
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
    model, spy, log = run("qwen3_moe", acceptmoe.policies.NaturalPolicy())
    assert not spy.blocks or spy.blocks  # natural policies are not asked
    report = model.acceptmoe.report()
    num_layers = len(model.acceptmoe.adapter.layers)
    unions = [len(set(ids.flatten().tolist())) for _, ids in log.calls]
    assert len(unions) == report["num_verifications"] * num_layers
    assert report["natural_union"] == pytest.approx(sum(unions) / len(unions))
