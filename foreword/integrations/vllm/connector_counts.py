"""The connector's metrics, each declared once, without vLLM: statistics, `/metrics` and docs/reference/metrics.md read these
declarations, and those of what stores count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal

from foreword.offload.counters import LookupCounts, OffloadStatus
from foreword.store.series import counted, series_of
from foreword.store.tier_counters import TierCounters


class FoundEnd(StrEnum):
    """The end of tokens that a lookup has found.

    Attributes:
        LOADED: they were loaded.
        SLOWER: computing them is faster than loading.
        CUT: their load ended before them: it was slow, a block was gone or damaged, or the load was refused.
        ENDED: their request ended first.
        REPEATED: vLLM scheduled their request anew, and it was looked up once more.
        RESET: the weights or vLLM's cache were reset first.
    """

    LOADED = "loaded"
    SLOWER = "slower"
    CUT = "cut"
    ENDED = "ended"
    REPEATED = "repeated"
    RESET = "reset"


@dataclass(slots=True)
class ConnectorCounts:
    """Counters of one side of the connector since its last report."""

    found_prefixes: Counter[FoundEnd] = counted(
        "Prefixes that lookups found, by what became of them; one that was cut counts twice.",
        *("prefixes", None, "found_prefixes"),
        by="outcome",
        values=tuple(FoundEnd),
    )
    found_tokens: Counter[FoundEnd] = counted(
        "Tokens of prefixes that lookups found: those loaded, and the rest by the reason.",
        *("tokens", None, "found_tokens"),
        by="outcome",
        values=tuple(FoundEnd),
    )
    loads: int = counted("Loads of a request's prefix that have ended.", "loads", None, "loads")
    degraded: int = counted(
        "Sides of the connector that stopped after an error. No KV is saved or loaded; vLLM serves on.",
        *("sides", None, "degraded"),
    )
    unsafe_requests: int = counted(
        "Requests whose KV was not saved because vLLM computes it wrongly beside adapters.",
        *("requests", None, "unsafe_requests"),
    )

    def note_found(self, end: FoundEnd, tokens: int) -> None:
        """Count tokens of one request, unless there are none."""
        if tokens > 0:
            self.found_prefixes[end] += 1
            self.found_tokens[end] += tokens


@dataclass(slots=True)
class HandoffCounts:
    """Counters of what a worker keeps and lends for other instances, since its start."""

    leases: int = counted("Prompts whose blocks were kept for a decode instance.", "prompts", None, "leases")
    leases_unread: int = counted(
        "Prompts whose blocks were kept and that no instance read.", "prompts", None, "leases_unread"
    )
    lent_blocks: int = counted("Blocks that other instances read from leases.", "blocks", None, "lent_blocks")
    shared_blocks: int = counted("Blocks that other instances read from memory tiers.", "blocks", None, "shared_blocks")


@dataclass(frozen=True, slots=True)
class ConnectorMetric:
    """A metric in vLLM's `/metrics`.

    Attributes:
        name: behind `vllm:foreword_`.
        labels: behind vLLM's own; counters show these values of them from the start. Tiers are configured.
    """

    name: str
    text: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: Mapping[str, Sequence[str]]


def _counters(counters: type, *labels: str) -> Iterator[ConnectorMetric]:
    for one in series_of(counters):
        if one.kind == "counter":
            values = dict.fromkeys(labels, ()) | dict.fromkeys(one.labels(engine=True), one.values)
            yield ConnectorMetric(one.engine, one.text, "counter", values)


def _gauge(name: str, text: str, *labels: str) -> ConnectorMetric:
    return ConnectorMetric(name, text, "gauge", dict.fromkeys(labels, ()))


_LOAD: Final = "Seconds from the step that starts a request's load to the step that sees its end."
_FIXED: Final = "Seconds that a load takes however small it is, measured: what saves less is computed."
_QUEUED: Final = next(one for one in series_of(OffloadStatus) if one.field == "queued")
# Metrics that no server has under another name.
OWN: Final = (
    *_counters(ConnectorCounts),
    *_counters(HandoffCounts),
    ConnectorMetric("load_seconds", _LOAD, "histogram", {}),
    _gauge("load_fixed_seconds", _FIXED, "tier"),
    _gauge("queued_blocks", _QUEUED.text, "rank"),
    _gauge("tier_state", "1 for the state that a tier has in a process, 0 for the others.", "tier", "process", "state"),
    _gauge("model_info", "1 for the weights that are served, 0 for those that were replaced in place.", "fingerprint"),
)
METRICS: Final = {
    one.name: one
    for one in (*_counters(TierCounters, "tier"), *_counters(LookupCounts), *_counters(OffloadStatus), *OWN)
}
