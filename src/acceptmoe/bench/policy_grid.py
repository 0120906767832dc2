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
# One setting each, near the union that the default uses; moe-spec is the rival with a curve.
FIXED_RIVALS = ("oea:top=2", "lynx:drop=0.5", "s2")


def rival_policies(num_experts: int) -> tuple[str, ...]:
    """The policies of a curve or a rival, as `load_policy` reads them, for targets of E experts."""
    budgets = [f"moe-spec:budget={_share(share, num_experts)}" for share in MOE_SPEC_SHARES]
    shares = [f"xshare:size={_share(share, num_experts)}" for share in MOE_SPEC_SHARES[2:3]]
    fixed = [spec for spec in FIXED_RIVALS if spec.partition(":")[0] in POLICIES]
    return (*curve_policies(), *budgets, *shares, *fixed)


def curve_policies() -> tuple[str, ...]:
    """The default policy at other exponents than its own; none where it has no exponent."""
    if "exponent" not in inspect.signature(POLICIES[DEFAULT_POLICY]).parameters:
        return ()
    own = load_policy(None).params()["exponent"]
    return tuple(f"{DEFAULT_POLICY}:exponent={e:g}" for e in EXPONENTS if e != own)


def _share(share: Fraction, num_experts: int) -> int:
    return max(1, round(share * num_experts))
