"""Statistics of the vLLM connector, for vLLM's log line and its /metrics.

A worker reports what was added since its last report, and so does the scheduler's side if it has stores of its own: ten times
a second at most while steps compute, because vLLM asks after each of them, and only if something has changed. vLLM adds the
reports up; each rank counts its own part of a block.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import product
from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from foreword.errors import StoreError
from foreword.integrations.vllm.degraded import statistic
from foreword.offload.counters import LookupCounts, OffloadStatus
from foreword.offload.lookups import StoreLookups
from foreword.offload.manager import OffloadManager
from foreword.offload.policy import LoadCosts
from foreword.store.series import Series, series_of
from foreword.store.tier_counters import TierCounters, TierState
from foreword.store.tiered import TieredStore
from foreword.store.urls import labels_of

if TYPE_CHECKING:
    from foreword.integrations.vllm_extras.interfaces import InstanceLeases

REPORT_SECONDS: Final = 0.1


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


def _labels(series: Series) -> dict[str, Sequence[str]]:
    return dict.fromkeys(series.labels(engine=True), series.values)


_OF_TIERS: Final = series_of(TierCounters)
_OF_REQUESTS: Final = series_of(LookupCounts)
_QUEUED, *_OF_LOADS = series_of(OffloadStatus)
# Counters by name: text, and labels after vLLM's own with those values that are shown from the start (tiers are configured).
_COUNTERS: Final[dict[str, tuple[str, dict[str, Sequence[str]]]]] = {
    **{one.engine: (one.text, {"tier": (), **_labels(one)}) for one in _OF_TIERS},
    **{one.engine: (one.text, _labels(one)) for one in (*_OF_REQUESTS, *_OF_LOADS)},
    **{
        name: (text, {"outcome": tuple(FoundEnd)})
        for name, text in (
            ("found_prefixes", "Prefixes that lookups found, by what became of them; one that was cut counts twice."),
            ("found_tokens", "Tokens of prefixes that lookups found: those loaded, and the rest by the reason."),
        )
    },
    "loads": ("Loads of a request's prefix that have ended.", {}),
    "degraded": ("Sides of the connector that stopped after an error. No KV is saved or loaded; vLLM serves on.", {}),
    "unsafe_requests": ("Requests whose KV was not saved because vLLM computes it wrongly beside adapters.", {}),
    "leases": ("Prompts whose blocks were kept for a decode instance.", {}),
    "leases_unread": ("Prompts whose blocks were kept and that no instance read.", {}),
    "lent_blocks": ("Blocks that other instances read from leases.", {}),
    "shared_blocks": ("Blocks that other instances read from memory tiers.", {}),
}
# In the keys of `counts`, between the name of a counter and the values of its labels.
_NEXT: Final = "\t"
# In vLLM's log line, with those that have no labels.
_IN_LOG: Final = (
    *("request_lookups", "found_tokens", "corrupt_blocks", "errors", "skipped"),
    *("loaded_blocks", "saved_blocks", "loaded_bytes", "saved_bytes"),
)
_GOOD: Final = (TierState.OK, TierState.HOLDING)
_LOAD_BUCKETS: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class FoundCounts:
    """Counts what became of what lookups have found. Called from the engine's thread only."""

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}

    def note(self, end: FoundEnd, tokens: int) -> None:
        """Tokens of one request."""
        if tokens > 0:
            _add(self._counts, {f"found_prefixes{_NEXT}{end.value}": 1, f"found_tokens{_NEXT}{end.value}": tokens})

    def take(self) -> dict[str, float]:
        """Statistics since the last call."""
        counts, self._counts = self._counts, {}
        return counts


@dataclasses.dataclass
class ForewordStats(KVConnectorStats):  # type: ignore[misc]
    """Statistics since the last report.

    `data`: `counts` (name of a counter, and behind it the values of its labels -> amount), `load_seconds` (one per load that
    has ended). Not added up: `queued` (rank -> length of the write queue in blocks), `states` (process -> label of a tier ->
    its state), `fixed` (label -> seconds that a load takes however small it is), `fingerprint` (of the weights, in the first
    report and when they have changed; else empty).
    """

    data: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data = {"counts": {}, "queued": {}, "states": {}, "fixed": {}, "load_seconds": [], "fingerprint": ""}

    @statistic(lambda *_: False)
    def is_empty(self) -> bool:
        return not any(self.data.values())

    @statistic(lambda self, _: self)
    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add up amounts; the other's queue lengths and states are newer."""
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
        for key, amount in self.data["counts"].items():
            name, *labels = key.split(_NEXT)
            if not labels:
                found[name] = amount
            elif name in _IN_LOG:
                said = name.removeprefix("request_").replace("bytes", "MB").replace("_", " ")
                shown = round(amount / 1e6, 1) if said.endswith("MB") else amount
                found[f"{labels[0]} {said}" if "tier" in _COUNTERS[name][1] else f"{said} {labels[0]}"] = shown
        for process, states in self.data["states"].items():
            found.update({f"{label} in {process}": state for label, state in states.items() if state not in _GOOD})
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
        leases: InstanceLeases | None = None,
    ) -> None:
        self._process = process
        self._store = store
        self._lookups = lookups
        self._costs = costs
        self._offload = offload
        self._leases = leases
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
        status = OffloadStatus(declined=self._costs.declined, too_small=self._costs.too_small)
        if self._offload is not None:
            status = self._offload.status()
        counts = {**_amounts(_OF_REQUESTS, requests), **_amounts(_OF_LOADS, status), **_of_leases(self._leases)}
        for tier in tiers:
            counts.update(_amounts(_OF_TIERS, tier.counters, tier.label))
        more = {name: amount - self._counts.get(name, 0) for name, amount in counts.items()}
        more = {name: amount for name, amount in more.items() if amount}
        if load_seconds:
            more["loads"] = len(load_seconds)
        states = {one.label: one.state.value for one in tiers}
        fixed = self._costs.fixed.measured
        if not more and (fixed, status.queued, states) == (self._fixed, self._queued, self._states):
            return None
        self._counts, self._queued, self._states, self._fixed = counts, status.queued, states, fixed
        data: dict[str, Any] = {
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


def _amounts(of: Iterable[Series], counters: object, *labels: str) -> dict[str, float]:
    return {
        _NEXT.join((one.engine, *labels, *values)): amount
        for one in of
        for values, amount in one.amounts(counters, engine=True).items()
    }


def _of_leases(leases: InstanceLeases | None) -> Mapping[str, float]:
    return leases.counted() if leases is not None else {}


class ForewordPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The statistics as Prometheus metrics, `vllm:foreword_...`."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._counter_cls(name=f"vllm:foreword_{name}", documentation=text, labelnames=[*labelnames, *labels])
            for name, (text, labels) in _COUNTERS.items()
        }

        def gauge(name: str, text: str, *labels: str) -> Any:
            names, mode = [*labelnames, *labels], "mostrecent"
            return self._gauge_cls(
                name=f"vllm:foreword_{name}", documentation=text, labelnames=names, multiprocess_mode=mode
            )

        states = "1 for the state that a tier has in a process, 0 for the others."
        self._states = gauge("tier_state", states, "tier", "process", "state")
        fixed = "Seconds that a load takes however small it is, measured: what saves less is computed."
        self._fixed = gauge("load_fixed_seconds", fixed, "tier")
        self._queued = gauge("queued_blocks", _QUEUED.text, "rank")
        model = "1 for the weights that are served, 0 for those that were replaced in place."
        self._models = gauge("model_info", model, "fingerprint")
        self._seconds = self._histogram_cls(
            name="vllm:foreword_load_seconds",
            documentation="Seconds from the step that starts a request's load to the step that sees its end.",
            buckets=_LOAD_BUCKETS,
            labelnames=labelnames,
        )
        self._fingerprints: dict[int, str] = {}
        for values in per_engine_labelvalues.values():
            self._start(values, _tiers_of(vllm_config))

    def _start(self, values: Sequence[object], tiers: Sequence[str]) -> None:
        """Show what is counted from the start, with 0."""
        self._seconds.labels(*values)
        for name, (_, labels) in _COUNTERS.items():
            for known in product(*(tiers if label == "tier" else given for label, given in labels.items())):
                self._counters[name].labels(*values, *known)

    @statistic(lambda *_, **__: None)
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        for key, amount in transfer_stats_data["counts"].items():
            name, *labels = key.split(_NEXT)
            self._counters[name].labels(*values, *labels).inc(amount)
        for process, states in transfer_stats_data["states"].items():
            for label, state in states.items():
                for one in TierState:
                    self._states.labels(*values, label, process, one.value).set(float(one == state))
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
