"""What Prometheus sees of the router."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from foreword.router.replicas import Upstream, clock

if TYPE_CHECKING:
    from foreword.router.service import Router

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_OVERHEAD: Final = (0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)


class RouterMetrics(Collector):
    """Counters of what happened, and gauges read when they are asked for."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._labelled: dict[tuple[object, ...], Any] = {}

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"foreword:router_{name}", text, labels, registry=self._registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"foreword:router_{name}", text, labels, registry=self._registry, buckets=buckets)

        self._responses = counter("http_responses", "Responses to clients.", "route", "status")
        self._decisions = counter("decisions", "Requests sent to a replica, by why there.", "replica", "reason")
        self._failures = counter("failures", "Requests that a replica failed.", "replica")
        self._retries = counter("retries", "Requests sent again before their first token.")
        self._continued = counter(
            "continuations", "Answers that were lost in the middle, and what became of them.", "outcome"
        )
        self._moved = counter("moved", "Answers that moved to another server, which was followed.")
        self._shed = counter("rejected", "Requests that were not sent anywhere.", "tenant", "code")
        self._tokens = counter("prompt_tokens", "Prompt tokens placed, by where the tokens came from.", "source")
        self._first = histogram("time_to_first_token_seconds", "From arrival to the first token.", _SECONDS, "replica")
        self._queued = histogram("queue_seconds", "Time spent in the router's queue.", _SECONDS)
        self._overhead = histogram("overhead_seconds", "From arrival to sending, without queueing.", _OVERHEAD)
        self._registry.register(self)

    def response(self, route: str, status: int) -> None:
        self._child(self._responses, route, str(status)).inc()

    def decision(self, replica: str, reason: str, source: str, tokens: int, overhead: float, queued: float) -> None:
        self._child(self._decisions, replica, reason).inc()
        self._child(self._tokens, source).inc(tokens)
        self._overhead.observe(overhead)
        if queued:
            self._queued.observe(queued)

    def failure(self, upstream: Upstream) -> None:
        self._child(self._failures, upstream.url).inc()

    def retry(self) -> None:
        self._retries.inc()

    def continued(self, outcome: str) -> None:
        self._child(self._continued, outcome).inc()

    def moved(self) -> None:
        self._moved.inc()

    def shed(self, tenant: str, code: str) -> None:
        self._child(self._shed, tenant, code).inc()

    def first_token(self, replica: str, seconds: float) -> None:
        self._child(self._first, replica).observe(seconds)

    def _child(self, metric: Any, *labels: str) -> Any:
        """`labels` of the library takes a lock and builds strings each time."""
        name = (metric, *labels)
        found = self._labelled.get(name)
        if found is None:
            found = self._labelled[name] = metric.labels(*labels)
        return found

    def forget(self, replica: str) -> None:
        """A replica is gone: replicas that come and go under new names must not pile up here."""
        for metric, *labels in [name for name in self._labelled if replica in name]:
            del self._labelled[(metric, *labels)]
            metric.remove(*labels)  # type: ignore[attr-defined]

    def render(self, accept: str) -> tuple[bytes, str]:
        encode, media_type = choose_encoder(accept)
        return encode(self._registry), media_type

    def families(self) -> Iterator[Metric]:
        """All metrics as objects, for readers in this process. On the event loop's thread."""
        yield from self._registry.collect()

    def collect(self) -> Iterator[Metric]:
        router = self._router
        yield from _replicas(router)
        queue = GaugeMetricFamily("foreword:router_queue_length", "Requests that wait here.", labels=("model_name",))
        blocks = GaugeMetricFamily("foreword:router_directory_blocks", "Blocks remembered.", labels=("model_name",))
        sessions = GaugeMetricFamily("foreword:router_sessions", "Sessions remembered.", labels=("model_name",))
        moved = CounterMetricFamily(
            "foreword:router_sessions_moved", "Requests that left their replica.", labels=("model_name",)
        )
        for name, pool in router.pools.items():
            queue.add_metric((name,), len(pool.queue))
            blocks.add_metric((name,), len(pool.fleet.directory))
            sessions.add_metric((name,), len(pool.fleet.sessions))
            moved.add_metric((name,), pool.fleet.sessions_moved)
        yield from (queue, blocks, sessions, moved)
        yield from _events(router)


def _replicas(router: Router) -> Iterator[Metric]:
    up = GaugeMetricFamily("foreword:router_replica_up", "1 if a replica takes requests.", labels=("replica",))
    flight = GaugeMetricFamily("foreword:router_in_flight", "Requests in flight.", labels=("replica",))
    opened = CounterMetricFamily("foreword:router_breaker_opened", "Times it was left alone.", labels=("replica",))
    for url, upstream in router.upstreams.items():
        up.add_metric((url,), 0.0 if upstream.excluded(clock()) else 1.0)
        flight.add_metric((url,), upstream.in_flight)
        opened.add_metric((url,), upstream.breaker.opened)
    yield from (up, flight, opened)
    expected = CounterMetricFamily(
        "foreword:router_expected_cached_tokens", "Prompt tokens expected to be found.", labels=("replica",)
    )
    actual = CounterMetricFamily("foreword:router_actual_cached_tokens", "Prompt tokens found.", labels=("replica",))
    over = CounterMetricFamily("foreword:router_overestimated_tokens", "Expected and not found.", labels=("replica",))
    under = CounterMetricFamily("foreword:router_underestimated_tokens", "Found and not expected.", labels=("replica",))
    waiting = GaugeMetricFamily("foreword:router_waiting", "Requests without a first token.", labels=("replica",))
    prefill = GaugeMetricFamily("foreword:router_prefill_seconds", "Learned, per token.", labels=("replica",))
    for pool in router.pools.values():
        for url, replica in pool.fleet.replicas.items():
            accuracy = replica.accuracy
            expected.add_metric((url,), accuracy.expected_tokens)
            actual.add_metric((url,), accuracy.actual_tokens)
            over.add_metric((url,), accuracy.overestimated_tokens)
            under.add_metric((url,), accuracy.underestimated_tokens)
            waiting.add_metric((url,), len(replica.load.waiting))
            prefill.add_metric((url,), replica.cost_model.costs.prefill)
    yield from (expected, actual, over, under, waiting, prefill)


def _events(router: Router) -> Iterator[Metric]:
    events = CounterMetricFamily(
        "foreword:router_kv_events", "KV events, by what they were.", labels=("replica", "kind")
    )
    for url, subscriptions in router.feeds.items():
        for name in ("messages", "stored_blocks", "removed_blocks", "skipped_blocks", "malformed", "gaps", "clears"):
            total = sum(getattr(one.feed.counters, name) for one in subscriptions)
            events.add_metric((url, name), total)
    yield events
