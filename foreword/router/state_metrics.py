"""Prometheus metrics that are read from the router's state at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any, Final

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from foreword.observability.front_registry import counter, gauge
from foreword.router.replicas import clock
from foreword.router.router import Router
from foreword.routing.event_feed import FeedCounters

# Name, description, and how the state of a replica or of a pool gives the value.
Table = Sequence[tuple[str, str, Callable[[Any], float]]]

_PREFIX: Final = "foreword:router_"
_UPSTREAM_GAUGES: Final[Table] = (
    ("replica_up", "1 if the replica takes requests.", lambda one: 0.0 if one.excluded(clock()) else 1.0),
    ("in_flight", "Requests in flight.", lambda one: one.in_flight),
)
_UPSTREAM_COUNTERS: Final[Table] = (
    ("breaker_opened", "Times the replica's circuit was opened.", lambda one: one.breaker.opened),
)
_REPLICA_GAUGES: Final[Table] = (
    ("waiting", "Requests without a first token.", lambda one: len(one.load.waiting)),
    ("prefill_seconds", "Learned prefill cost in seconds per token.", lambda one: one.cost_model.costs.prefill),
)
_ACCURACY_COUNTERS: Final[Table] = (
    ("expected_cached_tokens", "Cached prompt tokens expected at placement.", lambda found: found.expected_tokens),
    ("actual_cached_tokens", "Cached prompt tokens reported by the replica.", lambda found: found.actual_tokens),
    (
        "overestimated_tokens",
        "Cached prompt tokens expected but not reported.",
        lambda found: found.overestimated_tokens,
    ),
    (
        "underestimated_tokens",
        "Cached prompt tokens reported but not expected.",
        lambda found: found.underestimated_tokens,
    ),
)
_POOL_GAUGES: Final[Table] = (
    ("queue_length", "Requests in the router's queue, and broken streams that wait.", lambda pool: pool.waiting),
    ("queued_work_seconds", "Prompt work not done yet, in seconds of one replica.", lambda pool: pool.queued_seconds),
    ("directory_blocks", "Blocks in the directory.", lambda pool: len(pool.fleet.directory)),
    ("sessions", "Known sessions.", lambda pool: len(pool.fleet.sessions)),
    ("panic", "1 while replicas are used although requests failed at all of them.", lambda pool: float(pool.panic)),
    ("model_fingerprints", "Different weights of replicas in service.", lambda pool: len(pool.by_weights())),
)
_POOL_COUNTERS: Final[Table] = (
    ("sessions_moved", "Requests not placed on their session's replica.", lambda pool: pool.fleet.sessions_moved),
)


def _of(kind: Callable[..., Metric], table: Table, label: str, ones: Iterable[tuple[str, Any]]) -> Iterator[Metric]:
    """The metrics of a table for replicas or pools, given by name."""
    for name, text, value in table:
        yield kind(_PREFIX + name, text, (label,), [((key,), value(one)) for key, one in ones])


class RouterStateCollector(Collector):
    """Collects on the event loop's thread."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def collect(self) -> Iterator[Metric]:
        upstreams, pools = self._router.upstreams.items(), self._router.pools.items()
        replicas = [pair for _, pool in pools for pair in pool.fleet.replicas.items()]
        yield from _of(gauge, _UPSTREAM_GAUGES, "replica", upstreams)
        yield from _of(counter, _UPSTREAM_COUNTERS, "replica", upstreams)
        yield from _of(gauge, _REPLICA_GAUGES, "replica", replicas)
        yield from _of(counter, _ACCURACY_COUNTERS, "replica", [(url, one.accuracy) for url, one in replicas])
        yield from _of(gauge, _POOL_GAUGES, "model_name", pools)
        yield from _of(counter, _POOL_COUNTERS, "model_name", pools)
        served = [(url, name, one.weights or "unknown") for name, pool in pools for url, one in pool.upstreams.items()]
        labels = ("replica", "model_name", "weights")
        yield gauge(_PREFIX + "replica_weights", "1; the label has the weights.", labels, [(one, 1) for one in served])
        text = "Requests that were refused because replicas died at what they ask."
        yield counter(_PREFIX + "suspicious_requests", text, (), [((), self._router.suspects.refused)])
        yield self._events()
        yield from self._audit()

    def _audit(self) -> Iterator[Metric]:
        audit = self._router.audit
        done = [((result,), count) for result, count in audit.results.items()]
        text = "Hits that were chosen for an audit: equal, different, skipped or failed."
        yield counter(_PREFIX + "audits", text, ("result",), done)
        text = "Tenants whose cached KV an audit found to be wrong."
        yield gauge(_PREFIX + "quarantined_tenants", text, (), [((), audit.quarantined)])

    def _events(self) -> Metric:
        counts = [
            ((url, kind.name), sum(getattr(one.feed.counters, kind.name) for one in subscriptions))
            for url, subscriptions in self._router.subscriptions.items()
            for kind in fields(FeedCounters)
        ]
        return counter(_PREFIX + "kv_events", "KV events received, by kind.", ("replica", "kind"), counts)
