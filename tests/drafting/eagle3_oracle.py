"""A slow EAGLE-3 drafter as a judge: it reads the files itself and keeps nothing between calls.

It shares no code with the package. Every node of a tree is computed from the whole sequence of
pairs and the node's own ancestors, row after row in float32, without a cache or a tree mask.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

Candidate = tuple[tuple[int, ...], float]  # tokens from the root's child on, path probability


class OracleDrafter:
    """Proposes (tokens, parents, path probabilities) for given pairs."""

    def __init__(self, folder: Path, embedding: Tensor, output: Tensor, topk: int) -> None:
        raw = json.loads((folder / "config.json").read_text())
        layer = raw.get("transformer_layer_config", raw)
        self.options = {**raw.get("eagle_config", {}), **raw}
        self.weights = {
            name.replace("layers.0.", "midlayer."): tensor.float()
            if tensor.is_floating_point()
            else tensor
            for name, tensor in load_file(folder / "model.safetensors").items()
        }
        self.num_heads = layer["num_attention_heads"]
        self.num_kv_heads = layer["num_key_value_heads"]
        self.head_dim = layer["head_dim"]
        self.eps = layer["rms_norm_eps"]
        self.topk = topk
        self.embedding = self.weights.get("embed_tokens.weight", embedding.float())
        self.output = self.weights.get("lm_head.weight", output.float())
        rope = layer.get("rope_parameters") or {
            **(layer["rope_scaling"] or {"rope_type": "default"}),
            "rope_theta": layer["rope_theta"],
        }
        self.rotary = LlamaRotaryEmbedding(
            LlamaConfig(
                hidden_size=self.num_heads * self.head_dim,
                num_attention_heads=self.num_heads,
                head_dim=self.head_dim,
                max_position_embeddings=layer["max_position_embeddings"],
                rope_parameters=rope,
            )
        )

    @torch.no_grad()
    def propose(
        self, features: Tensor, tokens: list[int], num_nodes: int, max_depth: int
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]:
        """`tokens[i]` follows the position whose target states are `features[i]`."""
        states = [self.fuse(row) for row in features]
        candidates: list[Candidate] = self.children(states, tokens, ())
        frontier = candidates[:]
        for _ in range(max_depth - 1):
            level = [
                (path + extra, score * probability)
                for path, score in frontier
                for extra, probability in self.children(states, tokens, path)
            ]
            candidates += level
            frontier = sorted(level, key=lambda item: -item[1])[: self.topk]
        ranked = sorted(range(len(candidates)), key=lambda i: -candidates[i][1])
        chosen = [candidates[i] for i in sorted(ranked[: num_nodes - 1])]
        nodes = {(): 0} | {path: node for node, (path, _) in enumerate(chosen, start=1)}
        return (
            (tokens[-1], *(path[-1] for path, _ in chosen)),
            (-1, *(nodes[path[:-1]] for path, _ in chosen)),
            (1.0, *(score for _, score in chosen)),
        )

    def children(
        self, states: list[Tensor], tokens: list[int], path: tuple[int, ...]
    ) -> list[Candidate]:
        """The likeliest continuations of `path`, each a path of one token with its probability."""
        states, tokens = list(states), list(tokens)
        hidden = self.layer(states, tokens)
        for token in path:
            normed = self.norm(hidden, "norm.weight")
            states.append(normed if self.options.get("norm_output") else hidden)
            tokens.append(token)
            hidden = self.layer(states, tokens)
        probabilities = torch.softmax(self.output @ self.norm(hidden, "norm.weight"), dim=0)
        best = probabilities.sort(descending=True, stable=True).indices[: self.topk].tolist()
        offsets = self.weights.get("d2t", torch.zeros(len(probabilities), dtype=torch.int64))
        return [((i + int(offsets[i]),), float(probabilities[i])) for i in best]

    def fuse(self, features: Tensor) -> Tensor:
        weights = self.weights
        if self.options.get("norm_before_fc"):
            features = self.norm(features, "input_norm.weight")
        if self.options.get("fc_norm"):
            parts = features.chunk(self.options["num_aux_hidden_states"])
            features = torch.cat(
                [self.norm(part, f"fc_norm.{i}.weight") for i, part in enumerate(parts)]
            )
        fused = weights["fc.weight"] @ features
        return fused + weights["fc.bias"] if self.options.get("bias") else fused

    def layer(self, states: list[Tensor], tokens: list[int]) -> Tensor:
        """The layer's output at the last row."""
        w = self.weights
        inputs = [
            torch.cat(
                [
                    self.norm(self.embedding[token], "midlayer.input_layernorm.weight"),
                    self.norm(state, "midlayer.hidden_norm.weight"),
                ]
            )
            for state, token in zip(states, tokens, strict=True)
        ]
        last = len(inputs) - 1
        query = self.heads(inputs[last], "q", self.num_heads, last)
        keys = [self.heads(x, "k", self.num_kv_heads, i) for i, x in enumerate(inputs)]
        values = [self.heads(x, "v", self.num_kv_heads, None) for x in inputs]
        attended = []
        for head in range(self.num_heads):
            shared = head // (self.num_heads // self.num_kv_heads)
            scores = torch.stack([query[head] @ key[shared] for key in keys])
            weights = torch.softmax(scores / math.sqrt(self.head_dim), dim=0)
            attended.append(sum(p * v[shared] for p, v in zip(weights, values, strict=True)))
        residual = states[last]
        if self.options.get("norm_before_residual"):
            residual = self.norm(residual, "midlayer.hidden_norm.weight")
        hidden = residual + self.linear(torch.cat(attended), "midlayer.self_attn.o_proj")
        x = self.norm(hidden, "midlayer.post_attention_layernorm.weight")
        gate = w["midlayer.mlp.gate_proj.weight"] @ x
        up = w["midlayer.mlp.up_proj.weight"] @ x
        return hidden + w["midlayer.mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)

    def heads(self, x: Tensor, name: str, count: int, position: int | None) -> Tensor:
        """Projection [count, d], rotated unless `position` is None."""
        y = self.linear(x, f"midlayer.self_attn.{name}_proj").view(count, self.head_dim)
        if f"midlayer.self_attn.{name}_norm.weight" in self.weights:
            rows = [self.norm(row, f"midlayer.self_attn.{name}_norm.weight") for row in y]
            y = torch.stack(rows)
        if position is None:
            return y
        cos, sin = (t[0, 0] for t in self.rotary(y, torch.tensor([[position]])))
        half = self.head_dim // 2
        return y * cos + torch.cat([-y[:, half:], y[:, :half]], dim=1) * sin

    def linear(self, x: Tensor, name: str) -> Tensor:
        y = self.weights[f"{name}.weight"] @ x
        return y + self.weights[f"{name}.bias"] if f"{name}.bias" in self.weights else y

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean() + self.eps) * self.weights[name]
