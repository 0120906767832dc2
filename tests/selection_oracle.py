"""The paper's selection as slow, obvious loops: what `acceptmoe.selection` is compared with."""

from __future__ import annotations

import math


def demand(gates, natural_ids, weights, is_real):
    totals = [0.0] * len(gates[0])
    for row, ids in enumerate(natural_ids):
        if is_real[row]:
            for expert in ids:
                totals[expert] += weights[row] * gates[row][expert]
    return totals


def eligible(expert_demand, anchors):
    rest = [e for e in range(len(expert_demand)) if e not in anchors]
    total = sum(expert_demand[e] for e in rest)
    if total == 0:
        return set(anchors)
    shares = [expert_demand[e] / total for e in rest if expert_demand[e] > 0]
    rank = math.exp(-sum(share * math.log(share) for share in shares))
    size = min(len(shares), math.ceil(rank - 1e-3))
    by_demand = sorted(rest, key=lambda e: (-expert_demand[e], e))
    return set(anchors) | set(by_demand[:size])


def prune(eligible_set, anchors, resident, expert_demand, natural_ids, is_real, min_experts):
    assigned = [0] * len(expert_demand)
    for row, ids in enumerate(natural_ids):
        for expert in ids:
            assigned[expert] += bool(is_real[row])
    budget = sum(n for expert, n in enumerate(assigned) if expert not in eligible_set)
    candidates = [e for e in eligible_set if e not in anchors and e not in resident]
    kept, spent = set(eligible_set), 0
    for expert in sorted(candidates, key=lambda e: (expert_demand[e], -e)):
        spent += assigned[expert]
        if spent > budget or len(kept) <= min_experts:
            break
        kept.remove(expert)
    return kept
