"""The router's own Prometheus counters and histograms. Gauges of its state are in `state_metrics`."""

from __future__ import annotations

from typing import Final

from prometheus_client.registry import Collector

from foreword.observability.front_registry import FrontRegistry

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)
_OVERHEAD: Final = (0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)


class RouterMetrics(FrontRegistry):
    """Counts events of the router and renders all metrics."""

    def __init__(self) -> None:
        super().__init__("foreword:router_")
        counter, histogram = self.counter, self.histogram
        self._decisions = counter("decisions", "Placement decisions by replica and reason.", "replica", "reason")
        self._failures = counter("failures", "Requests that failed on a replica.", "replica")
        self._deaths = counter("replica_deaths", "Deaths of replicas that were found when a request failed.", "replica")
        self._prompts = counter("usage_prompt_tokens", "Prompt tokens, where usage has the cached ones too.", "replica")
        self._cached = counter("usage_cached_tokens", "Cached prompt tokens as usage has them.", "replica")
        self._retries = counter("retries", "Requests retried on another replica before their first token.")
        self._continued = counter(
            "continuations", "Streams that broke after their first token: continued, or impossible.", "outcome"
        )
        self._migrated = counter("moved", "Streams that migrated to another server and were followed.")
        self._unwatched = counter("watch_failures", "Failed attempts to learn replicas or objectives.", "watched")
        self._rejected = counter("rejected", "Requests rejected by the router.", "tenant", "code")
        self._tokens = counter("prompt_tokens", "Prompt tokens placed, by the source of their token ids.", "source")
        self._placed = counter("placed_prompts", "Prompts placed, by the source of their token ids.", "source")
        self._first = histogram("time_to_first_token_seconds", "Time to first token (TTFT).", _SECONDS, "replica")
        self._next = histogram(
            "time_per_output_token_seconds", "Mean inter-token latency (ITL) of a streamed request.", _TOKEN_SECONDS
        )
        self._queued = histogram("queue_seconds", "Time in the router's queue.", _SECONDS)
        self._warmed = counter("warm_up_tokens", "Prompt tokens that joining replicas loaded before they got requests.")
        self._warm_up = histogram(
            "warm_up_seconds", "Time that joining replicas took to load common prefixes.", _SECONDS
        )
        self._overhead = histogram("overhead_seconds", "Time from arrival to placement, without queueing.", _OVERHEAD)

    def add_collector(self, collector: Collector) -> None:
        self._registry.register(collector)

    def decision(self, replica: str, reason: str, source: str, tokens: int, overhead: float, queued: float) -> None:
        self.child(self._decisions, replica, reason).inc()
        self.child(self._tokens, source).inc(tokens)
        self.child(self._placed, source).inc()
        self._overhead.observe(overhead)
        if queued:
            self._queued.observe(queued)

    def failure(self, replica: str) -> None:
        self.child(self._failures, replica).inc()

    def died(self, replica: str) -> None:
        self.child(self._deaths, replica).inc()

    def usage(self, replica: str, prompt: int, cached: int) -> None:
        self.child(self._prompts, replica).inc(prompt)
        self.child(self._cached, replica).inc(cached)

    def retry(self) -> None:
        self._retries.inc()

    def continued(self, outcome: str) -> None:
        self.child(self._continued, outcome).inc()

    def migrated(self) -> None:
        self._migrated.inc()

    def watch_failed(self, watched: str) -> None:
        self.child(self._unwatched, watched).inc()

    def rejected(self, tenant: str, code: str) -> None:
        self.child(self._rejected, tenant, code).inc()

    def first_token(self, replica: str, seconds: float) -> None:
        self.child(self._first, replica).observe(seconds)

    def token_time(self, seconds: float) -> None:
        self._next.observe(seconds)

    def warmed(self, tokens: int, seconds: float) -> None:
        self._warmed.inc(tokens)
        self._warm_up.observe(seconds)

    def remove_replica(self, replica: str) -> None:
        """Drop the series of a removed replica, so that replicas with ever new names do not accumulate."""
        for metric, *labels in [name for name in self._children if replica in name]:
            del self._children[(metric, *labels)]
            metric.remove(*labels)  # type: ignore[attr-defined]
