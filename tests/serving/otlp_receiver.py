"""A collector of OpenTelemetry traces: OTLP over HTTP, decoded by OpenTelemetry's own messages."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class ReceivedSpan:
    """Ids are in hexadecimal digits; times in nanoseconds."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    start: int
    end: int
    failed: bool
    attributes: dict[str, Any]
    events: list[str]


@dataclass
class Receiver:
    url: str
    spans: list[ReceivedSpan] = field(default_factory=list)

    def of(self, trace: str) -> list[ReceivedSpan]:
        return sorted((one for one in self.spans if one.trace == trace), key=lambda one: one.start)

    def take(self, body: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = _values(resource.resource.attributes).get("service.name", "")
            for scope in resource.scope_spans:
                self.spans += [_received(service, span) for span in scope.spans]


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


def _received(service: str, span: Any) -> ReceivedSpan:
    ids = (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex())
    times, events = (span.start_time_unix_nano, span.end_time_unix_nano), [one.name for one in span.events]
    return ReceivedSpan(service, span.name, *ids, *times, span.status.code == 2, _values(span.attributes), events)


@contextmanager
def otlp_receiver() -> Iterator[Receiver]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            if self.path == "/v1/traces":
                receiver.take(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver = Receiver(f"http://127.0.0.1:{server.server_address[1]}")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield receiver
    server.shutdown()
