"""Which policies are compared: the default and its curve, the paper's rule, and the rivals."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from acceptmoe.policies import DEFAULT_POLICY, POLICIES

NATURAL = "natural"
PAPER = "accept-depth"
MOE_SPEC_SHARES = (
    Fraction(1, 8),
    Fraction(3, 16),
    Fraction(1, 4),
    Fraction(3, 8),
    Fraction(1, 2),
)
# From many experts to few: the larger the floor, the exponent and 1 / size, the fewer rows and
# experts count. The last one keeps the root's own experts and nothing else.
CURVE = (
    "exponent=0.5,size=0.6",
    "min_commitment=0.06",
    "min_commitment=0.15,size=0.1",
    "min_commitment=0.4,size=0.1",
    "exponent=2,top=0,size=0.4",
    "exponent=4,top=0,size=0.2",
    "exponent=16,top=0,size=1e-06",
)
RIVAL_SHARE = Fraction(1, 4)  # of the experts, for rivals with one setting
LOSSLESS = ("evict", "utility")  # they shape the tree, not the routing


def rival_policies(num_experts: int) -> tuple[str, ...]:
    """The policies of a curve or a rival, as `load_policy` reads them, for targets of E experts."""
    budgets = (f"moe-spec:budget={_share(share, num_experts)}" for share in MOE_SPEC_SHARES)
    return (*curve_policies(), *budgets, *_single_rivals(num_experts))


def speed_policies(num_experts: int) -> tuple[str, ...]:
    """The policies whose speed is measured, one setting each, natural first."""
    lossless = (name for name in LOSSLESS if name in POLICIES)
    budget = f"moe-spec:budget={_share(RIVAL_SHARE, num_experts)}"
    return (NATURAL, PAPER, DEFAULT_POLICY, *lossless, budget, *_single_rivals(num_experts))


def _single_rivals(num_experts: int) -> tuple[str, ...]:
    """Rivals of which one setting is measured; moe-spec is the one with a curve."""
    size = _share(RIVAL_SHARE, num_experts)
    rivals = (f"xshare:size={size}", "oea:top=2", "lynx:drop=0.5", f"s2:size={size}")
    return tuple(spec for spec in rivals if spec.partition(":")[0] in POLICIES)


def curve_policies() -> tuple[str, ...]:
    """The default policy at other settings than its own."""
    return tuple(f"{DEFAULT_POLICY}:{settings}" for settings in CURVE)


def setting_label(policy: str, params: Mapping[str, Any]) -> str:
    """A policy with those of its settings that are not its defaults, as `load_policy` reads them.

    >>> setting_label("moe-spec", {"budget": 8})
    'moe-spec:budget=8'
    """
    kind = POLICIES.get(policy)  # a peer, or a policy of another version, has none
    defaults = {} if kind is None else inspect.signature(kind).parameters
    shown = ",".join(
        f"{name}={value:g}" if isinstance(value, (int, float)) else f"{name}={value}"
        for name, value in params.items()
        if name not in defaults or value != defaults[name].default
    )
    return f"{policy}:{shown}" if shown else policy


def _share(share: Fraction, num_experts: int) -> int:
    return max(1, round(share * num_experts))
