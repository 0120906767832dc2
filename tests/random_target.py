"""A random mixture-of-experts model with its drafter and table, small enough for every test."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from acceptmoe import CommitmentTable, targets
from acceptmoe.table import (
    CalibrationCurve,
    DepthStatistics,
    HeldOutError,
    Provenance,
    config_fingerprint,
)

# Names that no shipped table or weights have.
TARGET = "random-moe"
ASSISTANT = "random-assistant"


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints of a target and its assistant, random but alike."""
    folder = tmp_path_factory.mktemp("weights")
    tokenizer = byte_tokenizer()
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": 32,
        "max_position_embeddings": 1024,
        "initializer_range": 0.3,  # spread enough for greedy text to be neither a loop nor noise
        "eos_token_id": tokenizer.eos_token_id,
        "tie_word_embeddings": True,
    }
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    torch.manual_seed(0)
    for name, model in (
        (TARGET, Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts))),
        (ASSISTANT, Qwen3ForCausalLM(Qwen3Config(**sizes))),
    ):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture
def bundled(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the bundled target, which is the random one while the test runs."""
    monkeypatch.setattr(targets, "_WEIGHTS", checkpoints)
    monkeypatch.setattr(targets, "_ASSISTANT_OF", {TARGET: ASSISTANT})
    return TARGET


@pytest.fixture(scope="session")
def table_file(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table for the random target with its assistant and trees of 8 nodes, depth 3."""
    return save_table(checkpoints, tmp_path_factory.mktemp("tables") / "assistant.json")


def save_table(checkpoints: Path, file: Path, drafter: str = "assistant") -> Path:
    config = Qwen3MoeConfig.from_pretrained(checkpoints / TARGET)
    CommitmentTable(
        target=TARGET,
        target_fingerprint=config_fingerprint(config),
        drafter=drafter,
        num_nodes=8,
        max_depth=3,
        depths=DepthStatistics((10, 10, 10, 10), (10, 5, 2, 1)),
        curve=CalibrationCurve((0.0, 1.0), (0.0, 0.9)),
        held_out_error=HeldOutError(0.01, 0.02, 2, 100),
        provenance=Provenance("random prompts", (0,), 10, "0.1.0", "acceptmoe calibrate"),
    ).save(file)
    return file


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and one that ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
