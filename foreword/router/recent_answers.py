"""What the last requests showed, for the fleet page: how fast each replica answered, whether it failed, and which prefixes the
prompts shared.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Mapping
from itertools import islice
from typing import Any, Final, NamedTuple

from foreword.routing.fleet import Fleet
from foreword.routing.placement import Decision, KeySpace, PlacementQuery

_TIMES: Final = 128
_OUTCOMES: Final = 8
# Times of all replicas together that the fleet's quantiles are of.
_FLEET_TIMES: Final = 8192
_PROMPTS: Final = 1024


class RecentAnswers:
    """Recent answers of one replica: its last 128 TTFTs and mean ITLs in seconds, and how its last requests ended.

    Attributes:
        problems: why requests failed, "" for those that did not; the newest last.
    """

    def __init__(self) -> None:
        self.ttft: deque[float] = deque(maxlen=_TIMES)
        self.itl: deque[float] = deque(maxlen=_TIMES)
        self.problems: deque[str] = deque(maxlen=_OUTCOMES)

    def plain(self) -> dict[str, Any]:
        failed = [one for one in self.problems if one]
        return {
            "ttft": quantiles(self.ttft),
            "itl": quantiles(self.itl),
            "ended": len(self.problems),
            "failures": len(failed),
            "problem": failed[-1] if failed else "",
        }


def quantiles(times: Collection[float]) -> list[float] | None:
    """Median, 99th percentile, number; None without times."""
    found, count = sorted(times), len(times)
    return [round(found[count // 2], 5), round(found[count * 99 // 100], 5), count] if found else None


def of_fleet(recent: Collection[RecentAnswers]) -> dict[str, Any]:
    """The quantiles of all replicas together, at most equally many times of each."""
    each = max(_FLEET_TIMES // max(len(recent), 1), 1)
    return {
        "ttft": quantiles([time for one in recent for time in islice(one.ttft, each)]),
        "itl": quantiles([time for one in recent for time in islice(one.itl, each)]),
    }


class _Prompt(NamedTuple):
    """A prompt that began with what a replica had. `ends`: the last block of that, in each key space."""

    tenant: str
    name: str | None
    tokens: int
    ends: Mapping[KeySpace, bytes]
    request_id: str


class SharedPrefixes:
    """The prefixes that the last 1,024 prompts of a model shared with earlier ones. Keeps their keys: no text, no tokens."""

    def __init__(self) -> None:
        self._prompts: deque[_Prompt | None] = deque(maxlen=_PROMPTS)

    def record(self, request_id: str, tenant: str, name: str | None, query: PlacementQuery, decision: Decision) -> None:
        """Note a prompt. `name`: of the named prefix that it begins with."""
        tokens = max((one.reused for one in decision.estimates), default=0)
        spaces = (query.key_space, *query.other_keys)
        known = {space: query.keys_in(space)[: tokens // space[1]] for space in spaces}
        ends = {space: keys[-1] for space, keys in known.items() if keys}
        self._prompts.append(_Prompt(tenant, name, tokens, ends, request_id) if ends else None)

    def overview(self, fleet: Fleet, order: Collection[str], count: int) -> list[dict[str, Any]]:
        """The prefixes of at least two prompts, those first that save most.

        `tiers` has a character per replica of `order`: the fastest tier that has the prefix (0 to 2), or `-`.
        """
        groups: dict[bytes, list[_Prompt]] = defaultdict(list)
        for prompt in self._prompts:
            if prompt is not None:
                groups[next(iter(prompt.ends.values()))].append(prompt)
        ranked = sorted(
            (group for group in groups.values() if len(group) > 1), key=lambda one: -len(one) * one[0].tokens
        )
        return [self._describe(fleet, order, group) for group in ranked[:count]]

    def _describe(self, fleet: Fleet, order: Collection[str], group: list[_Prompt]) -> dict[str, Any]:
        last = group[-1]
        holders, shared = fleet.holders(last.ends.values())
        return {
            "tenants": sorted({one.tenant for one in group}),
            "names": sorted({one.name for one in group if one.name is not None}),
            "tokens": last.tokens,
            "prompts": len(group),
            "of": len(self._prompts),
            "request_id": last.request_id,
            "tiers": "".join(str(int(holders[name])) if name in holders else "-" for name in order),
            "shared": shared,
        }
