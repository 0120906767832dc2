"""Train one bundled target, or the dense drafter that they share, on the four tasks.

    PYTHONPATH=src python bench/train_targets.py --model tiny-qwen3-moe --tokens 12e6 \
        --tokenizer checkpoints/tokenizer --out checkpoints/tiny-qwen3-moe

The run is a function of the seed and the token budget; interrupted, the same command goes on from
the last checkpoint. The learning rate is constant after a warm-up and falls linearly over the last
`--decay` of the budget, so the budget may still be changed before that.
"""

import argparse
import os
import signal
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import grouped_experts
from acceptmoe.targets.tasks import TASKS
from eval_targets import quick_accuracy
from muon import Muon
from target_configs import NAMES, config_of
from training_data import Batch, Mix, batches_from
from warm_start import start_from


class RouterWatch:
    """Collects router logits during a forward pass, through hooks on the router instances."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.logits: list[tuple[Tensor, Tensor]] = []
        self.is_on = True
        for layer in model.model.layers:
            router = getattr(layer.mlp, "gate", None) or getattr(layer.mlp, "router", None)
            if type(router).__name__.endswith("TopKRouter"):
                router.register_forward_hook(self._keep)

    def _keep(self, module: Any, inputs: Any, output: Any) -> None:
        if self.is_on:
            self.logits.append((output[0], output[2]))

    def take(self) -> list[tuple[Tensor, Tensor]]:
        taken, self.logits = self.logits, []
        return taken


def balance_loss(probabilities: Tensor, chosen: Tensor) -> Tensor:
    """E * sum_e (share of assignments) * (mean probability), 1 when both are uniform."""
    num_experts = probabilities.shape[-1]
    share = torch.bincount(chosen.reshape(-1), minlength=num_experts) / chosen.numel()
    return num_experts * (share * probabilities.mean(0)).sum()


def losses(
    model: PreTrainedModel, watch: RouterWatch, batch: Batch, is_moe: bool
) -> tuple[Tensor, Tensor]:
    """Return the mean loss of completion tokens and the mean balance loss of the layers."""
    hidden = model.model(
        input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False
    ).last_hidden_state
    is_scored = batch.labels != -100
    # The head is run where it is scored only: prompts are half of the tokens.
    token_loss = F.cross_entropy(model.lm_head(hidden[is_scored]), batch.labels[is_scored])
    if not is_moe:
        return token_loss, torch.zeros(())
    balance = torch.zeros(())
    layers = watch.take()
    for logits, chosen in layers:
        probabilities = logits.softmax(-1)
        # Decoding routes completion tokens, so these are balanced on their own as well.
        for is_counted in (batch.is_real.reshape(-1), is_scored.reshape(-1)):
            balance = balance + balance_loss(probabilities[is_counted], chosen[is_counted])
    return token_loss, balance / (2 * len(layers))


def optimizers(model: PreTrainedModel, lr: float, kind: str) -> list[torch.optim.Optimizer]:
    """Muon for the matrices between embedding and head, AdamW for everything else."""
    matrices, others = [], []
    for name, param in model.named_parameters():
        is_matrix = name.endswith("_proj.weight") or name.endswith(("gate_up_proj", "down_proj"))
        (matrices if is_matrix and kind == "muon" else others).append(param)
    made: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.98), weight_decay=0.0, foreach=True)
    ]
    if matrices:
        made.append(Muon(matrices, lr=lr, weight_decay=0.01, boost=2.0))
    return made


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write beside, then move: an interrupted save never replaces a good one."""
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


def average_gradients(model: PreTrainedModel) -> None:
    """Average over the workers in one message."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))


def part_of(batch: Batch, rank: int, workers: int) -> Batch:
    """The rows of a batch that one worker computes."""
    return Batch(*(getattr(batch, field.name)[rank::workers] for field in fields(Batch)))


def train(rank: int, arguments: argparse.Namespace) -> None:
    """One worker: it computes its rows of each batch; worker 0 also reports and saves."""
    torch.set_num_threads(max(1, arguments.threads // arguments.workers))
    if arguments.workers > 1:
        store = f"file://{arguments.out.resolve() / 'workers'}"
        dist.init_process_group("gloo", store, rank=rank, world_size=arguments.workers)
    mix = Mix(dict(zip(TASKS, map(float, arguments.mix.split(",")), strict=True)))
    torch.manual_seed(arguments.seed)
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    config = config_of(arguments.model, tokenizer)
    is_moe = arguments.model != "assistant"
    eager = {"attn_implementation": "eager"} if arguments.model == "tiny-gpt-oss" else {}
    model = AutoModelForCausalLM.from_config(config, **eager)
    if is_moe:
        model.set_experts_implementation(grouped_experts.register())
    if arguments.init_from is not None:
        batches = batches_from(tokenizer, mix, arguments.seed, 0, 32, arguments.length)
        start_from(arguments.init_from, model, next(batches))
    watch = RouterWatch(model)
    opts = optimizers(model, arguments.lr, arguments.optimizer)
    saved = arguments.out / "checkpoint.pt"
    step, tokens, seconds = 0, 0, 0.0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        for opt, part in zip(opts, state["optimizers"], strict=True):
            opt.load_state_dict(part)
        step, tokens, seconds = state["step"], state["tokens"], state["seconds"]

    started, last_save = time.monotonic() - seconds, time.monotonic()
    if rank == 0:
        size = sum(p.numel() for p in model.parameters())
        print(f"{arguments.model}: {size} parameters, from step {step}", flush=True)
    average: dict[str, float] = {}

    def save_and_probe(count: int) -> None:
        state = {
            "model": model.state_dict(),
            "optimizers": [opt.state_dict() for opt in opts],
            "step": step,
            "tokens": tokens,
            "seconds": time.monotonic() - started,
        }
        save_checkpoint(saved, state)
        model.eval()
        watch.is_on = False
        probes = quick_accuracy(model, tokenizer, split="tuning", count=count)
        watch.is_on = True
        model.train()
        facts = " ".join(f"{key} {value:.3f}" for key, value in {**average, **probes}.items())
        minutes = (time.monotonic() - started) / 60
        print(f"step {step} tokens {tokens / 1e6:.2f}M minutes {minutes:.1f} {facts}", flush=True)

    columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, transient=True, disable=rank > 0) as progress:
        bar = progress.add_task("", total=arguments.tokens, completed=tokens)
        window_start, window_tokens = time.monotonic(), 0
        batches = batches_from(
            tokenizer, mix, arguments.seed, step, arguments.rows, arguments.length
        )
        for batch in batches:
            if tokens >= arguments.tokens:
                break
            left = 1 - tokens / arguments.tokens
            factor = min(1.0, (step + 1) / 40) * min(1.0, left / arguments.decay)
            for opt in opts:
                for group in opt.param_groups:
                    group["lr"] = arguments.lr * factor
            token_loss, balance = losses(
                model, watch, part_of(batch, rank, arguments.workers), is_moe
            )
            (token_loss + arguments.balance * balance).backward()
            if arguments.workers > 1:
                average_gradients(model)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for opt in opts:
                opt.step()
                opt.zero_grad(set_to_none=True)
            step += 1
            real = int(batch.is_real.sum())
            tokens += real
            window_tokens += real
            for key, value in (("loss", token_loss.item()), ("balance", balance.item())):
                average[key] = 0.95 * average.get(key, value) + 0.05 * value
            if rank == 0 and step % 20 == 0:
                speed = window_tokens / (time.monotonic() - window_start)
                window_start, window_tokens = time.monotonic(), 0
                text = (
                    f"step {step} {tokens / 1e6:.2f}M loss {average['loss']:.4f} "
                    f"balance {average['balance']:.3f} {speed:.0f} tokens/s"
                )
                progress.update(bar, completed=tokens, description=text)
                if not progress.console.is_terminal:
                    print(text, flush=True)
            # Only worker 0 saves; the others wait for it at the next gradient.
            if rank == 0 and time.monotonic() - last_save > 60 * arguments.probe_minutes:
                save_and_probe(count=32)
                last_save = window_start = time.monotonic()
                window_tokens = 0
    if rank == 0:
        save_and_probe(count=100)
        if is_moe:
            model.set_experts_implementation("eager")
        model.to(torch.bfloat16).save_pretrained(arguments.out / "final")
        tokenizer.save_pretrained(arguments.out / "final")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, choices=NAMES)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--tokens", type=float, required=True, help="training budget")
    parser.add_argument("--decay", type=float, default=0.4)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon")
    parser.add_argument("--balance", type=float, default=0.02)
    parser.add_argument("--rows", type=int, default=20)
    parser.add_argument("--length", type=int, default=192)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mix", default="1.2,1,1,1", help="weights in the order of TASKS")
    parser.add_argument("--init-from", type=Path, help="a trained target to start from")
    parser.add_argument("--probe-minutes", type=float, default=8.0)
    # The products are small: two processes of one thread beat one process of two threads.
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "workers").unlink(missing_ok=True)
    if arguments.workers == 1:
        train(0, arguments)
    else:
        # Asked to end, end by exiting, which takes the workers along.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        torch.multiprocessing.spawn(train, (arguments,), nprocs=arguments.workers, daemon=True)


if __name__ == "__main__":
    main()
