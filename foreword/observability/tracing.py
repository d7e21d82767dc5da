"""OpenTelemetry traces: the spans of requests, joined with those of clients, routers and replicas by W3C trace context.

Without an endpoint there is no `Tracer`: nothing is imported and no span is made. Sampling, headers for the collector and
resource attributes are set by OpenTelemetry's own environment variables. Attributes that vLLM has too have its names.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from foreword.errors import ConfigError

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
