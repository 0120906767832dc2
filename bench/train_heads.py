"""Train the EAGLE-3 head of one target by training-time test, and measure what it accepts.

    PYTHONPATH=src python bench/train_heads.py --target tiny-qwen3-moe --out checkpoints/heads/q

The target is frozen. Texts are train-split problems: mostly with their reference completions, on
which the target's own distribution is the label, and some with the target's own continuations. The
run is a function of its arguments; interrupted, the same command goes on from the last checkpoint.
`--out` receives the head in the SpecForge layout and `training.json` with the facts of the run.
"""

import argparse
import json
import os
import time
from collections import defaultdict
from itertools import count
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

import grouped_experts
from acceptmoe.drafting.eagle3 import Eagle3Drafter
from acceptmoe.drafting.eagle3_checkpoint import load_head, save_head
from acceptmoe.drafting.eagle3_head import Eagle3Config, Eagle3Head
from acceptmoe.drafting.eagle3_layouts import default_boundaries
from acceptmoe.targets import target_folder, target_names
from head_acceptance import accepted_lengths
from head_data import (
    HeadBatch,
    Sample,
    batches_of_epoch,
    frequent_tokens,
    own_samples,
    reference_samples,
)
from head_loss import step_losses, view_target

NUM_STEPS = 5  # of training-time test: the depth of the trees
SAVE_EVERY = 50
REPORT_EVERY = 10


def load_target(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A bundled target by name, or any checkpoint folder; float32, frozen."""
    path = target_folder(name) if name in target_names() else name
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation(grouped_experts.register())
    return model.eval().requires_grad_(False), AutoTokenizer.from_pretrained(path)


def head_config(
    model: PreTrainedModel, boundaries: tuple[int, ...], draft_vocab_size: int, inner_size: int
) -> Eagle3Config:
    """A head with the target's hidden size and attention shape."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Eagle3Config(
        vocab_size=config.vocab_size,
        draft_vocab_size=draft_vocab_size,
        hidden_size=config.hidden_size,
        target_hidden_size=config.hidden_size,
        intermediate_size=inner_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        num_aux=len(boundaries),
        boundaries=boundaries,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
    )


def new_head(model: PreTrainedModel, config: Eagle3Config, token_ids: Tensor) -> Eagle3Head:
    """A fresh head whose output matrix and final norm start as the target's.

    Its input starts from noise: the target's latest state, passed on as it is, speaks for the token
    that the head is given already. A short trial that began so (at half the learning rate) was
    behind after 20 steps.
    """
    head = Eagle3Head(config, token_ids)
    with torch.no_grad():
        head.lm_head.weight.copy_(model.get_output_embeddings().weight[token_ids])
        head.norm.copy_(model.model.norm.weight)
    return head


def continued_head(folder: Path, config: Eagle3Config) -> Eagle3Head:
    """A trained head as the start, for a target that grew out of the one it was made for."""
    head = load_head(folder).float().requires_grad_(True).train()
    if head.config != config:
        raise SystemExit(
            f"--start-from {folder} has another shape than the head to be trained: {head.config} "
            f"instead of {config}"
        )
    return head


def cached_own_samples(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    arguments: argparse.Namespace,
    file: Path,
) -> list[Sample]:
    """The target's own continuations; written once, since generating takes minutes."""
    if not file.exists():
        made = own_samples(model, tokenizer, arguments.own, arguments.seed + 1)
        rows = [[sample.prompt, sample.completion] for _, sample in made]
        file.write_text(json.dumps(rows))
    return [Sample(*row) for row in json.loads(file.read_text())]


class Training:
    """A head, its optimiser and its schedule, saved and resumed together."""

    def __init__(self, head: Eagle3Head, arguments: argparse.Namespace, file: Path) -> None:
        self.head = head
        self.step = 0
        self.num_tokens = 0
        self.seconds = 0.0
        self._arguments = arguments
        self._file = file
        self._optimizer = torch.optim.AdamW(
            head.parameters(), lr=arguments.lr, betas=(0.9, 0.95), weight_decay=0.0
        )
        self._run = {key: str(value) for key, value in vars(arguments).items() if key != "threads"}
        if file.exists():
            state = torch.load(file, weights_only=True)
            if state["run"] != self._run:
                raise SystemExit(
                    f"{file} belongs to a run with other arguments; remove it or choose another "
                    f"--work folder. It was made with {state['run']}"
                )
            head.load_state_dict(state["head"])
            self._optimizer.load_state_dict(state["optimizer"])
            self.step, self.num_tokens = state["step"], state["num_tokens"]
            self.seconds = state["seconds"]

    def learn(self, loss: Tensor, batch: HeadBatch) -> None:
        """One optimiser step; warm-up, then linear to a tenth."""
        steps, warm_up = self._arguments.steps, 30
        factor = min(1.0, (self.step + 1) / warm_up) * (1 - 0.9 * self.step / steps)
        for group in self._optimizer.param_groups:
            group["lr"] = self._arguments.lr * factor
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.num_tokens += batch.num_tokens

    def save(self) -> None:
        """Write beside, then move: an interrupted save never replaces a good one."""
        state = {
            "run": self._run,
            "head": self.head.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "step": self.step,
            "num_tokens": self.num_tokens,
            "seconds": self.seconds,
        }
        partial = self._file.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self._file)


def train(
    model: PreTrainedModel,
    training: Training,
    samples: list[Sample],
    pad_id: int,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """Train to the last step; the facts of the last hundred steps."""
    head = training.head
    boundaries = head.config.boundaries
    embedding = model.get_input_embeddings().weight
    recent: list[tuple[float, list[float]]] = []
    batches = (
        batch
        for epoch in count()
        for batch in batches_of_epoch(samples, arguments.rows, pad_id, arguments.seed, epoch)
    )
    for _ in range(training.step):
        next(batches)
    columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, transient=True) as progress:
        bar = progress.add_task("", total=arguments.steps, completed=training.step)
        window_start, window_tokens = time.monotonic(), training.num_tokens
        while training.step < arguments.steps:
            started = time.monotonic()
            batch = next(batches)
            view = view_target(model, boundaries, batch)
            result = step_losses(head, embedding, view, batch, NUM_STEPS)
            training.learn(result.total(), batch)
            training.seconds += time.monotonic() - started
            agreement = [a / max(n, 1) for a, n in zip(result.agreed, result.rows, strict=True)]
            recent = [*recent[-99:], (float(result.total().detach()), agreement)]
            if training.step % REPORT_EVERY == 0:
                speed = (training.num_tokens - window_tokens) / (time.monotonic() - window_start)
                window_start, window_tokens = time.monotonic(), training.num_tokens
                last = recent[-REPORT_EVERY:]
                steps = [sum(row[j] for _, row in last) / len(last) for j in range(NUM_STEPS)]
                text = (
                    f"step {training.step} loss {sum(loss for loss, _ in last) / len(last):.4f} "
                    f"agreement {' '.join(f'{a:.3f}' for a in steps)} {speed:.0f} tokens/s"
                )
                progress.update(bar, completed=training.step, description=text)
                if not progress.console.is_terminal:
                    print(text, flush=True)
            if training.step % SAVE_EVERY == 0:
                training.save()
    training.save()
    return {
        "loss": round(sum(loss for loss, _ in recent) / max(len(recent), 1), 4),
        "agreement": [
            round(sum(row[j] for _, row in recent) / max(len(recent), 1), 4)
            for j in range(NUM_STEPS)
        ],
    }


def measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    arguments: argparse.Namespace,
) -> dict[str, float]:
    """Accepted length by task of the head as saved, on prompts that no training has seen."""
    drafter = Eagle3Drafter.from_pretrained(folder, model, topk=arguments.topk)
    by_task: dict[str, list[Sample]] = defaultdict(list)
    made = own_samples(model, tokenizer, arguments.measure, seed=0, split="tuning")
    for task, sample in made:
        by_task[task].append(sample)
    totals = {
        task: accepted_lengths(model, drafter, samples, arguments.num_nodes, arguments.max_depth)
        for task, samples in by_task.items()
    }
    tokens, passes = (sum(column) for column in zip(*totals.values(), strict=True))
    rows = {task: round(t / max(p, 1), 3) for task, (t, p) in totals.items()}
    return {**rows, "all": round(tokens / max(passes, 1), 3)}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True, help="name of a bundled target, or a folder")
    parser.add_argument("--out", required=True, type=Path, help="folder of the finished head")
    parser.add_argument("--work", type=Path, help="folder of checkpoints (default: OUT)")
    parser.add_argument("--start-from", type=Path, help="folder of a head to begin with")
    parser.add_argument("--steps", type=int, default=420)
    parser.add_argument("--rows", type=int, default=32, help="samples in a batch")
    parser.add_argument("--references", type=int, default=2500, help="problems of each task")
    parser.add_argument("--own", type=int, default=128, help="own continuations of each task")
    parser.add_argument("--draft-vocab", type=int, default=512)
    parser.add_argument("--inner", type=int, default=384, help="inner size of the head's MLP")
    parser.add_argument("--boundaries", type=int, nargs="+", help="default 2 3 4, or by the rule")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--measure", type=int, default=24, help="tuning problems of each task")
    parser.add_argument("--num-nodes", type=int, default=32)
    parser.add_argument("--max-depth", type=int, default=5)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    work = arguments.work or arguments.out
    work.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load_target(arguments.target)
    num_layers = model.config.num_hidden_layers
    rule = default_boundaries(num_layers) if num_layers >= 8 else (2, 3, 4)
    boundaries = tuple(arguments.boundaries or rule)

    samples = reference_samples(tokenizer, arguments.references, arguments.seed)
    if arguments.own:
        samples += cached_own_samples(model, tokenizer, arguments, work / "own.json")
    token_ids = frequent_tokens(samples, arguments.draft_vocab, model.config.vocab_size)
    config = head_config(model, boundaries, len(token_ids), arguments.inner)
    if arguments.start_from:
        head = continued_head(arguments.start_from, config)
        token_ids = head.token_ids
    else:
        head = new_head(model, config, token_ids)
    training = Training(head, arguments, work / "training.pt")
    facts = train(model, training, samples, tokenizer.pad_token_id, arguments)

    save_head(training.head, arguments.out, dtype=getattr(torch, arguments.dtype))
    accepted = measure(model, tokenizer, arguments.out, arguments)
    covered = torch.isin(
        torch.tensor([token for sample in samples for token in sample.completion]), token_ids
    )
    run = {
        "target": Path(arguments.target).name,
        "started_from": arguments.start_from and arguments.start_from.name,
        "parameters": sum(p.numel() for p in training.head.parameters()),
        "steps": training.step,
        "tokens": training.num_tokens,
        "minutes": round(training.seconds / 60, 1),
        **facts,
        "draft_vocab_coverage": round(covered.float().mean().item(), 5),
        "accepted_length": accepted,
        "num_nodes": arguments.num_nodes,
        "max_depth": arguments.max_depth,
        "seed": arguments.seed,
        "torch": torch.__version__,
    }
    (work / "training.json").write_text(json.dumps(run, indent=2) + "\n")
    table = Table(
        title=f"Accepted length, {Path(arguments.target).name}, {arguments.num_nodes} nodes"
    )
    table.add_column("task")
    table.add_column("tokens per pass", justify="right")
    for task, length in accepted.items():
        table.add_row(task, f"{length:.2f}")
    Console().print(table)
    print(json.dumps(run))


if __name__ == "__main__":
    main()
