"""Tenants and priorities for the requests of a trace that does not name them."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from foreword.errors import ConfigError, did_you_mean
from foreword.sim.trace import TraceRequest

_KEYS: Final[dict[str, tuple[Callable[[str], Any], str]]] = {
    "share": (float, r"\d{1,9}(\.\d{1,9})?"),
    "priority": (int, r"-?\d{1,9}"),
}


@dataclass(frozen=True, slots=True)
class TenantRule:
    """A tenant that sends a part of a trace.

    Attributes:
        share: of the sessions, relative to the shares of the other tenants.
        priority: of its requests; lower numbers are more urgent, as in vLLM. None: as in the trace.
    """

    name: str
    share: float = 1.0
    priority: int | None = None


def parse_tenant(text: str) -> TenantRule:
    """`"team-a share=3 priority=5"`. Raises ConfigError."""
    name, *pairs = text.split() or [""]
    values: dict[str, Any] = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key not in _KEYS:
            raise ConfigError(
                f"--tenant {name}: {key} is not a key; choose from share, priority{did_you_mean(key, _KEYS)}"
            )
        kind, form = _KEYS[key]
        if not re.fullmatch(form, value):
            raise ConfigError(f"--tenant {name}: {key} takes a number, not {value!r}")
        values[key] = kind(value)
    if not name or "=" in name or not values.get("share", 1.0) > 0:
        raise ConfigError(f"--tenant {text!r}: write NAME and any of share=N (more than 0) and priority=N")
    return TenantRule(name, **values)


def with_tenants(trace: Sequence[TraceRequest], rules: Sequence[TenantRule], *, seed: int = 1) -> list[TraceRequest]:
    """Divide the sessions of a trace at random between tenants, by their shares.

    Without sessions, requests belong together whose first block outside of a common prompt is the same; blocks that more than
    half of the requests have are common. Raises ConfigError for a trace that names its tenants, and for two rules of one name.
    """
    names = [rule.name for rule in rules]
    if len(set(names)) < len(names):
        raise ConfigError(f"--tenant: two tenants have one name: {', '.join(names)}")
    if not rules:
        return list(trace)
    if any(one.tenant for one in trace):
        raise ConfigError("--tenant: the trace names the tenants of its requests already")
    counts = Counter(number for one in trace for number in set(one.ids))
    common = {number for number, count in counts.items() if 2 * count > len(trace)}
    rng, chosen = random.Random(seed), dict[object, TenantRule]()
    found = []
    for one in trace:
        group = one.session or next((number for number in one.ids if number not in common), -1)
        if group not in chosen:
            [chosen[group]] = rng.choices(rules, [rule.share for rule in rules])
        rule = chosen[group]
        priority = one.priority if rule.priority is None else rule.priority
        found.append(replace(one, tenant=rule.name, priority=priority))
    return found
