"""Counters of the offload: blocks, loads, and the lookups of requests in all tiers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from foreword.store.series import counted
from foreword.store.tier_counters import OUTCOMES, LookupOutcome


@dataclass(frozen=True, slots=True)
class LookupCounts:
    """Lookups of requests in all tiers."""

    lookups: Counter[LookupOutcome] = counted(
        "Lookups of requests in all tiers.", "lookups", "store_lookups", "request_lookups", **OUTCOMES
    )
    tokens: Counter[LookupOutcome] = counted(
        "Tokens looked up: those found, and the rest by the reason.",
        *("tokens", "store_lookup_tokens", "request_lookup_tokens"),
        **OUTCOMES,
    )
    inline: int = counted(
        "Lookups of requests that the asking thread answered, without a call that may block.",
        *("lookups", "store_inline_lookups"),
    )


@dataclass(frozen=True, slots=True)
class OffloadStatus:
    """Blocks, loads, and the length of the write queue."""

    queued: int = counted("Blocks in the write queue.", "blocks", "store_queued_blocks", kind="gauge")
    dropped: int = counted("Blocks not written: the write queue was full.", "blocks", "store_dropped_blocks")
    dropped_promotions: int = counted(
        "Blocks of a slower tier not written into the faster ones, which had no room, or since the process ended.",
        *("blocks", "store_dropped_promotions"),
    )
    saved: int = counted("Blocks that at least one tier stored.", "blocks", "store_saved_blocks", "stored_blocks")
    failed: int = counted("Blocks that no tier stored.", "blocks", "store_failed_blocks")
    loaded: int = counted("Blocks loaded to the device.", "blocks", "store_loaded_blocks", "device_blocks")
    cut: int = counted("Loads that brought fewer blocks than were found.", "loads", "store_cut_loads", "loads_cut")
    stopped: int = counted("Loads cut since computing was faster.", "loads", "store_stopped_loads", "loads_stopped")
    declined: int = counted(
        "Prefixes found and not loaded: computing is faster.", "loads", "store_declined_loads", "loads_declined"
    )
    too_small: int = counted(
        "Those of the declined that would pay if a load had no fixed cost.",
        *("loads", "store_too_small_loads", "loads_too_small"),
    )
    refused: int = counted(
        "Prefixes found and not loaded: the blocks may not be used any more.",
        *("loads", "store_refused_loads", "loads_refused"),
    )
    lookups: LookupCounts = field(default_factory=LookupCounts, metadata={"series": None})
