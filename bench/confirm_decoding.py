"""A confirming verifier: a cheap pass guesses the text, a natural one confirms it. Lossless.

One block: draft a tree; verify it on few experts; take the path that this pass chooses, its own
next token, and what the drafter thinks comes then, as one short chain; verify the chain naturally;
emit what that confirms. Only natural logits ever choose a token, so the text is plain greedy
decoding's whatever the first pass gets wrong: it can cost time, never a token.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import (
    Cache,
    DynamicCache,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from acceptmoe.bench.token_clock import TimedText, TokenClock
from acceptmoe.decoding.acceptance import accept_greedy
from acceptmoe.decoding.emission import TokenEmitter
from acceptmoe.decoding.session import Session
from acceptmoe.decoding.steering import Steering
from acceptmoe.decoding.verify import Prefix, Verifier
from acceptmoe.models.counters import RoutingCounters
from acceptmoe.models.kv import keep_path, rolled_back_on_error
from acceptmoe.tree import ROOT_PARENT, DraftTree
from look_ahead import LookAhead, look_ahead


@dataclass
class ConfirmCounts:
    """Sums over texts; seconds are wall-clock ones of the host.

    A block is one turn of the loop, and has one natural pass. `num_guessed` tokens came from the
    constrained pass, `num_drafted` from the drafter behind them; `num_guessed_true` and
    `num_drafted_true` of them were confirmed. The counters hold the routing of either kind of pass.
    """

    num_blocks: int = 0
    num_tokens: int = 0
    num_constrained_passes: int = 0
    num_guessed: int = 0
    num_guessed_true: int = 0
    num_drafted: int = 0
    num_drafted_true: int = 0
    draft_s: float = 0.0
    constrained_s: float = 0.0
    natural_s: float = 0.0
    constrained: RoutingCounters = field(default_factory=RoutingCounters)
    natural: RoutingCounters = field(default_factory=RoutingCounters)

    def count_block(self, chain: GuessedChain, num_tokens: int) -> None:
        """Count one block that emitted `num_tokens`: the last is the natural pass's own."""
        self.num_blocks += 1
        self.num_tokens += num_tokens
        num_true = num_tokens - 1
        self.num_guessed += chain.num_guessed
        self.num_guessed_true += min(num_true, chain.num_guessed)
        self.num_drafted += chain.num_drafted
        self.num_drafted_true += max(0, num_true - chain.num_guessed)


@dataclass(frozen=True)
class GuessedChain:
    """What is verified naturally: the root, tokens of the constrained pass, tokens of the drafter.

    A draft that was a short chain already is all the drafter's.
    """

    tree: DraftTree
    num_guessed: int

    @property
    def num_drafted(self) -> int:
        return self.tree.num_nodes - 1 - self.num_guessed


@torch.no_grad()
def generate_confirming(
    model: PreTrainedModel,
    prompt: Tensor,
    counts: ConfirmCounts,
    *,
    max_new_tokens: int,
    end_ids: Sequence[int] = (),
) -> TimedText:
    """The greedy text after `prompt` [1, P], timed as `generate_timed` times its own.

    `model` is wrapped: its policy constrains the first pass, its drafter, tree and table are used.
    Chains have at most `max_depth + 1` rows. `counts` is added to.
    """
    max_length = prompt.shape[1] + max_new_tokens
    clock = TokenClock()
    emitter = TokenEmitter(
        prompt,
        LogitsProcessorList(),
        StoppingCriteriaList([MaxLengthCriteria(max_length), EosTokenCriteria(list(end_ids))]),
        clock,
        keeps_scores=False,
        keeps_logits=False,
    )
    start = time.perf_counter()
    clock.put(prompt)
    session: Session = model.acceptmoe
    with session.exclusive("generate_confirming"):
        decoder = ConfirmingDecoder(model, session, emitter, counts, frozenset(end_ids))
        decoder.decode(prompt, max_length)
    new_tokens = emitter.input_ids[0, prompt.shape[1] :].tolist()
    return TimedText(new_tokens, clock.last_s - clock.first_s, time.perf_counter() - start)


class ConfirmingDecoder:
    """The decode loop of one text."""

    def __init__(
        self,
        model: PreTrainedModel,
        session: Session,
        emitter: TokenEmitter,
        counts: ConfirmCounts,
        end_ids: frozenset[int],
    ) -> None:
        self._model, self._session, self._emitter = model, session, emitter
        self._counts, self._end_ids = counts, end_ids
        self._drafter: LookAhead = look_ahead(session.drafter)
        self._steering: Steering = session.begin_text()
        self._verifier = Verifier(model, session.adapter, session.patch, session.tap, session.table)
        self._max_rows = session.max_depth + 1

    def decode(self, prompt: Tensor, max_length: int) -> None:
        """Emit tokens until the text ends: draft, guess, confirm, commit."""
        emitter, counts, cache = self._emitter, self._counts, DynamicCache()
        prefix = self._prefill(prompt, cache)
        root = emitter.next_token(0)
        is_finished = emitter.emit(root)
        if not is_finished:
            self._drafter.start(prompt[0], root, self._session.tap.features)
        while not is_finished:
            start = time.perf_counter()
            num_wanted = max_length - emitter.length
            tree = self._draft(root, num_wanted)
            counts.draft_s += time.perf_counter() - start
            with rolled_back_on_error(cache, prefix.length):
                chain = self._guess(tree, cache, prefix, num_wanted)
                start = time.perf_counter()
                self._session.patch.counters = counts.natural
                block = self._verifier.verify(chain.tree, cache, prefix, is_natural=True)
                emitter.begin_block(block.logits)
                path = accept_greedy(chain.tree, emitter.next_token, emitter.emit)
            keep_path(cache, prefix.length, path.nodes)
            prefix = prefix.extended(len(path.nodes))
            counts.natural_s += time.perf_counter() - start
            counts.count_block(chain, len(path.tokens))
            root, is_finished = path.tokens[-1], path.is_finished
            if not is_finished:
                start = time.perf_counter()
                features = None if block.features is None else block.features[list(path.nodes)]
                self._drafter.extend(path.tokens, features)
                counts.draft_s += time.perf_counter() - start

    def _prefill(self, prompt: Tensor, cache: Cache) -> Prefix:
        inputs = {"input_ids": prompt, self._session.adapter.cache_keyword: cache}
        with self._session.tap.recording():
            output = self._model(**inputs, use_cache=True, logits_to_keep=1, return_dict=True)
        self._emitter.begin_block(output.logits[:, -1])
        is_valid = torch.ones(prompt.shape[1], dtype=torch.bool, device=prompt.device)
        return Prefix(is_valid, next_position=prompt.shape[1])

    def _draft(self, root: int, num_wanted: int) -> DraftTree:
        max_depth = min(self._session.max_depth, num_wanted - 1)
        if max_depth < 1:
            return DraftTree.root_only(root)
        return self._steering.prune(self._drafter.propose(self._session.num_nodes, max_depth))

    def _guess(
        self, tree: DraftTree, cache: Cache, prefix: Prefix, num_wanted: int
    ) -> GuessedChain:
        """The chain to confirm; the cache is left as it was.

        Rows that lost too many experts to be trusted count as well: the natural pass will tell.
        """
        counts, max_rows = self._counts, min(self._max_rows, num_wanted)
        if is_chain(tree) and tree.num_nodes <= max_rows:
            return GuessedChain(tree, num_guessed=0)  # there is nothing to choose
        start = time.perf_counter()
        self._session.patch.counters = counts.constrained
        block = self._verifier.verify(tree, cache, prefix)
        keep_path(cache, prefix.length, ())  # keys and values of other experts
        choices = block.logits.float().argmax(dim=-1).tolist()
        guess = accept_greedy(tree, choices.__getitem__, self._end_ids.__contains__)
        counts.constrained_s += time.perf_counter() - start
        counts.num_constrained_passes += 1
        guessed = list(guess.tokens[:-1] if guess.is_finished else guess.tokens)[: max_rows - 1]
        drafted: list[int] = []
        num_free = max_rows - 1 - len(guessed)
        if num_free > 0 and not guess.is_finished:
            start = time.perf_counter()
            features = None if block.features is None else block.features[list(guess.nodes)]
            drafted = self._drafter.continuation(guessed, features, num_free)
            counts.draft_s += time.perf_counter() - start
        return GuessedChain(chain_of([tree.tokens[0], *guessed, *drafted]), len(guessed))


def is_chain(tree: DraftTree) -> bool:
    """Whether no two nodes have one parent."""
    return len(set(tree.parents)) == tree.num_nodes


def chain_of(tokens: Sequence[int]) -> DraftTree:
    """The tree of one path; a natural pass reads no probabilities, so they are all 1."""
    parents = (ROOT_PARENT, *range(len(tokens) - 1))
    return DraftTree(tuple(tokens), parents, (1.0,) * len(tokens))
