"""Statistics of the vLLM connector, for vLLM's log line and its /metrics.

A worker reports what was added since its last report, and so does the scheduler's side if it has stores of its own: ten times
a second at most while steps compute, because vLLM asks after each of them, and only if something has changed. vLLM adds the
reports up; each rank counts its own part of a block.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, Final, Self

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from foreword.errors import StoreError
from foreword.integrations.vllm.connector_counts import METRICS, ConnectorCounts
from foreword.integrations.vllm.degraded import statistic
from foreword.offload.counters import OffloadStatus
from foreword.offload.lookups import StoreLookups
from foreword.offload.manager import OffloadManager
from foreword.offload.policy import LoadCosts
from foreword.store.series import series_of
from foreword.store.tier_counters import TierState
from foreword.store.tiered import TieredStore
from foreword.store.urls import labels_of

if TYPE_CHECKING:
    from foreword.integrations.vllm_extras.interfaces import InstanceLeases

REPORT_SECONDS: Final = 0.1
# In the keys of `counts`, between the name of a counter and the values of its labels.
_NEXT: Final = "\t"
# In vLLM's log line, with those that have no labels.
_IN_LOG: Final = (
    *("request_lookups", "found_tokens", "corrupt_blocks", "errors", "skipped"),
    *("loaded_blocks", "saved_blocks", "loaded_bytes", "saved_bytes"),
)
_GOOD: Final = (TierState.OK, TierState.HOLDING)
_LOAD_BUCKETS: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


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

    def count(self, counts: ConnectorCounts) -> Self:
        """Add what a side has counted; returns these statistics."""
        _add(self.data["counts"], _amounts(counts))
        return self

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
                found[f"{labels[0]} {said}" if "tier" in METRICS[name].labels else f"{said} {labels[0]}"] = shown
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
        tiers, requests = self._store.tiers, self._lookups.counts()
        status = OffloadStatus(declined=self._costs.declined, too_small=self._costs.too_small)
        if self._offload is not None:
            status = self._offload.status()
        counts = {**_amounts(requests), **_amounts(status)}
        if self._leases is not None:
            counts.update(_amounts(self._leases.counted()))
        for tier in tiers:
            counts.update(_amounts(tier.counters, tier.label))
        more = {name: amount - self._counts.get(name, 0) for name, amount in counts.items()}
        more = {name: amount for name, amount in more.items() if amount}
        if load_seconds:
            more.update(_amounts(ConnectorCounts(loads=len(load_seconds))))
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


def _amounts(counters: Any, *labels: str) -> dict[str, float]:
    """Amounts of counters, those that are 0 left out, by the keys of `counts`."""
    return {
        _NEXT.join((one.engine, *labels, *values)): amount
        for one in series_of(counters.__class__)
        if one.kind == "counter"
        for values, amount in one.amounts(counters, engine=True).items()
        if amount
    }


class ForewordPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The statistics as Prometheus metrics, `vllm:foreword_...`."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        makers = {
            "counter": self._counter_cls,
            "gauge": partial(self._gauge_cls, multiprocess_mode="mostrecent"),
            "histogram": partial(self._histogram_cls, buckets=_LOAD_BUCKETS),
        }
        self._shown = {
            name: makers[one.kind](
                name=f"vllm:foreword_{name}", documentation=one.text, labelnames=[*labelnames, *one.labels]
            )
            for name, one in METRICS.items()
        }
        self._fingerprints: dict[int, str] = {}
        for values in per_engine_labelvalues.values():
            self._start(values, _tiers_of(vllm_config))

    def _start(self, values: Sequence[object], tiers: Sequence[str]) -> None:
        """Show what is counted from the start, with 0."""
        for name, one in METRICS.items():
            given = (tiers if label == "tier" else known for label, known in one.labels.items())
            for known in product(*given) if one.kind != "gauge" else ():
                self._shown[name].labels(*values, *known)

    @statistic(lambda *_, **__: None)
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        for key, amount in transfer_stats_data["counts"].items():
            name, *labels = key.split(_NEXT)
            self._shown[name].labels(*values, *labels).inc(amount)
        for process, states in transfer_stats_data["states"].items():
            for label, state in states.items():
                for one in TierState:
                    self._shown["tier_state"].labels(*values, label, process, one.value).set(float(one == state))
        for seconds in transfer_stats_data["load_seconds"]:
            self._shown["load_seconds"].labels(*values).observe(seconds)
        for rank, queued in transfer_stats_data["queued"].items():
            self._shown["queued_blocks"].labels(*values, rank).set(queued)
        for label, seconds in transfer_stats_data.get("fixed", {}).items():
            self._shown["load_fixed_seconds"].labels(*values, label).set(seconds)
        if transfer_stats_data.get("fingerprint"):
            self._show_model(values, transfer_stats_data["fingerprint"], engine_idx)

    def _show_model(self, values: Sequence[object], fingerprint: str, engine: int) -> None:
        before = self._fingerprints.get(engine, fingerprint)
        self._fingerprints[engine] = fingerprint
        self._shown["model_info"].labels(*values, before).set(0.0)
        self._shown["model_info"].labels(*values, fingerprint).set(1.0)


def _tiers_of(vllm_config: Any) -> list[str]:
    """The labels of the tiers in the connector's settings; none where another connector wraps it."""
    given = (vllm_config.kv_transfer_config.kv_connector_extra_config or {}).get("store", ())
    try:
        return labels_of([given] if isinstance(given, str) else given)
    except StoreError:  # the engine says what is wrong with them
        return []
