"""The bundled targets: small trained MoE models with their tokenizer, tasks and drafter.

Each is a plain Transformers checkpoint folder beside this file, stored in bf16.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from acceptmoe.errors import TargetError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

__all__ = [
    "assistant_folder",
    "eagle3_folder",
    "load_assistant",
    "load_target",
    "target_folder",
    "target_names",
]

_WEIGHTS = Path(__file__).parent / "weights"

# The dense drafter of each target; targets with one tokenizer can share one drafter.
_ASSISTANT_OF = {
    "tiny-qwen3-moe": "tiny-assistant",
    "tiny-olmoe": "tiny-assistant",
    "tiny-gpt-oss": "tiny-assistant",
}


def target_names() -> tuple[str, ...]:
    """Return the names that `load_target` knows, those whose weights are installed."""
    return tuple(name for name in _ASSISTANT_OF if (_WEIGHTS / name / "config.json").is_file())


def target_folder(name: str) -> Path:
    """Return the checkpoint folder of a target, for code that loads it by itself."""
    if name not in target_names():
        raise TargetError(
            f"target is {name!r}; bundled targets: {', '.join(target_names())}. For any other "
            "model, load it with transformers and pass it to acceptmoe.wrap"
        )
    return _WEIGHTS / name


def assistant_folder(name: str) -> Path:
    """Return the checkpoint folder of the dense drafter that goes with a target."""
    target_folder(name)
    return _WEIGHTS / _ASSISTANT_OF[name]


def eagle3_folder(name: str) -> Path:
    """Return the folder of a target's EAGLE-3 head; `acceptmoe.wrap` takes it as `drafter`."""
    folder = target_folder(name).with_name(f"{name}-eagle3")
    if not folder.is_dir():
        raise TargetError(f"no EAGLE-3 head is bundled for {name!r}; its assistant is")
    return folder


def load_target(
    name: str, dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Return a bundled target, ready to generate, and its tokenizer.

    >>> model, tokenizer = load_target("tiny-qwen3-moe")
    """
    folder = target_folder(name)
    return _load_model(folder, dtype), _load_tokenizer(folder)


def load_assistant(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return the dense drafter of a bundled target; it shares the target's tokenizer."""
    return _load_model(assistant_folder(name), dtype)


def _load_model(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    if not dtype.is_floating_point:
        raise TargetError(f"dtype is {dtype}; it must be a floating point type, as torch.float32")
    # Imported late: `import acceptmoe` must stay quick, and transformers is not.
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)
