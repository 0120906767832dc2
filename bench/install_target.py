"""Put a trained checkpoint among the bundled targets, in a form that older Transformers open too.

    PYTHONPATH=src python bench/install_target.py --from checkpoints/tiny-olmoe/final \
        --name tiny-olmoe
"""

import argparse
import json
import shutil
from pathlib import Path

from transformers import GenerationConfig

from acceptmoe.targets.tasks import MAX_NEW_TOKENS

_WEIGHTS = Path(__file__).parents[1] / "src" / "acceptmoe" / "targets" / "weights"


def install(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for name in ("model.safetensors", "tokenizer.json"):
        shutil.copyfile(source / name, target / name)

    config = json.loads((source / "config.json").read_text())
    if config["model_type"] == "qwen3_moe":
        config["num_experts"] = config["num_local_experts"]  # the name before 5.24
    _write(target / "config.json", config)

    tokenizer = json.loads((source / "tokenizer_config.json").read_text())
    tokenizer["tokenizer_class"] = "PreTrainedTokenizerFast"
    for name in ("is_local", "local_files_only", "backend"):  # how it was loaded, not what it is
        tokenizer.pop(name, None)
    _write(target / "tokenizer_config.json", tokenizer)

    GenerationConfig(
        do_sample=False,
        max_new_tokens=MAX_NEW_TOKENS,
        eos_token_id=config["eos_token_id"],
        pad_token_id=config["pad_token_id"],
        bos_token_id=config["bos_token_id"],
    ).save_pretrained(target)


def _write(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--from", dest="source", type=Path, required=True)
    parser.add_argument("--name", required=True)
    arguments = parser.parse_args()
    install(arguments.source, _WEIGHTS / arguments.name)


if __name__ == "__main__":
    main()
