"""Routing policies, one a file; `load_policy` finds them by name."""

from __future__ import annotations

import inspect

from acceptmoe.errors import InvalidArgumentError
from acceptmoe.policies.accept import AcceptPolicy
from acceptmoe.policies.accept_depth import AcceptDepthPolicy
from acceptmoe.policies.evict import EvictPolicy
from acceptmoe.policies.lynx import LynxPolicy
from acceptmoe.policies.moe_spec import MoeSpecPolicy
from acceptmoe.policies.natural import NaturalPolicy
from acceptmoe.policies.oea import OEAPolicy
from acceptmoe.policies.policy import FusedParams, RoutingPolicy
from acceptmoe.policies.s2 import S2Policy
from acceptmoe.policies.utility import UtilityPolicy
from acceptmoe.policies.xshare import XSharePolicy

POLICIES: dict[str, type[RoutingPolicy]] = {
    policy.name: policy
    for policy in (
        AcceptPolicy,
        AcceptDepthPolicy,
        NaturalPolicy,
        EvictPolicy,
        UtilityPolicy,
        MoeSpecPolicy,
        XSharePolicy,
        OEAPolicy,
        LynxPolicy,
        S2Policy,
    )
}
DEFAULT_POLICY = AcceptPolicy.name
# For the settings that have no default, because no value suits every number of experts.
EXAMPLES = {"budget": "16", "size": "16", "top": "2", "drop": "0.25"}


def load_policy(spec: str | RoutingPolicy | None) -> RoutingPolicy:
    """The policy itself, one by its name, or the default for None.

    A name may carry settings: "accept:exponent=1.0,sizing=mass,size=0.9", "moe-spec:budget=16".

    Raises `InvalidArgumentError` for an unknown name, an unknown setting, or a bad value.
    """
    if isinstance(spec, RoutingPolicy):
        name = getattr(spec, "name", None)
        if not isinstance(name, str) or not name:
            raise InvalidArgumentError(
                f"name of the policy {type(spec).__name__} is {name!r}; it must be a text, it goes "
                "into reports"
            )
        return spec
    text = DEFAULT_POLICY if spec is None else spec
    name = text.partition(":")[0] if isinstance(text, str) else ""
    if name not in POLICIES:
        raise InvalidArgumentError(
            f"policy is {spec!r}; it must be one of {', '.join(sorted(POLICIES))}, "
            "or a RoutingPolicy object"
        )
    kind = POLICIES[name]
    settings = _parse_settings(text, kind)
    missing = [
        parameter
        for parameter, default in _parameters(kind).items()
        if default is inspect.Parameter.empty and parameter not in settings
    ]
    if missing:
        raise InvalidArgumentError(
            f"policy {name!r} needs {missing[0]}; write for instance "
            f"'{name}:{missing[0]}={EXAMPLES.get(missing[0], 'VALUE')}'"
        )
    return kind(**settings)


def _parameters(kind: type[RoutingPolicy]) -> dict[str, object]:
    parameters = inspect.signature(kind).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}


def _parse_settings(text: str, kind: type[RoutingPolicy]) -> dict[str, float | str]:
    """The settings behind the colon of "name:key=value,key=value": numbers, or named choices."""
    known = _parameters(kind)
    settings: dict[str, float | str] = {}
    for part in filter(None, text.partition(":")[2].split(",")):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if key in settings:
            raise InvalidArgumentError(f"policy {text!r} sets {key} twice; it must be set once")
        if key not in known:
            allowed = ", ".join(known) or "none"
            raise InvalidArgumentError(
                f"policy {text!r} sets {key!r}; the settings of {kind.name!r} are: {allowed}"
            )
        if isinstance(known[key], str):
            settings[key] = value  # the policy knows its choices
            continue
        try:
            settings[key] = int(value) if value.lstrip("+-").isdigit() else float(value)
        except ValueError:
            raise InvalidArgumentError(
                f"policy {text!r} sets {key} to {value!r}; it must be a number"
            ) from None
    return settings


__all__ = [
    "DEFAULT_POLICY",
    "POLICIES",
    "AcceptDepthPolicy",
    "AcceptPolicy",
    "EvictPolicy",
    "FusedParams",
    "LynxPolicy",
    "MoeSpecPolicy",
    "NaturalPolicy",
    "OEAPolicy",
    "RoutingPolicy",
    "S2Policy",
    "UtilityPolicy",
    "XSharePolicy",
    "load_policy",
]
