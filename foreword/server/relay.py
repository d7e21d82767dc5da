"""A request that went on at another server, for a client who does not know: its deltas are fetched there and passed on."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, Final
from urllib.parse import quote

import httpx
import msgspec

from foreword.engine.request import Delta, MigratedTo
from foreword.errors import EngineFailed, ForewordError, ShuttingDown, TransferUnavailable
from foreword.server.job import FOLLOW_HEADER, Caller

MOVED: Final = "foreword.moved"
DELTA: Final = "foreword.delta"
# Seconds between two signs of life of a stream that has nothing to say, and without one until it is taken for dead.
KEEP_ALIVE: Final = 5.0
_SILENCE: Final = 30.0


def moved_event(departure: MigratedTo) -> bytes:
    """The last event of a stream whose client follows."""
    return event(MOVED, dataclasses.asdict(departure))


def delta_event(delta: Delta) -> bytes:
    """A delta for another server."""
    return event(DELTA, msgspec.to_builtins(delta, builtin_types=(bytes,)))


def event(name: str, data: Any) -> bytes:
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"event: {name}\ndata: {text}\n\n".encode("utf-8", "surrogatepass")


async def follow(departure: MigratedTo, caller: Caller, ended: asyncio.Event) -> AsyncGenerator[Delta, None]:
    """The deltas of a request that moved, from wherever it goes.

    `ended` is set when this server stops waiting. Raises TransferUnavailable if the other server is gone, and what it said if
    it failed.
    """
    there: MigratedTo | None = departure
    while there is not None:
        onward: MigratedTo | None = None
        async with aclosing(_until(_fetch(there, caller), ended)) as found:
            async for one in found:
                if isinstance(one, MigratedTo):
                    onward = one
                    break
                yield one
                if one.finish_reason is not None:
                    return
        if onward is None:
            raise TransferUnavailable(f"the server at {there.to}, where the request went on, has ended")
        there = onward


async def _fetch(there: MigratedTo, caller: Caller) -> AsyncGenerator[Delta | MigratedTo, None]:
    url = f"{there.to.rstrip('/')}/v1/requests/{quote(there.request_id, safe='')}/stream"
    headers = {**caller.headers, FOLLOW_HEADER: "1"}
    timeout = httpx.Timeout(10, read=_SILENCE)
    query = {"from": str(there.tokens), "format": "deltas"}
    try:
        async with (
            httpx.AsyncClient(timeout=timeout, trust_env=False, verify=url.startswith("https")) as client,
            client.stream("GET", url, params=query, headers=headers) as response,
        ):
            if response.status_code != 200:
                data = await response.aread()
                raise TransferUnavailable(f"{there.to} does not give the request out: {_sentence(data)}")
            async with aclosing(_events(response.aiter_lines())) as events:
                async for name, text in events:
                    yield _read(name, text)
    except httpx.HTTPError as error:
        text = f"the connection to {there.to}, where the request went on, broke: {error}"
        raise TransferUnavailable(text) from error


def _read(name: str, text: str) -> Delta | MigratedTo:
    data = json.loads(text)
    if name == MOVED:
        return msgspec.convert(data, MigratedTo)
    if name == DELTA:
        return msgspec.convert(data, Delta)
    raise EngineFailed(_sentence(text.encode()))


def _sentence(data: bytes) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(data)["error"]["message"])
    return "it did not answer as a Foreword server does"


async def _events(lines: AsyncIterator[str]) -> AsyncGenerator[tuple[str, str], None]:
    """Name and data of each server-sent event; every event here has one line of data."""
    name = ""
    async for line in lines:
        if line.startswith("event:"):
            name = line[6:].strip()
        elif line.startswith("data:"):
            yield name, line[5:].strip()
            name = ""


async def _until(
    items: AsyncGenerator[Delta | MigratedTo, None], ended: asyncio.Event
) -> AsyncGenerator[Delta | MigratedTo, None]:
    """The items; raises ShuttingDown as soon as `ended` is set."""
    stop = asyncio.ensure_future(ended.wait())
    following: asyncio.Future[Delta | MigratedTo] | None = None
    try:
        while True:
            following = asyncio.ensure_future(anext(items))
            await asyncio.wait((following, stop), return_when=asyncio.FIRST_COMPLETED)
            if not following.done():
                raise ShuttingDown("The server is shutting down and ended the request before its end")
            try:
                yield following.result()
            except StopAsyncIteration:
                return
    finally:
        stop.cancel()
        if following is not None:
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration, ForewordError):
                await following
        await items.aclose()


async def keep_alive(events: AsyncGenerator[bytes, None], seconds: float = KEEP_ALIVE) -> AsyncGenerator[bytes, None]:
    """The events, and a comment whenever there was none for so long."""
    following: asyncio.Future[bytes] | None = None
    try:
        while True:
            following = following or asyncio.ensure_future(anext(events))
            done, _ = await asyncio.wait((following,), timeout=seconds)
            if not done:
                yield b": nothing new\n\n"
                continue
            try:
                item = following.result()
            except StopAsyncIteration:
                return
            following = None
            yield item
    finally:
        if following is not None:
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration, ForewordError):
                await following
        await events.aclose()
