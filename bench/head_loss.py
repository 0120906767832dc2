"""Training-time test: the head is trained on its own states, step after step.

Axes: B sequences, S positions, G feature width, H hidden size, V and D tokens of the target's and
the draft vocabulary, C key-value heads, g query heads of each, d their dimension.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from head_data import HeadBatch
from torch import Tensor
from transformers import PreTrainedModel

from acceptmoe.drafting.eagle3_head import Eagle3Head, rotary_table
from acceptmoe.models.features import decoder_modules

STEP_DECAY = 0.8  # weight of step j is 0.8^j, as in EAGLE-3


@dataclass(frozen=True)
class TargetView:
    """What one pass of the frozen target gives to training."""

    features: Tensor  # [B, S, G]
    logits: Tensor  # [B, S, V]


@torch.no_grad()
def view_target(
    model: PreTrainedModel, boundaries: tuple[int, ...], batch: HeadBatch
) -> TargetView:
    """Run the target and keep its residual streams at `boundaries` (b enters layer b)."""
    kept: dict[int, Tensor] = {}
    modules = decoder_modules(model)
    handles = []
    for boundary in boundaries:

        def keep(module: Any, args: Any, kwargs: Any, boundary: int = boundary) -> None:
            kept[boundary] = args[0] if args else kwargs["hidden_states"]

        handles.append(modules[boundary].register_forward_pre_hook(keep, with_kwargs=True))
    try:
        output = model(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False
        )
    finally:
        for handle in handles:
            handle.remove()
    return TargetView(torch.cat([kept[b] for b in boundaries], dim=-1), output.logits)


@dataclass(frozen=True)
class StepLosses:
    """Of each step: the loss, the rows scored, and on how many of them the argmax agreed."""

    losses: list[Tensor]
    rows: list[int]
    agreed: list[int]

    def total(self) -> Tensor:
        """Scalar: the mean of the steps' losses with weights 0.8^j."""
        weights = torch.tensor([STEP_DECAY**j for j in range(len(self.losses))])
        return (torch.stack(self.losses) * weights).sum() / weights.sum()


def step_losses(
    head: Eagle3Head, embedding: Tensor, view: TargetView, batch: HeadBatch, num_steps: int
) -> StepLosses:
    """Losses and agreement of `num_steps` steps.

    A row is scored where the target predicts a completion token. Its loss is the cross-entropy
    against the target's distribution, restricted to the draft vocabulary and renormalised; it is
    left out where the target's argmax is outside that vocabulary, and counted as a disagreement.
    """
    # Row i pairs the state at i with token i + 1, where a draft may begin: in the completion.
    is_start = is_scored = batch.is_scored
    token_ids = head.token_ids
    losses, agreed, rows = [], [], []
    for step, hidden in enumerate(unrolled(head, embedding, view.features, batch, num_steps)):
        shift = step + 1  # row i predicts as the target does at position i + shift
        is_row = is_start[:, : is_scored.shape[1] - shift] & is_scored[:, shift:]
        wanted = view.logits[:, shift:][is_row]  # [N, V]
        best = wanted.argmax(-1)
        logits = head.lm_head(head.normalize(hidden[:, : is_scored.shape[1] - shift][is_row]))
        guessed = logits.argmax(-1)
        if token_ids is not None:
            guessed = token_ids[guessed]
            wanted = wanted[:, token_ids]
            can_learn = torch.isin(best, token_ids)
            logits, wanted = logits[can_learn], wanted[can_learn]
        losses.append(F.cross_entropy(logits, wanted.softmax(-1)))
        agreed.append(int((guessed == best).sum()))
        rows.append(len(best))
    return StepLosses(losses, rows, agreed)


def unrolled(
    head: Eagle3Head, embedding: Tensor, features: Tensor, batch: HeadBatch, num_steps: int
) -> list[Tensor]:
    """The head's output [B, S, H] at each step; step j reads its own states of step j - 1.

    At step j row i holds token i + 1 + j at rotary position i + j. It attends to the step-0 rows
    up to i, whose states are true, and to its own rows of steps 1..j: that is what a draft sees.
    """
    num_positions = batch.input_ids.shape[1]
    cos, sin = rotary_table(head.config, num_positions + num_steps, head.device, head.dtype)
    states = head.fuse(features)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    outputs = []
    for step in range(num_steps):
        tokens = F.pad(batch.input_ids[:, step + 1 :], (0, step + 1))
        positions = slice(step, step + num_positions)
        embeddings = F.embedding(tokens, embedding)
        q, k, v, residual = head.project(embeddings, states, cos[positions], sin[positions])
        keys.append(k)
        values.append(v)
        hidden = head.complete(_attend_own_past(q, keys, values), residual)
        outputs.append(hidden)
        states = head.normalize(hidden) if head.config.norm_output else hidden
    return outputs


def _attend_own_past(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Causal over the first keys, and over the same row of the later ones; [B, S, A * d].

    `q` is [B, S, A, d], each of `keys` and `values` [B, S, C, d].
    """
    batch, length, num_heads, head_dim = q.shape
    num_kv_heads = keys[0].shape[2]
    q = q.reshape(batch, length, num_kv_heads, -1, head_dim) * head_dim**-0.5
    scores = torch.einsum("bqcgd,bkcd->bcgqk", q, keys[0])
    is_later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu_(1)
    scores = scores.masked_fill(is_later, torch.finfo(q.dtype).min)
    own = [torch.einsum("bqcgd,bqcd->bcgq", q, k)[..., None] for k in keys[1:]]
    weights = torch.cat([scores, *own], dim=-1).softmax(-1)
    out = torch.einsum("bcgqk,bkcd->bqcgd", weights[..., :length], values[0])
    for j, v in enumerate(values[1:]):
        out = out + torch.einsum("bcgq,bqcd->bqcgd", weights[..., length + j], v)
    return out.reshape(batch, length, num_heads * head_dim)
