"""A server for official clients: it parses their requests with a dialect and writes scripted output."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from foreword.api.dialects.decode import Limits
from foreword.api.dialects.dialect_writers import WRITERS
from foreword.api.dialects.registry import DIALECTS
from foreword.api.dialects.writer import ResponseHead, Writer, to_json
from foreword.api.output import CallArguments, CallStart, ChoiceDelta, Reasoning, Text, Usage
from foreword.api.request import GenerateRequest
from foreword.errors import ForewordError

USAGE = Usage(prompt_tokens=7, output_tokens=5, cached_tokens=4, written_tokens={300.0: 2}, reasoning_tokens=2)
# Reasoning, text, and two calls.
SENTENCE = (
    ChoiceDelta(0, (Reasoning("It "),), (1,)),
    ChoiceDelta(0, (Reasoning("is. "), Text("So ")), (2, 3)),
    ChoiceDelta(0, (Text("so."), CallStart(0, "call_1", "weather")), (4,)),
    ChoiceDelta(0, (CallArguments(0, '{"city":'),), (5,)),
    ChoiceDelta(0, (CallArguments(0, '"Rome"}'), CallStart(1, "call_2", "weather"), CallArguments(1, "{}")), (6,)),
    ChoiceDelta(0, (), (7,), finish_reason="tool_calls"),
)
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@dataclass
class DialectServer:
    """An HTTP server that answers every request with `deltas`, or with `error` after them.

    Attributes:
        report: the cache report.
        requests: what was parsed.
    """

    deltas: Sequence[ChoiceDelta] = SENTENCE
    error: ForewordError | None = None
    report: dict[str, Any] | None = None
    requests: list[GenerateRequest] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[str]:
        """Its URL."""
        with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
            server.answer = self.answer  # type: ignore[attr-defined]
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            try:
                yield f"http://127.0.0.1:{server.server_port}"
            finally:
                server.shutdown()
                thread.join()

    def answer(self, path: str, body: bytes) -> tuple[int, str, bytes]:
        """Status, media type and body of the response."""
        dialect = next(one for one in DIALECTS.values() if one.path == path)
        try:
            parsed = dialect.parse(body, Limits.for_model(4096))
        except ForewordError as error:
            status, text, _ = dialect.error_response(error, request_id="req_1")
            return status, "application/json", text
        self.requests.append(parsed)
        writer = WRITERS[parsed.dialect](parsed, ResponseHead(f"{dialect.id_prefix}1", "nano", 1700000000, "fp_1"))
        if parsed.stream:
            return 200, "text/event-stream", self._stream(writer)
        for delta in self.deltas:
            writer.add(delta)
        return 200, "application/json", to_json(writer.whole(USAGE, self.report))

    def _stream(self, writer: Writer) -> bytes:
        parts = writer.start(Usage(prompt_tokens=7))
        for delta in self.deltas:
            parts += writer.events(delta)
        return b"".join(parts) + (writer.end(USAGE, self.report) if self.error is None else writer.error(self.error))


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["content-length"]))
        status, media_type, body = self.server.answer(self.path, raw)  # type: ignore[attr-defined]
        self.send_response(status)
        self.send_header("content-type", media_type)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass
