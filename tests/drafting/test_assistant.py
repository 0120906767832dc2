"""The assistant drafter against an assistant that reads every path from the start, uncached."""

import heapq
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from acceptmoe.drafting import AssistantDrafter, Drafter, assistant
from acceptmoe.errors import DrafterError, InvalidArgumentError
from acceptmoe.policies.drafts import keep_nodes
from acceptmoe.tree import DraftTree, sibling_tokens_are_distinct

VOCAB = 50
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


BLOOM = {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 1, "n_head": 4}
FALCON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "alibi": True,
}


def build(model_class: type[PreTrainedModel], config: object, seed: int = 0) -> PreTrainedModel:
    """A random model whose next-token distributions are peaked, so that trees have some depth."""
    torch.manual_seed(seed)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(12 if "lm_head" in name else 5)
    return model


def llama(seed: int = 0, **changes: object) -> PreTrainedModel:
    return build(LlamaForCausalLM, LlamaConfig(**{**SIZES, **changes}), seed)


def qwen3_moe() -> PreTrainedModel:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return build(Qwen3MoeForCausalLM, Qwen3MoeConfig(**SIZES, **experts))


def mistral(window: int) -> PreTrainedModel:
    return build(MistralForCausalLM, MistralConfig(**SIZES, sliding_window=window))


def qwen2_alternating() -> PreTrainedModel:
    layers = {"layer_types": ["full_attention", "sliding_attention"]}
    window = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
    return build(Qwen2ForCausalLM, Qwen2Config(**SIZES, **layers, **window))


def gpt_oss() -> PreTrainedModel:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = GptOssConfig(**SIZES, **experts, sliding_window=8)
    config._attn_implementation = "eager"  # the family has no sdpa
    return build(GptOssForCausalLM, config)


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": llama,
    "llama-eager": lambda: llama(attn_implementation="eager"),
    "qwen3_moe": qwen3_moe,
    "mistral-window-8": lambda: mistral(8),
    "mistral-window-2": lambda: mistral(2),  # smaller than the tree is deep
    "qwen2-alternating": qwen2_alternating,
    "gpt_oss": gpt_oss,
}


@pytest.fixture(scope="module")
def small_llama() -> PreTrainedModel:
    return llama()


def random_text(num_tokens: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (num_tokens,), generator=generator).tolist()


def start(drafter: AssistantDrafter, text: list[int]) -> AssistantDrafter:
    drafter.start(torch.tensor(text[:-1], dtype=torch.int64), text[-1], None)
    return drafter


def paths(tree: DraftTree) -> dict[tuple[int, ...], float]:
    """The tokens after the root of every node (the root's are empty), with its probability."""
    return {
        tuple(tree.tokens[step] for step in tree.shape.path(node)[1:]): tree.path_probabilities[
            node
        ]
        for node in range(tree.num_nodes)
    }


@torch.no_grad()
def sequential_tree(
    model: PreTrainedModel,
    text: list[int],
    num_nodes: int,
    max_depth: int,
    num_children: int = 8,
    frontier: int = 8,
) -> dict[tuple[int, ...], float]:
    """The same tree from one uncached pass for each path, and a heap for the best-first choice."""

    def children(path: tuple[int, ...], probability: float) -> dict[tuple[int, ...], float]:
        logits = model(torch.tensor([text + list(path)]), use_cache=False).logits[0, -1]
        probabilities, tokens = logits.float().softmax(-1).topk(num_children)
        pairs = zip(tokens.tolist(), probabilities.tolist(), strict=True)
        return {(*path, token): probability * p for token, p in pairs}

    offered = {(): children((), 1.0)} if max_depth else {}
    level = offered.get((), {})
    for _ in range(1, max_depth):
        widest = sorted(level, key=lambda path: -level[path])[:frontier]
        offered |= {path: children(path, level[path]) for path in widest}
        level = {child: p for path in widest for child, p in offered[path].items()}
    tree: dict[tuple[int, ...], float] = {}
    heap = [(-1.0, ())]
    while heap and len(tree) < num_nodes:
        negative, path = heapq.heappop(heap)
        tree[path] = -negative
        for child, probability in offered.get(path, {}).items():
            heapq.heappush(heap, (-probability, child))
    return tree


def assert_same_tree(tree: DraftTree, expected: dict[tuple[int, ...], float]) -> None:
    drafted = paths(tree)
    assert drafted.keys() == expected.keys()
    for path, probability in drafted.items():
        # Logits of a tree and of a sequence differ by up to 2e-5 in fp32 for each step of a path.
        assert probability == pytest.approx(expected[path], rel=5e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_tree_equals_the_sequential_best_first_tree(family: str) -> None:
    model = FAMILIES[family]()
    drafter = AssistantDrafter(model, min_reach=0.0)
    text = random_text(13)
    start(drafter, text)
    for round_number in range(3):
        tree = drafter.propose(24, 4)
        assert_same_tree(tree, sequential_tree(model, text, 24, 4))
        assert tree.shape.max_depth >= 2
        # Commit a drafted path, a different branch each round, and a token that was not drafted.
        leaf = tree.shape.leaves[-1 - round_number]
        committed = [tree.tokens[node] for node in tree.shape.path(leaf)[1:]]
        committed.append((committed[-1] + 17) % VOCAB)
        drafter.extend(committed, None)
        text = text + committed


@pytest.mark.parametrize(("num_children", "frontier"), [(1, 1), (1, 8), (3, 2), (50, 4)])
def test_widths_are_obeyed(small_llama: PreTrainedModel, num_children: int, frontier: int) -> None:
    drafter = AssistantDrafter(
        small_llama, min_reach=0.0, num_children=num_children, frontier=frontier
    )
    text = random_text(9)
    tree = start(drafter, text).propose(20, 4)
    expected = sequential_tree(small_llama, text, 20, 4, num_children, frontier)
    assert_same_tree(tree, expected)


@pytest.mark.parametrize("max_depth", [0, 1, 7])
@pytest.mark.parametrize("num_nodes", [1, 2, 3, 33])
def test_tree_keeps_its_limits(
    small_llama: PreTrainedModel, num_nodes: int, max_depth: int
) -> None:
    drafter = start(AssistantDrafter(small_llama, min_reach=0.0), random_text(6))
    tree = drafter.propose(num_nodes, max_depth)
    assert tree.tokens[0] == random_text(6)[-1]
    assert tree.num_nodes <= num_nodes
    assert tree.shape.max_depth <= max_depth
    assert sibling_tokens_are_distinct(tree)
    for node, parent in enumerate(tree.parents[1:], start=1):
        assert 0 < tree.path_probabilities[node] <= tree.path_probabilities[parent]
    if max_depth:
        assert tree.num_nodes == min(num_nodes, 9 if max_depth == 1 else num_nodes)


# What is committed after a draft: how far down which branch, then other tokens.
commitments = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 4), st.lists(st.integers(0, VOCAB - 1))),
    min_size=1,
    max_size=4,
)


@settings(max_examples=15, deadline=None)
@given(steps=commitments, prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9))
def test_extended_drafter_equals_a_fresh_one(
    small_llama: PreTrainedModel,
    steps: list[tuple[int, int, list[int]]],
    prompt: list[int],
) -> None:
    drafter = start(AssistantDrafter(small_llama, min_reach=0.0), prompt)
    text = list(prompt)
    for node, num_accepted, others in steps:
        tree = drafter.propose(16, 4)
        path = tree.shape.path(node % tree.num_nodes)[1 : 1 + num_accepted]
        committed = [tree.tokens[step] for step in path] + others
        drafter.extend(committed, None)
        text += committed
    fresh = start(AssistantDrafter(small_llama, min_reach=0.0), text)
    assert_same_tree(drafter.propose(16, 4), paths(fresh.propose(16, 4)))


def test_proposing_twice_gives_the_same_tree(small_llama: PreTrainedModel) -> None:
    drafter = start(AssistantDrafter(small_llama, min_reach=0.0), random_text(7))
    first = drafter.propose(12, 3)
    assert_same_tree(drafter.propose(12, 3), paths(first))


@pytest.mark.parametrize("min_probability", [1e-4, 3e-3, 0.05, 1.0])
def test_what_will_not_be_verified_is_not_expanded(
    small_llama: PreTrainedModel, min_probability: float
) -> None:
    """Above the floor the tree is the same, with fewer passes the higher the floor is."""
    drafter = start(AssistantDrafter(small_llama, min_reach=0.0), random_text(7))
    whole = drafter.propose(24, 4)
    drafter.min_probability = min_probability
    tree = drafter.propose(24, 4)
    above = above_floor(whole, min_probability)
    assert_same_tree(above_floor(tree, min_probability), paths(above))
    if min_probability == 1.0:
        assert (
            drafter._num_cached + 1 >= drafter._forward.cache.get_seq_length()
        )  # no level was run


def test_a_level_that_the_output_hardly_reaches_is_not_run(small_llama: PreTrainedModel) -> None:
    """In a chain a level is one node; the first improbable one is drafted, and none behind it."""

    def draft_chain(min_reach: float) -> DraftTree:
        drafter = AssistantDrafter(small_llama, num_children=1, frontier=1, min_reach=min_reach)
        return start(drafter, random_text(7)).propose(6, 5)

    probabilities = draft_chain(0.0).path_probabilities
    assert len(probabilities) == 6
    for min_reach in (probabilities[1] * 1.01, probabilities[2] * 0.99, probabilities[4] * 1.01):
        num_above = sum(probability >= min_reach for probability in probabilities)
        assert draft_chain(min_reach).path_probabilities == probabilities[: num_above + 1]


@pytest.mark.parametrize("min_reach", [-0.1, 1.5, float("nan"), "0.3", True, None])
def test_a_reach_that_is_no_probability_is_refused(
    small_llama: PreTrainedModel, min_reach: object
) -> None:
    with pytest.raises(InvalidArgumentError, match=r"min_reach is .* must be a probability from 0"):
        AssistantDrafter(small_llama, min_reach=min_reach)


def above_floor(tree: DraftTree, min_probability: float) -> DraftTree:
    return keep_nodes(
        tree, [n for n, p in enumerate(tree.path_probabilities) if p >= min_probability]
    )


def test_start_forgets_the_text_before(small_llama: PreTrainedModel) -> None:
    drafter = start(AssistantDrafter(small_llama, min_reach=0.0), random_text(11, seed=1))
    drafter.propose(12, 3)
    text = random_text(7)
    fresh = start(AssistantDrafter(small_llama, min_reach=0.0), text)
    assert start(drafter, text).propose(12, 3) == fresh.propose(12, 3)


def test_one_token_is_enough_of_a_text(small_llama: PreTrainedModel) -> None:
    tree = start(AssistantDrafter(small_llama, min_reach=0.0), [3]).propose(8, 2)
    assert_same_tree(tree, sequential_tree(small_llama, [3], 8, 2))


def test_drafted_tokens_that_were_committed_are_not_read_again(
    small_llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = start(AssistantDrafter(small_llama, min_reach=0.0), random_text(10))
    tree = drafter.propose(24, 2)
    leaf = tree.shape.depths.index(2)
    drafter.extend([*(tree.tokens[node] for node in tree.shape.path(leaf)[1:]), 1], None)
    num_read = []
    read = drafter._forward.read

    def counted_read(tokens: list[int], *rest: object) -> torch.Tensor:
        num_read.append(len(tokens))
        return read(tokens, *rest)

    monkeypatch.setattr(drafter._forward, "read", counted_read)
    drafter.propose(24, 2)
    # The root of the next tree, and the node of the last level, which was never expanded.
    assert num_read == [2]


def test_cache_never_outgrows_the_text_and_one_tree(small_llama: PreTrainedModel) -> None:
    drafter = start(AssistantDrafter(small_llama, min_reach=0.0, frontier=4), random_text(10))
    num_tokens = 10
    for step in range(6):
        tree = drafter.propose(16, 3)
        assert (
            drafter._forward.cache.get_seq_length() <= num_tokens + 2 * 4
        )  # two levels of four rows
        committed = [*tree.tokens[1 : 1 + step % 2], 5]
        drafter.extend(committed, None)
        num_tokens += len(committed)
        assert drafter._forward.cache.get_seq_length() < num_tokens
        for layer in drafter._forward.cache.layers:
            assert layer.keys.shape[-2] == drafter._forward.cache.get_seq_length()


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_assistant_equal_to_the_target_drafts_its_greedy_continuation_first(family: str) -> None:
    target = FAMILIES[family]()
    text = random_text(12)
    drafter = start(AssistantDrafter(target, min_reach=0.0), text)
    drafter.check_target(target)
    tree = drafter.propose(24, 4)
    greedy = target.generate(torch.tensor([text]), max_new_tokens=4, do_sample=False)[
        0, len(text) :
    ]
    first_path, node = [], 0
    while tree.shape.children[node]:
        node = tree.shape.children[node][0]
        first_path.append(tree.tokens[node])
    assert first_path
    assert first_path == greedy.tolist()[: len(first_path)]


def test_drafting_leaves_the_assistant_as_it_was(small_llama: PreTrainedModel) -> None:
    before = {name: value.clone() for name, value in small_llama.state_dict().items()}
    start(AssistantDrafter(small_llama, min_reach=0.0), random_text(8)).propose(16, 3)
    after = small_llama.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not small_llama.training
    assert all(parameter.requires_grad for parameter in small_llama.parameters())
    assert not any(module._forward_hooks for module in small_llama.modules())


def test_half_precision_assistant_drafts_with_fp32_probabilities() -> None:
    model = llama().to(torch.bfloat16)
    tree = start(AssistantDrafter(model, min_reach=0.0), random_text(8)).propose(24, 3)
    children = tree.shape.children[0]
    assert tree.num_nodes == 24
    # A softmax in bfloat16 would give at most three digits.
    assert any(p != torch.tensor(p).bfloat16().item() for p in tree.path_probabilities[1:])
    assert sum(tree.path_probabilities[child] for child in children) <= 1 + 1e-6


def test_continuations_of_zero_probability_are_left_out() -> None:
    model = llama()
    with torch.no_grad():
        model.lm_head.weight.mul_(1e4)  # all but one token underflow
    tree = start(AssistantDrafter(model, min_reach=0.0), random_text(8)).propose(16, 3)
    assert tree.num_nodes < 16
    assert min(tree.path_probabilities) > 0


def test_assistant_keeps_the_protocol(small_llama: PreTrainedModel) -> None:
    assert isinstance(AssistantDrafter(small_llama, min_reach=0.0), Drafter)


def test_logits_that_are_not_finite_are_reported() -> None:
    model = llama()
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    drafter = start(AssistantDrafter(model, min_reach=0.0), random_text(5))
    message = r"LlamaForCausalLM \(torch.float32\) produced logits that are not finite; load it in"
    with pytest.raises(DrafterError, match=message):
        drafter.propose(8, 3)


def test_proposing_before_start_is_refused(small_llama: PreTrainedModel) -> None:
    with pytest.raises(DrafterError, match=r"no text to continue; call start\(prompt"):
        AssistantDrafter(small_llama, min_reach=0.0).propose(8, 3)


def test_target_with_another_vocabulary_is_refused(small_llama: PreTrainedModel) -> None:
    drafter = AssistantDrafter(small_llama, min_reach=0.0)
    drafter.check_target(small_llama)
    message = (
        "LlamaForCausalLM has vocab_size 50 and the target LlamaForCausalLM has 64; they must share"
    )
    with pytest.raises(DrafterError, match=message):
        drafter.check_target(llama(vocab_size=64))


def test_assistant_put_into_training_mode_is_refused() -> None:
    model = llama()
    drafter = AssistantDrafter(model, min_reach=0.0)
    model.train()
    message = r"LlamaForCausalLM is in training mode, .*; call .eval\(\) on it first"
    with pytest.raises(DrafterError, match=message):
        drafter.check_target(model)
    with pytest.raises(DrafterError, match=message):
        AssistantDrafter(model, min_reach=0.0)


class UncachedLlama(LlamaForCausalLM):
    def forward(self, input_ids):  # type: ignore[no-untyped-def]
        return super().forward(input_ids, use_cache=False)


def t5() -> PreTrainedModel:
    sizes = {"d_model": 16, "d_ff": 16, "d_kv": 8, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, **sizes)).eval()


def mamba() -> PreTrainedModel:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
    return MambaForCausalLM(MambaConfig(vocab_size=VOCAB, **sizes)).eval()


def configured_llama(**changes: object) -> PreTrainedModel:
    model = llama()
    for name, value in changes.items():
        setattr(model.config, name, value)
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (t5, "T5ForConditionalGeneration is an encoder-decoder model; .*; choose a causal one"),
        (
            lambda: LlamaModel(LlamaConfig(**SIZES)).eval(),
            "LlamaModel has no language-model head; load it with AutoModelForCausalLM",
        ),
        (mamba, r"MambaForCausalLM is stateful \(.*; choose a model with attention layers only"),
        (
            lambda: configured_llama(layer_types=["full_attention", "conv"]),
            "LlamaForCausalLM has conv layers; only full and sliding-window attention can draft",
        ),
        (
            lambda: configured_llama(attention_chunk_size=4),
            "LlamaForCausalLM has chunked_attention layers; only full and sliding-window attention",
        ),
        (
            lambda: configured_llama(kv_sharing_modes=["own", "reuse"]),
            "LlamaForCausalLM keeps a DummyLayer in layer 1; only full and sliding-window",
        ),
        (
            lambda: UncachedLlama(LlamaConfig(**SIZES)).eval(),
            r"UncachedLlama takes no key-value cache \(.*; choose a model of transformers",
        ),
        (
            lambda: BloomForCausalLM(BloomConfig(**BLOOM)).eval(),
            "BloomForCausalLM takes no position_ids, or has ALiBi",
        ),
        (
            lambda: FalconForCausalLM(FalconConfig(**FALCON)).eval(),
            "FalconForCausalLM takes no position_ids, or has ALiBi",
        ),
        (
            lambda: configured_llama(_attn_implementation="flash_attention_2"),
            "uses flash_attention_2 attention, which takes no tree mask; allowed: sdpa, eager",
        ),
    ],
)
def test_models_that_cannot_draft_are_refused(
    model: Callable[[], PreTrainedModel], message: str
) -> None:
    with pytest.raises(DrafterError, match=message):
        AssistantDrafter(model())


def test_windows_of_different_sizes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class TwoWindows:
        def __init__(self, config: object) -> None:
            self.layers = [assistant.DynamicSlidingWindowLayer(size) for size in (4, 8)]

    monkeypatch.setattr(assistant, "DynamicCache", TwoWindows)
    message = r"different attention windows \(\[4, 8\]\); all must be equal; choose another"
    with pytest.raises(DrafterError, match=message):
        AssistantDrafter(llama())


def test_assistant_that_is_no_model_is_refused() -> None:
    message = r"the assistant is 'llama' \(str\); it must be a transformers PreTrainedModel; load"
    with pytest.raises(InvalidArgumentError, match=message):
        AssistantDrafter("llama")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["num_children", "frontier"])
@pytest.mark.parametrize("value", [0, -1, 1025, 1.5, True])
def test_absurd_widths_are_refused(small_llama: PreTrainedModel, name: str, value: object) -> None:
    message = f"{name} is {value!r}; it must be a whole number from 1 to 1024"
    with pytest.raises(InvalidArgumentError, match=message):
        AssistantDrafter(small_llama, **{name: value})  # type: ignore[arg-type]
