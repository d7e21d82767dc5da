"""Counters of the audit of hits. Metrics read them without the audit, which needs PyTorch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from foreword.store.series import counted


@dataclass(slots=True)
class AuditCounts:
    """Counts of the audit since the start. A hit is an admission of a sequence with cached blocks.

    A hit is audited if at least one of its blocks was compared.
    """

    hits: Counter[str] = counted(
        "Sequences with cached blocks, by where these came from (with engine.audit_every).",
        *("hits", "audit_hits"),
        by="source",
    )
    audited: Counter[str] = counted(
        "Hits whose KV was recomputed and compared.", "hits", "audit_audited_hits", by="source"
    )
    different: Counter[str] = counted("Audited hits whose KV was wrong.", "hits", "audit_different_hits", by="source")
    skipped: int = counted(
        "Hits chosen for an audit that were evicted or never had their turn.", "hits", "audit_skipped_hits"
    )
    blocks: int = counted("Blocks compared.", "blocks", "audit_blocks")
    exact: int = counted("Compared blocks that were equal bit for bit.", "blocks", "audit_exact_blocks")
    seconds: float = counted("Seconds spent in audits.", "seconds", "audit_seconds")
    largest: float = counted(
        "The largest distance of a compared block that was right; the tolerance is its limit.",
        *("distance", "audit_largest_distance"),
        kind="gauge",
    )
