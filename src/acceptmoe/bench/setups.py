"""A bundled target with its drafter and table, at its own size or widened."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from acceptmoe.drafting import AssistantDrafter, Drafter, Eagle3Drafter, NgramDrafter
from acceptmoe.errors import InvalidArgumentError
from acceptmoe.policies import load_policy
from acceptmoe.table import CommitmentTable
from acceptmoe.targets import (
    eagle3_folder,
    load_assistant,
    load_target,
    target_folder,
    target_names,
)
from acceptmoe.targets.tasks import TASKS
from acceptmoe.targets.widen import widen, widen_eagle3_head

DRAFTERS = ("assistant", "eagle3", "ngram")


@dataclass(frozen=True)
class Setup:
    """What one target's measurements need; `model` is not wrapped."""

    target: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    drafter: Drafter
    table: CommitmentTable


def load_setup(
    target: str,
    drafter: str,
    *,
    dtype: torch.dtype = torch.float32,
    factor: int = 1,
    table: str | None = None,
    draft_weights: str | None = None,
) -> Setup:
    """A bundled target, its drafter by name and their table, all features repeated `factor` times.

    The table is the shipped one of the two, or the file or shipped name in `table`: widening
    changes no path probability beyond rounding, so one table serves every width, and drafts in 8
    bits (`draft_weights="int8"`) too.

    Raises `TargetError`, `InvalidArgumentError`, `DrafterError` and `TableError` for what is
    unknown or missing.
    """
    check_names(targets=[target], drafter=drafter)
    # Their bars would come between ours, and would be noise in a log.
    transformers_logging.disable_progress_bar()
    model, tokenizer = load_target(target, dtype)
    if factor > 1:
        model = widen(model, factor, factor)
    return Setup(
        target,
        model,
        tokenizer,
        load_bundled_drafter(drafter, target, dtype, factor, draft_weights),
        CommitmentTable.load(table or f"{target}__{drafter}"),
    )


def load_bundled_drafter(
    name: str, target: str, dtype: torch.dtype, factor: int, weights: str | None = None
) -> Drafter:
    """The drafter `name` of a bundled target, as wide as the target; see `draft_weights`."""
    if name == "ngram":
        return NgramDrafter()
    if name == "assistant":
        model = load_assistant(target, dtype)
        if factor > 1:
            model = widen(model, factor, factor)
        return AssistantDrafter(model, weights=weights)
    folder = eagle3_folder(target)
    if factor == 1:
        return Eagle3Drafter.from_pretrained(folder, weights=weights)
    return _widened_head(folder, factor, weights)


def _widened_head(folder: Path, factor: int, weights: str | None) -> Eagle3Drafter:
    tensors, config = widen_eagle3_head(
        load_file(folder / "model.safetensors"),
        json.loads((folder / "config.json").read_text(encoding="utf-8")),
        factor,
        factor,
    )
    with TemporaryDirectory(prefix="acceptmoe-head-") as place:
        save_file(tensors, Path(place, "model.safetensors"))
        Path(place, "config.json").write_text(json.dumps(config), encoding="utf-8")
        return Eagle3Drafter.from_pretrained(place, weights=weights)


def num_experts(target: str) -> int:
    """Experts of a sparse layer of a bundled target, from its configuration alone."""
    config = _config(target)
    found: int = config.get("num_local_experts") or config["num_experts"]
    return found


def _config(target: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((target_folder(target) / "config.json").read_text("utf-8"))
    return found


def check_policies(specs: Iterable[str], targets: Iterable[str]) -> None:
    """Raise `InvalidArgumentError` for a policy, or a setting, that a target cannot have."""
    for spec in specs:
        policy = load_policy(spec)
        for target in targets:
            try:
                policy.check_model(num_experts(target), _config(target)["num_experts_per_tok"])
            except InvalidArgumentError as error:
                raise InvalidArgumentError(f"{spec} on {target}: {error}") from error


def check_names(
    targets: tuple[str, ...] | list[str] = (),
    tasks: tuple[str, ...] | list[str] = (),
    drafter: str | None = None,
) -> None:
    """Raise `InvalidArgumentError` for a name that nothing bundled has."""
    allowed = {"target": target_names(), "task": TASKS, "drafter": DRAFTERS}
    given = {"target": targets, "task": tasks, "drafter": [drafter] if drafter else []}
    for what, names in given.items():
        for name in names:
            if name not in allowed[what]:
                raise InvalidArgumentError(
                    f"{what} is {name!r}; it must be one of {', '.join(allowed[what]) or 'none'}"
                )
        if len(set(names)) < len(names):
            raise InvalidArgumentError(f"the same {what} was given twice; give each once")
