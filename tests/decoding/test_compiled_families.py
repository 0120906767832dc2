"""The forward of every family compiles as one graph, once for trees of all sizes, and gives plain
greedy text.
"""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

import acceptmoe
from acceptmoe.decoding.compiled import CompiledPasses
from acceptmoe.decoding.verify import Prefix, Verifier
from acceptmoe.models.backend import PassBackend
from acceptmoe.models.kv import make_cache
from acceptmoe.tree import DraftTree
from drafters import OracleDrafter
from passes import greedy, wrap_with_passes
from tables import make_table_for
from tiny_models import VOCAB_SIZE, is_available, make_model

# One of each family, with a sliding window where it has one.
FAMILIES = (
    "axk1",
    "deepseek_v3",
    "dots1_sliding",
    "exaone_moe",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_oss",
    "mimo_v2_flash",
    "mixtral_sliding",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
    "solar_open",
)
SIZE = 8
SIZES = tuple(range(1, SIZE + 1))


def prompt_of(length: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE, (1, length), generator=generator)


@pytest.mark.parametrize("name", FAMILIES)
def test_natural_text_is_greedy_and_a_pass_is_compiled_once(name: str) -> None:
    if not is_available(name):
        pytest.skip(f"this Transformers version has no {name}")
    check_family(name, "aot_eager")


def test_inductor_gives_the_same_text() -> None:
    check_family("qwen3_moe", "inductor")


def check_family(name: str, backend: str) -> None:
    model = make_model(name)
    prompts = [prompt_of(length, seed) for seed, length in enumerate((5, 17))]
    # A few tokens more than are compared: the oracle drafts beyond the end.
    futures = [greedy(model, prompt, max_new_tokens=24) for prompt in prompts]
    counter = PassBackend(backend)
    counters.clear()
    wrap_with_passes(model, SIZES, backend=counter, policy="natural", num_nodes=SIZE, max_depth=3)
    sizes = set()
    model.acceptmoe.observers.append(lambda tree, nodes: sizes.add(tree.num_nodes))
    for prompt, future in zip(prompts, futures, strict=True):
        model.acceptmoe.drafter = OracleDrafter(future, VOCAB_SIZE)
        start = prompt.shape[1]
        # EOS inside a block, so that no block is the root alone: that would be another pass.
        new = future[start:]
        end = max(i for i, token in enumerate(new[:16]) if new.index(token) == i)
        for model.acceptmoe.num_nodes in (SIZE, 5):
            assert greedy(model, prompt, eos_token_id=new[end]) == future[: start + end + 1]
    report = model.acceptmoe.report()
    assert report["compiled"]["num_compilations"] == 1
    assert report["compiled"]["num_compiled_passes"] == report["num_verifications"]
    assert report["compiled"]["num_uncompiled_passes"] == report["num_plain_steps"] == 0
    assert report["compiled"]["num_padded_rows"] == 0
    assert sizes == {SIZE - 1, 5}  # the oracle's trees are odd
    assert report["accepted_length"] > 1.5
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    acceptmoe.unwrap(model)


@torch.no_grad()
def test_a_pass_with_our_kernels_compiles_and_gives_the_same_logits() -> None:
    model = make_model("qwen3_moe").to(torch.bfloat16)
    table = make_table_for(model, num_nodes=SIZE, max_depth=3, drafter="ngram")
    acceptmoe.wrap(model, table, num_nodes=SIZE, max_depth=3, experts="acceptmoe")
    session = model.acceptmoe
    backend = PassBackend("aot_eager", torch.ops.acceptmoe.linear.default)
    passes = CompiledPasses(SIZES, 4, session.policy, backend)
    prompt, prefix = prompt_of(12, 3), Prefix(torch.ones(12, dtype=torch.bool), 12)
    tree = DraftTree((5, 6, 7, 8, 9), (-1, 0, 0, 2, 0), (1.0, 0.5, 0.4, 0.3, 0.1))
    logits = []
    for pool in (passes, None):
        cache = make_cache(None, model.config, 0)
        model(prompt, use_cache=True, **{session.adapter.cache_keyword: cache})
        verifier = Verifier(model, session.adapter, session.patch, session.tap, table, pool)
        if pool is None:
            logits.append(verifier.verify(tree, cache, prefix).logits)
            continue
        with pool.working_cache(model, cache, prefix, 40) as working:
            logits.append(verifier.verify(tree, working, prefix).logits)
    # Four products and a router in each layer, and the output.
    assert backend.num_linears_rewritten == 2 * 5 + 1
    # bf16 keeps 8 bits; logits are of order 1 and the products round in another order.
    torch.testing.assert_close(*logits, rtol=0, atol=0.05)
    acceptmoe.unwrap(model)
