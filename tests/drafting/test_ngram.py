"""The n-gram drafter against a scan of the whole text, and its promises on any text."""

import doctest
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from acceptmoe.drafting import Drafter, NgramDrafter, ngram
from acceptmoe.errors import DrafterError, InvalidArgumentError
from acceptmoe.tree import DraftTree, sibling_tokens_are_distinct

# Few distinct tokens, so that everything repeats; shorter than MAX_OCCURRENCES, so that the oracle
# need not know that limit.
texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)
lengths = st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted)


def started(text: list[int], max_ngram: int = 4, min_ngram: int = 1) -> NgramDrafter:
    drafter = NgramDrafter(max_ngram=max_ngram, min_ngram=min_ngram)
    drafter.start(torch.tensor(text[:-1], dtype=torch.int64), text[-1], None)
    return drafter


def paths(tree: DraftTree) -> dict[tuple[int, ...], float]:
    """The tokens after the root of every drafted node, with its path probability."""
    nodes = range(1, tree.num_nodes)
    return {
        tuple(tree.tokens[step] for step in tree.shape.path(node)[1:]): tree.path_probabilities[
            node
        ]
        for node in nodes
    }


@dataclass(frozen=True)
class Continuation:
    path: tuple[int, ...]
    probability: float
    num_backoffs: int


def scan_followers(text: list[int], context: list[int]) -> list[int]:
    size = len(context)
    return [text[end] for end in range(size, len(text)) if text[end - size : end] == context]


def all_continuations(
    text: list[int], min_ngram: int, max_ngram: int, max_depth: int
) -> Iterator[Continuation]:
    """Every node that could be drafted, by the definition and a scan for every context."""

    def below(node: Continuation, inherited: list[int]) -> Iterator[Continuation]:
        if len(node.path) == max_depth:
            return
        words = text + list(node.path)
        sizes = range(max_ngram, min_ngram - 1, -1)
        contexts = [words[-size:] for size in sizes if size <= len(words)]
        if inherited:
            shorter = [context for context in contexts if len(context) < len(inherited)]
            contexts = [inherited, *shorter]
        contexts = [context for context in contexts if scan_followers(text, context)]
        seen: set[int] = set()
        for passed_over, context in enumerate(contexts):
            followers = scan_followers(text, context)
            for token in set(followers) - seen:
                seen.add(token)
                child = Continuation(
                    (*node.path, token),
                    node.probability * followers.count(token) / len(followers),
                    node.num_backoffs + passed_over,
                )
                yield child
                yield from below(child, [*context, token])

    yield from below(Continuation((), 1.0, 0), [])


def rank(node: Continuation) -> tuple[int, float]:
    return node.num_backoffs, -round(node.probability, 9)


@given(text=texts, sizes=lengths, num_nodes=st.integers(1, 12), max_depth=st.integers(0, 3))
def test_tree_is_the_best_of_all_continuations(
    text: list[int], sizes: list[int], num_nodes: int, max_depth: int
) -> None:
    min_ngram, max_ngram = sizes
    tree = started(text, max_ngram, min_ngram).propose(num_nodes, max_depth)
    oracle = {node.path: node for node in all_continuations(text, min_ngram, max_ngram, max_depth)}
    drafted = paths(tree)
    for path, probability in drafted.items():
        assert probability == pytest.approx(oracle[path].probability)
    # Equally good nodes may replace each other, so ranks are compared and not the nodes.
    best = sorted(map(rank, oracle.values()))[: num_nodes - 1]
    assert sorted(rank(oracle[path]) for path in drafted) == best


@given(
    text=texts,
    sizes=lengths,
    num_nodes=st.sampled_from([1, 2, 3, 33]),
    max_depth=st.sampled_from([0, 1, 7]),
)
def test_tree_keeps_its_limits(
    text: list[int], sizes: list[int], num_nodes: int, max_depth: int
) -> None:
    tree = started(text, sizes[1], sizes[0]).propose(num_nodes, max_depth)
    assert tree.tokens[0] == text[-1]
    assert tree.num_nodes <= num_nodes
    assert tree.shape.max_depth <= max_depth
    assert sibling_tokens_are_distinct(tree)
    for node, parent in enumerate(tree.parents[1:], start=1):
        assert 0 < tree.path_probabilities[node] <= tree.path_probabilities[parent]


@given(text=texts, cuts=st.lists(st.integers(0, 40), max_size=5))
def test_extended_index_equals_one_built_from_scratch(text: list[int], cuts: list[int]) -> None:
    bounds = [1, *sorted(min(max(cut, 1), len(text)) for cut in cuts), len(text)]
    drafter = started(text[:1])
    for begin, end in pairwise(bounds):
        drafter.propose(8, 3)
        drafter.extend(text[begin:end], None)
    assert drafter.propose(16, 4) == started(text).propose(16, 4)


def test_start_forgets_the_text_before() -> None:
    drafter = started([1, 2, 3, 1])
    assert drafter.propose(2, 1).tokens == (1, 2)
    drafter.start(torch.tensor([7, 8]), 1, None)
    assert drafter.propose(2, 1).num_nodes == 1


def test_root_only_tree_when_nothing_matches() -> None:
    assert started([1, 2, 3, 4]).propose(32, 5) == DraftTree.root_only(4)


def test_probability_is_count_of_continuation_over_count_of_context() -> None:
    #        a  b  x        a  b  y        a  b  x        a  b
    text = [1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 3, 8, 1, 2]
    drafted = paths(started(text, max_ngram=2, min_ngram=2).propose(6, 2))
    assert drafted == {
        (3,): pytest.approx(2 / 3),
        (3, 9): pytest.approx(1 / 3),
        (3, 8): pytest.approx(1 / 3),
        (4,): pytest.approx(1 / 3),
        (4, 9): pytest.approx(1 / 3),
    }


def test_shorter_contexts_only_fill_the_places_left() -> None:
    # After (1, 2) came 3 once; after 2 alone came 5 three times.
    text = [1, 2, 3, 0, 2, 5, 7, 2, 5, 8, 2, 5, 6, 1, 2]
    drafter = started(text, max_ngram=2)
    assert paths(drafter.propose(2, 1)) == {(3,): 1.0}
    assert paths(drafter.propose(3, 1)) == {(3,): 1.0, (5,): 0.75}


def test_loop_is_followed_past_the_end_of_the_text() -> None:
    # The only earlier "1 2" is followed by two tokens of text, and the draft is longer.
    tree = started([1, 2, 1, 2]).propose(6, 5)
    assert tree.tokens == (2, 1, 2, 1, 2, 1)
    assert tree.parents == (-1, 0, 1, 2, 3, 4)


def test_only_the_most_recent_occurrences_count() -> None:
    recent = [1, 2] * (ngram.MAX_OCCURRENCES - 1) + [1, 3]
    drafter = started([1, 4] * 500 + recent + [1], max_ngram=1)
    assert paths(drafter.propose(4, 1)) == {
        (2,): pytest.approx(1 - 1 / ngram.MAX_OCCURRENCES),
        (3,): pytest.approx(1 / ngram.MAX_OCCURRENCES),
    }


class CountedReads(list[int]):
    """A text that counts how many of its tokens are looked at."""

    num_reads = 0

    def __getitem__(self, key):  # type: ignore[no-untyped-def]
        found = super().__getitem__(key)
        self.num_reads += len(found) if isinstance(key, slice) else 1
        return found

    def __iter__(self):  # type: ignore[no-untyped-def]
        self.num_reads += len(self)
        return super().__iter__()


def test_work_of_a_proposal_does_not_grow_with_the_text() -> None:
    def num_reads(num_tokens: int) -> int:
        drafter = started([token % 7 for token in range(num_tokens)])
        text = drafter._index.text = CountedReads(drafter._index.text)
        drafter.propose(32, 5)
        return text.num_reads

    # 700 tokens have 100 occurrences of everything, 28,000 have 4,000; 64 count.
    assert num_reads(28_000) <= 1.5 * num_reads(700)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"min_ngram": 0}, "min_ngram is 0; it must be a whole number from 1 to 64"),
        ({"min_ngram": True}, "min_ngram is True; it must be a whole number"),
        ({"max_ngram": 2.0}, "max_ngram is 2.0; it must be a whole number from 1 to 64"),
        ({"max_ngram": 65}, "max_ngram is 65; it must be a whole number from 1 to 64"),
        ({"max_ngram": 2, "min_ngram": 3}, "max_ngram is 2; it must be a whole number from 3 to"),
    ],
)
def test_absurd_ngram_lengths_are_refused(keywords: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        NgramDrafter(**keywords)


def test_proposing_before_start_is_refused() -> None:
    with pytest.raises(DrafterError, match=r"no text to continue; call start\(prompt"):
        NgramDrafter().propose(8, 3)


def test_ngram_drafter_keeps_the_protocol() -> None:
    assert isinstance(NgramDrafter(), Drafter)


def test_examples_of_the_docstrings() -> None:
    assert doctest.testmod(ngram).failed == 0
