"""Drafters: one a file; `load_drafter` makes one from what a user may pass as `drafter=`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from acceptmoe.drafting.assistant import AssistantDrafter
from acceptmoe.drafting.draft_weights import check_draft_weights
from acceptmoe.drafting.drafter import Drafter
from acceptmoe.drafting.eagle3 import Eagle3Drafter
from acceptmoe.drafting.eagle3_layouts import describes_eagle3
from acceptmoe.drafting.ngram import NgramDrafter
from acceptmoe.errors import DrafterError, InvalidArgumentError

__all__ = ["AssistantDrafter", "Drafter", "Eagle3Drafter", "NgramDrafter", "load_drafter"]

ALLOWED_FORMS = (
    "allowed: 'ngram', the folder of a checkpoint, a transformers causal language model, or a "
    "Drafter object"
)


def load_drafter(
    spec: Drafter | PreTrainedModel | str | os.PathLike[str], *, weights: str | None = None
) -> Drafter:
    """The drafter that `spec` stands for.

    - `"ngram"`: prompt lookup, no weights;
    - a checkpoint folder: by its config an EAGLE-3 head or an assistant model;
    - a transformers causal language model: `AssistantDrafter` with its defaults;
    - a `Drafter`: itself.

    `weights="int8"` drafts with the model's or the head's weights rounded to 8 bits, on a CPU (see
    `draft_weights`); None leaves them as they are.

    Raises `InvalidArgumentError` for anything else, and for `weights` with a drafter that has none
    or is made already; `DrafterError` for a folder or model that cannot draft.

    >>> load_drafter("ngram").name
    'ngram'
    """
    check_draft_weights(weights)
    if isinstance(spec, PreTrainedModel):
        return AssistantDrafter(spec, weights=weights)
    if isinstance(spec, Drafter) and not isinstance(spec, type):
        _check_attributes(spec)
        _check_not_made(spec, weights)
        return spec
    if isinstance(spec, str) and spec in NAMED_DRAFTERS:
        check_has_weights(spec, weights)
        return NAMED_DRAFTERS[spec]()
    if isinstance(spec, (str, os.PathLike)):
        return _load_folder(Path(spec), weights)
    raise InvalidArgumentError(f"drafter is {spec!r:.80} ({type(spec).__name__}); {ALLOWED_FORMS}")


def check_has_weights(name: str, weights: str | None) -> None:
    """Raise `InvalidArgumentError` where `weights` is given and the drafter `name` has none."""
    if weights is not None and name in NAMED_DRAFTERS:
        raise InvalidArgumentError(
            f"weights is {weights!r} and the drafter {name!r} has no weights; leave it out, or "
            "draft with a model or an EAGLE-3 head"
        )


def _check_not_made(drafter: Drafter, weights: str | None) -> None:
    if weights is not None:
        raise InvalidArgumentError(
            f"weights is {weights!r} and the drafter {drafter.name!r} is made already; give "
            "weights= where the drafter is made, as in "
            f"AssistantDrafter(model, weights={weights!r})"
        )


def _check_attributes(drafter: Drafter) -> None:
    """Raise `InvalidArgumentError` for attributes that a protocol check does not look into."""
    kind, name, boundaries = type(drafter).__name__, drafter.name, drafter.feature_boundaries
    if not isinstance(name, str) or not name:
        raise InvalidArgumentError(
            f"name of the drafter {kind} is {name!r}; it must be a text, it goes into tables and "
            "reports"
        )
    if not isinstance(boundaries, tuple) or any(type(number) is not int for number in boundaries):
        raise InvalidArgumentError(
            f"feature_boundaries of the drafter {name!r} is {boundaries!r:.80}; it must be a tuple "
            "of layer numbers, () where the drafter reads no features"
        )


def _load_folder(folder: Path, weights: str | None) -> Drafter:
    if not folder.is_dir():
        raise InvalidArgumentError(
            f"drafter is {str(folder)!r}, which is no drafter's name and no folder; {ALLOWED_FORMS}"
            "; a model of a hub must be downloaded first"
        )
    config = _read_config(folder)
    for is_ours, load in FOLDER_LOADERS:
        if is_ours(config):
            return load(folder, weights)
    raise DrafterError(
        f"{folder / 'config.json'} has architectures {config.get('architectures')!r}; a drafter "
        "must be a causal language model that transformers knows; load the model yourself and "
        "pass it as drafter"
    )


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DrafterError(
            f"{folder} has no config.json; a drafter's folder must hold one checkpoint, as "
            "save_pretrained writes it"
        ) from None
    except ValueError as error:  # not UTF-8 or not JSON
        raise DrafterError(
            f"{path} is not JSON ({error}); a drafter's folder must hold one checkpoint, as "
            "save_pretrained writes it; copy the file again"
        ) from error
    if not isinstance(config, dict):
        raise DrafterError(
            f"{path} holds a {type(config).__name__}; it must be a JSON object, as "
            "save_pretrained writes it; copy the file again"
        )
    return config


def _is_causal_lm(config: dict[str, Any]) -> bool:
    # Draft heads carry a causal model's model_type, so only the class name tells them apart.
    known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    architectures = config.get("architectures")
    return isinstance(architectures, list) and any(name in known for name in architectures)


def _load_head(folder: Path, weights: str | None) -> Drafter:
    return Eagle3Drafter.from_pretrained(folder, weights=weights)


def _load_assistant(folder: Path, weights: str | None) -> Drafter:
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", local_files_only=True, output_loading_info=True
        )
    except (OSError, RuntimeError, ValueError, KeyError, SafetensorError) as error:
        raise DrafterError(
            f"the checkpoint in {folder} cannot be loaded ({error}); it must be complete, as "
            "save_pretrained writes it; copy it again"
        ) from error
    if info["missing_keys"]:
        # transformers would fill them with random numbers and only warn.
        missing = sorted(info["missing_keys"])
        raise DrafterError(
            f"the checkpoint in {folder} lacks {len(missing)} weights of "
            f"{type(model).__name__}, {missing[0]} among them; it must hold all; copy it again"
        )
    return AssistantDrafter(model, weights=weights)


NAMED_DRAFTERS: dict[str, Callable[[], Drafter]] = {"ngram": NgramDrafter}
# Read from the top: whether a folder's config belongs to the loader, and the loader. A draft head
# goes before the causal models, some heads carry such a model's class name.
FolderLoader = Callable[[Path, str | None], Drafter]
FOLDER_LOADERS: list[tuple[Callable[[dict[str, Any]], bool], FolderLoader]] = [
    (describes_eagle3, _load_head),
    (_is_causal_lm, _load_assistant),
]
