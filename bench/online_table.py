"""Whether correcting a commitment table online predicts held-out texts better than leaving it.

Decodes prompts of the tuning split naturally, and then replays their verification blocks: every
block is predicted before it is learnt from. One line for each way of keeping a table, with the
expected calibration error over all draft nodes and the mean log loss (nats), which also sees how
well nodes of one text are told apart.

    python bench/online_table.py --target tiny-qwen3-moe --drafter ngram --prompts 16
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
import torch

import acceptmoe
from acceptmoe import CommitmentTable, DraftTree
from acceptmoe.bench.workloads import encode, end_token_ids, mixed_problems
from acceptmoe.calibrate import expected_calibration_error
from acceptmoe.decoding.online_table import OnlineCommitmentTable
from acceptmoe.drafting import load_drafter
from acceptmoe.targets import assistant_folder, load_target

Block = tuple[DraftTree, tuple[int, ...]]


def record_texts(target: str, drafter: str, num_prompts: int, seed: int) -> list[list[Block]]:
    """The verification blocks of each text, under natural routing."""
    model, tokenizer = load_target(target)
    chosen = load_drafter(assistant_folder(target) if drafter == "assistant" else drafter)
    acceptmoe.wrap(model, policy="natural", drafter=chosen)
    end_ids = end_token_ids(model, tokenizer)
    texts: list[list[Block]] = []
    for problem in mixed_problems("tuning", num_prompts, seed):
        blocks: list[Block] = []
        model.acceptmoe.observers[:] = [lambda *block, blocks=blocks: blocks.append(block)]
        prompt = encode(tokenizer, problem.prompt, model.device)
        model.generate(prompt, max_new_tokens=160, do_sample=False, eos_token_id=end_ids)
        texts.append([block for block in blocks if block[0].num_nodes > 1])
    return texts


def replay(texts: Sequence[Sequence[Block]], table: CommitmentTable) -> tuple[float, float]:
    """Calibration error and log loss of `table` over all draft nodes, block by block."""
    predicted: list[float] = []
    labels: list[float] = []
    for blocks in texts:
        if isinstance(table, OnlineCommitmentTable):
            table.begin_text()
        for tree, nodes in blocks:
            commitment = table.path_commitment(torch.tensor(tree.path_probabilities))
            predicted += commitment[1:].tolist()
            labels += [float(node in nodes) for node in range(1, tree.num_nodes)]
            if isinstance(table, OnlineCommitmentTable):
                table.observe(tree, nodes)
    share = np.clip(predicted, 1e-4, 1 - 1e-4)
    losses = -np.log(np.where(np.asarray(labels) > 0, share, 1 - share))
    return expected_calibration_error(predicted, labels), float(losses.mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="tiny-qwen3-moe")
    parser.add_argument("--drafter", default="ngram", choices=("ngram", "assistant"))
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--seed", type=int, default=11)
    arguments = parser.parse_args()
    texts = record_texts(arguments.target, arguments.drafter, arguments.prompts, arguments.seed)
    table = CommitmentTable.load(f"{arguments.target}__{arguments.drafter}")
    model, _ = load_target(arguments.target)
    print(f"{arguments.target}, {arguments.drafter}: {sum(map(len, texts))} blocks")

    def fresh(carries_over: bool) -> OnlineCommitmentTable:
        return OnlineCommitmentTable.without_table(
            model, arguments.drafter, carries_over=carries_over
        )

    for name, ways in (
        ("table", table),
        ("table, online", OnlineCommitmentTable(table)),
        ("table, online over all texts", OnlineCommitmentTable(table, carries_over=True)),
        ("drafter, online", fresh(carries_over=False)),
        ("drafter, online over all texts", fresh(carries_over=True)),
    ):
        error, loss = replay(texts, ways)
        print(f"{name:<40} ECE {error:.4f}  log loss {loss:.4f}")


if __name__ == "__main__":
    main()
