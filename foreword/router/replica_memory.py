"""How full the replicas of a router are, by their own metrics. They are asked while somebody looks at the router's page."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

# Seconds for which an answer is good, and that one may take.
_AGE: Final = 2.0
_PATIENCE: Final = 2.0
_MOST_BYTES: Final = 8 << 20
_LINE: Final = re.compile(
    r"^(vllm:kv_cache_usage_perc|foreword:(?:blocks|blocks_free|blocks_cached|blocks_pinned)|foreword:tier_"
    r"(?:bytes|budget_bytes|blocks|pinned_bytes|open))(\{.*\})? (\S+)$",
    re.MULTILINE,
)
_TIER: Final = re.compile(r'[{,]tier="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Fill:
    """What a replica said of its memory.

    Attributes:
        usage: share of its blocks that requests use; None if it does not say.
        device: blocks of a Foreword server's device: all, free, cached, pinned.
        tiers: its tiers, in its own order.
    """

    usage: float | None = None
    device: dict[str, float] | None = None
    tiers: tuple[dict[str, Any], ...] = ()


NOTHING: Final = Fill()


def read_fill(text: str) -> Fill:
    """From a server's `/metrics`."""
    flat: dict[str, float] = {}
    tiers: dict[str, dict[str, Any]] = {}
    for name, labels, number in _LINE.findall(text):
        try:
            value = float(number)
        except ValueError:
            continue
        tier = _TIER.search(labels)
        if tier is not None:
            tiers.setdefault(tier[1], {})[name.removeprefix("foreword:tier_")] = value
        else:
            flat[name.removeprefix("foreword:")] = value
    device = None
    if {"blocks", "blocks_free", "blocks_cached"} <= flat.keys():
        device = {
            "all": flat["blocks"],
            "free": flat["blocks_free"],
            "cached": flat["blocks_cached"],
            "pinned": flat.get("blocks_pinned", 0.0),
        }
    return Fill(flat.get("vllm:kv_cache_usage_perc"), device, tuple(_tier(label, tiers[label]) for label in tiers))


def _tier(label: str, found: dict[str, Any]) -> dict[str, Any]:
    return {
        "tier": label,
        "held": found.get("bytes", 0.0),
        "budget": found.get("budget_bytes", 0.0),
        "blocks": found.get("blocks", -1.0),
        "pinned": found.get("pinned_bytes", 0.0),
        "open": bool(found.get("open")),
    }


class Fills:
    """Asks, and remembers for some seconds. On one event loop."""

    def __init__(self) -> None:
        self._known: dict[str, Fill] = {}
        self._asked = -_AGE
        self._asking = asyncio.Lock()

    async def of(self, urls: Iterable[str]) -> dict[str, Fill]:
        """By URL. A replica that does not answer says nothing."""
        async with self._asking:
            if time.monotonic() - self._asked >= _AGE:
                wanted = list(urls)
                async with aiohttp.ClientSession() as client:
                    found = await asyncio.gather(*(_ask(client, url) for url in wanted))
                self._known = dict(zip(wanted, found, strict=True))
                self._asked = time.monotonic()
            return self._known


async def _ask(client: aiohttp.ClientSession, url: str) -> Fill:
    try:
        async with asyncio.timeout(_PATIENCE), client.get(f"{url}/metrics") as answer:
            if answer.status != 200:
                return NOTHING
            text = bytearray()
            async for part in answer.content.iter_any():
                text += part
                if len(text) > _MOST_BYTES:
                    return NOTHING
    except (aiohttp.ClientError, OSError, TimeoutError):
        return NOTHING
    return await asyncio.to_thread(read_fill, text.decode("utf-8", "replace"))
