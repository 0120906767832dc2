"""Routing policies, one a file; `load_policy` finds them by name."""

from __future__ import annotations

from acceptmoe.errors import InvalidArgumentError
from acceptmoe.policies.accept import AcceptPolicy
from acceptmoe.policies.accept_depth import AcceptDepthPolicy
from acceptmoe.policies.natural import NaturalPolicy
from acceptmoe.policies.policy import RoutingPolicy

POLICIES: dict[str, type[RoutingPolicy]] = {
    policy.name: policy for policy in (NaturalPolicy, AcceptDepthPolicy, AcceptPolicy)
}
DEFAULT_POLICY = AcceptPolicy.name


def load_policy(spec: str | RoutingPolicy | None) -> RoutingPolicy:
    """The policy itself, one by its name with its default settings, or the default for None."""
    if isinstance(spec, RoutingPolicy):
        return spec
    name = DEFAULT_POLICY if spec is None else spec
    if not isinstance(name, str) or name not in POLICIES:
        raise InvalidArgumentError(
            f"policy is {spec!r}; it must be one of {', '.join(sorted(POLICIES))}, "
            "or a RoutingPolicy object"
        )
    return POLICIES[name]()


__all__ = [
    "DEFAULT_POLICY",
    "POLICIES",
    "AcceptDepthPolicy",
    "AcceptPolicy",
    "NaturalPolicy",
    "RoutingPolicy",
    "load_policy",
]
