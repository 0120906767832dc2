"""Compare selection rules on the very same verification blocks: experts used against KL.

    python bench/policy_search.py --out bench/results/policy_search.json

Prompts of the *tuning* split are decoded naturally. Every block is verified again, from the same
cache, under every rule of `candidates`; KL(natural || rule) is taken at the nodes of the natural
path that the rule would accept, the root included, in nats per accepted node. So all rules see the
same blocks. What the rule prunes or does not trust shows in its accepted length.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from acceptmoe.api import wrap
from acceptmoe.bench.provenance import provenance
from acceptmoe.bench.setups import DRAFTERS, load_bundled_drafter
from acceptmoe.bench.workloads import encode, end_token_ids, mixed_problems
from acceptmoe.decoding.acceptance import accept_greedy
from acceptmoe.decoding.verify import Prefix, VerifiedBlock, Verifier
from acceptmoe.models.counters import RoutingCounters
from acceptmoe.models.kv import keep_path, make_cache
from acceptmoe.policies import AcceptPolicy, NaturalPolicy, RoutingPolicy, load_policy
from acceptmoe.policies.history import StepHistory
from acceptmoe.selection import RoutedBlock, Selection, anchors, select_eligible
from acceptmoe.table import CommitmentTable
from acceptmoe.targets import load_target, target_names
from acceptmoe.tree import DraftTree

PAPER = "accept-depth"
WHOLE = {"min_commitment": 0.0, "max_lost": 1.0, "max_lost_unsure": 1.0}  # neither floor nor trust
BY_DEMAND = {**WHOLE, "top": 0, "size": 1.0}  # nor an expert that does not enter by demand
NOTHING = 1e-6  # of the effective rank
MAX_NEW_TOKENS = 200


class GatePower(AcceptPolicy):
    """A variant that was left out: demand sums the gates to a power, so that large ones count."""

    def __init__(self, power: float, exponent: float) -> None:
        super().__init__(exponent=exponent, **BY_DEMAND)
        self.power = power

    def select(self, block: RoutedBlock) -> Selection:
        weights = block.rows.path_commitment[:, None] ** self.exponent
        demand = ((block.gates * block.is_wanted) ** self.power * weights).sum(dim=0)
        return Selection(select_eligible(demand, anchors(block)))


def candidates(num_experts: int) -> dict[str, RoutingPolicy]:
    """Every rule that is compared, by its label; the paper's first."""
    specs = [PAPER, *(f"moe-spec:budget={num_experts * share // 16}" for share in (3, 4, 6, 8))]
    rules = {spec: load_policy(spec) for spec in specs}
    rules["oea:top=2"] = load_policy("oea:top=2")

    def add(label: str, **settings: Any) -> None:
        rules[label] = AcceptPolicy(**settings)

    for exponent in (0.5, 1.0, 2.0):
        add(f"by demand, exponent {exponent:g}", **BY_DEMAND, exponent=exponent)
    add("by demand, 95 % of it", **{**BY_DEMAND, "sizing": "mass", "size": 0.95})
    add("by demand, anchors above 0.7", **BY_DEMAND, anchor_above=0.7)
    add("by demand, natural combine", **BY_DEMAND, combine="natural")
    for power in (1.5, 2.0):
        rules[f"by demand, gates to the power {power:g}"] = GatePower(power, exponent=0.5)
    for top in (1, 2):
        add(f"each row's best {top}, no more", **WHOLE, top=top, size=NOTHING)
    for size in (0.15, 0.3, 0.6):
        add(f"each row's best, {size:g} of the rank", **WHOLE, size=size)
    for floor in (0.01, 0.02, 0.04):
        add(f"floor {floor:g}, all trusted", **{**WHOLE, "min_commitment": floor})
        add(f"floor {floor:g}, trust", min_commitment=floor)
    add("no floor, trust", min_commitment=0.0)
    add("floor 0.02, trust, by demand, 0.9 of the rank", top=0, size=0.9)
    for exponent in (0.5, 1.0):
        add(f"floor 0.02, trust, exponent {exponent:g}", exponent=exponent)
    for max_lost, unsure, sure in ((0.35, 0.05, 0.98), (0.4, 0.07, 0.99), (0.5, 0.07, 0.99)):
        add(
            f"floor 0.02, trust {max_lost:g} / {unsure:g} / {sure:g}",
            max_lost=max_lost,
            max_lost_unsure=unsure,
            sure_above=sure,
        )
    return rules


@dataclass
class Tally:
    """Sums of one rule over blocks."""

    kl: float = 0.0
    num_agreeing: int = 0
    num_accepted: int = 0
    num_nodes: int = 0
    counters: RoutingCounters = field(default_factory=RoutingCounters)


class Search:
    """One target, its drafter, and the blocks of its natural decoding."""

    def __init__(self, target: str, drafter: str) -> None:
        self.model, self.tokenizer = load_target(target)
        self.end_ids = set(end_token_ids(self.model, self.tokenizer))
        chosen = load_bundled_drafter(drafter, target, self.model.dtype, 1)
        self.table = CommitmentTable.load(f"{target}__{chosen.name}")
        wrap(self.model, self.table, drafter=chosen, policy="natural")
        session = self.model.acceptmoe
        self.session, self.natural = session, NaturalPolicy()
        self.verifier = Verifier(
            self.model, session.adapter, session.patch, session.tap, self.table
        )

    def blocks(self, prompt: Tensor) -> Iterator[tuple[DraftTree, Cache, Prefix]]:
        """Each draft of a natural decoding before it is verified, with the cache it starts from."""
        session, model = self.session, self.model
        cache = make_cache(None, model.config, 0)
        with session.tap.recording():
            keywords = {session.adapter.cache_keyword: cache, "use_cache": True}
            logits = model(input_ids=prompt, **keywords).logits
        root = int(logits[0, -1].argmax())
        session.drafter.start(prompt[0], root, session.tap.features)
        prefix = Prefix(torch.ones(prompt.shape[1], dtype=torch.bool), prompt.shape[1])
        while root not in self.end_ids and prefix.length < prompt.shape[1] + MAX_NEW_TOKENS:
            tree = session.drafter.propose(session.num_nodes, session.max_depth)
            yield tree, cache, prefix
            block = self.verify(self.natural, tree, cache, prefix, RoutingCounters())
            path = self.natural_path(tree, block)
            keep_path(cache, prefix.length, path)
            prefix = prefix.extended(len(path))
            root = int(block.logits[path[-1]].argmax())
            tokens = [tree.tokens[node] for node in path[1:]] + [root]
            features = None if block.features is None else block.features[list(path)]
            session.drafter.extend(tokens, features)

    def verify(
        self,
        policy: RoutingPolicy,
        tree: DraftTree,
        cache: Cache,
        prefix: Prefix,
        counters: RoutingCounters,
    ) -> VerifiedBlock:
        self.session.patch.policy, self.session.patch.counters = policy, counters
        return self.verifier.verify(tree, cache, prefix)

    def natural_path(self, tree: DraftTree, block: VerifiedBlock) -> tuple[int, ...]:
        best = block.logits.argmax(dim=-1).tolist()
        return accept_greedy(tree, best.__getitem__, self.end_ids.__contains__).nodes

    def judge(
        self,
        policy: RoutingPolicy,
        tally: Tally,
        tree: DraftTree,
        cache: Cache,
        prefix: Prefix,
        reference: Tensor,
        path: tuple[int, ...],
    ) -> None:
        """Add to `tally` what `policy` does to a block whose natural path is `path`."""
        pruner = policy.tree_policy(StepHistory(), self.table)
        kept = tree if pruner is None else pruner.prune(tree)
        block = self.verify(policy, kept, cache, prefix, tally.counters)
        keep_path(cache, prefix.length, ())
        tally.num_nodes += kept.num_nodes
        own = block.logits.float().log_softmax(dim=-1)
        node = 0
        for step, natural_node in enumerate(path):
            if step:
                token = tree.tokens[natural_node]
                children = kept.shape.children[node]
                following = [child for child in children if kept.tokens[child] == token]
                if not following:
                    return
                node = following[0]
                if block.is_trusted is not None and not block.is_trusted[node]:
                    return
            expected = reference[natural_node]
            tally.kl += float((expected.exp() * (expected - own[node])).sum())
            tally.num_agreeing += int(expected.argmax() == own[node].argmax())
            tally.num_accepted += 1


@torch.no_grad()
def search(
    target: str, drafter: str, num_prompts: int, progress: Callable[[int], None]
) -> list[dict[str, Any]]:
    """A row for every rule."""
    run = Search(target, drafter)
    rules = candidates(run.session.adapter.num_experts)
    tallies = {label: Tally() for label in rules}
    natural = Tally()
    for number, problem in enumerate(mixed_problems("tuning", num_prompts)):
        prompt = encode(run.tokenizer, problem.prompt, run.model.device)
        for tree, cache, prefix in run.blocks(prompt):
            if tree.num_nodes == 1:
                continue
            block = run.verify(run.natural, tree, cache, prefix, natural.counters)
            keep_path(cache, prefix.length, ())
            reference = block.logits.float().log_softmax(dim=-1)
            path = run.natural_path(tree, block)
            natural.num_accepted += len(path)
            natural.num_nodes += 1
            for label, policy in rules.items():
                run.judge(policy, tallies[label], tree, cache, prefix, reference, path)
        progress(number + 1)
    return [row_of(target, label, rules[label], tally, natural) for label, tally in tallies.items()]


def row_of(
    target: str, label: str, policy: RoutingPolicy, tally: Tally, natural: Tally
) -> dict[str, Any]:
    counts, num_blocks = tally.counters.read(), natural.num_nodes
    assert counts is not None, "no block was verified"
    return {
        "target": target,
        "rule": label,
        "policy": policy.name,
        "params": policy.params(),
        "num_blocks": num_blocks,
        "nodes": tally.num_nodes / num_blocks,
        "experts_used": counts.experts_used,
        "natural_union": counts.natural_union,
        "kl_step": tally.kl / tally.num_accepted,
        "top1": tally.num_agreeing / tally.num_accepted,
        "accepted_length": tally.num_accepted / num_blocks,
        "accepted_length_natural": natural.num_accepted / num_blocks,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", action="append", choices=target_names())
    parser.add_argument("--drafter", default="eagle3", choices=DRAFTERS)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    rows = []
    for target in arguments.target or target_names():
        done = search(
            target,
            arguments.drafter,
            arguments.prompts,
            lambda n, name=target: print(f"\r{name}: {n}/{arguments.prompts}", end="", flush=True),
        )
        paper = done[0]
        print()
        for row in sorted(done, key=lambda row: row["experts_used"]):
            print(
                f"{row['rule']:46} used {row['experts_used']:6.2f}"
                f" ({row['experts_used'] / paper['experts_used']:.2f})"
                f"  kl {row['kl_step']:.6f}  top-1 {row['top1']:.4f}  nodes {row['nodes']:4.1f}"
                f"  length {row['accepted_length']:.2f} of {row['accepted_length_natural']:.2f}"
            )
        rows += done
    arguments.out.write_text(json.dumps({"provenance": provenance(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
