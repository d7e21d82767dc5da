"""Prometheus metrics that are read from the router's state at each scrape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from foreword.router.replicas import clock
from foreword.router.service import Router


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"foreword:router_{name}", text, labels=labels)


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"foreword:router_{name}", text, labels=labels)


class RouterStateCollector(Collector):
    """Collects on the event loop's thread."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def collect(self) -> Iterator[Metric]:
        yield from self._upstreams()
        yield from self._replicas()
        yield from self._pools()
        yield self._events()
        yield from self._audit()

    def _audit(self) -> Iterator[Metric]:
        audit = self._router.audit
        done = _counter("audits", "Hits that were chosen for an audit: equal, different, skipped or failed.", "result")
        for result, count in audit.results.items():
            done.add_metric((result,), count)
        tenants = _gauge("quarantined_tenants", "Tenants whose cached KV an audit found to be wrong.")
        tenants.add_metric((), len(audit.salts))
        yield from (done, tenants)

    def _upstreams(self) -> Iterator[Metric]:
        up = _gauge("replica_up", "1 if the replica takes requests.", "replica")
        in_flight = _gauge("in_flight", "Requests in flight.", "replica")
        opened = _counter("breaker_opened", "Times the replica's circuit was opened.", "replica")
        for url, upstream in self._router.upstreams.items():
            up.add_metric((url,), 0.0 if upstream.excluded(clock()) else 1.0)
            in_flight.add_metric((url,), upstream.in_flight)
            opened.add_metric((url,), upstream.breaker.opened)
        yield from (up, in_flight, opened)

    def _replicas(self) -> Iterator[Metric]:
        expected = _counter("expected_cached_tokens", "Cached prompt tokens expected at placement.", "replica")
        actual = _counter("actual_cached_tokens", "Cached prompt tokens reported by the replica.", "replica")
        over = _counter("overestimated_tokens", "Cached prompt tokens expected but not reported.", "replica")
        under = _counter("underestimated_tokens", "Cached prompt tokens reported but not expected.", "replica")
        waiting = _gauge("waiting", "Requests without a first token.", "replica")
        prefill = _gauge("prefill_seconds", "Learned prefill cost in seconds per token.", "replica")
        for pool in self._router.pools.values():
            for url, replica in pool.fleet.replicas.items():
                accuracy = replica.accuracy
                expected.add_metric((url,), accuracy.expected_tokens)
                actual.add_metric((url,), accuracy.actual_tokens)
                over.add_metric((url,), accuracy.overestimated_tokens)
                under.add_metric((url,), accuracy.underestimated_tokens)
                waiting.add_metric((url,), len(replica.load.waiting))
                prefill.add_metric((url,), replica.cost_model.costs.prefill)
        yield from (expected, actual, over, under, waiting, prefill)

    def _pools(self) -> Iterator[Metric]:
        queue = _gauge("queue_length", "Requests in the router's queue.", "model_name")
        work = _gauge("queued_work_seconds", "Prompt work not done yet, in seconds of one replica.", "model_name")
        blocks = _gauge("directory_blocks", "Blocks in the directory.", "model_name")
        sessions = _gauge("sessions", "Known sessions.", "model_name")
        moved = _counter("sessions_moved", "Requests not placed on their session's replica.", "model_name")
        prints = _gauge("model_fingerprints", "Different weights of replicas in service.", "model_name")
        weights = _gauge("replica_weights", "1; the label has the weights.", "replica", "model_name", "weights")
        for name, pool in self._router.pools.items():
            queue.add_metric((name,), pool.waiting)
            prints.add_metric((name,), len(pool.by_weights()))
            for url, upstream in pool.upstreams.items():
                weights.add_metric((url, name, upstream.weights or "unknown"), 1)
            work.add_metric((name,), pool.fleet.queued_seconds(clock(), pool.queue.cost))
            blocks.add_metric((name,), len(pool.fleet.directory))
            sessions.add_metric((name,), len(pool.fleet.sessions))
            moved.add_metric((name,), pool.fleet.sessions_moved)
        yield from (queue, work, blocks, sessions, moved, prints, weights)

    def _events(self) -> Metric:
        events = _counter("kv_events", "KV events by kind.", "replica", "kind")
        for url, subscriptions in self._router.subscriptions.items():
            for kind in (
                "messages",
                "stored_blocks",
                "removed_blocks",
                "skipped_blocks",
                "malformed",
                "gaps",
                "clears",
            ):
                events.add_metric((url, kind), sum(getattr(one.feed.counters, kind) for one in subscriptions))
        return events
