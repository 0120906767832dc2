"""Whole texts on a GPU: a bundled target with wide matrices, plainly and by trees, end to end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from acceptmoe.bench.policy_grid import PLAIN
from acceptmoe.bench.setups import Setup, load_setup
from acceptmoe.bench.speed_arms import ArmName, SpeedArms
from acceptmoe.bench.workloads import TEST_SPLIT, Tree, encode, end_token_ids, mixed_problems
from acceptmoe.drafting import AssistantDrafter

COLUMNS = ("target", "arm", "kernels", "tokens_per_s", "tokens_per_pass", "same_as_plain")
TREE = Tree(16, 5)
ARMS = (ArmName(PLAIN), ArmName("natural", TREE), ArmName("accept", TREE))
# Keywords of `wrap` by the name of the column: as Transformers computes, and all that is ours.
KERNELS: dict[str, dict[str, Any]] = {
    "stock": {},
    "ours": {"experts": "acceptmoe", "compile": True},
}
WARM_UP_TOKENS = 24


def widened_speed(
    target: str,
    *,
    device: str,
    factor: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    num_prompts: int = 3,
    max_new_tokens: int = 96,
    kernels: dict[str, dict[str, Any]] = KERNELS,
) -> Iterator[dict[str, Any]]:
    """Rows of `COLUMNS`, over all prompts; arms take turns prompt by prompt.

    `same_as_plain` is the share of prompts whose text is that of plain decoding; in bfloat16 a
    block rounds otherwise than single steps do, so even natural trees may miss a close token.
    """
    setup = load_setup(target, "assistant", dtype=dtype, factor=factor)
    setup.model.to(device)
    assert isinstance(setup.drafter, AssistantDrafter)
    setup.drafter.model.to(device)
    texts = mixed_problems(TEST_SPLIT, num_prompts)
    prompts = [encode(setup.tokenizer, text.prompt, setup.model.device) for text in texts]
    for name, options in kernels.items():
        records = _decode(setup, options, prompts, max_new_tokens)
        plain = [record["token_ids"] for record in records[ARMS[0]]]
        for arm in ARMS:
            found = records[arm]
            num_tokens = sum(len(record["token_ids"]) for record in found)
            num_passes = sum(record["num_passes"] for record in found)
            is_same = [
                record["token_ids"] == text for record, text in zip(found, plain, strict=True)
            ]
            yield {
                "target": target,
                "arm": str(arm),
                "kernels": "stock" if arm.policy == PLAIN else name,
                "tokens_per_s": num_tokens / sum(record["call_s"] for record in found),
                "tokens_per_pass": num_tokens / num_passes if num_passes else 1.0,
                "same_as_plain": sum(is_same) / len(is_same),
            }


def _decode(
    setup: Setup, options: dict[str, Any], prompts: list[torch.Tensor], max_new_tokens: int
) -> dict[ArmName, list[dict[str, Any]]]:
    """What each arm did with each prompt, after a short text that compiles and captures."""
    settings = {
        "do_sample": False,
        "max_new_tokens": max_new_tokens,
        "eos_token_id": end_token_ids(setup.model, setup.tokenizer),
        "pad_token_id": 0,
    }
    arms = SpeedArms(setup, setup.drafter.model, options, settings)  # type: ignore[attr-defined]
    for arm in ARMS:
        arms.decode(arm, prompts[0], max_new_tokens=WARM_UP_TOKENS)
    records: dict[ArmName, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    for prompt in prompts:
        for arm in ARMS:
            records[arm].append(arms.decode(arm, prompt))
    return records
