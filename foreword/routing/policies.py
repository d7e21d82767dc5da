"""The placement policies by name: the cost policy, and simpler ones where the router's extras are installed.

Another package adds a policy as an entry point of the group `foreword.placement_policies`: a class that is created without
arguments (`placement.Policy`, or a subclass of `rule_policies.RulePolicy`), under its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from foreword.errors import ConfigError
from foreword.plugins import Plugins, of_product
from foreword.routing.placement import CostPolicy, Policy

_RULES: Final[Mapping[str, type[Policy]] | None] = of_product("foreword.routing.rule_policies:RULES")
POLICIES: Final = Plugins[type[Policy]](
    "foreword.placement_policies", "policy", type, {"cost": CostPolicy, **(_RULES or {})}
)


def policy_named(name: str) -> Policy:
    """A new policy. Raises ConfigError for an unknown name."""
    try:
        policy = POLICIES[name]
    except ConfigError as error:
        if _RULES is None:
            raise ConfigError(f"{error.message}; simpler ones need the package foreword-route-extras") from None
        raise
    return policy()
