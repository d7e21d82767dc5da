"""The Prometheus metrics of a front: a registry with what every front counts, and families that are read at a scrape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

Samples = Iterable[tuple[tuple[str, ...], float]]


class FrontRegistry:
    """Metrics whose names begin with `prefix`, and those of the process."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._registry = CollectorRegistry()
        self._children: dict[tuple[object, ...], Any] = {}
        ProcessCollector(registry=self._registry)
        self._responses = self.counter("http_responses", "HTTP responses to clients.", "route", "status")
        text = "Requests for generated text, by dialect and outcome."
        self._requests = self.counter("requests", text, "dialect", "outcome")
        self._ignored = self.counter("ignored_fields", "Requests with fields that had no effect here.", "route")
        text = "Requests, and tasks beside them, that ended because something raised that no code expects."
        self._unexpected = self.counter("unexpected_errors", text, "error")
        self._misses = self.counter("cache_misses", "Requests by the cause of their cache miss.", "cause")
        text = "Recomputed prompt tokens by the cause of the miss, estimated."
        self._lost = self.counter("cache_miss_tokens", text, "cause")

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(self._prefix + name, text, labels, registry=self._registry)

    def histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(self._prefix + name, text, labels, registry=self._registry, buckets=buckets)

    def response(self, route: str, status: int) -> None:
        """Count an HTTP response."""
        self.child(self._responses, route, str(status)).inc()

    def outcome(self, dialect: str, outcome: str) -> None:
        """Count a request for generated text that has ended."""
        self.child(self._requests, dialect, outcome).inc()

    def ignored(self, route: str) -> None:
        """Count a request with fields that had no effect."""
        self.child(self._ignored, route).inc()

    def unexpected(self, error: BaseException) -> None:
        """Count an exception that no code expects, by its class."""
        self.child(self._unexpected, type(error).__name__).inc()

    def miss(self, cause: str, tokens: int) -> None:
        """Count a request whose miss is explained, and the prompt tokens that were recomputed."""
        self.child(self._misses, cause).inc()
        self.child(self._lost, cause).inc(tokens)

    def child(self, metric: Any, *labels: str) -> Any:
        """Caches children, because `labels` of the library takes a lock and builds strings at each call."""
        name = (metric, *labels)
        found = self._children.get(name)
        if found is None:
            found = self._children[name] = metric.labels(*labels)
        return found

    def render(self, accept: str) -> tuple[bytes, str]:
        """The exposition format that the `Accept` header asks for, and its media type."""
        encode, media_type = choose_encoder(accept)
        return encode(self._registry), media_type

    def families(self) -> Iterator[Metric]:
        """All metrics as objects. A router's are read on the event loop's thread."""
        yield from self._registry.collect()


def gauge(name: str, text: str, labels: tuple[str, ...], samples: Samples) -> Metric:
    """A family of gauges with these values."""
    return _filled(GaugeMetricFamily(name, text, labels=labels), samples)


def counter(name: str, text: str, labels: tuple[str, ...], samples: Samples) -> Metric:
    """A family of counters with these values."""
    return _filled(CounterMetricFamily(name, text, labels=labels), samples)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, samples: Samples) -> Metric:
    for values, amount in samples:
        family.add_metric(values, amount)
    return family
