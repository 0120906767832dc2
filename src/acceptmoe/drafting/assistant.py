"""Drafts by a smaller causal language model with the target's vocabulary.

Axes: F rows of one level (the nodes expanded together), M children offered by each row, V
vocabulary, P committed tokens, S cache slots that drafted rows take behind the committed ones.

Rows are numbered as they are expanded, row 0 is the root. The children of row r are the candidates
r * M to r * M + M - 1, so the parent of a candidate is a division away and needs no table.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from acceptmoe.errors import DrafterError, InvalidArgumentError
from acceptmoe.models.dense import LinearsMode, linears_for
from acceptmoe.models.kv import find_cache_keyword, keep_path
from acceptmoe.tree import ROOT_PARENT, DraftTree, best_first_nodes

# A level of an assistant takes about as long as a third to a half of a token's whole share.
DEFAULT_REACH = 0.4
MAX_WIDTH = 1024  # far above any useful frontier; an absurd number is a caller's slip
ATTENTION_IMPLEMENTATIONS = ("sdpa", "eager")  # those that take an additive 4-D mask
FULL, SLIDING = "full_attention", "sliding_attention"  # layer types, as configs name them


class AssistantDrafter:
    """Best-first trees from a causal language model that keeps its own key-value cache.

    Each level is one forward pass over the `frontier` likeliest nodes of that depth, each offering
    its `num_children` likeliest tokens; the tree is the `num_nodes` likeliest of all candidates by
    path probability (the product of the assistant's softmax along the path, in fp32). Keys and
    values of committed tokens stay in the cache, those of drafted nodes only if committed.

    A pass costs time and gains at most one token, so a level is run only if its nodes have a path
    probability of `min_reach` or more together: that is how often the output comes by one of them.
    0 drafts to the full depth.

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
    ) -> None:
        _check_width("num_children", num_children)
        _check_width("frontier", frontier)
        _check_reach(min_reach)
        check_assistant(model)
        self.model = model
        self.num_children = num_children
        self.frontier = frontier
        self.min_reach = float(min_reach)
        self.min_probability = 0.0  # see `Drafter`
        self._forward = _AssistantForward(model)
        self._forget([])

    def check_target(self, model: PreTrainedModel) -> None:
        """Raise `DrafterError` unless the assistant can draft for `model`."""
        check_assistant(self.model)  # it may have been put into training mode since
        ours, theirs = _vocab_size(self.model), _vocab_size(model)
        if ours != theirs:
            raise DrafterError(
                f"the assistant {type(self.model).__name__} has vocab_size {ours} and the target "
                f"{type(model).__name__} has {theirs}; they must share one tokenizer and have the "
                "same vocab_size, padding included; choose an assistant of the target's family"
            )

    def use_compiled_kernels(self, is_wanted: bool) -> None:
        """Multiply by `acceptmoe::linear` where it is the faster way, if `is_wanted`.

        It is where a CPU's own products in the assistant's dtype are slow (see
        `is_faster_than_stock`). In float32 they stay torch's, bit for bit. Calls of the model by
        others never change.
        """
        weight = self.model.get_output_embeddings().weight
        self._forward.linears = linears_for(weight, is_wanted=is_wanted)

    def start(self, prompt: Tensor, first_token: int, features: Tensor | None) -> None:
        """Forget everything and begin with `prompt` ([P] int64) followed by `first_token`.

        The first `propose` reads the prompt.
        """
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
        with torch.inference_mode():
            self._drop_drafted()
            return self._grow(num_nodes, max_depth)

    def _forget(self, text: list[int]) -> None:
        self._text = text
        # Without a config every layer keeps all tokens, also where the model's attention has a
        # window: a sliding layer would let rejected drafts push context out.
        self._cache = DynamicCache()
        self._num_cached = 0  # so many tokens of the text have their keys and values in the cache
        self._row_of: dict[tuple[int, int], int] = {}  # (parent row, token) of the drafted rows

    def _keep_drafted(self, tokens: list[int]) -> None:
        """Keep the cache entries of the root and of the drafted path that `tokens` follow."""
        rows = [0]
        for token in tokens:
            row = self._row_of.get((rows[-1], token))
            if row is None:
                break
            rows.append(row)
        self._drop_drafted(rows)

    def _drop_drafted(self, kept_rows: Sequence[int] = ()) -> None:
        """Drop the cache entries of all drafted rows, the root's included, except `kept_rows`."""
        if self._cache.get_seq_length() == self._num_cached:
            return  # no proposal since the last commitment, so no rows either
        with torch.inference_mode():
            # Rows took their slots in order, the root's first, right behind the committed text.
            keep_path(self._cache, self._num_cached, kept_rows)
        self._num_cached += len(kept_rows)
        self._row_of = {}

    def _grow(self, num_nodes: int, max_depth: int) -> DraftTree:
        """Expand level by level; candidates stay on the assistant's device until the end."""
        forward, text = self._forward, self._text
        logits = forward.read(text[self._num_cached :], self._num_cached, self._cache)
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
            logits = forward.expand(row_tokens, sees, len(text), level_starts, self._cache)
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

    `logits` is [F, V] fp32. The log-sum-exp is never below the largest logit, so no child comes out
    likelier than its parent.
    """
    top_logits, tokens = logits.topk(num)
    return tokens, scores[:, None] + (top_logits - logits.logsumexp(-1, keepdim=True))


class _AssistantForward:
    """Calls the model, with the keywords of its version and the masks of its attention layers."""

    def __init__(self, model: PreTrainedModel) -> None:
        parameters = inspect.signature(type(model).forward).parameters
        self._model = model
        self.linears: LinearsMode = nullcontext
        self._cache_keyword = find_cache_keyword(model) or "past_key_values"
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self._window = _attention_window(model)
        self._layer_types = _layer_types(model)
        # Embeddings that accelerate keeps off the device are fetched by its hooks, from any device.
        device = model.get_input_embeddings().weight.device
        self._device = torch.device("cpu") if device.type == "meta" else device

    def read(self, tokens: list[int], num_cached: int, cache: DynamicCache) -> Tensor:
        """[1, V] fp32: the logits after a chain of committed tokens that follow the cached ones."""
        token_ids = torch.tensor([tokens], device=self._device)
        positions = torch.arange(num_cached, num_cached + len(tokens), device=self._device)
        # The model's own masks are right for a chain, and cheap for a long prompt.
        return self._logits(token_ids, positions[None], None, cache, **self._last_only)[-1:]

    def expand(
        self,
        tokens: Tensor,
        sees: Tensor,
        num_committed: int,
        level_starts: list[int],
        cache: DynamicCache,
    ) -> Tensor:
        """[F, V] fp32: the logits after the rows of one level, `tokens` [F].

        `sees` [F, S] bool says which drafted rows, from row 1 on, are ancestors of a row or itself;
        `level_starts` is the first row of every depth down to this one. Row r lies in cache slot
        `num_committed - 1 + r`, the root in the last committed slot.
        """
        root = num_committed - 1
        position = root + len(level_starts) - 1
        hidden = torch.finfo(self._model.dtype).min
        mask = torch.zeros(
            len(tokens), num_committed + sees.shape[1], dtype=self._model.dtype, device=sees.device
        )
        mask[:, num_committed:].masked_fill_(~sees, hidden)
        masks = {FULL: mask[None, None]}
        if self._window is not None:
            # The window counts positions: a level is one position but as many slots as rows.
            first_visible = max(0, position - self._window + 1)
            if first_visible > root:
                first_visible = root + level_starts[first_visible - root]
            windowed = mask.clone()
            windowed[:, :first_visible] = hidden
            masks[SLIDING] = windowed[None, None]
        positions = torch.full((1, len(tokens)), position, device=self._device)
        return self._logits(tokens[None], positions, self._mask_argument(masks), cache)

    def _mask_argument(self, masks: dict[str, Tensor]) -> Tensor | dict[str, Tensor]:
        """What the model's forward takes: one mask, or one for each of its layer types."""
        if len(self._layer_types) > 1:
            return {layer_type: masks[layer_type] for layer_type in self._layer_types}
        return masks[FULL if self._window is None else SLIDING]

    def _logits(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention_mask: Tensor | dict[str, Tensor] | None,
        cache: DynamicCache,
        **keywords: Any,
    ) -> Tensor:
        with self.linears():
            output = self._model(
                input_ids=token_ids,
                attention_mask=attention_mask,
                position_ids=positions,
                use_cache=True,
                **{self._cache_keyword: cache},
                **keywords,
            )
        logits: Tensor = output.logits[0]
        return logits.to(self._device, torch.float32)


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


def _find_layer_problem(model: PreTrainedModel) -> str | None:
    """Why the attention layers cannot draft trees, or None."""
    only = (
        "; only full and sliding-window attention can draft trees; choose a model without hybrid, "
        "chunked or indexed layers"
    )
    # Chunked layers would pass for sliding ones by their cache, but see less.
    others = sorted(_layer_types(model) - {FULL, SLIDING})
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


def _layer_types(model: PreTrainedModel) -> set[str]:
    """The kinds of attention that the config names; empty when it leaves them to the window."""
    config = _text_config(model)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None and getattr(config, "attention_chunk_size", None) is not None:
        layer_types = ["chunked_attention"]
    return set(layer_types or ())


def _attention_window(model: PreTrainedModel) -> int | None:
    """The window of the sliding layers in tokens, None without such layers."""
    for layer in DynamicCache(config=model.config).layers:
        if type(layer) is DynamicSlidingWindowLayer:
            return int(layer.sliding_window)
    return None


def _text_config(model: PreTrainedModel) -> Any:
    return model.config.get_text_config(decoder=True)


def _vocab_size(model: PreTrainedModel) -> int:
    return int(_text_config(model).vocab_size)


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
