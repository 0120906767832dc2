"""Results as the benchmarks write them, made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from acceptmoe.bench.results import save_results

Row = dict[str, Any]


def quality_row(policy: str, answers: str, *, task: str = "algebra", **more: Any) -> Row:
    accuracy = answers.count("1") / len(answers)
    return {
        "target": "tiny-qwen3-moe",
        "task": task,
        "policy": policy,
        "params": {},
        "num_prompts": len(answers),
        "accuracy": accuracy,
        "accuracy_natural": 1.0,
        "difference_points": 100 * (accuracy - 1),
        "difference_low_points": -50.0,
        "difference_high_points": 0.0,
        "kl": 0.001,
        "kl_step": None,
        "top1": 0.99,
        "accepted_length": 4.0,
        "natural_union": 40.0,
        "eligible": 24.0,
        "experts_used": 20.0,
        "num_experts": 64,
        "same_as_natural": 0.9,
        "answers": answers,
        **more,
    }


def save_quality(path: Path, rows: list[Row], seed: int = 0) -> Path:
    accuracy = {
        "policy": "accept",
        "num_pairs": 1,
        "mean_difference_points": -0.1,
        "low_points": -0.3,
        "high_points": 0.1,
        "worst_pair": ["tiny-qwen3-moe", "algebra"],
        "worst_difference_points": -0.4,
    }
    paper = {
        "target": "tiny-qwen3-moe",
        "experts_used": 20.0,
        "experts_used_paper": 25.0,
        "saved_share": 0.2,
        "kl": 0.001,
        "kl_paper": 0.002,
    }
    rival = {
        "target": "tiny-qwen3-moe",
        "rival": "moe-spec:budget=8",
        "experts_used": 8.0,
        "kl": 0.25,
        "accepted_length": 4.0,
        "best": None,
        "is_dominated": False,
    }
    summary = {
        "accuracy": [accuracy],
        "default_against_paper": [paper],
        "default_against_moe_spec": [rival],
    }
    save_results(path, "quality", rows, seed=seed, summary=summary)
    return path


def speed_row(policy: str, speeds: list[float | None], num_nodes: int | None = 32) -> Row:
    known = sorted(speed for speed in speeds if speed is not None)
    return {
        "target": "tiny-qwen3-moe",
        "drafter": "assistant",
        "policy": policy,
        "params": {},
        "num_nodes": num_nodes,
        "max_depth": None if num_nodes is None else 5,
        "is_chain": None if num_nodes is None else False,
        "tokens_per_s": known[len(known) // 2] if known else None,
        "q1": known[0] if known else None,
        "q3": known[-1] if known else None,
        "call_tokens_per_s": 9.0,
        "accepted_length": None,
        "natural_union": None,
        "experts_used": None,
        "same_as_natural": 1.0,
        "tokens_per_s_by_prompt": speeds,
    }


def save_speed(path: Path, rows: list[Row], seed: int = 0) -> Path:
    claim = {
        "target": "tiny-qwen3-moe",
        "num_nodes": 32,
        "tokens_per_s": 30.0,
        "ratios": {"natural-32": {"median": 1.3, "low": 1.2, "high": 1.4}, "natural-64": None},
    }
    guard = {
        "target": "tiny-qwen3-moe",
        "ratio": {"median": 0.98, "low": 0.97, "high": 0.99},
        "guard_reason": "drafting does not pay",
    }
    more = {"summary": [claim], "guard": [guard], "settings": {"factor": 16}}
    save_results(path, "speed", rows, seed=seed, **more)
    return path
