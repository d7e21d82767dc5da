"""The KV memory of a Foreword server, as its `/metrics` tell it: blocks on the device and the tiers of its stores."""

from __future__ import annotations

import math
import re
from typing import Any, Final

from foreword.router.replica_metrics import LABEL

_LINE: Final = re.compile(
    r"foreword:(blocks(?:_free|_cached|_pinned)?|tier_(?:bytes|budget_bytes|blocks|pinned_bytes|open))(\{.*\})?\s+(\S+)"
)


def memory_of(lines: tuple[str, ...]) -> tuple[dict[str, float] | None, tuple[dict[str, Any], ...]]:
    """Its device blocks (all, free, cached, pinned), None if it does not say, and its tiers, in its own order."""
    values: dict[str, float] = {}
    tiers: dict[str, dict[str, float]] = {}
    for found in filter(None, map(_LINE.fullmatch, lines)):
        try:
            value = float(found[3])
        except ValueError:
            continue
        if not math.isfinite(value):
            continue
        if found[1].startswith("tier_"):
            label = dict(LABEL.findall(found[2] or "")).get("tier", "")
            tiers.setdefault(label, {})[found[1].removeprefix("tier_")] = value
        else:
            values[found[1]] = value
    return _device(values), tuple(_tier(label, tiers[label]) for label in tiers)


def _device(values: dict[str, float]) -> dict[str, float] | None:
    if not {"blocks", "blocks_free", "blocks_cached"} <= values.keys():
        return None
    return {
        "all": values["blocks"],
        "free": values["blocks_free"],
        "cached": values["blocks_cached"],
        "pinned": values.get("blocks_pinned", 0.0),
    }


def _tier(label: str, values: dict[str, float]) -> dict[str, Any]:
    return {
        "tier": label,
        "held": values.get("bytes", 0.0),
        "budget": values.get("budget_bytes", 0.0),
        "blocks": values.get("blocks", -1.0),
        "pinned": values.get("pinned_bytes", 0.0),
        "open": bool(values.get("open")),
    }
