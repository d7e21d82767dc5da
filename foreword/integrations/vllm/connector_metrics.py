"""Statistics of the vLLM connector, for vLLM's log line and its /metrics.

A worker reports what was added since its last report, and so does the scheduler's side if it has stores of its own: ten times
a second at most while steps compute, because vLLM asks after each of them, and only if something has changed. vLLM adds the
reports up; each rank counts its own part of a block.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from foreword.errors import StoreError
from foreword.integrations.vllm.degraded import statistic
from foreword.offload.lookups import StoreLookups
from foreword.offload.manager import OffloadManager, OffloadStatus
from foreword.offload.policy import LoadCosts
from foreword.store.tier_counters import PER_TIER, LookupOutcome, TierState
from foreword.store.tiered import TieredStore

if TYPE_CHECKING:
    from foreword.integrations.vllm_extras.interfaces import Leases
from foreword.store.urls import labels_of

REPORT_SECONDS: Final = 0.1
# What `ForewordStats` counts by two names.
_NESTED: Final = ("tiers", "lookups", "requests", "found")
_TOTALS: Final = {
    "dropped_blocks": "Blocks that were not written because the write queue was full.",
    "loads": "Loads of a request's prefix that have ended.",
    "loads_cut": "Loads that brought fewer blocks than were found; vLLM computed the rest.",
    "loads_stopped": "Loads that were stopped because computing is faster.",
    "loads_declined": "Prefixes found in the stores that were computed because that is faster than loading.",
    "loads_too_small": "Those of the declined ones that would pay if a load had no fixed cost.",
    "loads_refused": "Prefixes found that were computed because the blocks could not be used any more.",
    "inline_lookups": "Lookups of requests that ended on the engine's thread, without a call that may block.",
    "degraded": "Sides of the connector that stopped after an error. vLLM serves on, and no KV is saved or loaded.",
    "unsafe_requests": "Requests whose KV was not saved because vLLM computes it wrongly beside adapters.",
    "leases": "Prompts whose blocks were kept for a decode instance.",
    "leases_unread": "Prompts whose blocks were kept and that no instance read.",
    "lent_blocks": "Blocks that other instances read from leases.",
    "shared_blocks": "Blocks that other instances read from memory tiers.",
}
_REQUESTS: Final = {
    "request_lookups": "Lookups of requests in all tiers.",
    "request_lookup_tokens": "Tokens that were looked up: those found, and the rest by the reason.",
}
_FOUND: Final = {
    "found_prefixes": "Prefixes that lookups have found, by what became of them; a prefix that was cut counts twice.",
    "found_tokens": "Tokens of prefixes that lookups have found: those loaded, and the rest by the reason.",
}
_GOOD: Final = (TierState.OK, TierState.HOLDING)
_LOAD_BUCKETS: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


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


class FoundCounts:
    """Counts what became of what lookups have found. Called from the engine's thread only."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[str, float]] = {}

    def note(self, end: FoundEnd, tokens: int) -> None:
        """Tokens of one request."""
        if tokens > 0:
            _add(self._counts.setdefault("found_prefixes", {}), {end.value: 1})
            _add(self._counts.setdefault("found_tokens", {}), {end.value: tokens})

    def take(self) -> dict[str, dict[str, float]]:
        """Statistics since the last call."""
        counts, self._counts = self._counts, {}
        return counts


@dataclasses.dataclass
class ForewordStats(KVConnectorStats):  # type: ignore[misc]
    """Statistics since the last report.

    `data`: `tiers` (label -> name -> amount), `lookups` (label -> outcome -> amount), `requests` (name -> outcome -> amount),
    `found` (name -> what became of it -> amount), `counts` (name -> amount), `load_seconds` (one per load that has ended).
    Not added up: `queued` (rank -> length of the write queue in blocks), `states` (process -> label of a tier -> its state),
    `fixed` (label -> seconds that a load takes however small it is), `fingerprint` (of the weights, in the first report and
    when they have changed; else empty).
    """

    data: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data = {
            **{name: {} for name in (*_NESTED, "counts", "queued", "states", "fixed")},
            "load_seconds": [],
            "fingerprint": "",
        }

    @statistic(lambda *_: False)
    def is_empty(self) -> bool:
        return not any(self.data.values())

    @statistic(lambda self, _: self)
    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add up amounts; the other's queue lengths and states are newer."""
        for name in _NESTED:
            for label, amounts in other.data.get(name, {}).items():
                _add(self.data[name].setdefault(label, {}), amounts)
        _add(self.data["counts"], other.data["counts"])
        self.data["load_seconds"] = [*self.data["load_seconds"], *other.data["load_seconds"]]
        for name in ("queued", "states", "fixed"):
            self.data[name].update(other.data[name])
        self.data["fingerprint"] = other.data.get("fingerprint") or self.data.get("fingerprint", "")
        return self

    @statistic(lambda _: {})
    def reduce(self) -> dict[str, int | float | str]:
        """For the log line: lookups by outcome, traffic of each tier, failures, and the states that are not good."""
        found: dict[str, int | float | str] = {}
        for outcome, amount in self.data["requests"].get("request_lookups", {}).items():
            found[f"lookups {outcome}"] = amount
        for end, amount in self.data["found"].get("found_tokens", {}).items():
            found[f"found tokens {end}"] = amount
        for label, amounts in self.data["tiers"].items():
            for verb in ("loaded", "saved"):
                found[f"{label} {verb} blocks"] = amounts.get(f"{verb}_blocks", 0)
                found[f"{label} {verb} MB"] = round(amounts.get(f"{verb}_bytes", 0) / 1e6, 1)
            for name in ("corrupt_blocks", "errors", "skipped"):
                if amounts.get(name):
                    found[f"{label} {name}"] = amounts[name]
        for process, states in self.data["states"].items():
            found.update({f"{label} in {process}": state for label, state in states.items() if state not in _GOOD})
        found.update({name: amount for name, amount in self.data["counts"].items() if amount})
        seconds = self.data["load_seconds"]
        if seconds:
            found["mean load ms"] = round(1e3 * sum(seconds) / len(seconds), 1)
            found["longest load ms"] = round(1e3 * max(seconds), 1)
        found["queued_blocks"] = sum(self.data["queued"].values())
        return found


def _add(into: dict[str, float], amounts: Mapping[str, float]) -> None:
    for name, amount in amounts.items():
        into[name] = into.get(name, 0) + amount


class StatsReader:
    """Reads the counters of one process, and reports what was added since the last read.

    Args:
        process: its name in the metrics of states: "scheduler", or "worker 0".

    Attributes:
        due_at: when a step that computes reads them next.
    """

    def __init__(
        self,
        process: str,
        store: TieredStore,
        lookups: StoreLookups,
        costs: LoadCosts,
        offload: OffloadManager | None = None,
        leases: Leases | None = None,
    ) -> None:
        self._process = process
        self._store = store
        self._lookups = lookups
        self._costs = costs
        self._offload = offload
        self._leases = leases
        self._read: dict[str, dict[str, dict[str, float]]] = {name: {} for name in _NESTED}
        self._counts: dict[str, float] = {}
        self._queued = 0
        self._states: dict[str, str] = {}
        self._fixed: dict[int, float] = {}
        self.due_at = 0.0
        self._stamp: tuple[object, ...] = ()

    @property
    def behind(self) -> bool:
        """Whether blocks are in the write queue, or were at the last read."""
        return bool(self._queued or (self._offload is not None and self._offload.queued))

    @property
    def due(self) -> bool:
        """Whether the last read was a tenth of a second ago."""
        return time.monotonic() >= self.due_at

    def read(self, load_seconds: list[float]) -> ForewordStats | None:
        """`load_seconds`: of the loads that have ended since the last read. None if nothing has changed."""
        self.due_at = time.monotonic() + REPORT_SECONDS
        stamp = self._changes()
        if stamp == self._stamp and not load_seconds:
            return None
        self._stamp = stamp
        tiers, requests = self._store.tiers, self._lookups.counts()
        now: dict[str, dict[str, dict[str, float]]] = {
            "tiers": {one.label: {name: value(one.counters) for name, _, value in PER_TIER} for one in tiers},
            "lookups": {one.label: _plain(dict(one.counters.lookups)) for one in tiers},
            "requests": {
                "request_lookups": _plain(requests.lookups),
                "request_lookup_tokens": _plain(requests.tokens),
            },
            "found": {},
        }
        added = {
            name: {
                label: more for label, amounts in now[name].items() if (more := _added(amounts, read.get(label, {})))
            }
            for name, read in self._read.items()
        }
        status = self._offload.status() if self._offload is not None else OffloadStatus()
        counts = {
            "dropped_blocks": status.dropped,
            "loads_cut": status.cut,
            "loads_stopped": status.stopped,
            "loads_refused": status.refused,
            "loads_declined": self._costs.declined,
            "loads_too_small": self._costs.too_small,
            "inline_lookups": requests.inline,
            **_of_leases(self._leases),
        }
        more = _added(counts, self._counts)
        if load_seconds:
            more["loads"] = len(load_seconds)
        states = {one.label: one.state.value for one in tiers}
        fixed = self._costs.fixed.measured
        changed = (
            any(added.values())
            or more
            or fixed != self._fixed
            or status.queued != self._queued
            or states != self._states
        )
        if not changed:
            return None
        self._read, self._counts, self._queued, self._states = now, counts, status.queued, states
        self._fixed = fixed
        data: dict[str, Any] = {
            **added,
            "counts": more,
            "load_seconds": load_seconds,
            "states": {self._process: states},
            "fixed": {tiers[tier].label: value for tier, value in fixed.items() if tier < len(tiers)},
        }
        queued = {self._process.rpartition(" ")[2]: status.queued} if self._offload is not None else {}
        return ForewordStats({**data, "queued": queued})

    def _changes(self) -> tuple[object, ...]:
        """Differs from before if a count has changed. It is quick to make."""
        offload, tiers = self._offload, self._store.tiers
        return (
            [(one.counters.stamp, one.state) for one in tiers],
            self._lookups.total,
            self._costs.declined,
            self._costs.fixed.measured,
            None if offload is None else offload.stamp,
            _of_leases(self._leases),
        )


def _plain(counts: Mapping[LookupOutcome, int]) -> dict[str, float]:
    return {outcome.value: count for outcome, count in counts.items() if count}


def _added(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {name: amount - before.get(name, 0) for name, amount in now.items() if amount != before.get(name, 0)}


def _of_leases(leases: Leases | None) -> Mapping[str, float]:
    return leases.counted() if leases is not None else {}


class ForewordPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The statistics as Prometheus metrics, `vllm:foreword_...`."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._tiers = {
            name: self._counter_cls(name=f"vllm:foreword_{name}", documentation=text, labelnames=[*labelnames, "tier"])
            for name, text, _ in PER_TIER
        }
        self._counts = {
            name: self._counter_cls(name=f"vllm:foreword_{name}", documentation=text, labelnames=labelnames)
            for name, text in _TOTALS.items()
        }
        self._lookups = self._counter_cls(
            name="vllm:foreword_lookups",
            documentation="Lookups in a tier. A request may look up several times.",
            labelnames=[*labelnames, "tier", "outcome"],
        )
        self._requests = {
            name: self._counter_cls(
                name=f"vllm:foreword_{name}", documentation=text, labelnames=[*labelnames, "outcome"]
            )
            for name, text in _REQUESTS.items()
        }
        self._found = {
            name: self._counter_cls(
                name=f"vllm:foreword_{name}", documentation=text, labelnames=[*labelnames, "outcome"]
            )
            for name, text in _FOUND.items()
        }
        self._states = self._gauge_cls(
            name="vllm:foreword_tier_state",
            documentation="1 for the state that a tier has in a process, 0 for the others.",
            multiprocess_mode="mostrecent",
            labelnames=[*labelnames, "tier", "process", "state"],
        )
        self._seconds = self._histogram_cls(
            name="vllm:foreword_load_seconds",
            documentation="Seconds from the step that starts a request's load to the step that sees its end.",
            buckets=_LOAD_BUCKETS,
            labelnames=labelnames,
        )
        self._fixed = self._gauge_cls(
            name="vllm:foreword_load_fixed_seconds",
            documentation="Seconds that a load takes however small it is, measured: what saves less is computed.",
            multiprocess_mode="mostrecent",
            labelnames=[*labelnames, "tier"],
        )
        self._queued = self._gauge_cls(
            name="vllm:foreword_queued_blocks",
            documentation="Blocks in the write queue, by rank.",
            multiprocess_mode="mostrecent",
            labelnames=[*labelnames, "rank"],
        )
        self._models = self._gauge_cls(
            name="vllm:foreword_model_info",
            documentation="1 for the weights that are served, 0 for those that were replaced in place.",
            multiprocess_mode="mostrecent",
            labelnames=[*labelnames, "fingerprint"],
        )
        self._fingerprints: dict[int, str] = {}
        for values in per_engine_labelvalues.values():
            self._start(values, _tiers_of(vllm_config))

    def _start(self, values: Sequence[object], tiers: Sequence[str]) -> None:
        """Show what is counted from the start, with 0."""
        for metric in (*self._counts.values(), self._seconds):
            metric.labels(*values)
        for tier in tiers:
            for metric in self._tiers.values():
                metric.labels(*values, tier)
        for end in FoundEnd:
            for metric in self._found.values():
                metric.labels(*values, end.value)
        for outcome in LookupOutcome:
            for metric in self._requests.values():
                metric.labels(*values, outcome.value)
            for tier in tiers:
                self._lookups.labels(*values, tier, outcome.value)

    @statistic(lambda *_, **__: None)
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        for label, amounts in transfer_stats_data["tiers"].items():
            for name, amount in amounts.items():
                self._tiers[name].labels(*values, label).inc(amount)
        for label, amounts in transfer_stats_data["lookups"].items():
            for outcome, amount in amounts.items():
                self._lookups.labels(*values, label, outcome).inc(amount)
        for name, amounts in transfer_stats_data["requests"].items():
            for outcome, amount in amounts.items():
                self._requests[name].labels(*values, outcome).inc(amount)
        for name, amounts in transfer_stats_data["found"].items():
            for end, amount in amounts.items():
                self._found[name].labels(*values, end).inc(amount)
        for process, states in transfer_stats_data["states"].items():
            for label, state in states.items():
                for one in TierState:
                    self._states.labels(*values, label, process, one.value).set(float(one == state))
        for name, amount in transfer_stats_data["counts"].items():
            self._counts[name].labels(*values).inc(amount)
        for seconds in transfer_stats_data["load_seconds"]:
            self._seconds.labels(*values).observe(seconds)
        for rank, queued in transfer_stats_data["queued"].items():
            self._queued.labels(*values, rank).set(queued)
        for label, seconds in transfer_stats_data.get("fixed", {}).items():
            self._fixed.labels(*values, label).set(seconds)
        if transfer_stats_data.get("fingerprint"):
            self._show_model(values, transfer_stats_data["fingerprint"], engine_idx)

    def _show_model(self, values: Sequence[object], fingerprint: str, engine: int) -> None:
        before = self._fingerprints.get(engine, fingerprint)
        self._fingerprints[engine] = fingerprint
        self._models.labels(*values, before).set(0.0)
        self._models.labels(*values, fingerprint).set(1.0)


def _tiers_of(vllm_config: Any) -> list[str]:
    """The labels of the tiers in the connector's settings; none where another connector wraps it."""
    given = (vllm_config.kv_transfer_config.kv_connector_extra_config or {}).get("store", ())
    try:
        return labels_of([given] if isinstance(given, str) else given)
    except StoreError:  # the engine says what is wrong with them
        return []
