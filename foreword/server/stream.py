"""Streams of items: several as one, and one that ends when the server stops."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from foreword.errors import ForewordError, ShuttingDown

T = TypeVar("T")


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
