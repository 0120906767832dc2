"""The arms of `bench_floor.py`: a policy, a tree and a way to compute, and what each decoded."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from acceptmoe import wrap
from acceptmoe.bench.demo import twin_of
from acceptmoe.bench.setups import Setup
from acceptmoe.bench.token_clock import TimedText, generate_timed
from acceptmoe.policies import load_policy
from floors import Work, counted_products
from recorded_routing import RecordedRouting
from step_log import Step, StepLog

MAX_DEPTH = 5
# Prompt and text; no text comes near it, so no draft is cut short by it. With the rows of a tree
# it fills a compiled cache of 512 slots for every size of tree.
MAX_LENGTH = 448
STOCK_EXPERTS = ("grouped_mm", "eager")


@dataclass(frozen=True)
class ArmName:
    """A policy, a size of tree, and how its experts and passes are computed."""

    policy: str
    num_nodes: int
    implementation: str = "compiled"  # or "uncompiled", or one of `STOCK_EXPERTS`, uncompiled

    def __str__(self) -> str:
        return f"{self.policy} {self.num_nodes} {self.implementation}"


@dataclass
class Arm:
    """One wrapped twin of the target, and what has been measured on it."""

    name: ArmName
    model: PreTrainedModel
    log: StepLog
    texts: list[TimedText] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def decode(self, prompt: Tensor, settings: dict[str, Any]) -> TimedText:
        """One text; its steps are in the log."""
        self.log.clear()
        num_new = MAX_LENGTH - prompt.shape[1]
        return generate_timed(self.model, prompt, max_new_tokens=num_new, **settings)

    def measure(self, prompt: Tensor, settings: dict[str, Any]) -> None:
        """Decode and keep the times."""
        self.texts.append(self.decode(prompt, settings))
        self.steps += self.log.steps()


def make_arm(setup: Setup, name: ArmName, backend: str = "inductor") -> Arm:
    """A twin on the same weights, wrapped as `name` says; `backend` compiles its passes."""
    twin = twin_of(setup.model)
    is_stock = name.implementation in STOCK_EXPERTS
    if is_stock:
        twin.set_experts_implementation(name.implementation)
    model = wrap(
        twin,
        setup.table,
        drafter=setup.drafter,  # all arms share it: each text tells it how to multiply
        policy=load_policy(name.policy),
        num_nodes=name.num_nodes,
        max_depth=MAX_DEPTH,
        experts=None if is_stock else "acceptmoe",
        compile=backend if name.implementation == "compiled" else False,
        allow_table_mismatch=True,
    )
    return Arm(name, model, StepLog(model.acceptmoe))


@dataclass(frozen=True)
class Untimed:
    """What was counted while a compiled arm was checked against its uncompiled twin."""

    num_same: int
    draft: Work  # of one draft, on average
    select_ms: float


def check_arm(setup: Setup, arm: Arm, prompts: list[Tensor], settings: dict[str, Any]) -> Untimed:
    """Compile `arm`, compare its tokens, count its drafts, record routing and time the selection.

    Exits when most texts differ from those of the uncompiled twin.
    """
    reference = make_arm(setup, ArmName(arm.name.policy, arm.name.num_nodes, "uncompiled"))
    routing = RecordedRouting(reference.model)
    num_same, draft, num_drafts = 0, Work(), 0
    for prompt in prompts:
        with routing.recording():
            expected = reference.decode(prompt, settings).token_ids
        with counted_products(arm.model.acceptmoe.drafter) as work:
            arm.log.work = work
            num_same += arm.decode(prompt, settings).token_ids == expected
            arm.log.work = None
        drafted = arm.log.drafted_after_first()
        draft.num_bytes += drafted.num_bytes
        draft.num_operations += drafted.num_operations
        num_drafts += len(arm.log.steps())
    if 2 * num_same < len(prompts):
        sys.exit(
            f"{arm.name} emits the tokens of the uncompiled loop for {num_same} prompts of "
            f"{len(prompts)}; its speed would mean nothing"
        )
    mean = Work(draft.num_bytes / num_drafts, draft.num_operations / num_drafts)
    return Untimed(num_same, mean, routing.time_selection_ms())
