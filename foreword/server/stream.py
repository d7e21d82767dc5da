"""Event streams to clients, and work that ends when its client disconnects."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, Final, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from foreword.api import sse
from foreword.api.errors import error_body
from foreword.errors import ForewordError, ShuttingDown

T = TypeVar("T")

DONE: Final = b"data: " + sse.DONE + b"\n\n"
_COMMENT: Final = b": keep-alive\n\n"
# Seconds without an event after which a stream between servers sends a comment, so that the reader knows it is alive.
KEEP_ALIVE: Final = 5.0


class EventStream(Response):
    """A response made of server-sent events.

    The status line waits for the first event, which may be empty: an error before it is answered with its own HTTP status,
    one after it is sent as an event and ends the stream. When the client disconnects the generator is closed at once.

    Args:
        error_event: writes an error.
        keep_alive: seconds without an event after which a comment is sent.
        on_end: called when the response has ended, with the error that ended it; CancelledError if the client disconnected.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        error_event: Callable[[ForewordError], bytes] = lambda error: sse.encode(error_body(error)),
        keep_alive: float = KEEP_ALIVE,
        on_end: Callable[[BaseException | None], None] = lambda error: None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._events = events
        self._error_event = error_event
        self._keep_alive = keep_alive
        self._on_end = on_end
        self._sent = 0
        self._error: BaseException | None = asyncio.CancelledError()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._send_all(send))
        except ForewordError as error:
            self._error = error
            raise
        finally:
            self._on_end(self._error)

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            first = await anext(events, b"")
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            comments = asyncio.create_task(self._send_comments(send))
            try:
                await self._send_body(send, first)
                async for event in events:
                    await self._send_body(send, event)
                self._error = None
            except ForewordError as error:
                self._error = error
                await self._send_body(send, self._error_event(error))
            finally:
                comments.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_body(self, send: Send, body: bytes) -> None:
        self._sent += 1
        if body:
            await send({"type": "http.response.body", "body": body, "more_body": True})

    async def _send_comments(self, send: Send) -> None:
        """A comment whenever there was no event for a while. Proxies close connections on which nothing is sent."""
        while True:
            seen = self._sent
            await asyncio.sleep(self._keep_alive)
            if seen == self._sent:
                await send({"type": "http.response.body", "body": _COMMENT, "more_body": True})


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


async def until_stopped(items: AsyncGenerator[T, None], stop: asyncio.Event) -> AsyncGenerator[T, None]:
    """The items. Raises ShuttingDown once `stop` is set."""
    stopped = asyncio.ensure_future(stop.wait())
    following: asyncio.Future[T] | None = None
    try:
        while True:
            following = asyncio.ensure_future(anext(items))
            await asyncio.wait((following, stopped), return_when=asyncio.FIRST_COMPLETED)
            if not following.done():
                raise ShuttingDown("The server is shutting down and ended the request before its end")
            try:
                item = following.result()
            except StopAsyncIteration:
                return
            following = None
            yield item
    finally:
        stopped.cancel()
        if following is not None:
            following.cancel()
        if following is not None:
            with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration, ForewordError):
                await following
        await items.aclose()
