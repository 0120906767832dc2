"""The head's rotary positions against transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from eagle3_fixtures import LLAMA3, PLAIN, YARN
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from acceptmoe.drafting.eagle3_head import Eagle3Config, rotary_table, rotate


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e6},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
        LLAMA3,
        YARN,
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_positions_are_rotated_as_in_llama(rope: dict[str, Any]) -> None:
    config = Eagle3Config(**{**vars(PLAIN), "rope": rope, "max_position_embeddings": 64})
    llama = LlamaConfig(
        hidden_size=24,
        num_attention_heads=4,
        max_position_embeddings=64,
        rope_parameters=rope,
    )
    x = torch.randn(1, 1, 50, 6, generator=torch.Generator().manual_seed(0))
    cos, sin = LlamaRotaryEmbedding(llama)(x, torch.arange(50)[None])
    expected, _ = apply_rotary_pos_emb(x, x, cos, sin)
    ours = rotate(x, *rotary_table(config, 50, torch.device("cpu"), torch.float32))
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)  # cos of large float32 angles
