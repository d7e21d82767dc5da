"""Prometheus metrics of the engine: counters moved by events, and gauges read at a scrape (docs/reference/metrics.md).

Names are vLLM's where vLLM has the same quantity, so its dashboards and alerts work; the others begin with `foreword:`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from foreword.events import (
    BlocksRemoved,
    BlocksStored,
    Event,
    FirstToken,
    NextTokens,
    PrefixLookup,
    RequestBroken,
    RequestFinished,
    RequestPreempted,
    StepFinished,
    TransferEnded,
)
from foreword.observability.front_registry import FrontRegistry, counter, gauge
from foreword.store.series import Series, series_of
from foreword.store.tier_counters import TierCounters, TierState
from foreword.usage import MissExplained

if TYPE_CHECKING:
    from foreword.engine.hit_audit import HitAudit
    from foreword.engine.request import ModelInfo
    from foreword.entrypoints.async_engine import AsyncEngine
    from foreword.offload.manager import OffloadManager
    from foreword.store.base import StoreStatus
    from foreword.store.tier import StoreTier
    from foreword.transfer.frame_server import ServedStatus
    from foreword.transfer.transfer_endpoint import EndpointStatus

# vLLM's buckets, so that quantiles compare; those of tokens begin earlier, for small models.
_LONG = (2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, *_LONG, 160.0, 640.0, 2560.0)
_NEXT_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, *_LONG)
_SHORT = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5)
_REQUEST = (*_SHORT, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)

_TRANSFER_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_PAUSE_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

_FINISH_REASONS = ("stop", "length", "abort", "error", "moved")


class PrometheusObserver(FrontRegistry, Collector):
    """An `events.Observer` that counts for one engine, in its own registry.

    Events before `watch` (the engine's self-check while it loads) are not counted.
    """

    def __init__(self) -> None:
        super().__init__("foreword:")
        self._engine: AsyncEngine | None = None
        self._series: _EventSeries | None = None
        self._registry.register(self)

    def watch(self, engine: AsyncEngine) -> None:
        """Count for `engine` from now on."""
        self._engine = engine
        self._series = _EventSeries(self._registry, engine.info)

    def notify(self, event: Event) -> None:
        """Count an event. Called on the engine's thread."""
        if type(event) is MissExplained:
            self.miss(event.cause, event.tokens_lost)
        if self._series is not None and (count := self._series.handlers.get(type(event))) is not None:
            count(event)

    def rejected(self, tenant: str, code: str) -> None:
        """A server counts by outcome."""

    def collect(self) -> Iterator[Metric]:
        """Metrics that are read at a scrape, on the scraper's thread."""
        engine = self._engine
        if engine is None:
            return
        model = engine.info.name
        yield from _engine_gauges(engine)
        yield _info("foreword:model_info", "The model that is served.", engine.info, _MODEL_LABELS)
        yield _info("vllm:cache_config_info", "The pool of KV blocks.", engine.info, _CACHE_LABELS)
        if engine.offload is not None:
            yield from _offload_metrics(model, engine.offload)
            yield from _tier_metrics(model, engine.offload.store.tiers)
        if engine.audit is not None:
            yield from _audit_metrics(model, engine.audit)
        yield gauge(
            "foreword:quarantined_chains",
            "Chains that are not reused, because an audit found their KV to be wrong.",
            ("model_name",),
            [((model,), len(engine.quarantine.chains))],
        )
        if engine.instance is not None:
            yield from _endpoint_metrics(model, engine.instance.endpoint.status())
        if engine.served is not None:
            yield from _served_metrics(model, engine.served.status())


_MODEL_LABELS: dict[str, Callable[[ModelInfo], object]] = {
    "model_name": lambda info: info.name,
    "fingerprint": lambda info: info.fingerprint,
    "dtype": lambda info: info.dtype,
    "device": lambda info: info.device,
    "max_model_len": lambda info: info.max_model_len,
}
_CACHE_LABELS: dict[str, Callable[[ModelInfo], object]] = {
    "model_name": lambda info: info.name,
    "block_size": lambda info: info.block_size,
    "num_gpu_blocks": lambda info: info.num_blocks,
}


def _info(name: str, text: str, info: ModelInfo, labels: dict[str, Callable[[ModelInfo], object]]) -> Metric:
    """A gauge of value 1 whose labels carry the information."""
    return gauge(name, text, tuple(labels), [(tuple(str(label(info)) for label in labels.values()), 1)])


def _engine_gauges(engine: AsyncEngine) -> Iterator[Metric]:
    info, status, prefixes = engine.info, engine.status(), engine.prefixes
    retained, pinned = (n * info.kv_bytes_per_block for n in (status.retained_blocks, status.pinned_blocks))
    for name, text, value in (
        ("vllm:num_requests_running", "Sequences in the running batch.", status.running),
        ("vllm:num_requests_waiting", "Sequences that wait for admission.", status.waiting),
        ("vllm:kv_cache_usage_perc", "Share of the blocks that requests use; 1 is all of them.", status.kv_usage),
        ("foreword:blocks", "Blocks in the pool.", info.num_blocks),
        ("foreword:blocks_free", "Blocks that no request uses, cached blocks included.", status.free_blocks),
        ("foreword:blocks_cached", "Blocks that a prefix lookup can find.", status.cached_blocks),
        ("foreword:blocks_pinned", "Blocks that named prefixes pin.", status.pinned_blocks),
        ("foreword:prefix_pinned_bytes", "Bytes of KV that named prefixes pin.", pinned),
        ("foreword:prefix_retained_bytes", "Bytes of KV on the device that cache control keeps.", retained),
        (
            "foreword:prefix_budget_bytes",
            "Limit of all KV that is kept.",
            prefixes.budget_bytes or 0,
        ),
    ):
        yield gauge(name, text, ("model_name",), [((info.name,), value)])


def _counted(series: Series, labels: tuple[str, ...], counters: Iterable[tuple[tuple[str, ...], object]]) -> Metric:
    """The metric of a series, from the values of `labels` and the counters of each that has it."""
    samples = [
        ((*values, *more), amount)
        for values, one in counters
        for more, amount in series.amounts(one, engine=False).items()
    ]
    family = counter if series.kind == "counter" else gauge
    return family(f"foreword:{series.server}", series.text, (*labels, *series.labels(engine=False)), samples)


def _offload_metrics(model: str, offload: OffloadManager) -> Iterator[Metric]:
    """Metrics of transfers between the engine and its stores."""
    status = offload.status()
    for counters in (status, status.lookups):
        for series in series_of(type(counters)):
            yield _counted(series, ("model_name",), [((model,), counters)])


_TIER_GAUGES: tuple[tuple[str, str, Callable[[StoreTier, StoreStatus], float]], ...] = (
    ("tier_bytes", "Bytes of the blocks in a tier.", lambda tier, status: status.bytes),
    ("tier_budget_bytes", "Size limit of a tier; 0 if it sets none.", lambda tier, status: status.budget),
    ("tier_blocks", "Blocks in a tier; -1 if it does not count them.", lambda tier, status: status.blocks),
    ("tier_pinned_bytes", "Bytes of blocks that named prefixes pin.", lambda tier, status: status.pinned_bytes),
    ("tier_suspended", "1 while a tier is not read because of an audit.", lambda tier, status: float(tier.suspended)),
    ("tier_open", "1 while a tier's circuit breaker is open.", lambda tier, status: float(tier.breaker.is_open)),
)


def _tier_metrics(model: str, tiers: Iterable[StoreTier]) -> Iterator[Metric]:
    """Metrics of each tier."""
    each = [(tier, tier.status()) for tier in tiers]
    labels = ("model_name", "tier")
    counters = [((model, tier.label), tier.counters) for tier, _ in each]
    for series in series_of(TierCounters):
        yield _counted(series, labels, counters)
    states = [((model, tier.label, one.value), float(tier.state is one)) for tier, _ in each for one in TierState]
    text = "1 for the state that a tier has, 0 for the others."
    yield gauge("foreword:tier_state", text, (*labels, "state"), states)
    evictions = [((model, tier.label), status.evictions) for tier, status in each]
    yield counter("foreword:tier_evictions", "Blocks that a tier evicted.", labels, evictions)
    for name, text, value in _TIER_GAUGES:
        samples = [((model, tier.label), value(tier, status)) for tier, status in each]
        yield gauge(f"foreword:{name}", text, labels, samples)


def _audit_metrics(model: str, audit: HitAudit) -> Iterator[Metric]:
    """Metrics of the live audit. Its coverage is audited hits by hits."""
    counts = audit.counts
    for name, text, by_source in (
        ("hits", "Sequences with cached blocks, by where these came from.", counts.hits),
        ("audited_hits", "Hits whose KV was recomputed and compared.", counts.audited),
        ("different_hits", "Audited hits whose KV was wrong.", counts.different),
    ):
        samples = [((model, source), amount) for source, amount in dict(by_source).items()]
        yield counter(f"foreword:audit_{name}", text, ("model_name", "source"), samples)
    for name, text, amount in (
        ("skipped_hits", "Hits chosen for an audit that were evicted or never had their turn.", counts.skipped),
        ("blocks", "Blocks compared.", counts.blocks),
        ("exact_blocks", "Compared blocks that were equal bit for bit.", counts.exact),
        ("seconds", "Seconds spent in audits.", counts.seconds),
    ):
        yield counter(f"foreword:audit_{name}", text, ("model_name",), [((model,), amount)])
    text = "The largest distance of a compared block that was right; the tolerance is its limit."
    yield gauge("foreword:audit_largest_distance", text, ("model_name",), [((model,), counts.largest)])


def _endpoint_metrics(model: str, status: EndpointStatus) -> Iterator[Metric]:
    """Connections and transfers now, and what was sent over each kind of link."""
    for name, text, label, amounts in (
        ("connections", "Connections to other instances.", "link", status.connections),
        ("under_way", "Transfers in flight, by role and state.", "state", status.transfers),
    ):
        samples = [((model, value), amount) for value, amount in amounts.items()]
        yield gauge(f"foreword:transfer_{name}", text, ("model_name", label), samples)
    queued = [((model,), status.queued_bytes)]
    yield gauge("foreword:transfer_queued_bytes", "Bytes of KV in the send queue.", ("model_name",), queued)
    sizes = [
        ((model, link, direction), amount)
        for link, traffic in status.traffic.items()
        for direction, amount in (("sent", traffic.bytes_sent), ("received", traffic.bytes_received))
    ]
    labels = ("model_name", "link", "direction")
    yield counter("foreword:transfer_link_bytes", "Bytes of KV over a kind of link.", labels, sizes)
    seconds = [((model, link), traffic.seconds) for link, traffic in status.traffic.items()]
    yield counter("foreword:transfer_link_seconds", "Seconds spent sending KV.", ("model_name", "link"), seconds)


def _served_metrics(model: str, status: ServedStatus) -> Iterator[Metric]:
    """Metrics of blocks that other instances read of this one (`peer://` in their stores)."""
    served = [((model, "device"), status.device), ((model, "memory"), status.memory)]
    text = "Blocks read by other instances, by the tier that had them."
    yield counter("foreword:served_blocks", text, ("model_name", "source"), served)
    missing = [((model,), status.missing)]
    text = "Blocks that other instances requested and that were not here."
    yield counter("foreword:served_missing_blocks", text, ("model_name",), missing)


class _EventSeries:
    """Counters and histograms of one model, and which event moves which."""

    def __init__(self, registry: CollectorRegistry, info: ModelInfo) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, ("model_name", *labels), registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(name, text, ("model_name", *labels), registry=registry, buckets=buckets)

        def one(name: str, text: str) -> Counter:
            return counter(name, text).labels(info.name)

        def times(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return histogram(name, text, buckets).labels(info.name)

        self.model = info.name
        request_tokens = _one_two_five(info.max_model_len)
        self.queries = one("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self.hits = one("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self.cached = one("vllm:prompt_tokens_cached", "Prompt tokens whose KV was cached.")
        self.by_source = counter(
            "vllm:prompt_tokens_cached_by_source", "Cached prompt tokens, by the tier that had them.", "source"
        )
        self.from_device = self.by_source.labels(info.name, "device")
        self.prompt = one("vllm:prompt_tokens", "Prompt tokens of finished sequences, cached tokens included.")
        self.generated = one("vllm:generation_tokens", "Generated tokens.")
        self.preemptions = one("vllm:num_preemptions", "Preemptions: running sequences that lost their blocks.")
        finished = counter("vllm:request_success", "Finished sequences, by reason.", "finished_reason")
        self.finished = {reason: finished.labels(info.name, reason) for reason in _FINISH_REASONS}
        self.broken = counter(
            "foreword:request_exceptions", "Requests that ended because something raised in the engine.", "error"
        )
        self.stored = one("foreword:blocks_stored", "Blocks published to prefix lookups, further copies included.")
        self.removed = one("foreword:blocks_removed", "Keys that no block holds any more: evicted or withdrawn.")
        self.first = times("vllm:time_to_first_token_seconds", "Time to first token (TTFT).", _FIRST_TOKEN)
        self.first_by_cached = histogram(
            "foreword:time_to_first_token_by_cached_seconds",
            "Time to first token, by the cached share of the prompt: none, some, or most (half and more).",
            _FIRST_TOKEN,
            "cached",
        )
        # By request, between admission and first token.
        self.cached_share: dict[str, str] = {}
        for share in ("none", "some", "most"):
            self.first_by_cached.labels(info.name, share)
        self.queued = times("vllm:request_queue_time_seconds", "Time from arrival to admission.", _REQUEST)
        self.next = times("vllm:inter_token_latency_seconds", "Inter-token latency (ITL).", _NEXT_TOKEN)
        self.whole = times("vllm:e2e_request_latency_seconds", "Time from arrival to the last token.", _REQUEST)
        self.prompt_sizes = times("vllm:request_prompt_tokens", "Prompt tokens per sequence.", request_tokens)
        self.output_sizes = times("vllm:request_generation_tokens", "Generated tokens per sequence.", request_tokens)
        self.step_tokens = times("vllm:iteration_tokens_total", "Tokens computed per step.", _STEP_TOKENS)
        self.step = times("foreword:step_seconds", "Duration of a step.", _STEP_SECONDS)
        self.pairs = one("foreword:prefill_pairs", "Pairs of computed prompt tokens and tokens before them.")
        self.context = one("foreword:decode_context", "Tokens before the decoded ones, of all steps together.")

        transfer = ("kind", "side")
        self.transfers = counter("foreword:transfer_transfers", "Finished transfers.", *transfer, "outcome")
        self.transfer_bytes = counter("foreword:transfer_bytes", "Bytes of KV transferred.", *transfer)
        self.transfer_parts = counter("foreword:transfer_parts", "Messages that carried them.", *transfer)
        self.transfer_hidden = counter(
            "foreword:transfer_hidden_bytes",
            "Bytes sent before the prompt was computed: overlapped transfer.",
            *transfer,
        )
        self.transfer_times = histogram(
            "foreword:transfer_seconds", "Duration of a transfer.", _TRANSFER_SECONDS, *transfer
        )
        self.pauses = times(
            "foreword:transfer_pause_seconds", "Time without decoding of a migrated request.", _PAUSE_SECONDS
        )
        self.handlers: dict[type[Any], Callable[[Any], None]] = {
            PrefixLookup: self._on_lookup,
            BlocksStored: lambda event: self.stored.inc(len(event.keys)),
            BlocksRemoved: lambda event: self.removed.inc(len(event.keys)),
            RequestPreempted: lambda event: self.preemptions.inc(),
            FirstToken: self._on_first_token,
            NextTokens: self._on_next_tokens,
            RequestFinished: self._on_finished,
            RequestBroken: lambda event: self.broken.labels(self.model, event.error).inc(),
            StepFinished: self._on_step,
            TransferEnded: self._on_transfer,
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
        self.cached_share.pop(event.request_id, None)
        if event.reason == "moved":
            return  # the instance that took the request counts the rest
        self.prompt.inc(event.prompt_tokens)
        self.prompt_sizes.observe(event.prompt_tokens)
        self.output_sizes.observe(event.output_tokens)
        self.whole.observe(event.seconds)

    def _on_step(self, event: StepFinished) -> None:
        self.step.observe(event.seconds)
        self.step_tokens.observe(event.prefill_tokens + event.decode_tokens)
        self.pairs.inc(event.prefill_pairs)
        self.context.inc(event.decode_context)

    def _on_transfer(self, event: TransferEnded) -> None:
        labels = (self.model, event.kind, event.side)
        self.transfers.labels(*labels, event.outcome).inc()
        self.transfer_bytes.labels(*labels).inc(event.bytes)
        self.transfer_parts.labels(*labels).inc(event.parts)
        self.transfer_times.labels(*labels).observe(event.seconds)
        if event.side == "source":
            self.transfer_hidden.labels(*labels).inc(event.hidden_bytes)
        if event.pause:
            self.pauses.observe(event.pause)


def _one_two_five(largest: int) -> tuple[float, ...]:
    """1, 2, 5, 10, ... up to `largest`, as vLLM has it for tokens per request."""
    steps = (step * 10**power for power in range(10) for step in (1, 2, 5))
    return tuple(step for step in steps if step <= largest)
