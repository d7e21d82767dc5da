"""What Prometheus sees: an observer of the engine, and gauges read from it when they are asked for.

Names are vLLM's where vLLM has the same quantity, so its dashboards and alerts work; the rest is under `foreword:`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from foreword.events import (
    BlocksRemoved,
    BlocksStored,
    Event,
    FirstToken,
    NextTokens,
    PrefixLookup,
    RequestFinished,
    RequestPreempted,
    StepFinished,
    TransferEnded,
)
from foreword.observability.transfer_metrics import TransferSeries, endpoint_metrics, served_metrics
from foreword.offload.manager import OffloadManager
from foreword.store.tiered import StoreTier, TierCounters

# vLLM's buckets, so that quantiles compare.
_LONG = (2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, *_LONG, 160.0, 640.0, 2560.0)
_NEXT_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, *_LONG)
_SHORT = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5)
_REQUEST = (*_SHORT, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)

_FINISH_REASONS = ("stop", "length", "abort", "error", "moved")


class _Info(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def block_size(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...


class _Status(Protocol):
    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def kv_usage(self) -> float: ...
    @property
    def free_blocks(self) -> int: ...
    @property
    def cached_blocks(self) -> int: ...
    @property
    def pinned_blocks(self) -> int: ...


class _Pins(Protocol):
    @property
    def budget_bytes(self) -> int | None: ...
    @property
    def pinned_bytes(self) -> int: ...


class Watched(Protocol):
    """What is read at the moment of a scrape, on the scraper's thread."""

    @property
    def info(self) -> _Info: ...
    @property
    def prefixes(self) -> _Pins: ...
    @property
    def offload(self) -> OffloadManager | None: ...
    def status(self) -> _Status: ...


class PrometheusObserver(Collector):
    """An `events.Observer`.

    It has a registry of its own, so several engines in one process do not mix. What happens before `watch` (the
    engine's self-check while it loads) is not counted: it is nobody's request.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._watched: Watched | None = None
        self._series: _Series | None = None
        self._responses = Counter(
            "foreword:http_responses", "HTTP responses.", ("route", "status"), registry=self._registry
        )
        ProcessCollector(registry=self._registry)
        self._registry.register(self)

    def watch(self, engine: Watched) -> None:
        """Count for `engine` from now on."""
        self._watched = engine
        self._series = _Series(self._registry, engine.info)

    def notify(self, event: Event) -> None:
        """Count an event. On the engine's thread."""
        if self._series is not None and (count := self._series.handlers.get(type(event))) is not None:
            count(event)

    def count_response(self, route: str, status: int) -> None:
        """Count an HTTP response."""
        self._responses.labels(route, str(status)).inc()

    def render(self, accept: str) -> tuple[bytes, str]:
        """All metrics, and their media type, in the format that an `Accept` header asks for."""
        encode, media_type = choose_encoder(accept)
        return encode(self._registry), media_type

    def families(self) -> Iterator[Metric]:
        """All metrics as objects, for readers in this process. From any thread."""
        yield from self._registry.collect()

    def collect(self) -> Iterator[Metric]:
        """The gauges, all from one reading of the engine's status."""
        if self._watched is None:
            return
        info, status, pins = self._watched.info, self._watched.status(), self._watched.prefixes
        gauges: list[tuple[str, str, float]] = [
            ("vllm:num_requests_running", "Sequences in the engine's steps.", status.running),
            ("vllm:num_requests_waiting", "Sequences that wait for admission.", status.waiting),
            ("vllm:kv_cache_usage_perc", "Share of the blocks that requests use (1 is all of them).", status.kv_usage),
            ("foreword:blocks", "Blocks in the pool.", info.num_blocks),
            ("foreword:blocks_free", "Blocks that no request uses, cached ones included.", status.free_blocks),
            ("foreword:blocks_cached", "Blocks that a lookup can find.", status.cached_blocks),
            ("foreword:blocks_pinned", "Blocks that named prefixes pin.", status.pinned_blocks),
            ("foreword:prefix_pinned_bytes", "Bytes of KV that named prefixes pin.", pins.pinned_bytes),
            ("foreword:prefix_budget_bytes", "Bytes of KV that named prefixes may pin.", pins.budget_bytes or 0),
        ]
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(name, text, labels=("model_name",))
            gauge.add_metric((info.name,), value)
            yield gauge
        yield _info_metric(info)
        yield _cache_config_metric(info)
        if self._watched.offload is not None:
            yield from _store_metrics(info.name, self._watched.offload)
        instance = getattr(self._watched, "instance", None)
        if instance is not None:
            yield from endpoint_metrics(info.name, instance.endpoint.status())
        served = getattr(self._watched, "served", None)
        if served is not None:
            yield from served_metrics(info.name, served.status())


# Name, text, and how a tier's counters give the value.
_TIER_COUNTERS: tuple[tuple[str, str, Callable[[TierCounters], float]], ...] = (
    ("tier_hit_blocks", "Blocks that were read from a tier, whole.", lambda c: c.hit_blocks),
    (
        "tier_missed_blocks",
        "Blocks that a tier was asked for and did not have, or not whole.",
        lambda c: c.missed_blocks,
    ),
    ("tier_read_bytes", "Bytes read from a tier.", lambda c: c.read_bytes),
    ("tier_read_seconds", "Seconds spent reading.", lambda c: c.read_seconds),
    ("tier_written_blocks", "Blocks that a tier took, or had already.", lambda c: c.written_blocks),
    ("tier_written_bytes", "Bytes of those blocks.", lambda c: c.written_bytes),
    ("tier_write_seconds", "Seconds spent writing.", lambda c: c.write_seconds),
    ("tier_lookups", "Searches for a chain.", lambda c: c.lookups),
    ("tier_lookup_seconds", "Seconds spent searching.", lambda c: c.lookup_seconds),
    ("tier_skipped", "Calls not made because the tier kept failing.", lambda c: c.skipped),
)


def _store_metrics(model: str, cache: OffloadManager) -> Iterator[Metric]:
    """What happened in each tier, and between it and the engine."""
    tiers = cache.store.tiers
    for name, text, value in _TIER_COUNTERS:
        counter = CounterMetricFamily(f"foreword:{name}", text, labels=("model_name", "tier"))
        for tier in tiers:
            counter.add_metric((model, tier.label), value(tier.counters))
        yield counter
    errors = "Calls that failed, by kind.", [(tier.label, dict(tier.counters.errors)) for tier in tiers]
    bad = "Blocks that did not pass the check, by what was wrong.", [(t.label, dict(t.counters.bad)) for t in tiers]
    for name, (text, each) in (("tier_errors", errors), ("tier_bad_blocks", bad)):
        counter = CounterMetricFamily(f"foreword:{name}", text, labels=("model_name", "tier", "kind"))
        for label, kinds in each:
            for kind, amount in kinds.items():
                counter.add_metric((model, label, kind), amount)
        yield counter
    yield from _tier_gauges(model, tiers)
    status = cache.status()
    for name, text, count in (
        ("store_saved_blocks", "Blocks that were written behind and that at least one tier keeps.", status.saved),
        ("store_failed_blocks", "Blocks that were written behind and that no tier kept.", status.failed),
        ("store_dropped_blocks", "Blocks that were not written because the queue was full.", status.dropped),
        (
            "store_dropped_promotions",
            "Blocks from a slower tier that were not written into the faster ones, because loads needed the room.",
            status.dropped_promotions,
        ),
        ("store_loaded_blocks", "Blocks that were loaded to the device.", status.loaded),
        ("store_cut_loads", "Loads that brought less than was found.", status.cut),
        ("store_stopped_loads", "Loads that were stopped because computing was sooner.", status.stopped),
        (
            "store_declined_loads",
            "Prompts that were computed because loading would have taken longer.",
            status.declined,
        ),
    ):
        counter = CounterMetricFamily(f"foreword:{name}", text, labels=("model_name",))
        counter.add_metric((model,), count)
        yield counter
    queue = GaugeMetricFamily("foreword:store_queued_blocks", "Blocks that wait to be written.", labels=("model_name",))
    queue.add_metric((model,), status.queued)
    yield queue


def _tier_gauges(model: str, tiers: Sequence[StoreTier]) -> Iterator[Metric]:
    each = [(tier, tier.store.status()) for tier in tiers]
    evictions = CounterMetricFamily(
        "foreword:tier_evictions", "Blocks that made room for others.", labels=("model_name", "tier")
    )
    for tier, status in each:
        evictions.add_metric((model, tier.label), status.evictions)
    yield evictions
    for name, text, value in (
        ("tier_bytes", "Bytes of blocks in a tier.", lambda tier, status: status.bytes),
        (
            "tier_budget_bytes",
            "Bytes that a tier never passes; 0 if it sets no bound of its own.",
            lambda t, s: s.budget,
        ),
        ("tier_blocks", "Blocks in a tier; -1 if it does not count them.", lambda tier, status: status.blocks),
        ("tier_pinned_bytes", "Bytes of blocks that named prefixes keep.", lambda tier, status: status.pinned_bytes),
        ("tier_open", "1 while a tier is left alone because it kept failing.", lambda t, s: float(t.breaker.is_open)),
    ):
        gauge = GaugeMetricFamily(f"foreword:{name}", text, labels=("model_name", "tier"))
        for tier, status in each:
            gauge.add_metric((model, tier.label), value(tier, status))
        yield gauge


def _info_metric(info: _Info) -> Metric:
    labels = {
        "model_name": info.name,
        "fingerprint": info.fingerprint,
        "dtype": info.dtype,
        "device": info.device,
        "max_model_len": str(info.max_model_len),
    }
    metric = GaugeMetricFamily("foreword:model_info", "The model that is served.", labels=tuple(labels))
    metric.add_metric(tuple(labels.values()), 1)
    return metric


def _cache_config_metric(info: _Info) -> Metric:
    labels = {"model_name": info.name, "block_size": str(info.block_size), "num_gpu_blocks": str(info.num_blocks)}
    metric = GaugeMetricFamily("vllm:cache_config_info", "The pool of KV blocks.", labels=tuple(labels))
    metric.add_metric(tuple(labels.values()), 1)
    return metric


class _Series:
    """Counters and histograms of one model, and which event moves which."""

    def __init__(self, registry: CollectorRegistry, info: _Info) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, ("model_name",), registry=registry).labels(info.name)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, ("model_name",), registry=registry, buckets=buckets).labels(info.name)

        self.model = info.name
        request_tokens = _one_two_five(info.max_model_len)
        self.queries = counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self.hits = counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self.cached = counter("vllm:prompt_tokens_cached", "Prompt tokens whose KV was reused.")
        self.by_source = Counter(
            "vllm:prompt_tokens_cached_by_source",
            "Prompt tokens whose KV was reused, by the tier that had it.",
            ("model_name", "source"),
            registry=registry,
        )
        self.from_device = self.by_source.labels(info.name, "device")
        self.prompt = counter("vllm:prompt_tokens", "Prompt tokens of ended sequences, cached ones included.")
        self.generated = counter("vllm:generation_tokens", "Tokens generated.")
        self.preemptions = counter("vllm:num_preemptions", "Running requests that lost their blocks and waited again.")
        finished = Counter(
            "vllm:request_success",
            "Sequences that ended, by reason.",
            ("model_name", "finished_reason"),
            registry=registry,
        )
        self.finished = {reason: finished.labels(info.name, reason) for reason in _FINISH_REASONS}
        self.stored = counter(
            "foreword:blocks_stored", "Blocks that were filled and became visible to lookups, copies too."
        )
        self.removed = counter("foreword:blocks_removed", "Keys that no block holds any more: evicted or withdrawn.")
        self.first = histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN)
        self.first_by_cached = Histogram(
            "foreword:time_to_first_token_by_cached_seconds",
            "From arrival to the first token, by how much of the prompt was cached: none, some of it, or half and more.",
            ("model_name", "cached"),
            registry=registry,
            buckets=_FIRST_TOKEN,
        )
        # Labels of requests between admission and first token.
        self.cached_share: dict[str, str] = {}
        for share in ("none", "some", "most"):
            self.first_by_cached.labels(info.name, share)
        self.queued = histogram("vllm:request_queue_time_seconds", "From arrival to admission.", _REQUEST)
        self.next = histogram("vllm:inter_token_latency_seconds", "Between two tokens of a sequence.", _NEXT_TOKEN)
        self.whole = histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.", _REQUEST)
        self.prompt_sizes = histogram("vllm:request_prompt_tokens", "Prompt tokens per sequence.", request_tokens)
        self.output_sizes = histogram(
            "vllm:request_generation_tokens", "Generated tokens per sequence.", request_tokens
        )
        self.step_tokens = histogram("vllm:iteration_tokens_total", "Tokens computed per step.", _STEP_TOKENS)
        self.step = histogram("foreword:step_seconds", "Duration of a step.", _STEP_SECONDS)
        self.transfers = TransferSeries(registry, info.name)
        self.handlers: dict[type[Any], Callable[[Any], None]] = {
            PrefixLookup: self._on_lookup,
            BlocksStored: self._on_stored,
            BlocksRemoved: self._on_removed,
            RequestPreempted: self._on_preempted,
            FirstToken: self._on_first_token,
            NextTokens: self._on_next_tokens,
            RequestFinished: self._on_finished,
            StepFinished: self._on_step,
            TransferEnded: self.transfers.notify,
        }

    def _on_lookup(self, event: PrefixLookup) -> None:
        self.queries.inc(event.queried_tokens)
        self.hits.inc(event.hit_tokens)
        self.cached.inc(event.hit_tokens)
        for tier, tokens in event.loaded_tokens:
            self.by_source.labels(self.model, tier).inc(tokens)
        share = "none" if not event.hit_tokens else "most" if 2 * event.hit_tokens >= event.queried_tokens else "some"
        self.cached_share[event.request_id] = share
        self.from_device.inc(event.hit_tokens - sum(tokens for _, tokens in event.loaded_tokens))

    def _on_stored(self, event: BlocksStored) -> None:
        self.stored.inc(len(event.keys))

    def _on_removed(self, event: BlocksRemoved) -> None:
        self.removed.inc(len(event.keys))

    def _on_preempted(self, event: RequestPreempted) -> None:
        self.preemptions.inc()

    def _on_first_token(self, event: FirstToken) -> None:
        self.first.observe(event.seconds)
        self.queued.observe(event.queued)
        if (share := self.cached_share.get(event.request_id)) is not None:
            self.first_by_cached.labels(self.model, share).observe(event.seconds)
        self.generated.inc()

    def _on_next_tokens(self, event: NextTokens) -> None:
        self.generated.inc(len(event.seconds))
        for seconds in event.seconds:
            self.next.observe(seconds)

    def _on_finished(self, event: RequestFinished) -> None:
        self.finished[event.reason].inc()
        if event.reason == "moved":
            return  # whoever finishes it counts the rest
        self.cached_share.pop(event.request_id, None)
        self.prompt.inc(event.prompt_tokens)
        self.prompt_sizes.observe(event.prompt_tokens)
        self.output_sizes.observe(event.output_tokens)
        self.whole.observe(event.seconds)

    def _on_step(self, event: StepFinished) -> None:
        self.step.observe(event.seconds)
        self.step_tokens.observe(event.prefill_tokens + event.decode_tokens)


def _one_two_five(largest: int) -> tuple[float, ...]:
    """1, 2, 5, 10, ... up to `largest`, as vLLM has it for tokens per request."""
    steps = (step * 10**power for power in range(10) for step in (1, 2, 5))
    return tuple(step for step in steps if step <= largest)
