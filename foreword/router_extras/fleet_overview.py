"""Recent requests for the fleet page: answers of replicas, shared prefixes, decisions, causes of misses."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from foreword.router.attempt import DecisionLog, DecisionRecord, described
from foreword.router.replicas import RecentAnswers
from foreword.routing.directory import CacheTier
from foreword.routing.fleet import Fleet
from foreword.routing.placement import Decision, KeySpace, PlacementQuery

if TYPE_CHECKING:
    from foreword.api.misses.causes import Miss

# Times of all replicas together that the fleet's quantiles are of.
_FLEET_TIMES: Final = 8192
_PROMPTS: Final = 1024


class PromptStart(NamedTuple):
    """A prompt that began with what a replica had. `ends`: the last block of that, in each key space."""

    tenant: str
    name: str | None
    tokens: int
    ends: Mapping[KeySpace, bytes]
    request_id: str


class SharedPrefixes:
    """The starts of the last 1,024 prompts of a model; None for one that began with nothing known. No text, no tokens."""

    def __init__(self) -> None:
        self.prompts: deque[PromptStart | None] = deque(maxlen=_PROMPTS)

    def record(self, request_id: str, tenant: str, name: str | None, query: PlacementQuery, decision: Decision) -> None:
        """Note a prompt. `name`: of the named prefix that it begins with."""
        tokens = max([one.reused for one in decision.estimates], default=0)
        if not tokens:
            self.prompts.append(None)
            return
        spaces = (query.key_space, *query.other_keys)
        known = {space: query.keys_in(space)[: tokens // space[1]] for space in spaces}
        ends = {space: keys[-1] for space, keys in known.items() if keys}
        self.prompts.append(PromptStart(tenant, name, tokens, ends, request_id) if ends else None)


def answers_of(recent: RecentAnswers) -> dict[str, Any]:
    """The answers of a replica as the page shows them."""
    failed = [one for one in recent.problems if one]
    return {
        "ttft": quantiles(recent.ttft),
        "itl": quantiles(recent.itl),
        "ended": len(recent.problems),
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


def prefixes_of(shared: SharedPrefixes, fleet: Fleet, order: Collection[str], count: int) -> list[dict[str, Any]]:
    """The prefixes of at least two prompts, those first that save most.

    `tiers` has a character per replica of `order`: the fastest tier that has the prefix (0 to 2), or `-`.
    """
    groups: dict[bytes, list[PromptStart]] = defaultdict(list)
    for prompt in shared.prompts:
        if prompt is not None:
            groups[next(iter(prompt.ends.values()))].append(prompt)
    ranked = sorted((group for group in groups.values() if len(group) > 1), key=lambda one: -len(one) * one[0].tokens)
    return [_describe(shared, fleet, order, group) for group in ranked[:count]]


def _describe(shared: SharedPrefixes, fleet: Fleet, order: Collection[str], group: list[PromptStart]) -> dict[str, Any]:
    last = group[-1]
    holders, in_store = _holders(fleet, last.ends.values())
    return {
        "tenants": sorted({one.tenant for one in group}),
        "names": sorted({one.name for one in group if one.name is not None}),
        "tokens": last.tokens,
        "prompts": len(group),
        "of": len(shared.prompts),
        "request_id": last.request_id,
        "tiers": "".join(str(int(holders[name])) if name in holders else "-" for name in order),
        "shared": in_store,
    }


def _holders(fleet: Fleet, ends: Iterable[bytes]) -> tuple[dict[str, CacheTier], bool]:
    """Tell which replicas hold one of these blocks, and in which tier; whether a shared store does."""
    found, shared = dict[str, CacheTier](), False
    for key in ends:
        held = fleet.directory.lookup([key])
        shared |= held.shared[-1] > 0
        found |= {name: CacheTier(reach.index(1)) for name, reach in held.replicas.items()}
        for name, replica in fleet.replicas.items():
            if replica.estimated_blocks is not None and replica.estimated_blocks.known([key]):
                found[name] = CacheTier.DEVICE
    return found, shared


def misses_of(log: DecisionLog, count: int, requests: int) -> list[dict[str, Any]]:
    """The causes of cache misses by tenant, those first that cost most, each with its last requests."""
    groups: dict[tuple[str, str], list[tuple[DecisionRecord, Miss]]] = {}
    for record in reversed(log.records):
        if record.miss is not None:
            groups.setdefault((record.miss.cause, record.tenant), []).append((record, record.miss))
    found = [
        {
            "cause": cause,
            "tenant": tenant,
            "requests": len(group),
            "tokens": sum(miss.tokens_lost for _, miss in group),
            "last": [
                {"time": record.at, "request_id": record.request_id, "replica": record.decision.replica}
                | {"where": miss.where, "tokens": miss.tokens_lost, "advice": miss.advice}
                for record, miss in group[:requests]
            ],
        }
        for (cause, tenant), group in groups.items()
    ]
    return sorted(found, key=lambda one: (one["tokens"], one["requests"]), reverse=True)[:count]


def decisions_of(log: DecisionLog, count: int, candidates: int) -> list[dict[str, Any]]:
    """The last decisions as `DecisionLog.last`, with their cheapest candidates in numbers instead of all prices."""
    return [described(record) | _cheapest(record, candidates) for record in list(log.records)[::-1][:count]]


def _cheapest(record: DecisionRecord, count: int) -> dict[str, Any]:
    decision = record.decision
    order = sorted(decision.estimates, key=lambda one: (one.replica != decision.replica, bool(one.excluded), one.price))
    shown = [
        {
            "replica": one.replica,
            "seconds": round(one.total, 4),
            "queued": round(one.queue + one.memory, 4),
            "loading": round(one.load + one.transfer, 4),
            "computing": round(one.compute, 4),
            "other": round(one.decode + one.first, 4),
            "tokens": one.from_tiers,
            "computed": one.computed,
            "excluded": one.excluded,
        }
        for one in order[:count]
    ]
    return {"candidates": shown, "more": max(len(order) - count, 0)}
