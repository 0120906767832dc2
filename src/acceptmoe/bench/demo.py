"""What `acceptmoe demo` measures: one target's test prompts decoded in four modes, side by side.

Axes: N new tokens of one text, V vocabulary.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from acceptmoe.api import wrap
from acceptmoe.bench.workloads import encode, end_token_ids
from acceptmoe.drafting import Drafter
from acceptmoe.errors import InvalidArgumentError
from acceptmoe.table import CommitmentTable
from acceptmoe.targets.problem import Problem
from acceptmoe.targets.tasks import check_all

AUTOREGRESSIVE = "autoregressive"
MODES = (AUTOREGRESSIVE, "natural", "accept-depth", "accept")
WARM_UP_TOKENS = 16

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Fidelity:
    """How far an arm's own distributions lie from the unwrapped model's, summed over tokens."""

    num_tokens: int = 0
    kl_sum: float = 0.0
    num_agreeing: int = 0

    @property
    def top1(self) -> float | None:
        """The share of tokens where both find the same one likeliest; None without tokens."""
        return self.num_agreeing / self.num_tokens if self.num_tokens else None

    @property
    def kl(self) -> float | None:
        """KL(unwrapped || own) in nats per token; None without tokens."""
        # Rounding leaves the sum of identical distributions on either side of zero.
        return max(0.0, self.kl_sum / self.num_tokens) if self.num_tokens else None

    def __add__(self, other: Fidelity) -> Fidelity:
        return Fidelity(
            self.num_tokens + other.num_tokens,
            self.kl_sum + other.kl_sum,
            self.num_agreeing + other.num_agreeing,
        )


@dataclass
class Arm:
    """One mode of decoding, and what it did prompt by prompt."""

    mode: str
    model: PreTrainedModel
    outputs: list[list[int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    fidelity: Fidelity = field(default_factory=Fidelity)

    @property
    def is_baseline(self) -> bool:
        return self.mode == AUTOREGRESSIVE

    @property
    def report(self) -> dict[str, Any]:
        """The wrapped model's counts; every prompt is in them twice, which moves no average."""
        return {} if self.is_baseline else dict(self.model.acceptmoe.report())


def run_demo(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    *,
    target: str,
    drafter: Drafter,
    table: CommitmentTable,
    num_nodes: int = 32,
    max_depth: int = 5,
    max_new_tokens: int = 128,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Decode `problems` greedily in every mode of `MODES`; one row each, in that order.

    Speed is the wall time of the whole `generate` call, prefill included, the same in every mode;
    the modes take turns prompt by prompt, each turn beginning with another one, after a warm-up of
    each. Agreement with the unwrapped model is measured in a second, untimed decoding.

    Args:
        model: The target, not wrapped; it comes out as it went in.
        tokenizer: The target's tokenizer.
        problems: What to decode; keep them apart from what the table was made with.
        target: The target's name, for the rows.
        drafter: One for all modes, which take turns: it forgets everything with each prompt.
        table: The commitment table of the target and the drafter.
        num_nodes: Largest number of nodes of a draft tree, the root included.
        max_depth: Largest number of drafted tokens on one path.
        max_new_tokens: Largest number of tokens to decode for a prompt.
        progress: Called with the numbers of finished and of all steps.

    Raises:
        AcceptMoEError: What `wrap` raises for the model, the table and the drafter.
        InvalidArgumentError: There are no problems.
    """
    if not problems:
        raise InvalidArgumentError("there are no problems to decode; give at least one")
    end_ids = end_token_ids(model, tokenizer)
    settings = {
        "max_new_tokens": max_new_tokens,
        "do_sample": False,
        "eos_token_id": end_ids,
        "pad_token_id": end_ids[0] if end_ids else None,  # never used; unset, generate would warn
    }
    prompts = [encode(tokenizer, problem.prompt, model.device) for problem in problems]
    arms = make_arms(model, drafter, table, num_nodes, max_depth)
    num_steps = len(arms) * (len(prompts) + 1)
    steps_done = 0

    def step() -> None:
        nonlocal steps_done
        steps_done += 1
        if progress is not None:
            progress(steps_done, num_steps)

    for arm in arms:
        warm_up(arm, prompts[0], settings)
        step()
    for turn, prompt in enumerate(prompts):
        first = turn % len(arms)
        for arm in [*arms[first:], *arms[:first]]:
            decode_timed(arm, prompt, settings)
            if not arm.is_baseline:
                arm.fidelity += measure_fidelity(arm.model, model, prompt, settings)
            step()
    common = {
        "target": target,
        "drafter": drafter.name,
        "num_nodes": num_nodes,
        "num_prompts": len(problems),
        "num_experts": arms[-1].report["num_experts"],
    }
    return [
        {
            **make_row(arm, arms[0].outputs, common),
            "accuracy": accuracy(problems, tokenizer, arm.outputs, end_ids),
            "num_cut_off": have_ended(arm.outputs, end_ids).count(False),
        }
        for arm in arms
    ]


def make_arms(
    model: PreTrainedModel,
    drafter: Drafter,
    table: CommitmentTable,
    num_nodes: int,
    max_depth: int,
) -> list[Arm]:
    """An arm for each of `MODES`; all share the weights of `model`, which stays unwrapped."""
    arms = [Arm(AUTOREGRESSIVE, model)]
    for mode in MODES[1:]:
        wrapped = wrap(
            twin_of(model),
            table,
            drafter=drafter,
            policy=mode,
            num_nodes=num_nodes,
            max_depth=max_depth,
        )
        arms.append(Arm(mode, wrapped))
    return arms


def twin_of(model: PreTrainedModel) -> PreTrainedModel:
    """A model of its own, with its own hooks, on the very same weights."""
    shared = {id(weight): weight for weight in [*model.parameters(), *model.buffers()]}
    return copy.deepcopy(model, shared)


def warm_up(arm: Arm, prompt: Tensor, settings: dict[str, Any]) -> None:
    """Let first-time work (allocations, threads, lazy imports) happen before anything is timed."""
    arm.model.generate(prompt, **{**settings, "max_new_tokens": WARM_UP_TOKENS})
    if not arm.is_baseline:
        arm.model.acceptmoe.reset_statistics()


def decode_timed(arm: Arm, prompt: Tensor, settings: dict[str, Any]) -> None:
    """Decode one prompt and note tokens and seconds."""
    start = time.perf_counter()
    sequence = arm.model.generate(prompt, **settings)
    if sequence.is_cuda:
        torch.cuda.synchronize()
    arm.seconds.append(time.perf_counter() - start)
    arm.outputs.append(sequence[0, prompt.shape[1] :].tolist())


@torch.no_grad()
def measure_fidelity(
    arm_model: PreTrainedModel, model: PreTrainedModel, prompt: Tensor, settings: dict[str, Any]
) -> Fidelity:
    """Compare each distribution an arm chose a token from with the unwrapped model's there.

    The unwrapped model reads the text that the arm emitted in one ordinary forward, so what a
    restricted pass leaves in the cache counts as well. The first new token is left out: it comes
    from the prefill, which is the same in every mode.
    """
    out = arm_model.generate(prompt, **settings, return_dict_in_generate=True, output_logits=True)
    own = torch.cat(out.logits)[1:].float().log_softmax(-1)  # [N - 1, V]
    if not len(own):
        return Fidelity()
    logits = model(out.sequences[:, :-1]).logits[0, prompt.shape[1] :]
    reference = logits.float().log_softmax(-1)  # [N - 1, V]
    return compare_distributions(reference, own)


def compare_distributions(reference: Tensor, own: Tensor) -> Fidelity:
    """KL(reference || own) in nats and agreement of the likeliest token, of log probabilities."""
    terms = reference.exp() * (reference - own)
    # A token that the reference excludes contributes nothing, whatever its log probability.
    kl = torch.where(reference.exp() > 0, terms, 0.0).sum(dim=-1)
    agreeing = reference.argmax(dim=-1) == own.argmax(dim=-1)
    return Fidelity(len(kl), float(kl.double().sum()), int(agreeing.sum()))


def make_row(arm: Arm, baseline_outputs: list[list[int]], common: dict[str, Any]) -> dict[str, Any]:
    """The row of one mode; what a mode does not have is None.

    Plain decoding has no drafter, and no verification pass whose experts could be counted. It is
    the unwrapped model itself, so it agrees with it by definition.
    """
    report, fidelity = arm.report, arm.fidelity
    same = [a == b for a, b in zip(arm.outputs, baseline_outputs, strict=True)]
    return {
        "mode": arm.mode,
        "target": common["target"],
        "drafter": None if arm.is_baseline else common["drafter"],
        "num_nodes": 1 if arm.is_baseline else common["num_nodes"],
        "num_prompts": common["num_prompts"],
        "tokens_per_s": sum(map(len, arm.outputs)) / sum(arm.seconds),
        "accepted_length": 1.0 if arm.is_baseline else report["accepted_length"],
        "nodes_per_verification": report.get("nodes_per_verification"),
        "natural_union": report.get("natural_union"),
        "eligible": report.get("eligible"),
        "experts_used": report.get("experts_used"),
        "num_experts": common["num_experts"],
        "same_as_autoregressive": statistics.fmean(same),
        "top1": 1.0 if arm.is_baseline else fidelity.top1,
        "kl": 0.0 if arm.is_baseline else fidelity.kl,
    }


def accuracy(
    problems: Sequence[Problem],
    tokenizer: PreTrainedTokenizerBase,
    outputs: Sequence[list[int]],
    end_ids: Sequence[int],
) -> float:
    """The share of problems that the outputs solve; an output that never ended solves none."""
    ended = have_ended(outputs, end_ids)
    texts = [
        tokenizer.decode(output[:-1] if is_ended else output)
        for output, is_ended in zip(outputs, ended, strict=True)
    ]
    return statistics.fmean(check_all(problems, texts, ended))


def have_ended(outputs: Sequence[list[int]], end_ids: Sequence[int]) -> list[bool]:
    """Which outputs came to their end; the others were cut off by the limit of new tokens."""
    return [bool(output) and output[-1] in end_ids for output in outputs]
