"""On a GPU, replayed CUDA graphs give the text that eager passes give."""

from __future__ import annotations

import pytest
import torch

import acceptmoe
from acceptmoe.decoding.cuda_graphs import CudaGraphs
from passes import Uncompiled, greedy, wrap_with_passes
from tiny_models import VOCAB_SIZE, make_model

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_text_of_replayed_graphs_is_that_of_eager_passes(name: str) -> None:
    model = make_model(name).cuda()
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(VOCAB_SIZE, (1, length), generator=generator).repeat(1, 3).cuda()
        for length in (5, 9)
    ]
    futures = [greedy(model, prompt) for prompt in prompts]
    # grouped_mm reads sizes on the host for fp32; batched_mm can be captured.
    model.set_experts_implementation("batched_mm")
    wrap_with_passes(
        model,
        (1, 4, 8),
        backend=Uncompiled(),
        graphs=CudaGraphs(model.device),
        policy="natural",
        num_nodes=8,
        max_depth=3,
    )
    for _ in range(2):
        for prompt, future in zip(prompts, futures, strict=True):
            assert greedy(model, prompt) == future
    report = model.acceptmoe.report()["compiled"]
    assert report["num_passes"] <= 3
    assert report["num_uncompiled_passes"] == 0
    acceptmoe.unwrap(model)


def test_a_graph_reads_its_inputs_anew_and_shares_one_pool() -> None:
    graphs = CudaGraphs(torch.device("cuda", torch.cuda.current_device()))
    inputs = [torch.zeros(size, device="cuda") for size in (8, 4)]
    made = [graphs.capture(lambda x=x: x * 2 + 1) for x in inputs]
    for value in (1.0, 5.0):
        for x, graph in zip(inputs, made, strict=True):
            x.fill_(value)
            graph.replay()
        assert [graph.output.tolist() for graph in made] == [
            [2 * value + 1] * 8,
            [2 * value + 1] * 4,
        ]
