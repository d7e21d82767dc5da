"""Statistics of the vLLM connector, for vLLM's log line and its /metrics.

After a step in which something changed a worker reports what was added since its last report. vLLM adds up the reports of all
ranks; each rank counts its own part of a block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from foreword.integrations.vllm.leases import KVLeases
from foreword.offload.manager import OffloadManager, OffloadStatus
from foreword.store.tier_counters import TierCounters

# Name, help, and how the value is read from a tier's counters.
_PER_TIER: Final[tuple[tuple[str, str, Callable[[TierCounters], float]], ...]] = (
    ("loaded_blocks", "Blocks read from a tier and verified.", lambda c: c.hit_blocks),
    ("loaded_bytes", "Bytes read from a tier.", lambda c: c.read_bytes),
    ("load_busy_seconds", "Seconds spent reading from a tier, over all threads.", lambda c: c.read_seconds),
    ("missed_blocks", "Blocks that were requested from a tier and not read.", lambda c: c.missed_blocks),
    ("corrupt_blocks", "Blocks that failed verification; removed and not used.", lambda c: sum(c.bad.values())),
    ("saved_blocks", "Blocks written to a tier, including those it had already.", lambda c: c.written_blocks),
    ("saved_bytes", "Bytes written to a tier.", lambda c: c.written_bytes),
    ("save_busy_seconds", "Seconds spent writing to a tier.", lambda c: c.write_seconds),
    ("lookups", "Lookups in a tier.", lambda c: c.lookups),
    ("lookup_seconds", "Seconds spent on lookups in a tier.", lambda c: c.lookup_seconds),
    ("errors", "Calls to a tier that failed.", lambda c: sum(c.errors.values())),
    ("skipped", "Calls to a tier that its open circuit breaker skipped.", lambda c: c.skipped),
)
_TOTALS: Final = {
    "dropped_blocks": "Blocks that were not written because the write queue was full.",
    "loads": "Loads of a request's prefix that have ended.",
    "loads_cut": "Loads that brought fewer blocks than were found; vLLM computed the rest.",
    "loads_stopped": "Loads that were stopped because computing is faster.",
    "loads_declined": "Prefixes found in the stores that were computed because that is faster than loading.",
    "leases": "Prompts whose blocks were kept for a decode instance.",
    "leases_unread": "Prompts whose blocks were kept and that no instance read.",
    "lent_blocks": "Blocks that other instances read from leases.",
    "shared_blocks": "Blocks that other instances read from memory tiers.",
}
_LOAD_BUCKETS: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


@dataclasses.dataclass
class ForewordStats(KVConnectorStats):  # type: ignore[misc]
    """What was added since the last report.

    `data`: `tiers` (label -> name -> amount), `counts` (name -> amount), `load_seconds` (one per load that has ended), `queued`
    (rank -> length of the write queue in blocks).
    """

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data: dict[str, Any] = {"tiers": {}, "counts": {}, "load_seconds": [], "queued": {}}

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add up amounts; the other's queue lengths are newer."""
        for label, amounts in other.data["tiers"].items():
            _add(self.data["tiers"].setdefault(label, {}), amounts)
        _add(self.data["counts"], other.data["counts"])
        self.data["load_seconds"] = [*self.data["load_seconds"], *other.data["load_seconds"]]
        self.data["queued"].update(other.data["queued"])
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log line: traffic of each tier, and failures."""
        found: dict[str, int | float] = {}
        for label, amounts in self.data["tiers"].items():
            for verb in ("loaded", "saved"):
                found[f"{label} {verb} blocks"] = amounts.get(f"{verb}_blocks", 0)
                found[f"{label} {verb} MB"] = round(amounts.get(f"{verb}_bytes", 0) / 1e6, 1)
            for name in ("corrupt_blocks", "errors", "skipped"):
                if amounts.get(name):
                    found[f"{label} {name}"] = amounts[name]
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
    """Reads the counters of one rank, and reports what was added since the last read."""

    def __init__(self, offload: OffloadManager, rank: int, leases: KVLeases | None = None) -> None:
        self._offload = offload
        self._leases = leases
        self._rank = str(rank)
        self._tiers: dict[str, dict[str, float]] = {}
        self._counts: dict[str, float] = {}
        self._queued = 0

    @property
    def behind(self) -> bool:
        """Whether blocks are in the write queue, or were at the last read."""
        return bool(self._queued or self._offload.status().queued)

    def read(self, load_seconds: list[float]) -> ForewordStats | None:
        """`load_seconds`: of the loads that have ended since the last read. None if nothing has changed."""
        status = self._offload.status()
        tiers = {
            tier.label: {name: read(tier.counters) for name, _, read in _PER_TIER} for tier in self._offload.store.tiers
        }
        counts = {**_of_cache(status), **_of_leases(self._leases)}
        added = {label: _added(amounts, self._tiers.get(label, {})) for label, amounts in tiers.items()}
        more = _added(counts, self._counts)
        if load_seconds:
            more["loads"] = len(load_seconds)
        data = {
            "tiers": {label: amounts for label, amounts in added.items() if amounts},
            "counts": more,
            "load_seconds": load_seconds,
        }
        if not any(data.values()) and status.queued == self._queued:
            return None
        self._tiers, self._counts, self._queued = tiers, counts, status.queued
        return ForewordStats({**data, "queued": {self._rank: status.queued}})


def _added(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {name: amount - before.get(name, 0) for name, amount in now.items() if amount != before.get(name, 0)}


def _of_cache(status: OffloadStatus) -> dict[str, float]:
    return {
        "dropped_blocks": status.dropped,
        "loads_cut": status.cut,
        "loads_stopped": status.stopped,
        "loads_declined": status.declined,
    }


def _of_leases(leases: KVLeases | None) -> dict[str, float]:
    if leases is None:
        return {}
    given = leases.status()
    return {**leases.counts, "lent_blocks": given.device, "shared_blocks": given.memory}


class ForewordPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The statistics as Prometheus metrics, `vllm:foreword_...`."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._tiers = {
            name: self._counter_cls(name=f"vllm:foreword_{name}", documentation=text, labelnames=[*labelnames, "tier"])
            for name, text, _ in _PER_TIER
        }
        self._counts = {
            name: self._counter_cls(name=f"vllm:foreword_{name}", documentation=text, labelnames=labelnames)
            for name, text in _TOTALS.items()
        }
        self._seconds = self._histogram_cls(
            name="vllm:foreword_load_seconds",
            documentation="Seconds from the step that starts a request's load to the step that sees its end.",
            buckets=_LOAD_BUCKETS,
            labelnames=labelnames,
        )
        self._queued = self._gauge_cls(
            name="vllm:foreword_queued_blocks",
            documentation="Blocks in the write queue, by rank.",
            multiprocess_mode="mostrecent",
            labelnames=[*labelnames, "rank"],
        )
        for values in per_engine_labelvalues.values():
            for metric in (*self._counts.values(), self._seconds):
                metric.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        for label, amounts in transfer_stats_data["tiers"].items():
            for name, amount in amounts.items():
                self._tiers[name].labels(*values, label).inc(amount)
        for name, amount in transfer_stats_data["counts"].items():
            self._counts[name].labels(*values).inc(amount)
        for seconds in transfer_stats_data["load_seconds"]:
            self._seconds.labels(*values).observe(seconds)
        for rank, queued in transfer_stats_data["queued"].items():
            self._queued.labels(*values, rank).set(queued)
