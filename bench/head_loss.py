"""Training-time test: the head is trained on its own states, step after step.

Axes: B sequences, S positions, R rows of a sequence that are trained, G feature width, H hidden
size, V and D tokens of the target's and the draft vocabulary, C key-value heads, g query heads of
each, d their dimension.

Only rows where a draft can begin are trained: row r pairs the state at position P - 1 + r with the
token after it, P being the length of the prompt. The prompt gives keys and values, nothing else.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from acceptmoe.drafting.eagle3_head import Eagle3Head, rotary_table
from acceptmoe.models.features import decoder_modules
from head_data import HeadBatch

STEP_DECAY = 0.8  # weight of step j is 0.8^j, as in EAGLE-3


@dataclass(frozen=True)
class TargetView:
    """What one pass of the frozen target gives to training.

    `logits[b, r]` are the target's at the position that row r predicts in step 0, P + r; in step j
    row r predicts as `logits[b, r + j]` do.
    """

    features: Tensor  # [B, S, G]
    logits: Tensor  # [B, R, V]


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
        hidden = model.base_model(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False
        ).last_hidden_state
    finally:
        for handle in handles:
            handle.remove()
    predicted = batch.row_positions() + 1
    logits = model.get_output_embeddings()(take_rows(hidden, predicted))
    return TargetView(torch.cat([kept[b] for b in boundaries], dim=-1), logits)


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

    A row's loss is the cross-entropy against the target's distribution, restricted to the draft
    vocabulary and renormalised. It is left out where the target's argmax is outside that
    vocabulary, and counted as a disagreement.
    """
    best = view.logits.argmax(-1)  # [B, R]
    token_ids = head.token_ids
    if token_ids is None:
        wanted, can_learn = view.logits.softmax(-1), torch.ones_like(best, dtype=torch.bool)
        draft_best = best
    else:
        wanted = view.logits[..., token_ids].softmax(-1)
        can_learn = torch.isin(best, token_ids)
        # Draft vocabularies ascend; where the token is not in it, the place found means nothing.
        draft_best = torch.searchsorted(token_ids, best)
    is_row = batch.is_row()
    num_rows = is_row.shape[1]
    losses, agreed, rows = [], [], []
    for step, hidden in enumerate(unrolled(head, embedding, view.features, batch, num_steps)):
        later = slice(
            step, num_rows
        )  # what row r predicts in this step, row r + step did in step 0
        is_scored = is_row[:, later]
        is_learnt = is_scored & can_learn[:, later]
        logits = head.lm_head(head.normalize(hidden[:, : num_rows - step][is_learnt]))
        losses.append(F.cross_entropy(logits, wanted[:, later][is_learnt]))
        agreed.append(int((logits.argmax(-1) == draft_best[:, later][is_learnt]).sum()))
        rows.append(int(is_scored.sum()))
    return StepLosses(losses, rows, agreed)


def unrolled(
    head: Eagle3Head, embedding: Tensor, features: Tensor, batch: HeadBatch, num_steps: int
) -> list[Tensor]:
    """The head's output [B, R, H] at each step; step j reads its own states of step j - 1.

    At step j the row at position i holds token i + 1 + j at rotary position i + j. It attends to
    the step-0 pairs up to i, whose states are true, and to its own of steps 1..j: that is what a
    draft sees.
    """
    num_positions = batch.input_ids.shape[1]
    positions = batch.row_positions()
    cos, sin = rotary_table(head.config, num_positions + num_steps, head.device, head.dtype)
    text = F.pad(batch.input_ids, (0, num_steps + 1))

    states = head.fuse(features)
    embeddings = F.embedding(text[:, 1 : num_positions + 1], embedding)
    q, k, v, residual = head.project(embeddings, states, cos[:num_positions], sin[:num_positions])
    keys, values = [k], [v]
    q, residual = take_rows(q, positions), take_rows(residual, positions)
    is_hidden = torch.arange(num_positions) > positions[..., None]  # [B, R, S]
    outputs = []
    for step in range(num_steps):
        if step:
            embeddings = F.embedding(text.gather(1, positions + step + 1), embedding)
            places = positions + step
            q, k, v, residual = head.project(embeddings, states, cos[places], sin[places])
            keys.append(k)
            values.append(v)
        hidden = head.complete(_attend_own_past(q, keys, values, is_hidden), residual)
        outputs.append(hidden)
        states = head.normalize(hidden) if head.config.norm_output else hidden
    return outputs


def take_rows(x: Tensor, positions: Tensor) -> Tensor:
    """[B, S, ...] at `positions` [B, R]: [B, R, ...]."""
    return x[torch.arange(len(x))[:, None], positions]


def _attend_own_past(
    q: Tensor, keys: list[Tensor], values: list[Tensor], is_hidden: Tensor
) -> Tensor:
    """Attention to the first keys, and to the same row of the later ones; [B, R, A * d].

    `q` is [B, R, A, d]; the first of `keys` and `values` is [B, S, C, d], the others [B, R, C, d];
    `is_hidden` [B, R, S] bool says which of the first are out of sight.
    """
    batch, num_rows, num_heads, head_dim = q.shape
    num_kv_heads, num_first = keys[0].shape[2], keys[0].shape[1]
    q = q.reshape(batch, num_rows, num_kv_heads, -1, head_dim) * head_dim**-0.5
    scores = torch.einsum("brcgd,bkcd->bcgrk", q, keys[0])
    scores = scores.masked_fill(is_hidden[:, None, None], torch.finfo(q.dtype).min)
    own = [torch.einsum("brcgd,brcd->bcgr", q, k)[..., None] for k in keys[1:]]
    weights = torch.cat([scores, *own], dim=-1).softmax(-1)
    out = torch.einsum("bcgrk,bkcd->brcgd", weights[..., :num_first], values[0])
    for j, v in enumerate(values[1:]):
        out = out + torch.einsum("bcgr,brcd->brcgd", weights[..., num_first + j], v)
    return out.reshape(batch, num_rows, num_heads * head_dim)
