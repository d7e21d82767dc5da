"""Server-sent events, and work that ends when its client goes away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from foreword.errors import ForewordError
from foreword.server import errors as faults

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


def encode(event: Mapping[str, Any]) -> bytes:
    """One event. JSON has no line breaks of its own, so one `data:` line is enough."""
    text = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
    return b"data: " + text.encode("utf-8", "replace") + b"\n\n"


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
                await _send_body(send, encode(faults.body_of(error)))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_body(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Run `work`; if the client disconnects first, cancel it, wait for its end and return None.

    The request's body must have been read: `receive` then has nothing to say but the disconnect.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        # Also when this coroutine is cancelled: nothing may go on without its client.
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """The items of all streams as they come, each with its stream's number.

    The first error of a stream is raised; whatever ends this generator closes every stream before it returns.
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
