"""OpenTelemetry traces: the spans of requests, joined with those of clients, routers and replicas by W3C trace context.

Without an endpoint there is no `Tracer`: nothing is imported and no span is made. Sampling, headers for the collector and
resource attributes are set by OpenTelemetry's own environment variables. Attributes that vLLM has too have its names.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from foreword.errors import ConfigError, ForewordError
from foreword.events import Event, FirstToken, PrefixLookup

_PATH: Final = "/v1/traces"

Attributes = Mapping[str, str | int | float | bool]
_NONE: Final[Attributes] = {}


class Tracer:
    """Makes spans and sends them to a collector in the background: OTLP over HTTP. A collector that is down delays nothing;
    spans that do not fit into the queue are dropped.

    Args:
        endpoint: URL of the collector; `/v1/traces` is added if it has no path.
        service: `service.name`, unless `OTEL_SERVICE_NAME` names another.

    Raises ConfigError if OpenTelemetry is not installed or the URL is none.
    """

    def __init__(self, endpoint: str, service: str) -> None:
        if not endpoint.startswith(("http://", "https://")) or not urlsplit(endpoint).hostname:
            raise ConfigError(f"--otlp-endpoint takes a URL such as http://collector:4318, not {endpoint!r}")
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError:
            raise ConfigError("traces need OpenTelemetry: pip install 'foreword[otel]'") from None
        named = "OTEL_SERVICE_NAME" in os.environ
        self._provider = TracerProvider(resource=Resource.create({} if named else {"service.name": service}))
        base = endpoint.rstrip("/")
        url = base if "/" in base.partition("://")[2] else base + _PATH
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url)))
        self._tracer = self._provider.get_tracer("foreword")
        self._context = TraceContextTextMapPropagator()
        self._api = trace

    def request(self, name: str, headers: Mapping[str, str], attributes: Attributes) -> Span:
        """The span of a request that arrives now. Its headers may name the trace to which it belongs."""
        kind = self._api.SpanKind.SERVER
        return Span(self, self._tracer.start_span(name, self._context.extract(headers), kind, attributes))

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()

    def start(self, name: str, parent: Any, began: float | None, kind: str, attributes: Attributes) -> Any:
        context, at = self._api.set_span_in_context(parent), None if began is None else _wall(began)
        return self._tracer.start_span(name, context, self._api.SpanKind[kind], attributes, start_time=at)

    def headers(self, span: Any) -> dict[str, str]:
        found: dict[str, str] = {}
        self._context.inject(found, self._api.set_span_in_context(span))
        return found

    def failed(self, span: Any, reason: str) -> None:
        span.set_status(self._api.Status(self._api.StatusCode.ERROR, reason))


class Span:
    """A span in progress. Times are of `time.monotonic`."""

    def __init__(self, tracer: Tracer, span: Any) -> None:
        self._tracer = tracer
        self._span = span

    def call(self, name: str, attributes: Attributes) -> Span:
        """A call to another server, from now on."""
        return Span(self._tracer, self._tracer.start(name, self._span, None, "CLIENT", attributes))

    def part(self, name: str, began: float, ended: float, attributes: Attributes = _NONE) -> None:
        """A part of it that is over."""
        part = self._tracer.start(name, self._span, began, "INTERNAL", attributes)
        part.end(_wall(ended))

    def note(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def event(self, name: str, at: float) -> None:
        self._span.add_event(name, timestamp=_wall(at))

    def headers(self) -> dict[str, str]:
        """For the server that is called: `traceparent` and `tracestate`."""
        return self._tracer.headers(self._span)

    def end(self, problem: str = "") -> None:
        if problem:
            self._tracer.failed(self._span, problem)
        self._span.end()


def tracer_for(endpoint: str | None, service: str) -> Tracer | None:
    """None without an endpoint. Raises ConfigError."""
    return None if endpoint is None else Tracer(endpoint, service)


def _wall(monotonic: float) -> int:
    return time.time_ns() - int((time.monotonic() - monotonic) * 1e9)


@dataclass(slots=True)
class EngineTimes:
    """When the engine admitted a request, after waiting `loading` seconds for stores, and when its first token came."""

    admitted: float | None = None
    loading: float = 0.0
    cached_tokens: int = 0
    first: float | None = None


class EngineTraces:
    """Makes the spans of a server's requests, with their parts in the engine: queue, load, prefill, decode.

    It is an observer of the engine and called on the engine's thread.
    """

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self._times: dict[str, EngineTimes] = {}

    def notify(self, event: Event) -> None:
        if not isinstance(event, (PrefixLookup, FirstToken)) or (times := self._times.get(event.request_id)) is None:
            return
        # Of the sequences of a prompt, the first one counts.
        if isinstance(event, FirstToken):
            times.first = times.first or time.monotonic()
        elif times.admitted is None:
            times.admitted, times.loading, times.cached_tokens = time.monotonic(), event.load_seconds, event.hit_tokens

    @contextmanager
    def request(self, headers: Mapping[str, str], attributes: Attributes, prompts: Mapping[str, int]) -> Iterator[None]:
        """A span around the block. `prompts`: the tokens of each prompt, by the name of its engine request."""
        span, arrived, problem = self.tracer.request("llm_request", headers, attributes), time.monotonic(), ""
        self._times.update((name, EngineTimes()) for name in prompts)
        try:
            yield
        except ForewordError as error:
            problem = error.message
            raise
        finally:
            for name, tokens in prompts.items():
                _add_parts(span, self._times.pop(name), arrived, tokens)
            span.end(problem)


def _add_parts(span: Span, times: EngineTimes, arrived: float, prompt_tokens: int) -> None:
    now = time.monotonic()
    admitted, first = times.admitted, times.first
    found = max(admitted - times.loading, arrived) if admitted is not None else now
    span.part("queue", arrived, found)
    if admitted is None:
        return
    if times.loading:
        span.part("load", found, admitted)
    tokens = {"gen_ai.usage.prompt_tokens": prompt_tokens, "foreword.cached_tokens": times.cached_tokens}
    span.part("prefill", admitted, first or now, tokens)
    if first is not None:
        span.part("decode", first, now)
