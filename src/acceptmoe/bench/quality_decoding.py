"""Decodes the prompts of the quality benchmark and notes what every policy did to each.

Axes: B prompts of a batch, N new tokens of one text, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from acceptmoe.api import wrap
from acceptmoe.bench.demo import Fidelity, compare_distributions, twin_of
from acceptmoe.bench.setups import Setup, load_setup
from acceptmoe.bench.work_file import Record
from acceptmoe.bench.workloads import TEST_SPLIT, encode, end_token_ids
from acceptmoe.policies import load_policy
from acceptmoe.targets.problem import Problem
from acceptmoe.targets.tasks import problems

PLAIN = "plain"  # Transformers' own generate, in batches; what natural must equal
ROUTING_FIELDS = ("natural_union", "eligible", "experts_used", "excluded_mass", "routed_pairs")


@dataclass(frozen=True)
class DecodingSettings:
    """All that a record depends on beside its target, task, policy and prompt."""

    drafter: str = "eagle3"
    table: str | None = None
    num_nodes: int = 32
    max_depth: int = 5
    max_new_tokens: int = 256
    seed: int = 0
    experts: str | None = None
    audit: float = 0.0  # share of passes that also run naturally, from the same cache


@dataclass(frozen=True)
class Work:
    """Prompts `indices` of a task's test split, each decoded by every one of `policies`.

    `num_problems` is how many problems the task is drawn for, at least the largest index plus one.
    """

    target: str
    task: str
    policies: tuple[str, ...]
    indices: tuple[int, ...]
    num_problems: int


@dataclass(frozen=True)
class Decoded:
    """One new text, and the logits [N, V] that its tokens were chosen from."""

    token_ids: list[int]
    logits: Tensor


@lru_cache(maxsize=4)
def drawn_problems(task: str, count: int, seed: int) -> tuple[Problem, ...]:
    """The prompts of the benchmark: those of the split that nothing was made or tuned with."""
    return tuple(problems(task, TEST_SPLIT, count, seed))


class QualityWorker:
    """Decodes pieces of work; keeps one target and its wrapped twins loaded."""

    def __init__(self, settings: DecodingSettings) -> None:
        self.settings = settings
        self._setup: Setup | None = None
        self._arms: dict[str, PreTrainedModel] = {}

    def decode(self, work: Work) -> list[Record]:
        """The records of one piece of work, in no particular order."""
        if self._setup is None or self._setup.target != work.target:
            self._arms.clear()
            settings = self.settings
            self._setup = load_setup(work.target, settings.drafter, table=settings.table)
        if work.policies == (PLAIN,):
            return self._decode_plain(self._setup, work)
        drawn = drawn_problems(work.task, work.num_problems, self.settings.seed)
        return [
            record
            for index in work.indices
            for record in self._decode_paired(self._setup, work, index, drawn[index])
        ]

    def _decode_plain(self, setup: Setup, work: Work) -> list[Record]:
        """Greedy texts of the unwrapped model, all prompts of the work in one batch."""
        drawn = drawn_problems(work.task, work.num_problems, self.settings.seed)
        inputs = left_padded(setup, [drawn[index].prompt for index in work.indices])
        out = setup.model.generate(**inputs, **self._generate_settings(setup))
        end_ids = end_token_ids(setup.model, setup.tokenizer)
        texts = out[:, inputs["input_ids"].shape[1] :].tolist()
        return [
            record_of(setup, work, PLAIN, index, until_end(text, end_ids))
            for index, text in zip(work.indices, texts, strict=True)
        ]

    def _decode_paired(
        self, setup: Setup, work: Work, index: int, problem: Problem
    ) -> list[Record]:
        """The records of one prompt under every policy.

        Most policies emit the same text, so the reference distributions are computed once a text.
        """
        prompt = encode(setup.tokenizer, problem.prompt, setup.model.device)
        references: dict[tuple[int, ...], Tensor] = {}
        records = []
        for spec in work.policies:
            arm = self._arm(setup, spec)
            done = decode_with_logits(arm, prompt, self._generate_settings(setup))
            text = tuple(done.token_ids)
            if text not in references:
                references[text] = teacher_forced(setup.model, prompt, done.token_ids)
            fidelity = fidelity_of(references[text], done)
            records.append(
                record_of(setup, work, spec, index, done.token_ids)
                | vars(fidelity)
                | counts_of(arm.acceptmoe.report())
            )
        return records

    def _arm(self, setup: Setup, spec: str) -> PreTrainedModel:
        """A twin of the target under the policy `spec`, its counts at zero."""
        if spec not in self._arms:
            settings = self.settings
            chosen: dict[str, Any] = {"experts": settings.experts} if settings.experts else {}
            if settings.audit:
                chosen["audit"] = settings.audit
            self._arms[spec] = wrap(
                twin_of(setup.model),
                setup.table,
                drafter=setup.drafter,
                policy=load_policy(spec),
                num_nodes=settings.num_nodes,
                max_depth=settings.max_depth,
                **chosen,
            )
        arm = self._arms[spec]
        arm.acceptmoe.reset_statistics()
        return arm

    def _generate_settings(self, setup: Setup) -> dict[str, Any]:
        end_ids = end_token_ids(setup.model, setup.tokenizer)
        return {
            "max_new_tokens": self.settings.max_new_tokens,
            "do_sample": False,
            "eos_token_id": end_ids,
            "pad_token_id": end_ids[0],
        }


def record_of(setup: Setup, work: Work, policy: str, index: int, token_ids: list[int]) -> Record:
    """Which text this is, its tokens, and what a checker needs to judge it."""
    has_ended = token_ids[-1] in end_token_ids(setup.model, setup.tokenizer)
    return {
        "target": work.target,
        "task": work.task,
        "policy": policy,
        "index": index,
        "token_ids": token_ids,
        "text": setup.tokenizer.decode(token_ids[:-1] if has_ended else token_ids),
        "ended": has_ended,
    }


def left_padded(setup: Setup, prompts: list[str]) -> dict[str, Tensor]:
    """[B, P] token ids and attention mask; done here, since not every tokenizer has a padding."""
    encoded = [setup.tokenizer(prompt)["input_ids"] for prompt in prompts]
    longest = max(map(len, encoded))
    padding = end_token_ids(setup.model, setup.tokenizer)[0]  # behind the mask any token will do
    rows = [[padding] * (longest - len(ids)) + ids for ids in encoded]
    mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in encoded]
    device = setup.model.device
    return {
        "input_ids": torch.tensor(rows, device=device),
        "attention_mask": torch.tensor(mask, device=device),
    }


def decode_with_logits(arm: PreTrainedModel, prompt: Tensor, settings: dict[str, Any]) -> Decoded:
    """Text and logits from one decoding."""
    out = arm.generate(prompt, **settings, return_dict_in_generate=True, output_logits=True)
    return Decoded(out.sequences[0, prompt.shape[1] :].tolist(), torch.cat(out.logits))


@torch.no_grad()
def teacher_forced(model: PreTrainedModel, prompt: Tensor, token_ids: list[int]) -> Tensor:
    """[N - 1, V] log probabilities of the unwrapped model at every new token but the first.

    One ordinary forward over the emitted text, so that what a restricted pass leaves in the cache
    counts as a difference. The first token comes from the prefill, the same for every policy.
    """
    text = torch.cat([prompt[0], prompt.new_tensor(token_ids[:-1])])[None]
    num_wanted = len(token_ids) - 1
    logits: Tensor = model(text, logits_to_keep=max(num_wanted, 1)).logits[0]
    return logits[:num_wanted].float().log_softmax(-1)


def fidelity_of(reference: Tensor, done: Decoded) -> Fidelity:
    """How far the policy's own distributions lie from `reference` [N - 1, V]."""
    if not len(reference):
        return Fidelity()
    return compare_distributions(reference, done.logits[1:].float().log_softmax(-1))


def counts_of(report: dict[str, Any]) -> Record:
    """Of a report on one prompt, what can be added up over prompts.

    Routing averages become sums over passes, so that prompts with many passes weigh as many.
    """
    num_passes = report["num_verifications"]
    sums = {name: (report[name] or 0.0) * num_passes for name in ROUTING_FIELDS}
    audit = report.get("audit") or {"num_tokens": 0, "kl": None}
    sums["num_audited_tokens"] = audit["num_tokens"]
    sums["kl_step_sum"] = (audit["kl"] or 0.0) * audit["num_tokens"]
    return {
        "num_passes": num_passes,
        "num_verified_tokens": report["num_verified_tokens"],
        "num_verified_nodes": report["num_verified_nodes"],
        **sums,
    }


def until_end(token_ids: list[int], end_ids: list[int]) -> list[int]:
    """The text up to and with its first end token, without the padding of its batch."""
    for place, token in enumerate(token_ids):
        if token in end_ids:
            return token_ids[: place + 1]
    return token_ids
