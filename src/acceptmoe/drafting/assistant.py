"""Drafts by a smaller causal language model with the target's vocabulary.

Axes: F rows of one level (the nodes expanded together), M children offered by each row, V
vocabulary, P committed tokens, S cache slots that drafted rows take behind the committed ones.

Rows are numbered as they are expanded, row 0 is the root. The children of row r are the candidates
r * M to r * M + M - 1, so the parent of a candidate is a division away and needs no table.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from acceptmoe.drafting.assistant_forward import (
    FULL,
    SLIDING,
    AssistantForward,
    layer_types,
    text_config,
)
from acceptmoe.drafting.compiled_assistant import CompiledAssistantForward, is_compilable
from acceptmoe.drafting.draft_weights import check_can_round, check_draft_weights
from acceptmoe.errors import DrafterError, InvalidArgumentError
from acceptmoe.models.backend import PassBackend
from acceptmoe.models.dense import linears_for
from acceptmoe.models.kv import find_cache_keyword
from acceptmoe.models.rounded import round_again, rounded_copy
from acceptmoe.ops.linear import is_faster_than_stock
from acceptmoe.tree import ROOT_PARENT, DraftTree, best_first_nodes

# A level of an assistant takes about as long as a third to a half of a token's whole share.
DEFAULT_REACH = 0.4
MAX_WIDTH = 1024  # far above any useful frontier; an absurd number is a caller's slip
ATTENTION_IMPLEMENTATIONS = ("sdpa", "eager")  # those that take an additive 4-D mask


class AssistantDrafter:
    """Best-first trees from a causal language model that keeps its own key-value cache.

    Each level is one forward pass over the `frontier` likeliest nodes of that depth, each offering
    its `num_children` likeliest tokens; the tree is the `num_nodes` likeliest of all candidates by
    path probability (the product of the assistant's softmax along the path, in fp32). Keys and
    values of committed tokens stay in the cache, those of drafted nodes only if committed.

    A pass costs time and gains at most one token, so a level is run only if its nodes have a path
    probability of `min_reach` or more together: that is how often the output comes by one of them.
    0 drafts to the full depth.

    `weights="int8"` drafts with weights rounded to 8 bits, on a CPU; see `draft_weights`.
    Weights that change are rounded again when the next text begins.

    `model` is a decoder-only transformers model with the target's tokenizer, dense or sparse, the
    target itself included, in evaluation mode. Its device and dtype may differ from the target's,
    and nothing in it is changed.

    Raises `DrafterError` for a model that cannot draft, `InvalidArgumentError` for absurd numbers.
    """

    name = "assistant"
    feature_boundaries: tuple[int, ...] = ()

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        num_children: int = 8,
        frontier: int = 8,
        min_reach: float = DEFAULT_REACH,
        weights: str | None = None,
    ) -> None:
        _check_width("num_children", num_children)
        _check_width("frontier", frontier)
        _check_reach(min_reach)
        check_draft_weights(weights)
        check_assistant(model)
        self.model = model
        self.num_children = num_children
        self.frontier = frontier
        self.min_reach = float(min_reach)
        self.min_probability = 0.0  # see `Drafter`
        self.weights = weights
        check_can_round(weights, model.device, model.dtype)
        self._computed = model if weights is None else rounded_copy(model)
        self._forwards: dict[tuple[str | None, bool], AssistantForward] = {}
        # (parent row, token) of the drafted rows; None without a draft since the last commitment.
        self._row_of: dict[tuple[int, int], int] | None = None
        self.use_kernels(is_wanted=False)

    def check_target(self, model: PreTrainedModel) -> None:
        """Raise `DrafterError` unless the assistant can draft for `model`."""
        check_assistant(self.model)  # it may have been put into training mode since
        check_can_round(self.weights, self.model.device, self.model.dtype)
        ours, theirs = _vocab_size(self.model), _vocab_size(model)
        if ours != theirs:
            raise DrafterError(
                f"the assistant {type(self.model).__name__} has vocab_size {ours} and the target "
                f"{type(model).__name__} has {theirs}; they must share one tokenizer and have the "
                "same vocab_size, padding included; choose an assistant of the target's family"
            )

    def use_kernels(self, *, is_wanted: bool, backend: str | None = None) -> None:
        """How the model is called from the next text on, as `wrap` was asked to; forgets the text.

        `is_wanted`: multiply by `acceptmoe::linear` where it is the faster way, that is where a
        CPU's own products in the assistant's dtype are slow (see `is_faster_than_stock`). In
        float32 they stay torch's, bit for bit. With weights of 8 bits nothing changes.

        `backend`: compile the forward of a level with that backend of `torch.compile`, for a dense
        assistant on a CPU. It compiles once for each capacity of its cache, half a minute on two
        cores. Calls of the model by others never change.
        """
        weight = self.model.get_output_embeddings().weight
        is_own = is_wanted and self.weights is None and is_faster_than_stock(weight)
        if backend is not None and not is_compilable(self._computed):
            backend = None
        if (backend, is_own) not in self._forwards:
            self._forwards[backend, is_own] = self._make_forward(backend, weight, is_own)
        self._forward = self._forwards[backend, is_own]
        self._forget([])

    @property
    def num_compilations(self) -> int:
        """Graphs that were compiled for drafting, by all that `use_kernels` has chosen."""
        forwards = self._forwards.values()
        compiled = [each for each in forwards if isinstance(each, CompiledAssistantForward)]
        return sum(forward.backend.num_graphs for forward in compiled)

    def _make_forward(self, backend: str | None, weight: Tensor, is_own: bool) -> AssistantForward:
        if backend is None:
            forward = AssistantForward(self._computed)
        else:
            linear = torch.ops.acceptmoe.linear.default if is_own else None
            forward = CompiledAssistantForward(
                self._computed, self.frontier, PassBackend(backend, linear)
            )
        forward.linears = linears_for(weight, is_wanted=is_own)
        return forward

    def start(self, prompt: Tensor, first_token: int, features: Tensor | None) -> None:
        """Forget everything and begin with `prompt` ([P] int64) followed by `first_token`.

        The first `propose` reads the prompt.
        """
        if self._computed is not self.model:
            round_again(self._computed)
        self._forget([*prompt.tolist(), int(first_token)])

    def extend(self, tokens: list[int], features: Tensor | None) -> None:
        """Take over newly committed tokens, and the cache entries of those that were drafted."""
        if not tokens:
            return
        tokens = [int(token) for token in tokens]
        # The last one becomes the root and is read again: the next draft needs its logits.
        self._keep_drafted(tokens[:-1])
        self._text.extend(tokens)

    def propose(self, num_nodes: int, max_depth: int) -> DraftTree:
        """The likeliest tree of at most `num_nodes` nodes (root included) and depth `max_depth`.

        Raises `DrafterError` before `start`, and when the assistant's logits are not finite.
        """
        if not self._text:
            raise DrafterError(
                "the assistant has no text to continue; call start(prompt, first_token) first"
            )
        if num_nodes <= 1 or max_depth <= 0:
            return DraftTree.root_only(self._text[-1])
        # Compiled forwards write to tensors that were made outside inference mode.
        with torch.inference_mode(False), torch.no_grad():
            self._forward.drop_drafted(self._num_cached)
            self._row_of = None  # as long as the draft is not whole
            return self._grow(num_nodes, max_depth)

    def __getstate__(self) -> dict[str, Any]:
        # A copy goes on with the text, but reads it anew: forwards leave their caches behind.
        return {**vars(self), "_num_cached": 0, "_row_of": None}

    def _forget(self, text: list[int]) -> None:
        self._text = text
        self._forward.forget()
        self._num_cached = 0  # so many tokens of the text have their keys and values in the cache
        self._row_of = None

    def _keep_drafted(self, tokens: list[int]) -> None:
        """Keep the cache entries of the root and of the drafted path that `tokens` follow."""
        if self._row_of is None:
            return
        rows = [0]
        for token in tokens:
            row = self._row_of.get((rows[-1], token))
            if row is None:
                break
            rows.append(row)
        self._row_of = None
        with torch.inference_mode(False), torch.no_grad():
            self._forward.keep(self._num_cached, rows)
        self._num_cached += len(rows)

    def _grow(self, num_nodes: int, max_depth: int) -> DraftTree:
        """Expand level by level; candidates stay on the assistant's device until the end."""
        forward, text = self._forward, self._text
        logits = forward.read(text[self._num_cached :], self._num_cached)
        self._num_cached = len(text) - 1
        num_children = min(self.num_children, num_nodes - 1, logits.shape[-1])
        tokens, scores = _likeliest_children(logits, logits.new_zeros(1), num_children)
        all_tokens, all_scores = [tokens], [scores]  # of the candidates; [F, M] for each level
        expanded: list[Tensor] = []  # [F] for each level: the candidates that became its rows
        level_starts = [0]  # the first row of each depth
        num_rows = 1
        sees = torch.zeros(1, 0, dtype=torch.bool, device=logits.device)  # [F, S] drafted rows
        for _ in range(1, max_depth):
            width = self._num_worth_expanding(all_scores, num_nodes)
            if width == 0:
                break
            row_scores, chosen = scores.flatten().topk(width)
            row_tokens = tokens.flatten()[chosen]
            expanded.append(chosen + level_starts[-1] * num_children)
            level_starts.append(num_rows)
            num_rows += width
            itself = torch.eye(width, dtype=torch.bool, device=logits.device)
            sees = torch.cat([sees[chosen // num_children], itself], dim=1)
            logits = forward.expand(row_tokens, sees, len(text), level_starts)
            tokens, scores = _likeliest_children(logits, row_scores, num_children)
            all_tokens.append(tokens)
            all_scores.append(scores)
        probabilities = torch.cat(all_scores).flatten().exp().tolist()
        token_list, row_candidates = (
            torch.cat(parts).flatten().tolist() if parts else [] for parts in (all_tokens, expanded)
        )
        self._row_of = {
            (candidate // num_children, token_list[candidate]): row
            for row, candidate in enumerate(row_candidates, start=1)
        }
        return self._best_tree(num_nodes, num_children, token_list, probabilities, row_candidates)

    def _num_worth_expanding(self, all_scores: list[Tensor], num_nodes: int) -> int:
        """How many of the last level's candidates become rows; 0 ends the draft.

        Beside the root the tree has `num_nodes` - 1 places and no child beats its parent, so a
        candidate needs a rank of at most `num_nodes` - 2 among all of them, and `min_probability`;
        the best `frontier` of these are run if they come to `min_reach`. The host reads this one
        number, which costs far less than the passes it saves when the assistant is unsure.
        """
        scores = torch.cat([level.flatten() for level in all_scores])
        rank = min(num_nodes - 2, scores.numel())
        if rank == 0:
            return 0
        least = scores.topk(rank).values[-1]
        if self.min_probability > 0:
            least = least.clamp_min(math.log(self.min_probability))
        best = all_scores[-1].flatten().topk(min(self.frontier, all_scores[-1].numel())).values
        is_worth = best >= least
        is_reached = (best.exp() * is_worth).sum() >= self.min_reach
        return int(is_worth.sum() * is_reached)

    def _best_tree(
        self,
        num_nodes: int,
        num_children: int,
        tokens: list[int],
        probabilities: list[float],
        row_candidates: list[int],
    ) -> DraftTree:
        if not all(map(math.isfinite, probabilities)):
            raise DrafterError(
                f"the assistant {type(self.model).__name__} ({self.model.dtype}) produced logits "
                "that are not finite; load it in bfloat16 or float32, or check its weights"
            )
        node_of_row = {0: 0}
        row_of_candidate = {candidate: row for row, candidate in enumerate(row_candidates, start=1)}
        nodes = [(self._text[-1], ROOT_PARENT, 1.0)]
        for candidate in best_first_nodes(probabilities, num_nodes - 1):
            if probabilities[candidate] == 0.0:  # underflow: never to be committed
                continue
            if candidate in row_of_candidate:
                node_of_row[row_of_candidate[candidate]] = len(nodes)
            parent = node_of_row[candidate // num_children]
            nodes.append((tokens[candidate], parent, probabilities[candidate]))
        return DraftTree(*(tuple(column) for column in zip(*nodes, strict=True)))


def _likeliest_children(logits: Tensor, scores: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Tokens and log path probabilities, both [F, num], below rows with log probability `scores`.

    `logits` is [F, V] fp32. No child comes out likelier than its parent.
    """
    best, tokens = logits.log_softmax(-1).topk(num)
    return tokens, scores[:, None] + best


def check_assistant(model: PreTrainedModel) -> None:
    """Raise `DrafterError` unless trees can be drafted with `model`; it says what is missing."""
    if not isinstance(model, PreTrainedModel):
        raise InvalidArgumentError(
            f"the assistant is {model!r:.80} ({type(model).__name__}); it must be a transformers "
            "PreTrainedModel; load one with AutoModelForCausalLM.from_pretrained, or pass its "
            "folder to load_drafter"
        )
    config = model.config
    problem = None
    if config.is_encoder_decoder:
        problem = (
            "is an encoder-decoder model; an assistant must be decoder-only; choose a causal one"
        )
    elif model.get_output_embeddings() is None:
        problem = "has no language-model head; load it with AutoModelForCausalLM.from_pretrained"
    elif getattr(model, "_is_stateful", False):
        problem = (
            "is stateful (recurrent layers), so the branches of a tree would mix; choose a model "
            "with attention layers only"
        )
    elif find_cache_keyword(model) is None:
        problem = (
            "takes no key-value cache ('cache' or 'past_key_values' in its forward); an assistant "
            "keeps one between drafts; choose a model of transformers' own"
        )
    elif not _takes_positions(model):
        problem = (
            "takes no position_ids, or has ALiBi: it counts positions along its cache, where the "
            "branches of a tree lie one behind another; choose a model with rotary or learned "
            "positions"
        )
    elif config._attn_implementation not in ATTENTION_IMPLEMENTATIONS:
        problem = (
            f"uses {config._attn_implementation} attention, which takes no tree mask; allowed: "
            f"{', '.join(ATTENTION_IMPLEMENTATIONS)}; load it with attn_implementation='sdpa'"
        )
    elif model.training:
        problem = "is in training mode, so its drafts would be random; call .eval() on it first"
    else:
        problem = _find_layer_problem(model)
    if problem is not None:
        raise DrafterError(f"the assistant {type(model).__name__} {problem}")


def _takes_positions(model: PreTrainedModel) -> bool:
    """Whether the forward puts tokens where `position_ids` says."""
    has_alibi = getattr(text_config(model), "alibi", False)
    return not has_alibi and "position_ids" in inspect.signature(type(model).forward).parameters


def _find_layer_problem(model: PreTrainedModel) -> str | None:
    """Why the attention layers cannot draft trees, or None."""
    only = (
        "; only full and sliding-window attention can draft trees; choose a model without hybrid, "
        "chunked or indexed layers"
    )
    # Chunked layers would pass for sliding ones by their cache, but see less.
    others = sorted(layer_types(model) - {FULL, SLIDING})
    if others:
        return f"has {' and '.join(others)} layers{only}"
    windows = set()
    for number, layer in enumerate(DynamicCache(config=model.config).layers):
        if type(layer) is DynamicSlidingWindowLayer:
            windows.add(layer.sliding_window)
        elif type(layer) is not DynamicLayer:
            return f"keeps a {type(layer).__name__} in layer {number}{only}"
    if len(windows) > 1:
        return (
            f"has layers with different attention windows ({sorted(windows)}); all must be equal; "
            "choose another assistant"
        )
    return None


def _vocab_size(model: PreTrainedModel) -> int:
    return int(text_config(model).vocab_size)


def _check_reach(value: float) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= 1:
        raise InvalidArgumentError(
            f"min_reach is {value!r}; it must be a probability from 0, which drafts to the full "
            f"depth, to 1 (the default is {DEFAULT_REACH})"
        )


def _check_width(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_WIDTH:
        raise InvalidArgumentError(
            f"{name} is {value!r}; it must be a whole number from 1 to {MAX_WIDTH} (the default "
            "is 8)"
        )
