"""Prometheus metrics of the engine: counters moved by events, and gauges read at a scrape (docs/reference/metrics.md).

Names are vLLM's where vLLM has the same quantity, so its dashboards and alerts work; the others begin with `foreword:`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from foreword.engine.audit_counts import AuditCounts
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
from foreword.observability.front_registry import FrontRegistry, Samples, counter, gauge
from foreword.offload.counters import LookupCounts, OffloadStatus
from foreword.store.series import Series, series_of
from foreword.store.tier_counters import TierCounters, TierState
from foreword.usage import MissExplained

if TYPE_CHECKING:
    from foreword.engine.request import ModelInfo
    from foreword.entrypoints.async_engine import AsyncEngine
    from foreword.store.base import StoreStatus
    from foreword.store.tier import StoreTier
    from foreword.transfer.transfer_endpoint import EndpointStatus

    _Tier = tuple[StoreTier, StoreStatus]

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
        self._series = _EventSeries(self._registry, engine.info.name, engine.info.max_model_len)

    @classmethod
    def declared(cls) -> tuple[Self, list[Metric]]:
        """An observer that has counted nothing, and the families of what is read at a scrape, without samples.

        docs/reference/metrics.md is written from them.
        """
        observer = cls()
        observer._series = _EventSeries(observer._registry, "", 100)
        return observer, [one.family(()) for part in _PARTS for one in part.metrics]

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
        for part in _PARTS:
            if (state := part.of(engine)) is not None:
                for one in part.metrics:
                    yield one.family([((engine.info.name, *labels), amount) for labels, amount in one.samples(state)])


@dataclass(frozen=True, slots=True)
class _Scraped:
    """A metric that is read at a scrape: declared here, with how its samples follow from what is looked at.

    Attributes:
        labels: after `model_name`; `samples` gives their values, and the amounts.
    """

    name: str
    text: str
    samples: Callable[[Any], Samples]
    labels: tuple[str, ...] = ()
    kind: Literal["counter", "gauge"] = "gauge"

    def family(self, samples: Samples) -> Metric:
        made = counter if self.kind == "counter" else gauge
        return made(self.name, self.text, ("model_name", *self.labels), samples)


def _one(name: str, text: str, value: Callable[[Any], float], kind: Literal["counter", "gauge"] = "gauge") -> _Scraped:
    """A metric of one number."""
    return _Scraped(name, text, lambda of: [((), value(of))], kind=kind)


def _by(
    label: str,
    name: str,
    text: str,
    amounts: Callable[[Any], Mapping[str, float]],
    kind: Literal["counter", "gauge"] = "gauge",
) -> _Scraped:
    """A metric of one number for each value of a label."""
    return _Scraped(name, text, lambda of: [((value,), one) for value, one in amounts(of).items()], (label,), kind)


def _info(name: str, text: str, **labels: Callable[[ModelInfo], object]) -> _Scraped:
    """A gauge of value 1 whose labels carry the information."""
    return _Scraped(name, text, lambda info: [(tuple(str(one(info)) for one in labels.values()), 1)], tuple(labels))


def _counted(counters: type, read: Callable[[Any], Any] = lambda of: of) -> list[_Scraped]:
    """The metrics of a class of counters, which `read` finds in what is looked at."""

    def metric(one: Series) -> _Scraped:
        def samples(of: Any) -> Samples:
            return one.amounts(read(of), engine=False).items()

        return _Scraped(f"foreword:{one.server}", one.text, samples, one.labels(engine=False), one.kind)

    return [metric(one) for one in series_of(counters)]


def _of_tiers(one: _Scraped) -> _Scraped:
    """A metric of a tier and its status, for all tiers: with the label `tier`."""

    def samples(tiers: Iterable[_Tier]) -> Samples:
        return [((of[0].label, *labels), amount) for of in tiers for labels, amount in one.samples(of)]

    return replace(one, labels=("tier", *one.labels), samples=samples)


def _states(of: _Tier) -> Samples:
    return [((one.value,), float(of[0].state is one)) for one in TierState]


def _link_bytes(status: EndpointStatus) -> Samples:
    for link, traffic in status.traffic.items():
        yield (link, "sent"), traffic.bytes_sent
        yield (link, "received"), traffic.bytes_received


@dataclass(frozen=True, slots=True)
class _Part:
    """Metrics of a part of an engine. `of`: the part as it is now; None if the engine has none."""

    of: Callable[[AsyncEngine], Any]
    metrics: Sequence[_Scraped]


_STATUS: Final = (
    _one("vllm:num_requests_running", "Sequences in the running batch.", lambda one: one.running),
    _one("vllm:num_requests_waiting", "Sequences that wait for admission.", lambda one: one.waiting),
    _one(
        "vllm:kv_cache_usage_perc", "Share of the blocks that requests use; 1 is all of them.", lambda one: one.kv_usage
    ),
    _one("foreword:blocks_free", "Blocks that no request uses, cached blocks included.", lambda one: one.free_blocks),
    _one("foreword:blocks_cached", "Blocks that a prefix lookup can find.", lambda one: one.cached_blocks),
    _one("foreword:blocks_pinned", "Blocks that named prefixes pin.", lambda one: one.pinned_blocks),
)
_ENGINE: Final = (
    _one("foreword:blocks", "Blocks in the pool.", lambda one: one.info.num_blocks),
    _one(
        "foreword:prefix_pinned_bytes",
        "Bytes of KV that named prefixes pin.",
        lambda one: one.status().pinned_blocks * one.info.kv_bytes_per_block,
    ),
    _one(
        "foreword:prefix_retained_bytes",
        "Bytes of KV on the device that cache control keeps.",
        lambda one: one.status().retained_blocks * one.info.kv_bytes_per_block,
    ),
    _one("foreword:prefix_budget_bytes", "Limit of all KV that is kept.", lambda one: one.prefixes.budget_bytes or 0),
    _one(
        "foreword:quarantined_chains",
        "Chains that are not reused, because an audit found their KV to be wrong.",
        lambda one: len(one.quarantine.chains),
    ),
)
_INFO: Final = (
    _info(
        "foreword:model_info",
        "1; the labels describe the model that is served.",
        fingerprint=lambda info: info.fingerprint,
        dtype=lambda info: info.dtype,
        device=lambda info: info.device,
        max_model_len=lambda info: info.max_model_len,
    ),
    _info(
        "vllm:cache_config_info",
        "1; the labels describe the pool of KV blocks.",
        block_size=lambda info: info.block_size,
        num_gpu_blocks=lambda info: info.num_blocks,
    ),
)
_TIERS: Final = (
    _Scraped("foreword:tier_state", "1 for the state that a tier has, 0 for the others.", _states, ("state",)),
    _one("foreword:tier_evictions", "Blocks that a tier evicted.", lambda of: of[1].evictions, "counter"),
    _one("foreword:tier_bytes", "Bytes of the blocks in a tier.", lambda of: of[1].bytes),
    _one("foreword:tier_budget_bytes", "Size limit of a tier; 0 if it sets none.", lambda of: of[1].budget),
    _one("foreword:tier_blocks", "Blocks in a tier; -1 if it does not count them.", lambda of: of[1].blocks),
    _one("foreword:tier_pinned_bytes", "Bytes of the pinned blocks in a tier.", lambda of: of[1].pinned_bytes),
    _one(
        "foreword:tier_suspended",
        "1 while a tier is not read: an audit found a wrong block that came from it.",
        lambda of: float(of[0].suspended),
    ),
    _one("foreword:tier_open", "1 while a tier's circuit breaker is open.", lambda of: float(of[0].breaker.is_open)),
)
_ENDPOINT: Final = (
    _by("link", "foreword:transfer_connections", "Connections to other instances.", lambda one: one.connections),
    _by("state", "foreword:transfer_under_way", "Transfers in flight, by role and state.", lambda one: one.transfers),
    _one("foreword:transfer_queued_bytes", "Bytes of KV in the send queue.", lambda one: one.queued_bytes),
    _Scraped(
        "foreword:transfer_link_bytes",
        "Bytes of KV over a kind of link, sent and received.",
        _link_bytes,
        ("link", "direction"),
        "counter",
    ),
    _by(
        "link",
        "foreword:transfer_link_seconds",
        "Seconds spent sending KV.",
        lambda one: {link: traffic.seconds for link, traffic in one.traffic.items()},
        "counter",
    ),
)
_SERVED: Final = (
    _by(
        "source",
        "foreword:served_blocks",
        "Blocks that other instances read (peer://), by the tier that had them.",
        lambda one: {"device": one.device, "memory": one.memory},
        "counter",
    ),
    _one(
        "foreword:served_missing_blocks",
        "Blocks that other instances requested and that were not here.",
        lambda one: one.missing,
        "counter",
    ),
)


_OFFLOAD: Final = (*_counted(OffloadStatus), *_counted(LookupCounts, lambda status: status.lookups))
_ALL_TIERS: Final = tuple(map(_of_tiers, (*_counted(TierCounters, lambda of: of[0].counters), *_TIERS)))
_PARTS: Final = (
    _Part(lambda engine: engine.status(), _STATUS),
    _Part(lambda engine: engine, _ENGINE),
    _Part(lambda engine: engine.info, _INFO),
    _Part(lambda engine: engine.offload and engine.offload.status(), _OFFLOAD),
    _Part(lambda engine: engine.offload and [(one, one.status()) for one in engine.offload.store.tiers], _ALL_TIERS),
    _Part(lambda engine: engine.audit and engine.audit.counts, _counted(AuditCounts)),
    _Part(lambda engine: engine.instance and engine.instance.endpoint.status(), _ENDPOINT),
    _Part(lambda engine: engine.served and engine.served.status(), _SERVED),
)


class _EventSeries:
    """Counters and histograms of one model, and which event moves which."""

    def __init__(self, registry: CollectorRegistry, model: str, longest: int) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, ("model_name", *labels), registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(name, text, ("model_name", *labels), registry=registry, buckets=buckets)

        def one(name: str, text: str) -> Counter:
            return counter(name, text).labels(model)

        def times(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return histogram(name, text, buckets).labels(model)

        self.model = model
        request_tokens = _one_two_five(longest)
        self.queries = one("vllm:prefix_cache_queries", "Prompt tokens looked up.")
        self.hits = one("vllm:prefix_cache_hits", "Prompt tokens found, on the device or in a store.")
        self.cached = one("vllm:prompt_tokens_cached", "Prompt tokens whose KV was cached.")
        self.by_source = counter(
            "vllm:prompt_tokens_cached_by_source",
            "Cached prompt tokens, by source: device, or the label of a tier.",
            "source",
        )
        self.from_device = self.by_source.labels(model, "device")
        self.prompt = one("vllm:prompt_tokens", "Prompt tokens of finished sequences, cached tokens included.")
        self.generated = one("vllm:generation_tokens", "Generated tokens.")
        self.preemptions = one("vllm:num_preemptions", "Preemptions: running sequences that lost their blocks.")
        finished = counter(
            "vllm:request_success",
            "Finished sequences, by reason; moved: migrated to another server.",
            "finished_reason",
        )
        self.finished = {reason: finished.labels(model, reason) for reason in _FINISH_REASONS}
        self.broken = counter(
            "foreword:request_exceptions", "Requests that ended because something raised in the engine.", "error"
        )
        self.stored = one("foreword:blocks_stored", "Blocks published to prefix lookups, further copies included.")
        self.removed = one("foreword:blocks_removed", "Keys that no block holds any more: evicted or withdrawn.")
        self.first = times(
            "vllm:time_to_first_token_seconds", "Time from arrival to the first token (TTFT).", _FIRST_TOKEN
        )
        self.first_by_cached = histogram(
            "foreword:time_to_first_token_by_cached_seconds",
            "TTFT, by the cached share of the prompt: none, some, or most (half and more).",
            _FIRST_TOKEN,
            "cached",
        )
        # By request, between admission and first token.
        self.cached_share: dict[str, str] = {}
        for share in ("none", "some", "most"):
            self.first_by_cached.labels(model, share)
        self.queued = times("vllm:request_queue_time_seconds", "Time from arrival to admission.", _REQUEST)
        self.next = times(
            "vllm:inter_token_latency_seconds", "Time between two tokens of a sequence (ITL).", _NEXT_TOKEN
        )
        self.whole = times("vllm:e2e_request_latency_seconds", "Time from arrival to the last token.", _REQUEST)
        self.prompt_sizes = times("vllm:request_prompt_tokens", "Prompt tokens per sequence.", request_tokens)
        self.output_sizes = times("vllm:request_generation_tokens", "Generated tokens per sequence.", request_tokens)
        self.step_tokens = times("vllm:iteration_tokens_total", "Tokens computed per step.", _STEP_TOKENS)
        self.step = times("foreword:step_seconds", "Duration of a step.", _STEP_SECONDS)
        self.pairs = one(
            "foreword:prefill_pairs", "Pairs of computed prompt tokens and tokens before them: the work of attention."
        )
        self.context = one("foreword:decode_context", "Tokens before the decoded ones, of all steps together.")

        transfer = ("kind", "side")
        self.transfers = counter(
            "foreword:transfer_transfers",
            "Finished transfers: taken, or the reason of the failure.",
            *transfer,
            "outcome",
        )
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
