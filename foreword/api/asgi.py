"""A front as an ASGI application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from foreword.api.front import Answer, Front
from foreword.api.outcomes import ClientGone
from foreword.tasks import background

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class AsgiFront:
    """Serves one front. Other protocols than HTTP are refused by the server before it."""

    def __init__(self, front: Front) -> None:
        self.front = front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        for begin in self.front.on_serving:  # nothing tells an application that its loop has begun
            begin()
        exchange = AsgiExchange(scope, receive, send)
        try:
            answer = await self.front.serve(exchange)
            if answer is not None:
                await exchange.send(answer)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not exchange.left or task is None:
                raise
            task.uncancel()
        finally:
            exchange.unwatch()


class AsgiExchange:
    """A request.

    Attributes:
        left: the client has left, and the call was cancelled.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self.method: str = scope["method"]
        raw = scope.get("raw_path") or scope["path"].encode()
        self.path = raw.decode("latin-1").removeprefix(scope.get("root_path", ""))
        self.query = scope.get("query_string", b"").decode("utf-8", "surrogateescape")
        headers: dict[str, str] = {}
        for name, value in scope["headers"]:
            key, text = name.decode("latin-1").lower(), value.decode("latin-1")
            headers[key] = f"{headers[key]}, {text}" if key in headers else text
        self.headers: Mapping[str, str] = headers
        client = scope.get("client")
        self.address: str | None = client[0] if client else None
        self.left = False
        self._watching: asyncio.Task[None] | None = None

    def arrived(self, limit: int) -> bytes | None:
        """ASGI does not say."""
        return None

    async def pieces(self) -> AsyncIterator[bytes]:
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            more = message.get("more_body", False)
            yield message.get("body", b"")

    def watch(self) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._watching = background(self._watch(task), "watching a client")

    def unwatch(self) -> None:
        """The answer is complete: what the client does now ends nothing."""
        if self._watching is not None:
            self._watching.cancel()

    async def _watch(self, task: asyncio.Task[Any]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.left = True
        task.cancel()

    async def send(self, answer: Answer) -> None:
        """A whole response."""
        self.unwatch()
        length = {} if answer.status in (204, 304) else {"content-length": str(len(answer.body))}
        await self._begin(answer.status, {**answer.headers, **length})
        await self._send({"type": "http.response.body", "body": answer.body})

    async def open(self, status: int, headers: Mapping[str, str], at_once: bool) -> AsgiExchange:
        await self._begin(status, headers)
        return self

    async def _begin(self, status: int, headers: Mapping[str, str]) -> None:
        raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    def write_now(self, data: bytes) -> bool:
        """ASGI sends only what is awaited."""
        return False

    async def write(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        self.unwatch()
        await self._send({"type": "http.response.body", "body": data, "more_body": False})
