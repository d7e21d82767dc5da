"""HTTP inside vLLM's API server, without a connection: asking the server itself, replaying bodies, errors as JSON."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foreword.errors import BadRequest, EngineFailed, ForewordError, NotReady

_TAIL_BYTES = 8192
# Within a text of the answer its quotes would be escaped, so that this cannot match there.
_CACHED = re.compile(rb'(?<!\\)"cached_tokens":\s*(\d+)')


class InnerServer:
    """The server's own routes, called within the process, as its own client.

    Args:
        app: everything that a request passes after the middleware.
        host: the FastAPI application.
        key: an API key that the server takes, or None.
    """

    def __init__(self, app: ASGIApp, host: Any, key: str | None) -> None:
        self._app = app
        self._host = host
        self._key = key

    async def post(self, path: str, body: Mapping[str, object]) -> Any:
        """The answer's JSON. Raises BadRequest, NotReady or EngineFailed with the server's own sentence."""
        data = json.dumps(body).encode()
        asked = asyncio.Event()
        never = asyncio.Event()
        answer: list[bytes] = []
        status = 500

        async def receive() -> Message:
            if asked.is_set():
                await never.wait()
            asked.set()
            return {"type": "http.request", "body": data, "more_body": False}

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                answer.append(message.get("body", b""))

        await self._app(self._scope(path, len(data)), receive, send)
        return _understood(path, status, b"".join(answer))

    def _scope(self, path: str, length: int) -> Scope:
        headers = [(b"host", b"foreword"), (b"content-type", b"application/json"), (b"content-length", b"%d" % length)]
        if self._key is not None:
            headers.append((b"authorization", b"Bearer " + self._key.encode()))
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": headers,
            "client": ("127.0.0.1", 0),
            "server": ("127.0.0.1", 0),
            "state": {},
            "app": self._host,
        }

    async def tokens(self, body: Mapping[str, object]) -> list[int]:
        """What vLLM's `/tokenize` makes of a prompt or of messages. Raises as `post` does."""
        found: list[int] = (await self.post("/tokenize", body))["tokens"]
        return found


def _understood(path: str, status: int, data: bytes) -> Any:
    try:
        body = json.loads(data)
    except ValueError:
        raise EngineFailed(f"vLLM's {path} answered HTTP {status} and no JSON") from None
    if status < 400:
        return body
    message = f"vLLM's {path} answered HTTP {status}: {_sentence(body)}"
    if status in (429, 503):
        raise NotReady(message)
    if status >= 500:
        raise EngineFailed(message)
    raise BadRequest(message)


def _sentence(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


async def read_body(receive: Receive) -> list[Message] | None:
    """All messages of a request's body; None if the client has gone."""
    messages: list[Message] = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        messages.append(message)
        if not message.get("more_body", False):
            return messages


def body_of(messages: Sequence[Message]) -> bytes:
    return b"".join(message.get("body", b"") for message in messages)


def replay(messages: Sequence[Message], receive: Receive) -> Receive:
    """The messages again, then whatever else comes: a client that goes away."""
    left = list(messages)

    async def again() -> Message:
        return left.pop(0) if left else await receive()

    return again


def with_length(scope: Scope, length: int) -> Scope:
    """The scope of a request whose body has another length now."""
    headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"content-length"]
    return {**scope, "headers": [*headers, (b"content-length", b"%d" % length)]}


class CachedTokens:
    """Passes an answer on untouched and notes what its usage says of cached tokens, if it says so."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._tail = b""
        self.fine = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.fine = message["status"] < 400
        elif message["type"] == "http.response.body":
            self._tail = (self._tail + message.get("body", b""))[-_TAIL_BYTES:]
        await self._send(message)

    @property
    def count(self) -> int:
        """0 where vLLM does not tell (`--enable-prompt-tokens-details`; in a stream `stream_options`)."""
        found = _CACHED.findall(self._tail)
        return int(found[-1]) if found else 0


def problem(error: ForewordError) -> JSONResponse:
    """An error as OpenAI's JSON, as Foreword's own server writes it."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    body = {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}
    return JSONResponse(body, status_code=error.status, headers={"retry-after": "5"} if error.retry else None)
