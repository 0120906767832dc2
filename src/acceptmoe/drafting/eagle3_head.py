"""The EAGLE-3 head as a plain torch module: one decoder layer on fused states of the target.

Axes: R rows, H hidden size of the head, G = `num_aux` times the target's hidden size, V and D
tokens of the target's and of the draft vocabulary, A attention heads, C key-value heads, d their
dimension. Leading axes (a batch in training) pass through.

The architecture is that of EAGLE-3 (arXiv 2503.01840) with the options its descendants added:
norms before the fusion, a normalised residual or recurrent state, query-key norms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from acceptmoe.errors import DrafterError
from acceptmoe.models.dense import Product

# The others change their frequencies with the sequence length; cached keys would go stale.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# How the feature layers became known: by the caller, by ids read as boundaries or as layer
# outputs (one less), or by the default rule.
BoundaryRule = Literal["override", "boundaries", "layer outputs", "default"]
DEFAULT_ROPE: Mapping[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}


@dataclass(frozen=True)
class Eagle3Config:
    """Everything that decides a head's shapes and its arithmetic, whatever its layout on disk.

    `boundaries` are the target's residual streams that are fused (boundary b enters layer b, the
    number of layers means after the last one); None means the default rule, which needs the
    target. `rope` is in the form of transformers' `rope_parameters`. Raises `DrafterError` for
    values that contradict one another.
    """

    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_aux: int = 3
    boundaries: tuple[int, ...] | None = None
    boundary_rule: BoundaryRule = field(default="override", compare=False)
    rms_norm_eps: float = 1e-6
    rope: Mapping[str, Any] = field(default_factory=lambda: dict(DEFAULT_ROPE))
    max_position_embeddings: int = 2048
    attention_bias: bool = False
    qk_norm: bool = False
    fc_bias: bool = False
    fc_norm: bool = False  # one norm for each fused state
    norm_before_fc: bool = False  # one norm over their concatenation
    norm_before_residual: bool = False
    norm_output: bool = False  # the recurrent state is the normalised one
    owns_embedding: bool = False  # False: the target's embedding is used
    owns_lm_head: bool = True  # False: the target's output embedding is used

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise DrafterError(
                f"the head has {self.num_heads} attention heads and {self.num_kv_heads} key-value "
                "heads; the second must divide the first"
            )
        if self.head_dim % 2:
            raise DrafterError(f"head_dim is {self.head_dim}; rotary positions need an even number")
        if self.draft_vocab_size > self.vocab_size:
            raise DrafterError(
                f"draft_vocab_size is {self.draft_vocab_size}; it must be at most the target's "
                f"vocab_size, {self.vocab_size}"
            )
        if self.boundaries is not None and len(self.boundaries) != self.num_aux:
            raise DrafterError(
                f"the head names {len(self.boundaries)} feature layers {list(self.boundaries)} and "
                f"fuses {self.num_aux} states; the two must be the same"
            )
        if self.rope.get("rope_type", "default") not in ROPE_TYPES:
            raise DrafterError(
                f"rope_type is {self.rope.get('rope_type')!r}; an EAGLE-3 head may have one of "
                f"{', '.join(ROPE_TYPES)}"
            )
        for name, is_absent in (
            ("embed_tokens.weight", not self.owns_embedding),
            ("lm_head.weight", not self.owns_lm_head),
        ):
            if is_absent and self.hidden_size != self.target_hidden_size:
                raise DrafterError(
                    f"{name} is missing and the target's cannot stand in for it: the head's hidden "
                    f"size is {self.hidden_size}, the target's {self.target_hidden_size}"
                )
        if not self.owns_lm_head and self.draft_vocab_size != self.vocab_size:
            raise DrafterError(
                "lm_head.weight is missing and the target's cannot stand in for it: the draft "
                f"vocabulary has {self.draft_vocab_size} tokens, the target's {self.vocab_size}"
            )

    @property
    def feature_size(self) -> int:
        """Width of the fused features: the states side by side."""
        return self.num_aux * self.target_hidden_size


class Eagle3Head(nn.Module):
    """The trained part of an EAGLE-3 drafter; weights start as in Llama (normal, 0.02).

    Query, key and value projections are one matrix, and so are gate and up: at batch 1 the
    number of operations costs more than their size. `token_ids` [D] int64 maps draft to target
    vocabulary, None where the two are the same.
    """

    token_ids: Tensor | None

    def __init__(self, config: Eagle3Config, token_ids: Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        self.product: Product = F.linear  # see `Eagle3Drafter.use_kernels`
        size, states = config.hidden_size, config.feature_size
        num_qkv = config.num_heads + 2 * config.num_kv_heads
        self.fc = nn.Linear(states, size, bias=config.fc_bias)
        self.input_norm = _norm_weight(states) if config.norm_before_fc else None
        self.fc_norm = (
            _norm_weight(config.num_aux, config.target_hidden_size) if config.fc_norm else None
        )
        self.input_layernorm = _norm_weight(size)
        self.hidden_norm = _norm_weight(size)
        self.qkv_proj = nn.Linear(2 * size, num_qkv * config.head_dim, bias=config.attention_bias)
        self.q_norm = _norm_weight(config.head_dim) if config.qk_norm else None
        self.k_norm = _norm_weight(config.head_dim) if config.qk_norm else None
        self.o_proj = nn.Linear(
            config.num_heads * config.head_dim, size, bias=config.attention_bias
        )
        self.post_attention_layernorm = _norm_weight(size)
        self.gate_up_proj = nn.Linear(size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, size, bias=False)
        self.norm = _norm_weight(size)
        self.lm_head = (
            nn.Linear(size, config.draft_vocab_size, bias=False) if config.owns_lm_head else None
        )
        self.embed_tokens = nn.Embedding(config.vocab_size, size) if config.owns_embedding else None
        self.register_buffer("token_ids", token_ids)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    def _apply_linear(self, layer: nn.Linear, rows: Tensor) -> Tensor:
        return self.product(rows, layer.weight, layer.bias)

    def fuse(self, features: Tensor) -> Tensor:
        """[..., R, G] target states to [..., R, H] states of the head."""
        eps = self.config.rms_norm_eps
        if self.input_norm is not None:
            features = F.rms_norm(features, self.input_norm.shape, self.input_norm, eps)
        if self.fc_norm is not None:
            parts = features.reshape(*features.shape[:-1], *self.fc_norm.shape)
            features = (F.rms_norm(parts, parts.shape[-1:], None, eps) * self.fc_norm).flatten(-2)
        return self._apply_linear(self.fc, features)

    def project(
        self, embeddings: Tensor, states: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Rotated queries [..., R, A, d], rotated keys and values [..., R, C, d], the residual.

        `embeddings` [..., R, H] belong to the token after the one whose `states` [..., R, H] they
        are paired with; `cos` and `sin` [(...,) R, d] are rows of `rotary_table`.
        """
        config, eps = self.config, self.config.rms_norm_eps
        shape = self.input_layernorm.shape
        embeddings = F.rms_norm(embeddings, shape, self.input_layernorm, eps)
        normed = F.rms_norm(states, shape, self.hidden_norm, eps)
        residual = normed if config.norm_before_residual else states
        qkv = self._apply_linear(self.qkv_proj, torch.cat((embeddings, normed), dim=-1))
        qkv = qkv.view(*qkv.shape[:-1], -1, config.head_dim)
        num_rotated = config.num_heads + config.num_kv_heads
        rotated = qkv[..., :num_rotated, :]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = rotated[..., : config.num_heads, :], rotated[..., config.num_heads :, :]
            q = F.rms_norm(q, self.q_norm.shape, self.q_norm, eps)
            rotated = torch.cat((q, F.rms_norm(k, self.k_norm.shape, self.k_norm, eps)), dim=-2)
        rotated = rotate(rotated, cos[..., None, :], sin[..., None, :])
        queries = rotated[..., : config.num_heads, :]
        return queries, rotated[..., config.num_heads :, :], qkv[..., num_rotated:, :], residual

    def complete(self, attended: Tensor, residual: Tensor) -> Tensor:
        """The layer's output [..., R, H] from the attention's [..., R, A * d]."""
        config = self.config
        hidden = residual + self._apply_linear(self.o_proj, attended)
        normed = F.rms_norm(
            hidden, hidden.shape[-1:], self.post_attention_layernorm, config.rms_norm_eps
        )
        gate, up = self._apply_linear(self.gate_up_proj, normed).chunk(2, dim=-1)
        return hidden + self._apply_linear(self.down_proj, F.silu(gate) * up)

    def normalize(self, hidden: Tensor) -> Tensor:
        """The final norm [..., R, H]; what the output matrix is applied to."""
        return F.rms_norm(hidden, hidden.shape[-1:], self.norm, self.config.rms_norm_eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions; `sin` carries the sign of the rotated half (see `rotary_table`)."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


def rotary_table(
    config: Eagle3Config, num_positions: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin [P, d] of positions 0..P-1, computed in float32.

    The first half of `sin` is negated, so that rotating is one roll and one multiply-add.
    """
    frequencies, scaling = _rope_frequencies(config)
    angles = torch.arange(num_positions, device=device)[:, None] * frequencies.to(device)
    cos, sin = angles.cos() * scaling, angles.sin() * scaling
    return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def _rope_frequencies(config: Eagle3Config) -> tuple[Tensor, float]:
    """Inverse frequencies [d / 2] float32 and the factor on cos and sin."""
    rope_type = config.rope.get("rope_type", "default")
    if rope_type == "default":
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        return 1.0 / float(config.rope["rope_theta"]) ** exponents, 1.0
    llama = LlamaConfig(
        # Only head_dim counts here, and the head's own hidden size need not be a multiple of it.
        hidden_size=config.num_heads * config.head_dim,
        num_attention_heads=config.num_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=dict(config.rope),
    )
    frequencies, scaling = ROPE_INIT_FUNCTIONS[rope_type](llama, torch.device("cpu"))
    return frequencies.float(), float(scaling)


def _norm_weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(*shape))
