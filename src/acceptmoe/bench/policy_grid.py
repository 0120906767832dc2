"""Which policies are compared: the default and its curve, the paper's rule, and the rivals."""

from __future__ import annotations

import inspect
from fractions import Fraction

from acceptmoe.policies import DEFAULT_POLICY, POLICIES, load_policy

NATURAL = "natural"
PAPER = "accept-depth"
MOE_SPEC_SHARES = (
    Fraction(1, 8),
    Fraction(3, 16),
    Fraction(1, 4),
    Fraction(3, 8),
    Fraction(1, 2),
)
EXPONENTS = (0.25, 0.5, 1.0, 2.0, 4.0)
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
    """The default policy at other exponents than its own; none where it has no exponent."""
    if "exponent" not in inspect.signature(POLICIES[DEFAULT_POLICY]).parameters:
        return ()
    own = load_policy(None).params()["exponent"]
    return tuple(f"{DEFAULT_POLICY}:exponent={e:g}" for e in EXPONENTS if e != own)


def _share(share: Fraction, num_experts: int) -> int:
    return max(1, round(share * num_experts))
