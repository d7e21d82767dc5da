"""Memory usage of the replicas, read from their metrics while a client watches the dashboard."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from foreword.router.replicas import CONNECTION_ERRORS, ReplicaProbe, Upstream

# Seconds for which a result is cached, and the time limit for a replica.
_MAX_AGE: Final = 2.0
_TIMEOUT: Final = 2.0
_LINE: Final = re.compile(
    r"^(vllm:kv_cache_usage_perc|foreword:(?:blocks|blocks_free|blocks_cached|blocks_pinned)|foreword:tier_"
    r"(?:bytes|budget_bytes|blocks|pinned_bytes|open))(\{.*\})? (\S+)$",
    re.MULTILINE,
)
_TIER: Final = re.compile(r'[{,]tier="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class ReplicaMemory:
    """Memory usage of a replica.

    Attributes:
        usage: share of its blocks in use by requests; None if it does not report it.
        device: device blocks of a Foreword server: all, free, cached, pinned.
        tiers: its store tiers, in its own order.
    """

    usage: float | None = None
    device: dict[str, float] | None = None
    tiers: tuple[dict[str, Any], ...] = ()


UNKNOWN: Final = ReplicaMemory()


def parse_memory(text: str) -> ReplicaMemory:
    """Parse a server's `/metrics`."""
    values: dict[str, float] = {}
    tiers: dict[str, dict[str, float]] = {}
    for name, labels, number in _LINE.findall(text):
        try:
            value = float(number)
        except ValueError:
            continue
        tier = _TIER.search(labels)
        if tier is not None:
            tiers.setdefault(tier[1], {})[name.removeprefix("foreword:tier_")] = value
        else:
            values[name.removeprefix("foreword:")] = value
    device = None
    if {"blocks", "blocks_free", "blocks_cached"} <= values.keys():
        device = {
            "all": values["blocks"],
            "free": values["blocks_free"],
            "cached": values["blocks_cached"],
            "pinned": values.get("blocks_pinned", 0.0),
        }
    usage = values.get("vllm:kv_cache_usage_perc")
    return ReplicaMemory(usage, device, tuple(_tier(label, tiers[label]) for label in tiers))


def _tier(label: str, values: dict[str, float]) -> dict[str, Any]:
    return {
        "tier": label,
        "held": values.get("bytes", 0.0),
        "budget": values.get("budget_bytes", 0.0),
        "blocks": values.get("blocks", -1.0),
        "pinned": values.get("pinned_bytes", 0.0),
        "open": bool(values.get("open")),
    }


class MemoryReader:
    """Reads the memory usage of replicas and caches it for some seconds. Runs on one event loop."""

    def __init__(self) -> None:
        self._known: dict[str, ReplicaMemory] = {}
        self._read_at = -_MAX_AGE
        self._lock = asyncio.Lock()

    async def read(self, probe: ReplicaProbe, upstreams: Iterable[Upstream]) -> dict[str, ReplicaMemory]:
        """Memory usage by URL; `UNKNOWN` for a replica that does not respond."""
        async with self._lock:
            if time.monotonic() - self._read_at >= _MAX_AGE:
                wanted = list(upstreams)
                found = await asyncio.gather(*(_read(probe, upstream) for upstream in wanted))
                self._known = {upstream.url: one for upstream, one in zip(wanted, found, strict=True)}
                self._read_at = time.monotonic()
            return self._known


async def _read(probe: ReplicaProbe, upstream: Upstream) -> ReplicaMemory:
    try:
        async with asyncio.timeout(_TIMEOUT):
            text = await probe.metrics(upstream)
    except CONNECTION_ERRORS:
        return UNKNOWN
    return await asyncio.to_thread(parse_memory, text.decode("utf-8", "replace"))
