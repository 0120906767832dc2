"""From records of single prompts to the rows and the summary of the quality benchmark."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from acceptmoe.bench.demo import Fidelity
from acceptmoe.bench.intervals import mean_interval, stratified_mean_interval
from acceptmoe.bench.policy_grid import NATURAL, PAPER
from acceptmoe.bench.quality import QualitySettings
from acceptmoe.bench.quality_decoding import PLAIN, ROUTING_FIELDS, drawn_problems
from acceptmoe.bench.setups import num_experts
from acceptmoe.bench.work_file import Record
from acceptmoe.policies import DEFAULT_POLICY, load_policy
from acceptmoe.targets.problem import Problem
from acceptmoe.targets.tasks import check_all

Row = dict[str, Any]
ByIndex = dict[int, Record]  # the records of one policy, by prompt


@dataclass(frozen=True)
class Judged:
    """All records that a run asked for, by target, task and policy, and which texts are right."""

    settings: QualitySettings
    records: dict[tuple[str, str, str], ByIndex]
    verdicts: dict[tuple[str, int, str, bool], bool]

    def is_right(self, record: Record) -> bool:
        return self.verdicts[_text_key(record)]

    def differences(self, target: str, task: str, policy: str) -> list[float]:
        """Right (1) or wrong (0) under the policy minus the same of natural, in points."""
        plain = self.records[target, task, PLAIN]
        return [
            100.0 * (self.is_right(record) - self.is_right(plain[index]))
            for index, record in sorted(self.records[target, task, policy].items())
        ]


def judge(settings: QualitySettings, records: Sequence[Record]) -> Judged:
    """Sort the records and check their texts; of equal texts for one problem only one is run."""
    sorted_records: dict[tuple[str, str, str], ByIndex] = defaultdict(dict)
    wanted = {target: settings.policies(target) for target in settings.targets}
    for record in records:
        target, task, policy = record["target"], record["task"], record["policy"]
        count = wanted.get(target, {}).get(policy, 0)
        if task in settings.tasks and record["index"] < count:
            sorted_records[target, task, policy][record["index"]] = record
    keys = {_text_key(r) for group in sorted_records.values() for r in group.values()}
    drawn: dict[str, tuple[Problem, ...]] = {
        task: drawn_problems(task, settings.num_prompts, settings.decoding.seed)
        for task in settings.tasks
    }
    ordered = sorted(keys)
    verdicts = check_all(
        [drawn[task][index] for task, index, _, _ in ordered],
        [text for _, _, text, _ in ordered],
        [ended for _, _, _, ended in ordered],
    )
    return Judged(settings, dict(sorted_records), dict(zip(ordered, verdicts, strict=True)))


def _text_key(record: Record) -> tuple[str, int, str, bool]:
    return record["task"], record["index"], record["text"], record["ended"]


def quality_rows(judged: Judged) -> list[Row]:
    """One row for each target, task and policy."""
    settings = judged.settings
    return [
        make_row(judged, target, task, policy)
        for target in settings.targets
        for task in settings.tasks
        for policy in settings.policies(target)
        if policy != PLAIN
    ]


def make_row(judged: Judged, target: str, task: str, policy: str) -> Row:
    """Natural's accuracy is that of plain `generate`; all else comes from draft trees."""
    plain = judged.records[target, task, PLAIN]
    trees = judged.records[target, task, policy]
    answered = plain if policy == NATURAL else trees
    differences = [0.0] * len(plain)
    if policy != NATURAL:
        differences = judged.differences(target, task, policy)
    low, high = mean_interval(differences)
    num_passes = sum(record["num_passes"] for record in trees.values())
    same = [r["token_ids"] == plain[index]["token_ids"] for index, r in trees.items()]
    chosen = load_policy(policy)
    fidelity = pooled_fidelity(trees)
    return {
        "target": target,
        "task": task,
        "policy": chosen.name,
        "params": chosen.params(),
        "num_prompts": len(answered),
        "accuracy": statistics.fmean(judged.is_right(record) for record in answered.values()),
        "accuracy_natural": statistics.fmean(judged.is_right(plain[index]) for index in answered),
        "difference_points": statistics.fmean(differences),
        "difference_low_points": low,
        "difference_high_points": high,
        "kl": fidelity.kl,
        "kl_step": pooled(
            trees, "kl_step_sum", sum(record["num_audited_tokens"] for record in trees.values())
        ),
        "top1": fidelity.top1,
        "accepted_length": pooled(trees, "num_verified_tokens", num_passes),
        **{name: pooled(trees, name, num_passes) for name in ROUTING_FIELDS},
        "num_experts": num_experts(target),
        "same_as_natural": statistics.fmean(same),
        "num_prompts_by_trees": len(trees),
        # Prompt by prompt, so that two files can be compared in pairs.
        "answers": "".join("01"[judged.is_right(record)] for _, record in sorted(answered.items())),
        "drafter": judged.settings.decoding.drafter,
        "num_nodes": judged.settings.decoding.num_nodes,
    }


def pooled_fidelity(trees: ByIndex) -> Fidelity:
    """Over all tokens of all prompts."""
    return sum(
        (Fidelity(r["num_tokens"], r["kl_sum"], r["num_agreeing"]) for r in trees.values()),
        Fidelity(),
    )


def pooled(trees: ByIndex, name: str, count: int) -> float | None:
    """A sum over all prompts divided by `count` passes or tokens; None where there was none."""
    if not count:
        return None
    return float(sum(record[name] for record in trees.values()) / count)


def summarise(judged: Judged) -> dict[str, Any]:
    """The claims that the rows are for: accuracy over all pairs, experts and KL by target."""
    settings = judged.settings
    return {
        "accuracy": [accuracy_over_pairs(judged, policy) for policy in (PAPER, DEFAULT_POLICY)],
        "default_against_paper": [against_paper(judged, target) for target in settings.targets],
        "default_against_moe_spec": [
            row for target in settings.targets for row in against_moe_spec(judged, target)
        ],
    }


def accuracy_over_pairs(judged: Judged, policy: str) -> Row:
    """The mean of the pairs' differences from natural, its interval, and the worst pair."""
    pairs = {
        (target, task): judged.differences(target, task, policy)
        for target in judged.settings.targets
        for task in judged.settings.tasks
    }
    means = {pair: statistics.fmean(values) for pair, values in pairs.items()}
    worst = min(means, key=means.__getitem__)
    low, high = stratified_mean_interval(list(pairs.values()))
    return {
        "policy": policy,
        "num_pairs": len(pairs),
        "mean_difference_points": statistics.fmean(means.values()),
        "low_points": low,
        "high_points": high,
        "worst_pair": list(worst),
        "worst_difference_points": means[worst],
    }


@dataclass(frozen=True)
class Means:
    """Of one policy, each the mean of the tasks'; 0 where nothing was ever drafted."""

    experts_used: float
    kl: float
    accepted_length: float


def against_paper(judged: Judged, target: str) -> Row:
    """Experts used, KL and accepted length of the default and the paper's rule, same prompts."""
    ours = mean_over_tasks(judged, target, DEFAULT_POLICY)
    paper = mean_over_tasks(judged, target, PAPER)
    is_known = ours.experts_used and paper.experts_used
    return {
        "target": target,
        "experts_used": ours.experts_used,
        "experts_used_paper": paper.experts_used,
        "saved_share": 1 - ours.experts_used / paper.experts_used if is_known else None,
        "kl": ours.kl,
        "kl_paper": paper.kl,
        "accepted_length": ours.accepted_length,
        "accepted_length_paper": paper.accepted_length,
    }


def against_moe_spec(judged: Judged, target: str) -> list[Row]:
    """For each budget, the default's best setting among those that use no more experts.

    The best has the longest accepted length of those with no higher KL, for few experts are easily
    saved by accepting nothing; where there are none, it has the lowest KL. All are compared on the
    rivals' prompts alone.
    """
    few = judged.settings.policies(target)
    curve = [spec for spec in few if spec.partition(":")[0] == DEFAULT_POLICY]
    points = {spec: mean_over_tasks(judged, target, spec, few_only=True) for spec in curve}
    rows = []
    for spec in few:
        if not spec.startswith("moe-spec:"):
            continue
        rival = mean_over_tasks(judged, target, spec, few_only=True)
        no_larger = [own for own in curve if points[own].experts_used <= rival.experts_used]
        better = [own for own in no_larger if points[own].kl <= rival.kl]
        best: str | None = min(no_larger, key=lambda own: points[own].kl, default=None)
        if better:
            best = max(better, key=lambda own: points[own].accepted_length)
        of_best = dict.fromkeys(vars(rival)) if best is None else vars(points[best])
        rows.append(
            {
                "target": target,
                "rival": spec,
                **vars(rival),
                "best": best,
                **{f"best_{name}": value for name, value in of_best.items()},
                "is_dominated": bool(better),
            }
        )
    return rows


def mean_over_tasks(judged: Judged, target: str, policy: str, *, few_only: bool = False) -> Means:
    """The means of a policy on a target, over all prompts or the rivals' alone."""
    limit = judged.settings.num_rival_prompts if few_only else judged.settings.num_prompts
    used, kl, length = [], [], []
    for task in judged.settings.tasks:
        group = judged.records[target, task, policy]
        trees = {index: record for index, record in group.items() if index < limit}
        num_passes = sum(record["num_passes"] for record in trees.values())
        used.append(pooled(trees, "experts_used", num_passes) or 0.0)
        kl.append(pooled_fidelity(trees).kl or 0.0)
        length.append(pooled(trees, "num_verified_tokens", num_passes) or 0.0)
    return Means(*map(statistics.fmean, (used, kl, length)))
