"""Auditing changes nothing but the report, and the report says what two passes by hand say."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import re
import threading
import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import acceptmoe
from acceptmoe import InvalidArgumentError, KLLimitWarning, TreeShape
from acceptmoe.decoding.audit import (
    MIN_BLOCKS,
    WINDOW_BLOCKS,
    Auditor,
    BlockSampler,
    KLLimit,
    check_audit,
)
from acceptmoe.decoding.audit_statistics import BlockRatio, row_divergence, row_masses
from acceptmoe.models.counters import RoutedLayer
from acceptmoe.models.kv import find_cache_keyword, make_cache
from acceptmoe.policies import MoeSpecPolicy
from acceptmoe.tree import DraftTree, tree_attention_mask
from tables import make_table_for
from tiny_models import NUM_LAYERS, VOCAB_SIZE, is_available, make_model

FAMILIES = (
    "axk1",
    "deepseek_v3",
    "dots1_sliding",
    "exaone_moe",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_oss",
    "mimo_v2_flash",
    "mixtral",
    "mixtral_sliding",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
    "solar_open",
)
NUM_NODES, MAX_DEPTH = 10, 3
HARSH = "moe-spec:budget=2"  # K experts for the whole tree: as few as routing allows
NUM_TOKENS = 24


def make_prompt(length: int = 11, seed: int = 0) -> Tensor:
    """A random start, repeated, so that the n-gram drafter has something to look up."""
    start = torch.randint(VOCAB_SIZE, (1, length), generator=torch.Generator().manual_seed(seed))
    return torch.cat([start, start[:, :-1]], dim=-1)


def wrap(model: PreTrainedModel, policy: str = HARSH, **keywords: Any) -> PreTrainedModel:
    keywords = {"num_nodes": NUM_NODES, "max_depth": MAX_DEPTH, **keywords}
    if policy == HARSH:  # some models have another K
        policy = f"moe-spec:budget={model.config.num_experts_per_tok}"
    return acceptmoe.wrap(model, policy=policy, **keywords)


def generate(model: PreTrainedModel, prompt: Tensor | None = None, **keywords: Any) -> Any:
    prompt = make_prompt() if prompt is None else prompt
    return model.generate(
        prompt,
        **{
            "attention_mask": torch.ones_like(prompt),
            "do_sample": False,
            "pad_token_id": 0,
            "max_new_tokens": NUM_TOKENS,
            **keywords,
        },
    )


def counts_of(model: PreTrainedModel) -> dict[str, Any]:
    """The report without seconds and without the audit."""
    report = model.acceptmoe.report()
    return {
        key: value for key, value in report.items() if not key.endswith("_s") and key != "audit"
    }


# What auditing must not change


@pytest.mark.parametrize(
    ("family", "policy"),
    [("qwen3_moe", "accept"), *itertools.product(FAMILIES, [HARSH, "natural"])],
)
def test_text_cache_and_counts_do_not_depend_on_the_audit(family: str, policy: str) -> None:
    if not is_available(family):
        pytest.skip(f"this Transformers version has no {family}")
    model = make_model(family)
    table = make_table_for(model, num_nodes=NUM_NODES, max_depth=MAX_DEPTH, drafter="ngram")
    found = []
    for audit in (0.0, 1.0):
        wrap(model, policy, table=table, audit=audit)
        cache = make_cache(None, model.config, 0)
        keyword = model.acceptmoe.adapter.cache_keyword
        text = generate(model, **{keyword: cache})
        found.append((text, cache, counts_of(model), model.acceptmoe.report()["audit"]))
        acceptmoe.unwrap(model)
    (text, cache, counts, nothing), (audited_text, audited_cache, audited_counts, audit) = found
    assert torch.equal(audited_text, text)
    assert audited_counts == counts
    for layer, audited_layer in zip(cache.layers, audited_cache.layers, strict=True):
        assert torch.equal(layer.keys, audited_layer.keys)
        assert torch.equal(layer.values, audited_layer.values)
    assert nothing is None
    assert audit["num_blocks"] == counts["num_verifications"] > 0
    assert audit["num_tokens"] == counts["num_verified_tokens"]
    if policy == "natural":
        assert audit["kl"] == audit["kl_all_rows"] == audit["excluded_mass"] == 0.0
        assert audit["top1"] == audit["top1_all_rows"] == 1.0
        assert all(row["kl"] in (0.0, None) for row in audit["by_depth"])
        assert all(row["rows_moved"] == 0.0 for row in audit["by_layer"])
    if policy == HARSH:
        assert audit["kl_all_rows"] > 0.0


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_every_slot_of_a_static_cache_is_the_same_with_and_without_the_audit(family: str) -> None:
    model = make_model(family)
    found = []
    for audit in (0.0, 0.5, 1.0):
        wrap(model, audit=audit)
        keyword = model.acceptmoe.adapter.cache_keyword
        cache = make_cache("static", model.config, 64)
        text = generate(model, **{keyword: cache})
        states = [states for layer in cache.layers[:NUM_LAYERS] for states in (layer.keys,)]
        found.append((text, states, int(cache.get_seq_length())))
        acceptmoe.unwrap(model)
    for text, states, length in found[1:]:
        assert torch.equal(text, found[0][0])
        assert length == found[0][2]
        assert all(torch.equal(a, b) for a, b in zip(states, found[0][1], strict=True))


def test_scores_and_logits_do_not_depend_on_the_audit() -> None:
    model = make_model("qwen3_moe")
    found = []
    for audit in (0.0, 1.0):
        wrap(model, audit=audit)
        found.append(generate(model, return_dict_in_generate=True, output_logits=True).logits)
        acceptmoe.unwrap(model)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# What is audited


def test_the_same_calls_after_wrap_audit_the_same_blocks() -> None:
    model = make_model("qwen3_moe")
    reports = []
    for _ in range(2):
        wrap(model, audit=0.3)
        for seed in range(3):
            generate(model, make_prompt(seed=seed))
        reports.append(model.acceptmoe.report()["audit"])
        num_verifications = model.acceptmoe.report()["num_verifications"]
        acceptmoe.unwrap(model)
    assert reports[0] == reports[1]
    assert 0 < reports[0]["num_blocks"] < num_verifications


def test_the_share_of_audited_blocks_is_the_one_asked_for() -> None:
    class Verifier:
        def verify(self, *args: Any, **keywords: Any) -> Any:
            return keywords.setdefault("block", type("Block", (), {"logits": torch.zeros(2, 3)}))

    auditor, tree = Auditor(0.02), DraftTree((1, 2), (-1, 0), (1.0, 0.5))
    prefix = type("Prefix", (), {"length": 0})
    num_blocks = 5000
    num_audited = sum(
        auditor.natural_pass(Verifier(), tree, DynamicCache(), prefix) is not None
        for _ in range(num_blocks)
    )
    assert num_audited == 100


@pytest.mark.parametrize("share", [0.01, 0.25, 0.3, 0.75, 1.0])
def test_samples_keep_to_their_share_at_places_that_vary(share: float) -> None:
    sampler, num_blocks = BlockSampler(share), 1200
    taken = [block for block in range(num_blocks) if sampler.takes_next()]
    assert abs(len(taken) - share * num_blocks) <= 1
    for stratum, block in enumerate(taken):
        # One in each stretch of 1 / share blocks, or just behind it where two meet in one block.
        assert stratum / share - 1 < block < (stratum + 1) / share + 1
    gaps = {later - earlier for earlier, later in pairwise(taken)}
    assert (len(gaps) > 1) == (share < 1.0)


def test_a_pass_of_the_root_alone_is_never_audited() -> None:
    model = wrap(make_model("qwen3_moe"), num_nodes=1, audit=1.0)
    generate(model)
    report = model.acceptmoe.report()
    assert report["num_plain_steps"] > 0
    assert report["audit"]["num_blocks"] == 0
    assert report["audit"]["kl"] is None
    assert report["audit"]["by_depth"] == ()


def test_a_share_next_to_nothing_takes_nothing() -> None:
    sampler = BlockSampler(5e-324)
    assert not any(sampler.takes_next() for _ in range(100))


# What is recorded


@torch.no_grad()
def test_the_report_equals_two_passes_by_hand() -> None:
    model = make_model("qwen3_moe")
    table = make_table_for(model, num_nodes=NUM_NODES, max_depth=MAX_DEPTH, drafter="ngram")
    prompt = make_prompt()
    wrap(model, table=table, audit=1.0)
    blocks: list[tuple[DraftTree, tuple[int, ...]]] = []
    model.acceptmoe.observers.append(lambda tree, nodes: blocks.append((tree, nodes)))
    text = generate(model, prompt)
    report = model.acceptmoe.report()
    acceptmoe.unwrap(model)

    cache = DynamicCache()
    model(prompt, **{find_cache_keyword(model): cache})
    kl, same, weighted_kl, weight = [], [], 0.0, 0.0
    by_depth: dict[int, list[float]] = {}
    length = prompt.shape[1]
    for tree, nodes in blocks:
        if tree.num_nodes == 1:
            run_by_hand(model, cache, tree, length)
        else:
            natural, _ = run_by_hand(model, copy.deepcopy(cache), tree, length)
            own, cache = run_by_hand(model, cache, tree, length, MoeSpecPolicy(2))
            p, q = natural.double().softmax(-1), own.double().softmax(-1)
            rows = (p * (p.log() - q.log())).sum(-1)
            commitment = table.path_commitment(torch.tensor(tree.path_probabilities)).double()
            weighted_kl += float((rows * commitment).sum())
            weight += float(commitment.sum())
            for node in nodes:
                kl.append(float(rows[node]))
                same.append(int(p[node].argmax()) == int(q[node].argmax()))
                by_depth.setdefault(tree.shape.depths[node], []).append(kl[-1])
        kept = [*range(length), *(length + node for node in nodes)]
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
        length += len(nodes)
    assert length == text.shape[1] - 1  # the blocks were those of the whole text
    audit = report["audit"]
    # fp32 logits of order 10 in the package, fp64 here.
    assert audit["kl"] == pytest.approx(sum(kl) / len(kl), rel=1e-4)
    assert audit["top1"] == sum(same) / len(same)
    assert audit["num_tokens"] == len(kl)
    assert audit["kl_all_rows"] == pytest.approx(weighted_kl / weight, rel=1e-4)
    for row in audit["by_depth"]:
        found = by_depth.get(row["depth"], [])
        assert row["num_tokens"] == len(found)
        if found:
            assert row["kl"] == pytest.approx(sum(found) / len(found), rel=1e-4)
    assert audit["excluded_mass"] == pytest.approx(report["excluded_mass"], rel=1e-5)
    by_layer = [row["excluded_mass"] for row in audit["by_layer"]]
    assert len(by_layer) == NUM_LAYERS
    assert sum(by_layer) / NUM_LAYERS == pytest.approx(audit["excluded_mass"])
    assert all(0.0 < row["rows_moved"] <= 1.0 for row in audit["by_layer"])
    assert [row["name"] for row in audit["by_layer"]] == [
        "model.layers.0.mlp",
        "model.layers.1.mlp",
    ]


def run_by_hand(
    model: PreTrainedModel,
    cache: DynamicCache,
    tree: DraftTree,
    length: int,
    policy: MoeSpecPolicy | None = None,
) -> tuple[Tensor, DynamicCache]:
    """Logits of a tree's rows; with a policy, its budget of experts is all that routers offer."""
    handles = []
    if policy is not None:
        for layer in model.model.layers:

            def hook(router, args, output):
                logits = output[0]
                gates = logits.softmax(-1)
                best = gates.sum(0).topk(policy.budget).indices
                outside = torch.ones_like(gates, dtype=torch.bool)
                outside[:, best] = False
                weights, ids = gates.masked_fill(outside, -1.0).topk(router.top_k)
                return logits, weights / weights.sum(-1, keepdim=True), ids

            handles.append(layer.mlp.gate.register_forward_hook(hook))
    shape = TreeShape(tree.parents)
    is_valid = torch.ones(length, dtype=torch.bool)
    mask = tree_attention_mask(
        shape, is_valid, length + shape.num_nodes, torch.float32, window=None
    )
    try:
        output = model(
            torch.tensor([tree.tokens]),
            attention_mask=mask,
            position_ids=(length + torch.tensor(shape.depths))[None],
            **{find_cache_keyword(model): cache},
        )
    finally:
        for handle in handles:
            handle.remove()
    return output.logits[0], cache


def test_the_divergence_of_rows_is_that_of_the_definition() -> None:
    natural = torch.tensor([[0.0, 0.0], [math.log(3.0), 0.0], [2.0, -math.inf]])
    own = torch.tensor([[0.0, 0.0], [0.0, math.log(3.0)], [2.0, 2.0]])
    kl, is_same = row_divergence(natural, own)
    expected = [0.0, 0.75 * math.log(3.0) - 0.25 * math.log(3.0), math.log(2.0)]
    assert kl.tolist() == pytest.approx(expected, abs=1e-6)  # fp32 logits
    assert kl[0] == 0.0
    assert is_same.tolist() == [True, False, True]


def test_the_masses_of_rows_are_those_of_their_own_experts() -> None:
    gates = torch.tensor([[0.5, 0.3, 0.1, 0.1], [0.1, 0.2, 0.3, 0.4], [0.4, 0.1, 0.3, 0.2]])
    routed = RoutedLayer(
        num_experts=4,
        natural_ids=torch.tensor([[0, 1], [3, 2], [0, 2]]),
        used_ids=torch.tensor([[1, 0], [2, 1], [0, 2]]),  # the first in another order
        natural_weights=torch.ones(3, 2),  # not read here
        known_gates=gates,
        eligible=torch.tensor([True, True, True, False]),
    )
    wanted, excluded, is_moved = row_masses(routed)
    assert wanted.tolist() == pytest.approx([0.8, 0.7, 0.7])
    assert excluded.tolist() == pytest.approx([0.0, 0.4, 0.0])
    assert is_moved.tolist() == [0.0, 1.0, 0.0]


def test_standard_errors_are_those_of_a_ratio_over_blocks() -> None:
    ratio = BlockRatio()
    assert ratio.value is None
    for numerator, denominator in ((3.0, 2.0), (1.0, 1.0), (2.0, 3.0), (2.0, 2.0)):
        ratio.add(numerator, denominator)
    assert ratio.standard_error is None  # of four blocks
    ratio.add(2.0, 2.0)
    assert ratio.value == 1.0
    # Residuals 1, 0, -1, 0, 0; n / (n - 1) = 5 / 4; over the sum of the denominators, 10.
    assert ratio.standard_error == pytest.approx(math.sqrt(2.0 * 1.25) / 10.0)
    mean, values = BlockRatio(), (1.0, 2.0, 4.0, 3.0, 7.0)
    for value in values:
        mean.add(value)
    # With denominators of 1 it is the standard error of a mean.
    assert mean.standard_error == pytest.approx(torch.tensor(values).std() / 5**0.5)


def test_audit_time_is_apart_from_every_other() -> None:
    model = wrap(make_model("qwen3_moe"), audit=1.0)
    generate(model)
    report = model.acceptmoe.report()
    assert report["audit_s"] > 0.0
    decode_s = report["draft_s"] + report["verify_s"] + report["commit_s"]
    num_decoded = report["num_tokens"] - report["num_prompts"]
    assert report["tokens_per_s"] == pytest.approx(num_decoded / decode_s)


def test_resetting_the_statistics_empties_the_audit() -> None:
    model = wrap(make_model("qwen3_moe"), audit=1.0)
    generate(model)
    assert model.acceptmoe.report()["audit"]["num_blocks"] > 0
    model.acceptmoe.reset_statistics()
    audit = model.acceptmoe.report()["audit"]
    assert audit["num_blocks"] == audit["num_tokens"] == 0
    assert audit["running_kl"] is not None  # of the limit, not a statistic


# max_kl


def test_the_limit_needs_some_blocks_and_looks_at_the_last_ones() -> None:
    limit = KLLimit(0.125)
    assert not any(limit.add(5.0, 1) for _ in range(MIN_BLOCKS - 1))
    assert limit.running_kl == 5.0
    assert limit.add(5.0, 1)
    assert limit.is_tripped
    assert limit.tripped_kl == 5.0
    limit.reset()
    assert not limit.is_tripped
    assert limit.running_kl is None

    assert not any(limit.add(0.25, 2) for _ in range(500))  # 0.125 is not above the limit
    # One more nat in each block passes it by the window's mean at the first of them.
    assert limit.add(1.25, 2)
    assert limit.tripped_kl == pytest.approx((0.25 * WINDOW_BLOCKS + 1.0) / (2 * WINDOW_BLOCKS))


class StopAtLength(StoppingCriteria):
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.tensor([input_ids.shape[1] >= self.length])


def test_the_limit_trips_and_the_text_goes_on_naturally_from_there() -> None:
    model, prompt, num_tokens = make_model("qwen3_moe"), make_prompt(), 100
    wrap(model, audit=1.0, max_kl=1e-3)
    lengths = [prompt.shape[1] + 1]  # after the prefill and after every block
    is_natural = []

    def observe(tree: DraftTree, nodes: tuple[int, ...]) -> None:
        lengths.append(lengths[-1] + len(nodes))
        is_natural.append(model.acceptmoe.auditor.is_natural)  # while this block ran

    model.acceptmoe.observers.append(observe)
    with pytest.warns(KLLimitWarning, match=r"above max_kl=0\.001; from here on") as caught:
        text = generate(model, prompt, max_new_tokens=num_tokens)
    report = model.acceptmoe.report()
    audit = report["audit"]
    assert len(caught) == 1
    assert audit["max_kl_tripped"]
    assert audit["tripped_kl"] > 1e-3
    assert audit["num_blocks"] == audit["tripped_at_block"] == MIN_BLOCKS
    assert audit["num_natural_blocks"] == report["num_verifications"] - MIN_BLOCKS > 5
    acceptmoe.unwrap(model)

    # The same restricted beginning, ended there, and plain decoding from its cache.
    switch = lengths[is_natural.index(True)]
    wrap(model)
    cache = DynamicCache()
    criteria = StoppingCriteriaList([StopAtLength(switch)])
    generate_so_far = {"max_new_tokens": num_tokens, "stopping_criteria": criteria}
    start = generate(model, prompt, **{find_cache_keyword(model): cache}, **generate_so_far)
    acceptmoe.unwrap(model)
    assert start.shape[1] == switch
    assert torch.equal(start, text[:, :switch])
    rest = text.shape[1] - switch
    naturally = generate(model, start, **{find_cache_keyword(model): cache}, max_new_tokens=rest)
    assert torch.equal(naturally, text)
    # It would have gone another way under the policy, and naturally from the start.
    wrap(model)
    assert not torch.equal(generate(model, prompt, max_new_tokens=num_tokens), text)
    acceptmoe.unwrap(model)
    assert not torch.equal(generate(model, prompt, max_new_tokens=num_tokens), text)


def test_a_tripped_limit_holds_until_the_policy_is_resumed() -> None:
    model = make_model("qwen3_moe")
    natural = generate(model, max_new_tokens=40)
    wrap(model)
    restricted = generate(model)
    acceptmoe.unwrap(model)
    assert not torch.equal(natural[:, : restricted.shape[1]], restricted)
    wrap(model, audit=1.0, max_kl=1e-3)
    with pytest.warns(KLLimitWarning):
        generate(model, max_new_tokens=100)
    model.acceptmoe.reset_statistics()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        assert torch.equal(generate(model, max_new_tokens=40), natural)
    report = model.acceptmoe.report()
    assert report["audit"]["max_kl_tripped"]
    assert report["audit"]["num_blocks"] == 0
    assert report["audit"]["num_natural_blocks"] == report["num_verifications"] > 0
    assert report["experts_used"] == report["natural_union"]
    assert report["excluded_mass"] == 0.0

    model.acceptmoe.resume_policy()
    model.acceptmoe.reset_statistics()
    assert torch.equal(generate(model), restricted)
    audit = model.acceptmoe.report()["audit"]
    assert not audit["max_kl_tripped"]
    assert audit["tripped_at_block"] is None
    assert audit["num_natural_blocks"] == 0
    assert audit["num_blocks"] > 0


def test_a_natural_policy_never_reaches_the_limit() -> None:
    model = wrap(make_model("qwen3_moe"), "natural", audit=1.0, max_kl=1e-9)
    generate(model, max_new_tokens=100)
    audit = model.acceptmoe.report()["audit"]
    assert audit["num_blocks"] > MIN_BLOCKS
    assert not audit["max_kl_tripped"]


def test_a_warning_that_is_made_an_error_leaves_the_model_natural_and_usable() -> None:
    model = make_model("qwen3_moe")
    natural = generate(model, max_new_tokens=40)
    wrap(model, audit=1.0, max_kl=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", KLLimitWarning)
        with pytest.raises(KLLimitWarning):
            generate(model, max_new_tokens=100)
        assert torch.equal(generate(model, max_new_tokens=40), natural)


# Errors in the middle, threads, copies


@pytest.mark.parametrize("implementation", [None, "static"])
@pytest.mark.parametrize("failing_pass", [0, 1, 2, 3])
def test_an_error_in_either_pass_leaves_cache_and_model_usable(
    failing_pass: int, implementation: str | None
) -> None:
    model = make_model("qwen3_moe")
    wrap(model)
    expected = generate(model)
    acceptmoe.unwrap(model)
    wrap(model, audit=1.0)
    num_passes = -1  # the prefill is none

    def fail(module, args, output):
        nonlocal num_passes
        num_passes += 1
        if num_passes == failing_pass + 1:
            raise RuntimeError("out of memory")

    handle = model.model.layers[-1].register_forward_hook(fail)
    cache = make_cache(implementation, model.config, 64)
    lengths = []
    model.acceptmoe.observers.append(lambda tree, nodes: lengths.append(len(nodes)))
    with pytest.raises(RuntimeError, match="out of memory"):
        generate(model, **{find_cache_keyword(model): cache})
    handle.remove()
    assert int(cache.get_seq_length()) == make_prompt().shape[1] + sum(lengths)
    assert model.acceptmoe.patch.active_block is None
    assert torch.equal(generate(model), expected)
    with torch.no_grad():
        wrapped_logits = model(make_prompt()).logits
        assert torch.equal(acceptmoe.unwrap(model)(make_prompt()).logits, wrapped_logits)


def test_plain_forwards_in_another_thread_stay_natural_during_audits() -> None:
    model = make_model("qwen3_moe")
    with torch.no_grad():
        expected = model(make_prompt()).logits
    wrap(model, audit=1.0)
    found = []

    class Forwarding(BaseStreamer):
        def put(self, value: Tensor) -> None:
            def forward() -> None:
                with torch.no_grad():
                    found.append(model(make_prompt()).logits)

            thread = threading.Thread(target=forward)
            thread.start()
            thread.join()

        def end(self) -> None:
            pass

    text = generate(model, max_new_tokens=12, streamer=Forwarding())
    assert len(found) == 13
    assert all(torch.equal(logits, expected) for logits in found)
    assert torch.equal(generate(model, max_new_tokens=12), text)


def test_threads_that_generate_share_one_audit() -> None:
    model = make_model("qwen3_moe")
    wrap(model)
    expected = [generate(model, make_prompt(seed=seed)) for seed in range(3)]
    acceptmoe.unwrap(model)
    wrap(model, audit=1.0)
    found: dict[int, Tensor] = {}

    def work(seed: int) -> None:
        found[seed] = generate(model, make_prompt(seed=seed))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[seed], expected[seed]) for seed in range(3))
    report = model.acceptmoe.report()
    assert report["audit"]["num_blocks"] == report["num_verifications"]


def test_copies_audit_on_their_own() -> None:
    model = wrap(make_model("qwen3_moe"), audit=0.5, max_kl=100.0)
    generate(model)
    before = model.acceptmoe.report()["audit"]
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.acceptmoe.report()["audit"] == before
        generate(twin)
        assert twin.acceptmoe.report()["audit"]["num_blocks"] > before["num_blocks"]
    assert model.acceptmoe.report()["audit"] == before


# Bad input


@pytest.mark.parametrize(
    "audit", [-0.1, 1.5, math.nan, math.inf, True, False, "0.1", None, [0.1], 10**400]
)
def test_a_share_that_is_none_is_refused(audit: Any) -> None:
    text = f"audit is {audit!r}; it must be a number from 0 to 1"
    with pytest.raises(InvalidArgumentError, match=re.escape(text)):
        check_audit(audit, None)
    model = make_model("qwen3_moe")
    with pytest.raises(InvalidArgumentError, match=re.escape(text)):
        wrap(model, audit=audit)
    assert not hasattr(model, "acceptmoe")


@pytest.mark.parametrize("max_kl", [0.0, -1.0, math.nan, math.inf, True, "0.1", [0.1], 10**400])
def test_a_limit_that_is_none_is_refused(max_kl: Any) -> None:
    text = f"max_kl is {max_kl!r}; it must be a number above 0, in nats per token"
    with pytest.raises(InvalidArgumentError, match=re.escape(text)):
        check_audit(0.1, max_kl)
    with pytest.raises(InvalidArgumentError, match=re.escape(text)):
        wrap(make_model("qwen3_moe"), audit=0.1, max_kl=max_kl)


def test_a_limit_without_an_audit_is_refused() -> None:
    text = "max_kl is 0.05 and audit is 0.0; the KL is known from audited blocks only"
    with pytest.raises(InvalidArgumentError, match=re.escape(text)):
        wrap(make_model("qwen3_moe"), max_kl=0.05)
