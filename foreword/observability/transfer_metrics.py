"""What Prometheus sees of transfers between instances: counters moved by events, and gauges read from the endpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from foreword.events import TransferEnded

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_PAUSES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_WHOSE = ("model_name", "kind", "side")


class Traffic(Protocol):
    """What went over one kind of link."""

    bytes_sent: int
    bytes_received: int
    seconds: float


class Status(Protocol):
    """What an endpoint says of itself (`transfer.endpoint.EndpointStatus`)."""

    @property
    def connections(self) -> Mapping[str, int]: ...
    @property
    def transfers(self) -> Mapping[str, int]: ...
    @property
    def queued_bytes(self) -> int: ...
    @property
    def traffic(self) -> Mapping[str, Traffic]: ...


class Served(Protocol):
    """Blocks that other instances asked for (`engine.served_blocks.ServedStatus`)."""

    @property
    def device(self) -> int: ...
    @property
    def memory(self) -> int: ...
    @property
    def missing(self) -> int: ...


class TransferSeries:
    """Counters of ended transfers, by `kind` (`prefill`, `move`), `side` (`source`, `destination`) and outcome."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        def counter(name: str, text: str, labels: tuple[str, ...] = _WHOSE) -> Counter:
            return Counter(f"foreword:transfer_{name}", text, labels, registry=registry)

        self._model = model
        self._ended = counter("transfers", "Transfers that ended, by outcome.", (*_WHOSE, "outcome"))
        self._bytes = counter("bytes", "Bytes of KV that travelled.")
        self._parts = counter("parts", "Parts in which they travelled.")
        self._hidden = counter("hidden_bytes", "Of the bytes sent, those before the prompt was computed.")
        self._seconds = Histogram(
            "foreword:transfer_seconds",
            "From a transfer's beginning to its end.",
            _WHOSE,
            registry=registry,
            buckets=_SECONDS,
        )
        self._pause = Histogram(
            "foreword:transfer_pause_seconds",
            "How long a request that moved was not decoded.",
            ("model_name",),
            registry=registry,
            buckets=_PAUSES,
        )

    def notify(self, event: TransferEnded) -> None:
        whose = (self._model, event.kind, event.side)
        self._ended.labels(*whose, event.outcome).inc()
        self._bytes.labels(*whose).inc(event.bytes)
        self._parts.labels(*whose).inc(event.parts)
        self._seconds.labels(*whose).observe(event.seconds)
        if event.side == "source":
            self._hidden.labels(*whose).inc(event.hidden_bytes)
        if event.pause:
            self._pause.labels(self._model).observe(event.pause)


def served_metrics(model: str, status: Served) -> Iterator[Metric]:
    """What others read of this instance (`peer://` in their stores)."""
    served = CounterMetricFamily(
        "foreword:served_blocks", "Blocks given to other instances, by where they lay.", labels=("model_name", "source")
    )
    served.add_metric((model, "device"), status.device)
    served.add_metric((model, "memory"), status.memory)
    yield served
    missing = CounterMetricFamily(
        "foreword:served_missing_blocks", "Blocks that others asked for in vain.", labels=("model_name",)
    )
    missing.add_metric((model,), status.missing)
    yield missing


def endpoint_metrics(model: str, status: Status) -> Iterator[Metric]:
    """The endpoint at this moment, and what went over its links since the start."""
    named: tuple[tuple[str, str, str, Mapping[str, int]], ...] = (
        ("connections", "Connections to other instances.", "link", status.connections),
        ("under_way", "Transfers under way, by role and state.", "state", status.transfers),
    )
    for name, text, label, values in named:
        gauge = GaugeMetricFamily(f"foreword:transfer_{name}", text, labels=("model_name", label))
        for value, amount in values.items():
            gauge.add_metric((model, value), amount)
        yield gauge
    queued = GaugeMetricFamily("foreword:transfer_queued_bytes", "KV that waits to be sent.", labels=("model_name",))
    queued.add_metric((model,), status.queued_bytes)
    yield queued
    moved = CounterMetricFamily(
        "foreword:transfer_link_bytes", "Payloads over a kind of link.", labels=("model_name", "link", "direction")
    )
    for link, traffic in status.traffic.items():
        moved.add_metric((model, link, "sent"), traffic.bytes_sent)
        moved.add_metric((model, link, "received"), traffic.bytes_received)
    yield moved
    spent = CounterMetricFamily(
        "foreword:transfer_link_seconds", "Seconds spent sending payloads.", labels=("model_name", "link")
    )
    for link, traffic in status.traffic.items():
        spent.add_metric((model, link), traffic.seconds)
    yield spent
