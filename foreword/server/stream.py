"""Event streams to clients, and work that ends when its client disconnects."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, Final, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from foreword.api import sse
from foreword.api.errors import error_body
from foreword.errors import ForewordError, ShuttingDown

T = TypeVar("T")

DONE: Final = b"data: " + sse.DONE + b"\n\n"
# Seconds without an event after which a stream between servers sends a comment, so that the reader knows it is alive.
KEEP_ALIVE: Final = 5.0


class EventStream(Response):
    """A response made of server-sent events.

    The status line waits for the first event: an error before it is answered with its own HTTP status, one after it is
    sent as an event and ends the stream. When the client disconnects the generator is closed at once.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_disconnected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            first = await anext(events, b"")
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await _send_body(send, first)
            try:
                async for event in events:
                    await _send_body(send, event)
            except ForewordError as error:
                await _send_body(send, sse.encode(error_body(error)))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_body(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Run `work`. If the client disconnects first, cancel it, wait for its end and return None.

    The request's body must have been read: `receive` then reports nothing but the disconnect.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        # Also when this coroutine is cancelled: nothing may run on without its client.
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """The items of all streams as they arrive, each with its stream's number.

    Raises the first error of a stream. Every stream is closed before this generator returns.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as items:
            async for item in items:
                yield 0, item
        return
    arrived: asyncio.Queue[tuple[int, T] | asyncio.Task[None]] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(number, stream, arrived)) for number, stream in enumerate(streams)]
    for task in tasks:
        task.add_done_callback(arrived.put_nowait)
    try:
        unfinished = len(tasks)
        while unfinished:
            entry = await arrived.get()
            if isinstance(entry, asyncio.Task):
                entry.result()
                unfinished -= 1
            else:
                yield entry
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(number: int, stream: AsyncGenerator[T, None], into: asyncio.Queue[tuple[int, T] | Any]) -> None:
    async with aclosing(stream) as items:
        async for item in items:
            into.put_nowait((number, item))


async def keep_alive(events: AsyncGenerator[bytes, None], seconds: float = KEEP_ALIVE) -> AsyncGenerator[bytes, None]:
    """The events, and a comment whenever there was none for `seconds`."""
    async with aclosing(watched(events, seconds=seconds)) as items:
        async for item in items:
            yield b": keep-alive\n\n" if item is None else item


async def watched(
    items: AsyncGenerator[T, None], *, seconds: float | None = None, stop: asyncio.Event | None = None
) -> AsyncGenerator[T | None, None]:
    """The items, and None whenever there was none for `seconds`. Raises ShuttingDown once `stop` is set."""
    stopped = asyncio.ensure_future(stop.wait()) if stop is not None else None
    following: asyncio.Future[T] | None = None
    try:
        while True:
            following = following or asyncio.ensure_future(anext(items))
            waiting: list[asyncio.Future[Any]] = [following] if stopped is None else [following, stopped]
            await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                try:
                    item = following.result()
                except StopAsyncIteration:
                    return
                following = None
                yield item
            elif stopped is not None and stopped.done():
                raise ShuttingDown("The server is shutting down and ended the request before its end")
            else:
                yield None
    finally:
        for task in (stopped, following):
            if task is not None:
                task.cancel()
        if following is not None:
            with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration, ForewordError):
                await following
        await items.aclose()
