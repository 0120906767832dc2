"""The ways of decoding that are timed: policies with a tree each, and Transformers' own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from acceptmoe.api import wrap
from acceptmoe.bench.chains import chain_drafter
from acceptmoe.bench.demo import twin_of
from acceptmoe.bench.policy_grid import ASSISTED, LOOKUP, NATURAL, PEERS
from acceptmoe.bench.setups import Setup
from acceptmoe.bench.token_clock import TimedText, generate_timed
from acceptmoe.bench.useless_drafter import RandomDrafter
from acceptmoe.bench.work_file import Record
from acceptmoe.bench.workloads import Tree
from acceptmoe.drafting import Drafter
from acceptmoe.policies import load_policy

GUARDED = "guarded-random"  # natural trees of random tokens under the guard
LOOKUP_TOKENS = 10  # as in Transformers' documentation
ROUTING_FIELDS = ("natural_union", "eligible", "experts_used")


@dataclass(frozen=True)
class ArmName:
    """A policy and its tree, or one of `PEERS`, which have none."""

    policy: str
    tree: Tree | None = None

    def __str__(self) -> str:
        return self.policy if self.tree is None else f"{self.policy} {self.tree}"


@dataclass
class SpeedArms:
    """All arms of one target; each is made when it is first asked for, on the same weights.

    `options` are keywords of `wrap`, beyond policy, drafter and tree.
    """

    setup: Setup
    assistant: PreTrainedModel
    options: dict[str, Any]
    generate_settings: dict[str, Any]
    _models: dict[ArmName, PreTrainedModel] = field(default_factory=dict)
    _chain_drafter: Drafter | None = None

    def decode(self, name: ArmName, prompt: Tensor, **changes: Any) -> Record:
        """What `name` did with one prompt [1, P]; `changes` are settings of `generate`."""
        settings = {**self.generate_settings, **changes}
        if name.policy in PEERS:
            settings |= self._peer_settings(name)
            return record_of(name, generate_timed(self.setup.model, prompt, **settings), {})
        model = self._model(name)
        model.acceptmoe.reset_statistics()
        text = generate_timed(model, prompt, **settings)
        return record_of(name, text, model.acceptmoe.report())

    def drop(self) -> None:
        """Forget all wrapped models; their weights stay the setup's."""
        self._models.clear()

    def _peer_settings(self, name: ArmName) -> dict[str, Any]:
        if name.policy == LOOKUP:
            return {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
        if name.policy == ASSISTED:
            return {"assistant_model": self.assistant}
        return {}

    def _model(self, name: ArmName) -> PreTrainedModel:
        if name not in self._models:
            assert name.tree is not None
            keywords = {
                "num_nodes": name.tree.num_nodes,
                "max_depth": name.tree.max_depth,
                **self.options,
            }
            twin = twin_of(self.setup.model)
            if name.policy == GUARDED:
                random = RandomDrafter()
                self._models[name] = wrap(
                    twin, drafter=random, policy=NATURAL, guard=True, **keywords
                )
                return self._models[name]
            self._models[name] = wrap(
                twin,
                self.setup.table,
                drafter=self._drafter(name.tree),
                policy=load_policy(name.policy),
                # Shipped tables are made with one tree; the paper's policy reads its depths.
                allow_table_mismatch=True,
                **keywords,
            )
        return self._models[name]

    def _drafter(self, tree: Tree) -> Drafter:
        if not tree.is_chain:
            return self.setup.drafter
        if self._chain_drafter is None:
            self._chain_drafter = chain_drafter(self.setup.drafter)
        return self._chain_drafter


def record_of(name: ArmName, text: TimedText, report: dict[str, Any]) -> Record:
    """One text of one arm; routing averages become sums over passes, to be added up."""
    num_passes = report.get("num_verifications", 0)
    return {
        "arm": str(name),
        "token_ids": text.token_ids,
        "decode_s": text.decode_s,
        "num_first": text.num_first,
        "call_s": text.call_s,
        "num_passes": num_passes,
        "num_verified_tokens": report.get("num_verified_tokens", 0),
        **{field: (report.get(field) or 0.0) * num_passes for field in ROUTING_FIELDS},
        "guard_state": report.get("guard_state"),
        "guard_reason": report.get("guard_reason"),
    }
