"""Pieces of an answer that are sent at once: what a client gets, and what a client that does not read can make a front keep."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import cast

import pytest
from small_front import front, route

from foreword.api.front import Answer, ByteStream, Call
from foreword.api.http import bind, serving
from foreword.process_config import ServerConfig

_HEADERS = {"content-type": "text/event-stream"}
# A piece, and what the sockets of both sides and aiohttp hold before a writer waits.
_PIECE = b"data: 0123456789\n\n" * 60
_MOST_HELD = 32 << 20


async def asked(
    write: Callable[[ByteStream], Awaitable[None]],
    read: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    version: str,
    *,
    at_once: bool,
) -> None:
    """A front answers one request on a real socket with what `write` sends; `read` is its client."""

    async def stream(call: Call) -> Answer | None:
        out = await call.open(_HEADERS, at_once=at_once)
        await write(out)
        await out.end()
        return None

    served, _ = front(route(stream))
    config = ServerConfig(port=0)
    listener = bind(config)
    try:
        async with serving(served, listener, config):
            reader, writer = await asyncio.open_connection(*listener.getsockname()[:2], limit=_MOST_HELD)
            writer.write(f"GET /v1/x HTTP/{version}\r\nhost: x\r\n\r\n".encode())
            try:
                await read(reader, writer)
            finally:
                writer.transport.abort()
    finally:
        served.work.close()


def unchunked(body: bytes) -> bytes:
    found = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        found, body = found + body[: int(size, 16)], body[int(size, 16) + 2 :]
    return found


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_pieces_in_their_order(version: str, at_once: bool, seed: int) -> None:
    """Each piece arrives once and in its place, whichever way it was sent, with the head before and in both versions of HTTP;
    all but those before the head are sent at once to a client that reads."""
    draw = Random(seed)
    pieces = [b"data: %d %b\n\n" % (number, b"x" * draw.choice((0, 1, 500, 3000))) for number in range(200)]
    sent_now = []

    async def write(out: ByteStream) -> None:
        for piece in pieces:
            if draw.random() < 0.3 or not out.write_now(piece):
                await out.write(piece)
            else:
                sent_now.append(piece)
            await asyncio.sleep(0)

    async def read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        if b"transfer-encoding: chunked" not in head:
            assert version == "1.0"
            body = await reader.read()
        else:
            body = unchunked((await reader.readuntil(b"\r\n0\r\n\r\n"))[: -len(b"0\r\n\r\n")])
        assert body == b"".join(pieces)

    asyncio.run(asyncio.wait_for(asked(write, read, version, at_once=at_once), 60))
    assert len(sent_now) > 50


def test_a_client_that_does_not_read() -> None:
    """Data that is sent at once to a client that reads nothing is bounded: then the writer waits, until the client has gone."""
    sent = 0

    async def write(out: ByteStream) -> None:
        nonlocal sent
        while sent < 2 * _MOST_HELD:
            sent += len(_PIECE)
            if not out.write_now(_PIECE):
                await out.write(_PIECE)

    async def read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        cast(asyncio.Transport, writer.transport).pause_reading()
        before = -1
        while not sent or before != sent:  # until the writer waits
            before = sent
            await asyncio.sleep(0.3)

    asyncio.run(asyncio.wait_for(asked(write, read, "1.1", at_once=True), 60))
    assert sent < _MOST_HELD
