"""How many nodes each step drafts, and which of them it verifies: policies, and the guard."""

from __future__ import annotations

from typing import Any

from acceptmoe.decoding.online_table import OnlineCommitmentTable
from acceptmoe.policies import RoutingPolicy
from acceptmoe.policies.drafts import StepPolicy
from acceptmoe.policies.history import PLAIN, DecodingStep, StepHistory
from acceptmoe.policies.utility import UtilityGate
from acceptmoe.table import CommitmentTable
from acceptmoe.tree import DraftTree


class Steering:
    """The decisions of one `generate` about its drafts; what it rests on is the session's history.

    None of them changes what a natural pass emits, only how soon. With `guard` a draft is asked for
    only while that pays, whatever the policy; `UtilityGate` has the rule.
    """

    def __init__(
        self,
        policy: RoutingPolicy,
        table: CommitmentTable | None,
        num_nodes: int,
        history: StepHistory,
        *,
        guard: bool,
    ) -> None:
        self._num_nodes, self._history = num_nodes, history
        self._online_table = table if isinstance(table, OnlineCommitmentTable) else None
        if self._online_table is not None:
            self._online_table.begin_text()
        self._tree_policy = policy.tree_policy(history, table)
        own = policy.step_policy(num_nodes)
        self._step_policies: list[StepPolicy] = [] if own is None else [own]
        if guard and num_nodes > PLAIN and not isinstance(own, UtilityGate):
            self._step_policies.append(UtilityGate([num_nodes]))

    def num_nodes(self) -> int:
        """Nodes that the next step may draft, the root included."""
        return min(
            (policy.num_nodes(self._history) for policy in self._step_policies),
            default=self._num_nodes,
        )

    def prune(self, tree: DraftTree) -> DraftTree:
        """The nodes of a draft that are worth verifying."""
        if self._tree_policy is None or tree.num_nodes == PLAIN:
            return tree
        return self._tree_policy.prune(tree)

    @property
    def min_probability(self) -> float:
        """The path probability below which no node is verified; 0 without such a limit."""
        return 0.0 if self._tree_policy is None else self._tree_policy.min_probability

    @property
    def is_warm(self) -> bool:
        """Whether the policy has what it goes by; until then blocks route naturally."""
        return self._online_table is None or self._online_table.is_warm

    def record(self, step: DecodingStep) -> None:
        """Take over a finished step."""
        self._history.record(step)

    @property
    def gate(self) -> UtilityGate | None:
        """What switches drafting on and off, where anything does."""
        gates = [policy for policy in self._step_policies if isinstance(policy, UtilityGate)]
        return gates[0] if gates else None


GUARD_FIELDS = (
    "guard_state",
    "guard_reason",
    "num_guarded_steps",
    "drafted_tokens_per_s",
    "plain_tokens_per_s",
)


def guard_report(gate: UtilityGate | None, history: StepHistory) -> dict[str, Any]:
    """Whether a session drafts, why, and both ways' tokens per second as its steps showed them.

    All None without a gate; `guard_state` is "measuring", "speculating" or "plain".
    """
    if gate is None:
        return dict.fromkeys(GUARD_FIELDS)
    verdict = gate.verdict
    return {
        "guard_state": gate.state,
        "guard_reason": guard_reason(gate),
        "num_guarded_steps": history.num_guarded_steps,
        "drafted_tokens_per_s": None if verdict is None else verdict.drafted_tokens_per_s,
        "plain_tokens_per_s": history.tokens_per_s(PLAIN),
    }


def guard_reason(gate: UtilityGate) -> str:
    """One sentence on why drafts are made or not."""
    verdict = gate.verdict
    if verdict is None:
        return "too few steps were timed to compare drafting with plain decoding"
    drafting = f"drafts of {verdict.size} nodes give {verdict.drafted_tokens_per_s:.1f} tokens/s"
    plain = f"plain decoding {verdict.plain_tokens_per_s:.1f}"
    if gate.state == "speculating":
        return f"drafting pays: {drafting}, {plain}"
    return f"drafting does not pay: {drafting}, {plain}; it is tried again now and then"
