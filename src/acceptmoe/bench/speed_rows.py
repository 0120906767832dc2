"""From timed texts to the rows and the summary of the speed benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from acceptmoe.bench.intervals import median_ratio_interval, quartiles
from acceptmoe.bench.policy_grid import ASSISTED, LOOKUP, NATURAL, PEERS, PLAIN
from acceptmoe.bench.setups import num_experts
from acceptmoe.bench.speed import (
    GUARD_TREE,
    NATURAL_TREES,
    Phase,
    SpeedSettings,
    best_arm,
    final_arms,
    tokens_per_s,
)
from acceptmoe.bench.speed_arms import GUARDED, LOOKUP_TOKENS, ROUTING_FIELDS, ArmName
from acceptmoe.bench.work_file import Record
from acceptmoe.policies import DEFAULT_POLICY, load_policy

Row = dict[str, Any]
Texts = dict[str, dict[int, Record]]  # the records of one target and phase, by arm and prompt


def speed_rows(settings: SpeedSettings, records: Sequence[Record]) -> list[Row]:
    """One row for every reported arm of every target."""
    rows = []
    for target in settings.targets:
        texts = texts_of(records, target, "test", settings.num_prompts)
        baselines = baselines_of(settings, records, target)
        best = {best_arm(settings, records, target, p) for p in settings.policies_of(target)}
        for name in final_arms(settings, records, target):
            row = make_row(settings, target, name, texts)
            row["is_best_tree"] = name in best
            row["ratios"] = {label: ratio(texts, name, other) for label, other in baselines.items()}
            rows.append(row)
    return rows


def tuning_rows(settings: SpeedSettings, records: Sequence[Record]) -> list[Row]:
    """One row for every policy and tree, on the tuning prompts."""
    return [
        make_row(settings, target, ArmName(policy, tree), texts)
        for target in settings.targets
        for texts in [texts_of(records, target, "tuning", settings.num_tuning_prompts)]
        for policy in settings.policies_of(target)
        for tree in settings.trees
    ]


def texts_of(records: Sequence[Record], target: str, phase: Phase, num_prompts: int) -> Texts:
    """The records of one target and phase."""
    texts: Texts = {}
    for record in records:
        is_wanted = (record["target"], record["phase"]) == (target, phase)
        if is_wanted and record["index"] < num_prompts:
            texts.setdefault(record["arm"], {})[record["index"]] = record
    return texts


def baselines_of(
    settings: SpeedSettings, records: Sequence[Record], target: str
) -> dict[str, ArmName]:
    """What every arm is compared with, by the name of the ratio."""
    usual = {f"natural-{tree.num_nodes}": ArmName(NATURAL, tree) for tree in NATURAL_TREES}
    best = {"best-natural": best_arm(settings, records, target, NATURAL)}
    return {peer: ArmName(peer) for peer in PEERS} | usual | best


def make_row(settings: SpeedSettings, target: str, name: ArmName, texts: Texts) -> Row:
    """Speed in tokens/s over prompts, and what the arm did."""
    mine, plain = texts[str(name)], texts[PLAIN]
    speeds = [speed for speed in map(tokens_per_s, mine.values()) if speed is not None]
    first, median, third = quartiles(speeds) if speeds else (None, None, None)
    num_passes = sum(record["num_passes"] for record in mine.values())
    is_peer = name.policy in PEERS
    policy = None if is_peer else load_policy(name.policy)
    return {
        "target": target,
        "drafter": _peer_drafter(name.policy) if is_peer else settings.drafter,
        "policy": name.policy if policy is None else policy.name,
        "params": _peer_params(name.policy) if policy is None else policy.params(),
        "num_nodes": None if name.tree is None else name.tree.num_nodes,
        "max_depth": None if name.tree is None else name.tree.max_depth,
        "is_chain": None if name.tree is None else name.tree.is_chain,
        "tokens_per_s": median,
        "q1": first,
        "q3": third,
        "call_tokens_per_s": statistics.median(
            len(record["token_ids"]) / record["call_s"] for record in mine.values()
        ),
        "accepted_length": _average(mine, "num_verified_tokens", num_passes),
        **{field: _average(mine, field, num_passes) for field in ROUTING_FIELDS},
        "num_experts": num_experts(target),
        "same_as_natural": statistics.fmean(
            record["token_ids"] == plain[index]["token_ids"] for index, record in mine.items()
        ),
        # Prompt by prompt, so that two files can be compared in pairs; None without a second token.
        "tokens_per_s_by_prompt": [tokens_per_s(record) for _, record in sorted(mine.items())],
        "num_prompts": len(mine),
        "num_tokens": sum(len(record["token_ids"]) for record in mine.values()),
    }


def _peer_drafter(policy: str) -> str | None:
    return {LOOKUP: "prompt-lookup", ASSISTED: "assistant"}.get(policy)


def _peer_params(policy: str) -> dict[str, Any]:
    return {"prompt_lookup_num_tokens": LOOKUP_TOKENS} if policy == LOOKUP else {}


def _average(texts: dict[int, Record], name: str, num_passes: int) -> float | None:
    if not num_passes:
        return None
    return float(sum(record[name] for record in texts.values()) / num_passes)


def ratio(texts: Texts, name: ArmName, baseline: ArmName) -> Row | None:
    """The median over prompts of one arm's tokens/s over another's on the same prompt.

    None where no prompt has a speed under both.
    """
    pairs = [
        (speed, other)
        for index, record in texts[str(name)].items()
        if (speed := tokens_per_s(record)) is not None
        and (other := tokens_per_s(texts[str(baseline)][index])) is not None
    ]
    if not pairs:
        return None
    numerators, denominators = zip(*pairs, strict=True)
    low, high = median_ratio_interval(numerators, denominators)
    median = statistics.median(speed / other for speed, other in pairs)
    return {"median": median, "low": low, "high": high}


def summarise_speed(rows: Sequence[Row]) -> list[Row]:
    """For each target, the default policy at its best tree against every baseline."""
    summary = []
    for row in rows:
        if row["policy"] != DEFAULT_POLICY or not row["is_best_tree"]:
            continue
        if row["params"] != load_policy(None).params():
            continue
        ratios = row["ratios"]
        usual = [ratios[f"natural-{tree.num_nodes}"] for tree in NATURAL_TREES]
        known = [found["median"] for found in usual if found is not None]
        summary.append(
            {
                "target": row["target"],
                "num_nodes": row["num_nodes"],
                "max_depth": row["max_depth"],
                "tokens_per_s": row["tokens_per_s"],
                # The faster of the two natural trees is the one with the smaller ratio to it.
                "ratio_to_faster_usual_natural": min(known, default=None),
                "ratios": ratios,
            }
        )
    return summary


def guard_rows(settings: SpeedSettings, records: Sequence[Record]) -> list[Row]:
    """For each target, natural trees of random tokens under the guard against plain decoding."""
    if not settings.num_guard_prompts:
        return []
    rows = []
    guarded, plain = ArmName(GUARDED, GUARD_TREE), ArmName(PLAIN)
    for target in settings.targets:
        texts = texts_of(records, target, "guard", settings.num_guard_prompts)
        mine, other = texts[str(guarded)], texts[str(plain)]
        last = mine[max(mine)]
        rows.append(
            {
                "target": target,
                "num_nodes": GUARD_TREE.num_nodes,
                "tokens_per_s": _pooled_speed(mine),
                "plain_tokens_per_s": _pooled_speed(other),
                "ratio": ratio(texts, guarded, plain),
                "num_verifications": sum(record["num_passes"] for record in mine.values()),
                "same_as_natural": statistics.fmean(
                    record["token_ids"] == other[index]["token_ids"]
                    for index, record in mine.items()
                ),
                "guard_state": last["guard_state"],
                "guard_reason": last["guard_reason"],
                "num_prompts": len(mine),
            }
        )
    return rows


def _pooled_speed(texts: dict[int, Record]) -> float | None:
    """Tokens over seconds of all texts together: what finding out has cost is in it."""
    seconds = sum(record["decode_s"] for record in texts.values())
    num_decoded = sum(len(r["token_ids"]) - r["num_first"] for r in texts.values())
    return num_decoded / seconds if seconds > 0 else None
