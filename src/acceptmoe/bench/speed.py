"""How fast every policy decodes on targets with the matrices of a large model, one text at a time.

Each policy first finds its best tree on tuning prompts. Then all policies and Transformers' own
ways decode the same test prompts, taking turns prompt by prompt, each prompt beginning with another
arm, so that whatever else the machine does hits all alike.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from acceptmoe.bench.policy_grid import NATURAL, PEERS, PLAIN, speed_policies
from acceptmoe.bench.provenance import git_commit
from acceptmoe.bench.setups import Setup, check_names, check_policies, load_setup, num_experts
from acceptmoe.bench.speed_arms import GUARDED, ArmName, SpeedArms
from acceptmoe.bench.work_file import Record, WorkFile
from acceptmoe.bench.workloads import (
    TEST_SPLIT,
    TREES,
    TUNING_SPLIT,
    Tree,
    encode,
    end_token_ids,
    mixed_problems,
)
from acceptmoe.drafting import AssistantDrafter, check_has_weights
from acceptmoe.drafting.draft_weights import check_draft_weights
from acceptmoe.errors import AcceptMoEError, InvalidArgumentError
from acceptmoe.targets import load_assistant
from acceptmoe.targets.widen import MAX_FACTOR, widen

WARM_UP_TOKENS = 16
NATURAL_TREES = (Tree(32, 5), Tree(64, 5))  # always reported: the usual sizes
GUARD_TREE = Tree(32, 5)
Phase = Literal["tuning", "test", "guard"]
SPLIT_OF = {"tuning": TUNING_SPLIT, "test": TEST_SPLIT, "guard": TEST_SPLIT}
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

Progress = Callable[[int, int], None]


class MeasurementError(AcceptMoEError):
    """An arm emitted something else than it must, so that its speed means nothing."""


@dataclass(frozen=True)
class SpeedSettings:
    """What to measure; every field but targets, policies and the numbers of prompts is binding."""

    targets: tuple[str, ...]
    policies: tuple[str, ...] | None = None  # None: those of `speed_policies`
    trees: tuple[Tree, ...] = TREES
    drafter: str = "assistant"
    draft_weights: str | None = None
    table: str | None = None
    factor: int = 16  # hidden 128 becomes 2048
    dtype: str = "bfloat16"
    num_prompts: int = 12
    num_tuning_prompts: int = 4
    num_guard_prompts: int = 4
    max_new_tokens: int = 128
    seed: int = 0
    experts: str | None = None
    compile: bool = False
    threads: int | None = None

    def check(self) -> None:
        """Raise `InvalidArgumentError` for what cannot be measured; nothing is loaded."""
        check_names(self.targets, (), self.drafter)
        if not self.targets or not self.trees:
            raise InvalidArgumentError("there is no target or no tree to measure; give one")
        if self.table is not None and len(self.targets) > 1:
            raise InvalidArgumentError(
                f"table is {self.table!r} and there are {len(self.targets)} targets; a table "
                "belongs to one target, measure one at a time"
            )
        if self.dtype not in DTYPES:
            raise InvalidArgumentError(
                f"dtype is {self.dtype!r}; it must be one of {', '.join(DTYPES)}"
            )
        for name in ("num_prompts", "num_tuning_prompts", "factor", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise InvalidArgumentError(
                    f"{name} is {getattr(self, name)}; it must be 1 or larger"
                )
        if self.num_guard_prompts < 0:
            raise InvalidArgumentError(
                f"num_guard_prompts is {self.num_guard_prompts}; it must be 0 or larger"
            )
        if self.factor > MAX_FACTOR:
            raise InvalidArgumentError(f"factor is {self.factor}; it must be {MAX_FACTOR} or less")
        check_policies(self.policies or (), self.targets)
        check_draft_weights(self.draft_weights)
        check_has_weights(self.drafter, self.draft_weights)

    def policies_of(self, target: str) -> tuple[str, ...]:
        """Natural is always among them: it is what the others are compared with."""
        if self.policies is None:
            return speed_policies(num_experts(target))
        return tuple(dict.fromkeys((NATURAL, *self.policies)))

    def wrap_options(self) -> dict[str, Any]:
        """Keywords of `wrap` that were asked for."""
        options: dict[str, Any] = {"experts": self.experts} if self.experts else {}
        return options | ({"compile": True} if self.compile else {})


def measure_speed(
    settings: SpeedSettings,
    work_path: Path,
    *,
    is_fresh: bool = False,
    progress: Progress | None = None,
) -> list[Record]:
    """The records of tuning and of the reported prompts, target by target.

    Prompts whose arms are all in `work_path` are not decoded again. Raises `InvalidArgumentError`
    for bad settings and foreign work, `MeasurementError` when natural trees do not emit the text of
    plain decoding.
    """
    settings.check()
    work_file = WorkFile(work_path, fingerprint(settings), is_fresh=is_fresh)
    for place, target in enumerate(settings.targets):
        TargetRun(settings, target, work_file, _part(progress, place, len(settings.targets))).run()
    return work_file.records


def fingerprint(settings: SpeedSettings) -> dict[str, Any]:
    """What two records must have in common to be compared."""
    numbers = ("num_prompts", "num_tuning_prompts", "num_guard_prompts")
    free = ("targets", "policies", "trees", *numbers)
    return {
        "benchmark": "speed",
        "git_commit": git_commit(),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        **{name: value for name, value in asdict(settings).items() if name not in free},
    }


class TargetRun:
    """Tuning and measuring on one target, which is in memory for as long as this runs."""

    def __init__(
        self, settings: SpeedSettings, target: str, work_file: WorkFile, progress: Progress | None
    ) -> None:
        self.settings, self.target, self.work_file = settings, target, work_file
        self._progress = progress
        self._num_steps = self._num_done = 0
        self._warm: set[ArmName | Tree | None] = set()
        self._setup, assistant = load_widened(settings, target)
        self._arms = SpeedArms(
            self._setup,
            assistant,
            settings.wrap_options(),
            generate_settings(self._setup, settings.max_new_tokens),
        )

    def run(self) -> None:
        """Tune, check, measure."""
        settings = self.settings
        policies = settings.policies_of(self.target)
        grid = [ArmName(policy, tree) for policy in policies for tree in settings.trees]
        num_final = len(policies) + len(NATURAL_TREES) + len(PEERS)
        self._num_steps = (
            settings.num_tuning_prompts * (len(grid) + 1)
            + settings.num_prompts * num_final
            + settings.num_guard_prompts * 2
        )
        self._decode_in_turn("tuning", [ArmName(PLAIN), *grid], settings.num_tuning_prompts)
        check_natural(self.work_file.records, self.target)
        final = final_arms(settings, self.work_file.records, self.target)
        self._decode_in_turn("test", final, settings.num_prompts)
        if settings.num_guard_prompts:
            # Without an end: a guard that has to find out first needs texts of some length.
            endless = [self._setup.model.config.vocab_size]
            guarded = [ArmName(PLAIN), ArmName(GUARDED, GUARD_TREE)]
            self._decode_in_turn("guard", guarded, settings.num_guard_prompts, eos_token_id=endless)
        self._arms.drop()

    def _decode_in_turn(
        self, phase: Phase, names: Sequence[ArmName], num_prompts: int, **changes: Any
    ) -> None:
        """Every arm on every prompt; a prompt's records are kept once all its arms are through."""
        drawn = mixed_problems(SPLIT_OF[phase], num_prompts, self.settings.seed)
        wanted = {str(name) for name in names}
        for index, problem in enumerate(drawn):
            if wanted <= self._finished(phase, index):
                self._step(len(names))
                continue
            prompt = encode(self._setup.tokenizer, problem.prompt, self._setup.model.device)
            self._warm_up(names, prompt)
            first = index % len(names)
            records = []
            for name in [*names[first:], *names[:first]]:
                records.append(
                    {"target": self.target, "phase": phase, "index": index}
                    | self._arms.decode(name, prompt, **changes)
                )
                self._step(1)
            self.work_file.append(records)

    def _finished(self, phase: Phase, index: int) -> set[str]:
        return {
            record["arm"]
            for record in self.work_file.records
            if (record["target"], record["phase"], record["index"]) == (self.target, phase, index)
        }

    def _warm_up(self, names: Sequence[ArmName], prompt: Tensor) -> None:
        """Allocations, threads, compilation: what the first call of an arm has to do.

        Uncompiled passes of one tree are alike under every policy, so one of them does.
        """
        for name in names:
            is_shared = name.policy not in (*PEERS, GUARDED) and not self.settings.compile
            warm = name.tree if is_shared else name
            if warm not in self._warm:
                self._arms.decode(name, prompt, max_new_tokens=WARM_UP_TOKENS)
                self._warm.add(warm)

    def _step(self, num: int) -> None:
        self._num_done += num
        if self._progress is not None:
            self._progress(min(self._num_done, self._num_steps), self._num_steps)


def load_widened(settings: SpeedSettings, target: str) -> tuple[Setup, PreTrainedModel]:
    """The widened target and its assistant, which may be its drafter as well."""
    dtype, factor = DTYPES[settings.dtype], settings.factor
    setup = load_setup(
        target,
        settings.drafter,
        dtype=dtype,
        factor=factor,
        table=settings.table,
        draft_weights=settings.draft_weights,
    )
    if isinstance(setup.drafter, AssistantDrafter):
        return setup, setup.drafter.model
    assistant = load_assistant(target, dtype)
    return setup, assistant if factor == 1 else widen(assistant, factor, factor)


def generate_settings(setup: Setup, max_new_tokens: int) -> dict[str, Any]:
    """The keywords of `generate` that all arms get."""
    end_ids = end_token_ids(setup.model, setup.tokenizer)
    return {
        "max_new_tokens": max_new_tokens,
        "do_sample": False,
        "eos_token_id": end_ids,
        "pad_token_id": end_ids[0],
    }


def final_arms(settings: SpeedSettings, records: Sequence[Record], target: str) -> list[ArmName]:
    """The peers, each policy at its best tree, and natural at the usual sizes."""
    best = [best_arm(settings, records, target, spec) for spec in settings.policies_of(target)]
    usual = [ArmName(NATURAL, tree) for tree in NATURAL_TREES]
    return list(dict.fromkeys([*map(ArmName, PEERS), *best, *usual]))


def best_arm(
    settings: SpeedSettings, records: Sequence[Record], target: str, policy: str
) -> ArmName:
    """A policy at the tree with the highest median tokens/s over the tuning prompts."""
    arms = {str(name): name for name in (ArmName(policy, tree) for tree in settings.trees)}
    speeds: dict[ArmName, list[float]] = defaultdict(list)
    for record in records:
        is_tuning = (record["target"], record["phase"]) == (target, "tuning")
        speed = tokens_per_s(record)
        if is_tuning and record["arm"] in arms and speed is not None:
            speeds[arms[record["arm"]]].append(speed)
    if not speeds:
        raise MeasurementError(
            f"policy {policy!r} emitted no second token on any tuning prompt of {target}; give "
            "more --tuning-prompts or a larger --max-new-tokens"
        )
    return max(speeds, key=lambda name: statistics.median(speeds[name]))


def tokens_per_s(record: Record) -> float | None:
    """Decoding speed of one text; None where all its tokens came out with the first."""
    num_decoded = len(record["token_ids"]) - record["num_first"]
    return num_decoded / record["decode_s"] if num_decoded > 0 and record["decode_s"] > 0 else None


def check_natural(records: Sequence[Record], target: str) -> None:
    """Raise `MeasurementError` unless most natural trees emit the text of plain decoding.

    In bf16 a row among others rounds differently from a row alone, and two tokens can be as close
    as that; such texts are counted in `same_as_natural`. More than half of them is no rounding.
    """
    tuning = [r for r in records if (r["target"], r["phase"]) == (target, "tuning")]
    plain = {r["index"]: r["token_ids"] for r in tuning if r["arm"] == PLAIN}
    natural = [r for r in tuning if r["arm"].rpartition(" ")[0] == NATURAL]
    num_other = sum(r["token_ids"] != plain[r["index"]] for r in natural)
    if 2 * num_other > len(natural):
        raise MeasurementError(
            f"natural trees on {target} emitted other text than plain generate {num_other} times "
            f"of {len(natural)}; their speed would mean nothing. Try --dtype float32, and report "
            "a bug if they differ there"
        )


def _part(progress: Progress | None, place: int, num_parts: int) -> Progress | None:
    """Progress of one of several equal parts; steps of unequal parts are scaled."""
    if progress is None:
        return None
    scale = 1000
    return lambda done, total: progress(
        place * scale + scale * done // max(total, 1), num_parts * scale
    )
