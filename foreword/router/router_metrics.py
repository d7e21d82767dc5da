"""The router's own Prometheus counters and histograms. Gauges of its state are in `state_metrics`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)
_OVERHEAD: Final = (0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)


class RouterMetrics:
    """Counts events of the router and renders all metrics."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._children: dict[tuple[object, ...], Any] = {}

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"foreword:router_{name}", text, labels, registry=self._registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"foreword:router_{name}", text, labels, registry=self._registry, buckets=buckets)

        self._responses = counter("http_responses", "HTTP responses to clients.", "route", "status")
        self._requests = counter(
            "requests", "Requests for generated text, by dialect and outcome.", "dialect", "outcome"
        )
        self._decisions = counter("decisions", "Placement decisions by replica and reason.", "replica", "reason")
        self._failures = counter("failures", "Requests that failed on a replica.", "replica")
        self._prompts = counter("usage_prompt_tokens", "Prompt tokens, where usage has the cached ones too.", "replica")
        self._cached = counter("usage_cached_tokens", "Cached prompt tokens as usage has them.", "replica")
        self._retries = counter("retries", "Requests retried on another replica before their first token.")
        self._continued = counter(
            "continuations", "Streams that broke after their first token: continued, or impossible.", "outcome"
        )
        self._migrated = counter("moved", "Streams that migrated to another server and were followed.")
        self._rejected = counter("rejected", "Requests rejected by the router.", "tenant", "code")
        self._ignored = counter("ignored_fields", "Requests with fields that had no effect at the router.", "route")
        self._tokens = counter("prompt_tokens", "Prompt tokens placed, by the source of their token ids.", "source")
        self._misses = counter("cache_misses", "Requests by the cause of their cache miss.", "cause")
        self._lost = counter("cache_miss_tokens", "Recomputed prompt tokens by the cause of the miss.", "cause")
        self._first = histogram("time_to_first_token_seconds", "Time to first token (TTFT).", _SECONDS, "replica")
        self._next = histogram(
            "time_per_output_token_seconds", "Mean inter-token latency (ITL) of a streamed request.", _TOKEN_SECONDS
        )
        self._queued = histogram("queue_seconds", "Time in the router's queue.", _SECONDS)
        self._warmed = counter("warm_up_tokens", "Prompt tokens that joining replicas loaded before they got requests.")
        self._warm_up = histogram(
            "warm_up_seconds", "Time that joining replicas took to load common prefixes.", _SECONDS
        )
        self._overhead = histogram("overhead_seconds", "From arrival to placement, without queueing.", _OVERHEAD)

    def add_collector(self, collector: Collector) -> None:
        self._registry.register(collector)

    def response(self, route: str, status: int) -> None:
        self._child(self._responses, route, str(status)).inc()

    def outcome(self, dialect: str, outcome: str) -> None:
        self._child(self._requests, dialect, outcome).inc()

    def decision(self, replica: str, reason: str, source: str, tokens: int, overhead: float, queued: float) -> None:
        self._child(self._decisions, replica, reason).inc()
        self._child(self._tokens, source).inc(tokens)
        self._overhead.observe(overhead)
        if queued:
            self._queued.observe(queued)

    def failure(self, replica: str) -> None:
        self._child(self._failures, replica).inc()

    def usage(self, replica: str, prompt: int, cached: int) -> None:
        self._child(self._prompts, replica).inc(prompt)
        self._child(self._cached, replica).inc(cached)

    def retry(self) -> None:
        self._retries.inc()

    def continued(self, outcome: str) -> None:
        self._child(self._continued, outcome).inc()

    def migrated(self) -> None:
        self._migrated.inc()

    def rejected(self, tenant: str, code: str) -> None:
        self._child(self._rejected, tenant, code).inc()

    def ignored(self, route: str) -> None:
        self._child(self._ignored, route).inc()

    def miss(self, cause: str, tokens: int) -> None:
        self._child(self._misses, cause).inc()
        self._child(self._lost, cause).inc(tokens)

    def first_token(self, replica: str, seconds: float) -> None:
        self._child(self._first, replica).observe(seconds)

    def token_time(self, seconds: float) -> None:
        self._next.observe(seconds)

    def warmed(self, tokens: int, seconds: float) -> None:
        self._warmed.inc(tokens)
        self._warm_up.observe(seconds)

    def _child(self, metric: Any, *labels: str) -> Any:
        """Caches children, because `labels` of the library takes a lock and builds strings at each call."""
        name = (metric, *labels)
        found = self._children.get(name)
        if found is None:
            found = self._children[name] = metric.labels(*labels)
        return found

    def remove_replica(self, replica: str) -> None:
        """Drop the series of a removed replica, so that replicas with ever new names do not accumulate."""
        for metric, *labels in [name for name in self._children if replica in name]:
            del self._children[(metric, *labels)]
            metric.remove(*labels)  # type: ignore[attr-defined]

    def render(self, accept: str) -> tuple[bytes, str]:
        """The exposition format that the `Accept` header asks for, and its media type."""
        encode, media_type = choose_encoder(accept)
        return encode(self._registry), media_type

    def families(self) -> Iterator[Metric]:
        """All metrics as objects. Call it on the event loop's thread."""
        yield from self._registry.collect()
