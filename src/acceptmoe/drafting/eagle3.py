"""EAGLE-3 drafting: a small head on the target's hidden states proposes a dynamic tree.

Axes: R rows, H hidden size of the head, G width of the target features, P committed pairs, M
nodes that a level expands (`topk`), D tokens of the draft vocabulary, A attention heads, C
key-value heads, d their dimension.

A *pair* is a target feature and the token after it. The cache keeps keys and values of pairs
only, so it holds nothing but true target features; what a draft appends is overwritten.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from acceptmoe.drafting.draft_weights import (
    Int8Product,
    check_can_round,
    check_draft_weights,
)
from acceptmoe.drafting.eagle3_checkpoint import is_eagle3_checkpoint, load_head
from acceptmoe.drafting.eagle3_head import BoundaryRule, Eagle3Config, Eagle3Head, rotary_table
from acceptmoe.drafting.eagle3_layouts import default_boundaries
from acceptmoe.errors import DrafterError, InvalidArgumentError
from acceptmoe.models.dense import own_product
from acceptmoe.ops.linear import is_faster_than_stock
from acceptmoe.tree import ROOT_PARENT, DraftTree, best_first_nodes

__all__ = ["Eagle3Drafter", "is_eagle3_checkpoint"]

DEFAULT_TOPK = 8
ROWS_PER_CHUNK = 512  # of a long prompt: bounds the size of the causal mask


class Eagle3Drafter:
    """Drafts trees with an EAGLE-3 head (a `Drafter`).

    `topk` is the number of children of each node and of nodes that each level expands.
    `boundaries` overrides the feature layers that the head's config names. The head runs on the
    target's device and in its dtype, unless `dtype` says otherwise; path probabilities are always
    taken in float32. `weights="int8"` drafts with weights rounded to 8 bits, on a CPU (see
    `draft_weights`). `check_target` must come before anything is drafted: it binds the target,
    whose embedding (and output matrix, where the head has none) is read in place, never copied.

    `boundary_rule` says how the feature layers became known: "override" (by the caller),
    "boundaries" or "layer outputs" (the convention the head's ids were read with) or "default".
    """

    name = "eagle3"

    def __init__(
        self,
        head: Eagle3Head,
        *,
        topk: int = DEFAULT_TOPK,
        boundaries: tuple[int, ...] | None = None,
        dtype: torch.dtype | None = None,
        weights: str | None = None,
    ) -> None:
        if isinstance(topk, bool) or not isinstance(topk, int) or topk < 1:
            raise InvalidArgumentError(
                f"topk is {topk!r}; it must be a whole number, 1 or larger (8 is usual)"
            )
        if boundaries is not None and len(boundaries) != head.config.num_aux:
            raise DrafterError(
                f"boundaries has {len(boundaries)} layers; the head fuses {head.config.num_aux}"
            )
        check_draft_weights(weights)
        self.head = head
        self.weights = weights
        self._int8_product = None if weights is None else Int8Product()
        self.topk = min(topk, head.config.draft_vocab_size)
        self.boundary_rule: BoundaryRule = (
            head.config.boundary_rule if boundaries is None else "override"
        )
        self._named_boundaries = head.config.boundaries if boundaries is None else tuple(boundaries)
        # Empty until `check_target` where the default rule must know the number of layers.
        self.feature_boundaries: tuple[int, ...] = self._named_boundaries or ()
        self.min_probability = 0.0  # see `Drafter`
        self._dtype = dtype
        self._target: _BoundTarget | None = None
        self._state: _SequenceState | None = None

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        model: PreTrainedModel | None = None,
        *,
        topk: int = DEFAULT_TOPK,
        boundaries: tuple[int, ...] | None = None,
        dtype: torch.dtype | None = None,
        weights: str | None = None,
    ) -> Eagle3Drafter:
        """The drafter of the head in folder `path` (see `load_head`), bound to `model` if given.

        Raises `DrafterError` when the files are damaged or the head was made for another target.
        """
        head = load_head(path, boundaries=boundaries)
        drafter = cls(head, topk=topk, dtype=dtype, weights=weights)
        if model is not None:
            drafter.check_target(model)
        return drafter

    def check_target(self, model: PreTrainedModel) -> None:
        """Bind `model`, or raise `DrafterError` when this head was made for another target."""
        target = _BoundTarget(model)
        config = self.head.config
        _check_sizes(config, target)
        boundaries, num_layers = self._named_boundaries, target.num_layers
        if boundaries is None:
            boundaries = default_boundaries(num_layers)
        is_ascending = all(a < b for a, b in pairwise(boundaries))
        if not is_ascending or boundaries[0] < 0 or boundaries[-1] > num_layers:
            origin = f"by the rule {self.boundary_rule!r}"
            raise DrafterError(
                f"the head's feature layers are {list(boundaries)} ({origin}) and the target has "
                f"{num_layers} layers; they must ascend from 0 to at most {num_layers}. Load a "
                "head made for this target, or name its layers with `boundaries`"
            )
        if len(boundaries) != config.num_aux:
            raise DrafterError(
                f"the head fuses {config.num_aux} states and the default rule names "
                f"{len(boundaries)}; name the feature layers with `boundaries`"
            )
        self.feature_boundaries = boundaries
        weight = target.embedding_weight
        dtype = self._dtype or weight.dtype
        check_can_round(self.weights, weight.device, dtype)
        self.head.to(device=weight.device, dtype=dtype)
        self._target = target
        self._state = None
        self.use_kernels(is_wanted=False)

    def use_kernels(self, *, is_wanted: bool) -> None:
        """Multiply by `acceptmoe::linear` where it is the faster way, if `is_wanted`.

        It is where a CPU has no arithmetic for the head's dtype (see `is_faster_than_stock`). In
        float32 the products stay torch's, bit for bit. With weights of 8 bits nothing changes.
        """
        is_own = is_wanted and is_faster_than_stock(self.head.fc.weight)
        if self._int8_product is not None:
            self.head.product = self._int8_product
        else:
            self.head.product = own_product if is_own else F.linear

    @torch.inference_mode()
    def start(self, prompt: Tensor, first_token: int, features: Tensor | None) -> None:
        """Forget everything and begin with `prompt` ([P] int64) followed by `first_token`.

        `features` is [P', G], the target's states at the last P' <= P prompt positions. Attention
        reaches back over these P' positions only.
        """
        self._state = _SequenceState(self.head, self.topk, first_token)
        prompt = prompt.to(self.head.device)
        num_rows = 0 if features is None else features.shape[0]
        if num_rows > prompt.shape[0]:
            raise DrafterError(
                f"{num_rows} rows of features for a prompt of {prompt.shape[0]} tokens; there must "
                "be at most one a token"
            )
        following = F.pad(prompt[prompt.shape[0] - num_rows + 1 :], (0, 1), value=first_token)
        self._commit(following if num_rows else following[:0], features)

    @torch.inference_mode()
    def extend(self, tokens: list[int], features: Tensor | None) -> None:
        """Take over n newly committed tokens; `features` [n, G] belong to the rows before them."""
        if tokens:
            self._commit(torch.tensor(tokens, device=self.head.device), features)
            self._started.root = tokens[-1]

    @torch.inference_mode()
    def propose(self, num_nodes: int, max_depth: int) -> DraftTree:
        """The EAGLE-2 tree (arXiv 2406.16858): the `num_nodes - 1` likeliest of all candidates.

        Every level expands the M likeliest nodes of the level before, on a CPU only those of at
        least `min_probability`, with M children each; all children are candidates. The root, the
        last committed token, counts as a node. Path probabilities are products of the head's
        softmax over the draft vocabulary.
        """
        state = self._started
        if num_nodes < 2 or max_depth < 1 or state.last_hidden is None:
            return DraftTree.root_only(state.root)
        levels = self._draft_levels(state, max_depth)
        scores = torch.cat([level.scores for level in levels])
        # One transfer for everything the host needs; float64 holds every token id exactly.
        columns = [
            scores,
            *(level.tokens for level in levels),
            *(level.parents for level in levels),
        ]
        host = torch.cat([column.double() for column in columns]).tolist()
        num_candidates = len(scores)
        return _best_tree(
            state.root,
            num_nodes,
            scores=host[:num_candidates],
            tokens=host[num_candidates : 2 * num_candidates],
            frontier=[int(candidate) for candidate in host[2 * num_candidates :]],
            topk=self.topk,
        )

    @property
    def _started(self) -> _SequenceState:
        if self._state is None:
            raise DrafterError("the drafter has no sequence; call `start` first")
        return self._state

    def _commit(self, tokens: Tensor, features: Tensor | None) -> None:
        """Run the head over new pairs [R] and [R, G]; its last row will expand the root."""
        state, head = self._started, self.head
        shape = (tokens.shape[0], head.config.feature_size)
        got = None if features is None else tuple(features.shape)
        if self._target is None:
            raise DrafterError("the drafter knows no target; call `check_target` first")
        if features is None or got != shape:
            raise DrafterError(
                f"features have shape {got}; for {shape[0]} tokens they must have shape {shape}, "
                f"the target's states at the boundaries {list(self.feature_boundaries)}"
            )
        states = head.fuse(features.to(device=head.device, dtype=head.dtype))
        embeddings = self._embed(tokens)
        for first in range(0, shape[0], ROWS_PER_CHUNK):
            rows = slice(first, first + ROWS_PER_CHUNK)
            hidden = state.commit(embeddings[rows], states[rows])
            state.last_hidden = hidden[-1:]

    def _draft_levels(self, state: _SequenceState, max_depth: int) -> list[_Level]:
        """Candidates of depths 1 to `max_depth`, the root's children first."""
        head, topk, device = self.head, self.topk, self.head.device
        assert state.last_hidden is not None
        normed = head.normalize(state.last_hidden)
        scores, tokens = (rows[0] for rows in self._children(normed))
        recurrent = normed if head.config.norm_output else state.last_hidden
        width = self._num_worth_expanding(scores)
        states = recurrent.expand(width, -1)
        frontier_scores, frontier_tokens = scores[:width], tokens[:width]
        frontier = torch.arange(width, device=device)
        levels = [_Level(scores, tokens, frontier[:0])]
        state.begin_draft(max_depth, width)
        num_candidates = topk
        for depth in range(2, max_depth + 1):
            if width == 0:
                break
            hidden = state.draft(self._embed(frontier_tokens), states)
            normed = head.normalize(hidden)
            probabilities, children = self._children(normed)
            scores = (frontier_scores[:, None] * probabilities).flatten()
            tokens = children.flatten()
            levels.append(_Level(scores, tokens, frontier))
            if depth == max_depth:
                break
            frontier_scores, best = scores.topk(topk)
            width = self._num_worth_expanding(frontier_scores)
            frontier_scores, best = frontier_scores[:width], best[:width]
            rows = best // topk
            frontier_tokens = tokens[best]
            states = (normed if head.config.norm_output else hidden)[rows]
            state.branch(rows)
            frontier = best + num_candidates
            num_candidates += scores.shape[0]
        return levels

    def _num_worth_expanding(self, scores: Tensor) -> int:
        """How many of a level's M best `scores`, best first, get children."""
        if self.min_probability == 0 or scores.device.type != "cpu":
            return scores.shape[0]  # on a GPU reading the number would take longer than it saves
        return int((scores >= self.min_probability).sum())

    def _children(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """The M likeliest next tokens of each row: probabilities float32 and target ids, [R, M]."""
        head = self.head
        weight = self._bound.output_weight if head.lm_head is None else head.lm_head.weight
        probabilities, ids = head.product(normed, weight, None).float().softmax(-1).topk(self.topk)
        return probabilities, ids if head.token_ids is None else head.token_ids[ids]

    def _embed(self, tokens: Tensor) -> Tensor:
        own = self.head.embed_tokens
        weight = self._bound.embedding_weight if own is None else own.weight
        return F.embedding(tokens, weight).to(self.head.dtype)

    @property
    def _bound(self) -> _BoundTarget:
        assert self._target is not None  # `_commit` has checked
        return self._target


@dataclass(frozen=True)
class _Level:
    """Candidates of one depth, M children of each expanded node in turn.

    `parents` [M] are the candidate numbers of the expanded nodes; empty at depth 1, where the root
    is the only parent.
    """

    scores: Tensor
    tokens: Tensor
    parents: Tensor


def _best_tree(
    root: int,
    num_nodes: int,
    *,
    scores: list[float],
    tokens: list[float],
    frontier: list[int],
    topk: int,
) -> DraftTree:
    """The tree of the likeliest candidates; `frontier` lists the expanded ones, level by level."""
    chosen = best_first_nodes(scores, num_nodes - 1)
    node_of = {candidate: node for node, candidate in enumerate(chosen, start=1)}
    parents = [ROOT_PARENT]
    for candidate in chosen:
        # Candidates after the first M come in runs of M siblings, in the order of `frontier`.
        family = (candidate - topk) // topk
        parents.append(0 if family < 0 else node_of[frontier[family]])
    return DraftTree(
        tokens=(root, *(int(tokens[candidate]) for candidate in chosen)),
        parents=tuple(parents),
        path_probabilities=(1.0, *(scores[candidate] for candidate in chosen)),
    )


class _SequenceState:
    """Keys and values of one sequence's pairs, with room behind them for one draft.

    Buffers grow by doubling. A pair's rotary position is its number; the constant offset to its
    position in the text changes no attention score.
    """

    def __init__(self, head: Eagle3Head, topk: int, root: int) -> None:
        self.root = root
        self.last_hidden: Tensor | None = None  # [1, H], output at the newest pair
        self._head = head
        self._topk = topk
        self._num_pairs = 0
        self._num_drafted = self._num_levels = 0  # rows and levels of the draft
        self._capacity = 0
        self._keys = self._values = torch.empty(0)
        self._reserve(256)

    def commit(self, embeddings: Tensor, states: Tensor) -> Tensor:
        """Append pairs [R, H] and [R, H] for good; the layer's output [R, H]."""
        num_rows, first = embeddings.shape[0], self._num_pairs
        self._reserve(first + num_rows)
        positions = slice(first, first + num_rows)
        mask = None
        if num_rows > 1:
            mask = torch.ones(
                num_rows, first + num_rows, dtype=torch.bool, device=embeddings.device
            ).tril_(first)
        hidden = self._layer(embeddings, states, positions, positions, mask)
        self._num_pairs += num_rows
        return hidden

    def begin_draft(self, max_depth: int, width: int) -> None:
        """Make room for a draft behind the pairs, and forget the last one; `width` rows begin."""
        self._reserve(self._num_pairs + max_depth * self._topk)
        self._num_drafted = self._num_levels = 0
        self._mask[:, : self._num_pairs] = 0.0
        first = slice(self._num_pairs, self._num_pairs + width)
        self._mask[:width, first] = self._only_self[:width, :width]

    def draft(self, embeddings: Tensor, states: Tensor) -> Tensor:
        """Run one level [R, H]; a row sees every pair, its own ancestors and itself."""
        num_rows = embeddings.shape[0]
        first = self._num_pairs + self._num_drafted
        slots = slice(first, first + num_rows)
        position = self._num_pairs + self._num_levels  # the same for the whole level
        self._num_drafted += num_rows
        self._num_levels += 1
        positions = slice(position, position + 1)
        mask = self._mask[:num_rows, : slots.stop]
        return self._layer(embeddings, states, positions, slots, mask)

    def branch(self, rows: Tensor) -> None:
        """The next level's rows descend from `rows` [R] of the level just run."""
        num_rows = rows.shape[0]
        start = self._num_pairs
        stop = start + self._num_drafted
        self._mask[:num_rows, start:stop] = self._mask[rows, start:stop]
        self._mask[:num_rows, stop : stop + num_rows] = self._only_self[:num_rows, :num_rows]

    def _layer(
        self,
        embeddings: Tensor,
        states: Tensor,
        positions: slice,
        slots: slice,
        mask: Tensor | None,
    ) -> Tensor:
        q, k, v, residual = self._head.project(
            embeddings, states, self._cos[positions], self._sin[positions]
        )
        self._keys[:, slots] = k.transpose(0, 1)
        self._values[:, slots] = v.transpose(0, 1)
        attended = _attend(q, self._keys[:, : slots.stop], self._values[:, : slots.stop], mask)
        return self._head.complete(attended, residual)

    def _reserve(self, capacity: int) -> None:
        if capacity <= self._capacity:
            return
        head, config = self._head, self._head.config
        capacity = max(capacity, 2 * self._capacity)
        shape = (config.num_kv_heads, capacity, config.head_dim)
        keys = torch.empty(shape, dtype=head.dtype, device=head.device)
        values = torch.empty_like(keys)
        if self._num_pairs:
            keys[:, : self._num_pairs] = self._keys[:, : self._num_pairs]
            values[:, : self._num_pairs] = self._values[:, : self._num_pairs]
        self._keys, self._values, self._capacity = keys, values, capacity
        self._cos, self._sin = rotary_table(config, capacity, head.device, head.dtype)
        lowest = torch.finfo(head.dtype).min
        self._mask = torch.zeros(self._topk, capacity, dtype=head.dtype, device=head.device)
        self._only_self = torch.full_like(self._mask[:, : self._topk], lowest).fill_diagonal_(0.0)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Grouped-query attention of q [R, A, d] over k, v [C, S, d]; the result is [R, A * d]."""
    num_kv_heads, num_slots, head_dim = k.shape
    # [C, A / C, R, d]
    grouped = q.view(q.shape[0], num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    shape = (num_kv_heads, grouped.shape[1], num_slots, head_dim)
    out = F.scaled_dot_product_attention(
        grouped, k[:, None].expand(shape), v[:, None].expand(shape), attn_mask=mask
    )
    return out.permute(2, 0, 1, 3).flatten(1)


class _BoundTarget:
    """What a head reads of its target: sizes, and two weights in place."""

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config.get_text_config()
        self.name: str = type(model).__name__
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        self.num_layers: int = config.num_hidden_layers
        self._embedding = model.get_input_embeddings()
        self._output = model.get_output_embeddings()

    @property
    def embedding_weight(self) -> Tensor:  # [V, Ht]
        return self._embedding.weight  # type: ignore[no-any-return]

    @property
    def output_weight(self) -> Tensor:  # [V, Ht]
        return self._output.weight  # type: ignore[no-any-return]


def _check_sizes(config: Eagle3Config, target: _BoundTarget) -> None:
    for what, got, expected in (
        ("hidden size", target.hidden_size, config.target_hidden_size),
        ("vocabulary size", target.vocab_size, config.vocab_size),
    ):
        if got != expected:
            raise DrafterError(
                f"the head was made for a target with {what} {expected}; this {target.name} has "
                f"{got}. Load a head made for this target"
            )
