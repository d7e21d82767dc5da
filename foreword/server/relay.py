"""Relay the output of a migrated request: fetch its deltas from the server that continues it, for a client that stayed here."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final, TypeVar
from urllib.parse import quote

import msgspec

from foreword.api import sse
from foreword.api.dialects.answer_reader import error_of
from foreword.decoders import convert, decode_json
from foreword.engine.request import Delta, MigratedTo
from foreword.errors import EngineFailed, ForewordError, ShuttingDown, TransferUnavailable
from foreword.server.job import FOLLOW_HEADER, Caller

T = TypeVar("T")
# Names of events between servers, and between a server and a router.
MOVED: Final = "foreword.moved"
DELTA: Final = "foreword.delta"
# Seconds without any byte after which the other server counts as dead. It sends a comment every KEEP_ALIVE seconds.
_READ_TIMEOUT: Final = 30.0


def moved_event(departure: MigratedTo) -> bytes:
    """The last event of a stream whose client reconnects by itself."""
    return sse.encode(dataclasses.asdict(departure), MOVED)


def delta_event(delta: Delta) -> bytes:
    """A delta for another server."""
    return sse.encode(msgspec.to_builtins(delta, builtin_types=(bytes,)), DELTA)


async def follow(departure: MigratedTo, caller: Caller, stop: asyncio.Event) -> AsyncGenerator[Delta, None]:
    """The deltas of a migrated request, also when it migrates again.

    Raises ShuttingDown once `stop` is set, TransferUnavailable if the other server is gone, EngineFailed with the other
    server's error.
    """
    source: MigratedTo | None = departure
    while source is not None:
        onward: MigratedTo | None = None
        async with aclosing(_until_stopped(_fetch(source, caller), stop)) as items:
            async for item in items:
                if isinstance(item, MigratedTo):
                    onward = item
                    break
                yield item
                if item.finish_reason is not None:
                    return
        if onward is None:
            raise TransferUnavailable(f"the server at {source.to}, where the request migrated to, has ended")
        source = onward


async def _fetch(source: MigratedTo, caller: Caller) -> AsyncGenerator[Delta | MigratedTo, None]:
    import httpx

    url = f"{source.to.rstrip('/')}/v1/requests/{quote(source.request_id, safe='')}/stream"
    headers = {**caller.headers, FOLLOW_HEADER: "1"}
    timeout = httpx.Timeout(10, read=_READ_TIMEOUT)
    query = {"from": str(source.tokens), "format": "deltas"}
    parser = sse.EventParser()
    try:
        async with (
            httpx.AsyncClient(timeout=timeout, trust_env=False, verify=url.startswith("https")) as client,
            client.stream("GET", url, params=query, headers=headers) as response,
        ):
            if response.status_code != 200:
                message = _error_message(await response.aread())
                raise TransferUnavailable(f"{source.to} does not continue the request: {message}")
            async for piece in response.aiter_bytes():
                for event in parser.feed(piece):
                    if event.data:
                        yield _decode(event)
    except httpx.HTTPError as error:
        text = f"the connection to {source.to}, where the request migrated to, broke: {error}"
        raise TransferUnavailable(text) from error


def _decode(event: sse.ServerSentEvent) -> Delta | MigratedTo:
    if event.name == MOVED:
        return decode_json(event.data, MigratedTo)
    if event.name == DELTA:
        return convert(json.loads(event.data), Delta)
    raise EngineFailed(_error_message(event.data))


def _error_message(data: bytes) -> str:
    return error_of(data).message or "it did not answer as a Foreword server does"


async def _until_stopped(items: AsyncGenerator[T, None], stop: asyncio.Event) -> AsyncGenerator[T, None]:
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
