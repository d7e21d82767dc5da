"""A server that answers completions with bytes that a test chooses: forms of HTTP that are rare, or wrong."""

from __future__ import annotations

import asyncio
import json
from typing import cast

from router_parts import Loop
from scripted_replica import WEIGHTS, metrics_of

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
WORDS = ["w0", " w1", " w2", " w3", " w4"]
PROMPT_IDS = [7, 8, 9]
FIRST_TOKEN = 100


def events(words: list[str] = WORDS, first: int = 0) -> list[bytes]:
    """A stream of these words, without its last event, `[DONE]`."""
    found = []
    for number, word in enumerate(words, first):
        choice = {"index": 0, "text": word, "token_ids": [FIRST_TOKEN + number], "finish_reason": None}
        if number == first:
            choice["prompt_token_ids"] = PROMPT_IDS
        if number == first + len(words) - 1:
            choice["finish_reason"] = "stop"
        body = {"id": "c", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}
        found.append(b"data: " + json.dumps(body).encode() + b"\n\n")
    return found


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


EVENTS = [*events(), b"data: [DONE]\n\n"]
BODY = b"".join(EVENTS)
CHUNKS = b"".join(map(chunk, EVENTS))
LAST_CHUNK = b"0\r\n\r\n"


class RawReplica:
    """`answer` is what each request for a completion gets, piece by piece, in turns of the event loop of their own. An empty
    piece closes the connection. `asked` has the bodies; `connections`: how many were made for these. `greeting`: what new
    connections get before anything is asked."""

    def __init__(self, loop: Loop) -> None:
        self.answer: list[bytes] = []
        self.asked: list[dict[str, object]] = []
        self.connections = 0
        self.greeting = b""
        self.url: str = loop.call(self._start)

    async def _start(self) -> str:
        server = await asyncio.get_running_loop().create_server(lambda: _Connection(self), "127.0.0.1", 0)
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


class _Connection(asyncio.Protocol):
    def __init__(self, replica: RawReplica) -> None:
        self._replica = replica
        self._data = b""
        self._asks = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._replica.greeting:
            self._transport.write(self._replica.greeting)

    def data_received(self, data: bytes) -> None:
        self._data += data
        while b"\r\n\r\n" in self._data:
            head, _, rest = self._data.partition(b"\r\n\r\n")
            fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
            length = int(fields.get(b"content-length", 0))
            if len(rest) < length:
                return
            body, self._data = rest[:length], rest[length:]
            self._respond(head.split()[1], body)

    def _respond(self, path: bytes, body: bytes) -> None:
        card = {"id": "m", "object": "model", "owned_by": "vllm", "max_model_len": 8192}
        if path == b"/v1/completions":
            self._replica.asked.append(json.loads(body))
            self._replica.connections += not self._asks
            self._asks += 1
            self._send(list(self._replica.answer))
        elif path == b"/v1/models":
            self._whole(b"200 OK", json.dumps({"object": "list", "data": [card]}).encode())
        elif path == b"/metrics":
            self._whole(b"200 OK", metrics_of(WEIGHTS).encode())
        elif path == b"/health":
            self._whole(b"200 OK", b"")
        else:
            self._whole(b"404 Not Found", b"{}")

    def _whole(self, status: bytes, data: bytes) -> None:
        head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(data))
        self._transport.write(head + data)

    def _send(self, pieces: list[bytes]) -> None:
        if not pieces or self._transport.is_closing():
            return
        piece = pieces.pop(0)
        if piece:
            self._transport.write(piece)
        else:
            self._transport.close()
        asyncio.get_running_loop().call_soon(self._send, pieces)
