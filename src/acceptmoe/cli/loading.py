"""From the names on the command line to models, drafters and tables."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import typer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from acceptmoe.cli.options import Device, Dtype
from acceptmoe.drafting import (
    AssistantDrafter,
    Drafter,
    Eagle3Drafter,
    check_has_weights,
    load_drafter,
)
from acceptmoe.drafting.draft_weights import check_can_round
from acceptmoe.errors import AcceptMoEError, InvalidArgumentError
from acceptmoe.policies import RoutingPolicy, load_policy
from acceptmoe.table import CommitmentTable, shipped_tables
from acceptmoe.targets import assistant_folder, eagle3_folder, load_target, target_names
from acceptmoe.targets.widen import widen

DEFAULT_DRAFTER = "assistant"
# What a bundled target brings along, by the name of the drafter that uses it.
BUNDLED_DRAFTERS = {"assistant": assistant_folder, "eagle3": eagle3_folder}


class LoadingError(AcceptMoEError):
    """A checkpoint or file named on the command line cannot be read."""


@dataclass(frozen=True)
class Target:
    """A model named on the command line, its tokenizer, and whether it is a bundled one."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    is_bundled: bool


def bundled_targets() -> tuple[str, ...]:
    """The names of all bundled targets, at least one."""
    names = target_names()
    if not names:
        raise LoadingError(
            "no bundled target is installed, its weights are missing; reinstall acceptmoe, or give "
            "--target and --table of a model of your own"
        )
    return names


def open_target(name: str, dtype: Dtype, device: Device) -> Target:
    """A bundled target, the checkpoint in a folder, or one that Transformers finds by its name."""
    # Their bars would come between ours, and would be noise in a log.
    transformers_logging.disable_progress_bar()
    place = choose_device(device)
    if name in target_names():
        wanted = torch.float32 if dtype is Dtype.auto else getattr(torch, dtype.value)
        model, tokenizer = load_target(name, wanted)
        return Target(name, model.to(place), tokenizer, is_bundled=True)
    if not Path(name).is_dir() and ("/" not in name or Path(name).is_absolute()):
        raise typer.BadParameter(
            f"{name!r} is no folder and no bundled target ({', '.join(target_names()) or 'none'})",
            param_hint="--target",
        )
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype.value)
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise LoadingError(
            f"the target {name!r} cannot be loaded: {first_line(error)}. It must be a complete "
            "checkpoint with its tokenizer, as save_pretrained writes it"
        ) from error
    short_name = Path(name).resolve().name if Path(name).is_dir() else name
    return Target(short_name, model.to(place).eval(), tokenizer, is_bundled=False)


def choose_device(device: Device) -> torch.device:
    """The torch device of an option's value."""
    has_gpu = torch.cuda.is_available()
    if device is Device.cuda and not has_gpu:
        raise typer.BadParameter("torch sees no CUDA device here", param_hint="--device")
    return torch.device("cuda" if has_gpu and device is not Device.cpu else "cpu")


def open_drafter(spec: str | None, target: Target, weights: str | None = None) -> Drafter:
    """The drafter that `spec` names, or the target's usual one for None; see `draft_weights`."""
    if spec is None:
        spec = DEFAULT_DRAFTER if target.is_bundled else "ngram"
    check_weights_fit(spec, weights)
    # It goes where the target is; refused before it is loaded and rounded.
    check_can_round(weights, target.model.device, target.model.dtype)
    if spec in BUNDLED_DRAFTERS and target.is_bundled:
        drafter = load_drafter(BUNDLED_DRAFTERS[spec](target.name), weights=weights)
    elif spec in BUNDLED_DRAFTERS and not Path(spec).is_dir():
        raise typer.BadParameter(
            f"{spec!r} is the drafter of a bundled target and {target.name!r} is none; give the "
            "folder of a model with the same tokenizer or of a head, or 'ngram'",
            param_hint="--drafter",
        )
    else:
        drafter = load_drafter(spec, weights=weights)
    if isinstance(drafter, AssistantDrafter):
        drafter.model.to(target.model.device)
    return drafter


def check_weights_fit(drafter: str, weights: str | None) -> None:
    """`--draft-weights` for a drafter without weights is a usage error."""
    try:
        check_has_weights(drafter, weights)
    except InvalidArgumentError as error:
        raise typer.BadParameter(str(error), param_hint="--draft-weights") from error


def drafter_label(name: str, weights: str | None) -> str:
    """A drafter's name for people, with the precision it drafts in where that is not its own."""
    return name if weights is None else f"{name} in {weights}"


def widened_target(target: Target, factor: int) -> Target:
    """The same target with every hidden and inner feature repeated `factor` times."""
    return replace(target, model=widen(target.model, factor, factor))


def widened_drafter(drafter: Drafter, factor: int) -> Drafter:
    """The same drafter with larger matrices, so that drafting costs what it would; else itself."""
    if isinstance(drafter, Eagle3Drafter):
        raise typer.BadParameter(
            "an EAGLE-3 head reads its target's features at their own size; use --widen 1 with it",
            param_hint="--widen",
        )
    if isinstance(drafter, AssistantDrafter):
        # `model` is exact, so weights of 8 bits are rounded from the widened ones.
        return load_drafter(widen(drafter.model, factor, factor), weights=drafter.weights)
    return drafter


def open_table(
    spec: str | None, target: Target, drafter: Drafter, policy: RoutingPolicy
) -> CommitmentTable | None:
    """The table that `spec` names, or the shipped one; None where the policy does without."""
    if not (policy.reads_table or policy.uses_table):
        return None
    if spec is not None:
        return CommitmentTable.load(spec)
    shipped = shipped_table_name(target.name, drafter.name)
    if target.is_bundled and shipped in shipped_tables():
        return CommitmentTable.load(shipped)
    if not policy.reads_table:
        return None
    raise InvalidArgumentError(
        f"no table for target {target.name!r} and drafter {drafter.name!r} is shipped; make one "
        f"with 'acceptmoe calibrate --target ... --drafter ... --out FILE' and give --table FILE"
        ". Natural decoding needs none: acceptmoe generate --policy natural"
    )


def parse_policy(spec: str | None) -> RoutingPolicy:
    """The policy that an option's value names; a wrong one is a usage error."""
    try:
        return load_policy(spec)
    except InvalidArgumentError as error:
        raise typer.BadParameter(str(error), param_hint="--policy") from error


def shipped_table_name(target: str, drafter: str) -> str:
    """The name of the table in `tables/` for a bundled target and a drafter."""
    return f"{target}__{drafter}"


def first_line(error: BaseException) -> str:
    """The first line of an error's text: those of Transformers go on with advice on other uses."""
    lines: list[Any] = str(error).strip().splitlines() or [type(error).__name__]
    return str(lines[0]).rstrip(".")
