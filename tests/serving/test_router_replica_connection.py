"""Streams of events are taken where aiohttp parses them: when, in which pieces, and what is kept while nobody takes them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import aiohttp
import pytest
from raw_replica import CHUNKED, LAST_CHUNK, chunk

from foreword.router.replica_connection import ReplicaConnection, take_all

_BUFFER = 1 << 18


class Transport(asyncio.Transport):
    """Notes whether it is read from."""

    paused = closed = False

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


class Kept:
    """Keeps what it takes, and wants more."""

    def __init__(self, taken: list[bytes]) -> None:
        self._taken = taken

    def __call__(self, data: bytes) -> bool:
        self._taken.append(data)
        return True


class Connection:
    """aiohttp's end of a connection, to which a test gives bytes. `content` is the body of the answer that has begun."""

    content: aiohttp.StreamReader

    def __init__(self) -> None:
        self.transport = Transport()
        self.handler = ReplicaConnection(asyncio.get_running_loop())
        self.handler.connection_made(self.transport)
        self.handler.set_response_params(read_bufsize=_BUFFER, read_until_eof=True)

    def reads(self) -> bool:
        return not self.transport.paused

    async def begin(self, data: bytes) -> None:
        self.handler.data_received(data)
        _, self.content = await self.handler.read()


def run(work: Callable[[Connection], Awaitable[None]]) -> None:
    """On an event loop, with a new connection whose answer has begun."""

    async def with_connection() -> None:
        connection = Connection()
        await connection.begin(CHUNKED)
        await work(connection)

    asyncio.run(asyncio.wait_for(with_connection(), 60))


async def taking(connection: Connection, take: Callable[[bytes], bool]) -> asyncio.Task[None]:
    """A task that has begun to take."""
    task = asyncio.create_task(take_all(connection.content, take))
    await asyncio.sleep(0)
    return task


def test_an_event_is_taken_in_the_turn_in_which_it_comes() -> None:
    """Each event that comes alone is handed over once, within the call that brings its bytes: no turn of the event loop, no
    task and no second piece is between."""

    async def work(connection: Connection) -> None:
        taken: list[bytes] = []
        task = await taking(connection, Kept(taken))
        turns = tasks = 0
        loop = asyncio.get_running_loop()

        def started(loop: asyncio.AbstractEventLoop, work: Any, **more: Any) -> asyncio.Task[Any]:
            nonlocal tasks
            tasks += 1
            return asyncio.Task(work, loop=loop, **more)

        call_soon = loop.call_soon

        def counted(*arguments: Any, **more: Any) -> asyncio.Handle:
            nonlocal turns
            turns += 1
            return call_soon(*arguments, **more)

        loop.set_task_factory(started)
        loop.call_soon = cast(Any, counted)  # type: ignore[method-assign]
        events = [b"data: %d\n\n" % number for number in range(100)]
        for number, event in enumerate(events):
            connection.handler.data_received(chunk(event))
            assert len(taken) == number + 1
        assert taken == events and turns == 0 and tasks == 0
        connection.handler.data_received(LAST_CHUNK)
        await task
        assert turns > 0

    run(work)


@pytest.mark.parametrize("before", [0, 1, 7])
def test_what_came_before_is_taken_first_and_at_once(before: int) -> None:
    """Events that came while nobody took them come first, as one piece, in their order."""

    async def work(connection: Connection) -> None:
        taken: list[bytes] = []
        events = [b"data: %d\n\n" % number for number in range(10)]
        for event in events[:before]:
            connection.handler.data_received(chunk(event))
        task = await taking(connection, Kept(taken))
        assert taken == ([b"".join(events[:before])] if before else [])
        for event in events[before:]:
            connection.handler.data_received(chunk(event))
        connection.handler.data_received(LAST_CHUNK)
        await task
        assert b"".join(taken) == b"".join(events) and len(taken) == 10 - before + (before > 0)

    run(work)


def test_what_is_not_taken_is_kept_for_the_next() -> None:
    """When no more is to be taken, what comes then, also in the same piece, is kept: nothing is lost or doubled, however often
    the reading changes hands."""

    async def work(connection: Connection) -> None:
        taken: list[bytes] = []

        def one(data: bytes) -> bool:
            taken.append(data)
            return False

        events = [b"data: %d\n\n" % number for number in range(30)]
        for number in range(0, 30, 3):
            task = await taking(connection, one)
            connection.handler.data_received(b"".join(map(chunk, events[number : number + 3])))
            await task
        await asyncio.sleep(0)
        connection.handler.data_received(LAST_CHUNK)
        while not connection.content.at_eof():
            await take_all(connection.content, one)
        assert b"".join(taken) == b"".join(events)

    run(work)


def test_an_error_of_the_taker_is_raised_where_it_is_awaited() -> None:
    """The error is raised as it is, whether its cause came before or later; the connection still reads what follows."""

    async def work(connection: Connection) -> None:
        class Refused(Exception):
            pass

        def refuse(data: bytes) -> bool:
            raise Refused

        task = await taking(connection, refuse)
        connection.handler.data_received(chunk(b"data: 1\n\n"))
        connection.handler.data_received(chunk(b"data: 2\n\n"))
        with pytest.raises(Refused):
            await task
        with pytest.raises(Refused):
            await take_all(connection.content, refuse)
        assert not connection.transport.closed

    run(work)


@pytest.mark.parametrize("how", ["closed", "cut", "malformed", "reset"])
def test_a_stream_that_breaks_raises(how: str) -> None:
    """A connection that ends before its events raises where they are taken, whatever came before."""

    async def work(connection: Connection) -> None:
        taken: list[bytes] = []
        task = await taking(connection, Kept(taken))
        connection.handler.data_received(chunk(b"data: 1\n\n"))
        if how == "malformed":
            connection.handler.data_received(b"zz\r\n")
            assert connection.transport.closed
        elif how == "closed":
            connection.content.set_exception(aiohttp.ClientConnectionError("Connection closed"))
        if how == "cut":
            connection.handler.data_received(b"ff\r\ndata: 2")
        connection.handler.connection_lost(ConnectionResetError() if how == "reset" else None)
        with pytest.raises(aiohttp.ClientError):
            await task
        assert taken[0] == b"data: 1\n\n"

    run(work)


def test_a_reading_that_is_cancelled_takes_nothing_more() -> None:
    """Events that come after that are kept."""

    async def work(connection: Connection) -> None:
        taken: list[bytes] = []
        task = await taking(connection, Kept(taken))
        task.cancel()
        connection.handler.data_received(chunk(b"data: 1\n\n"))
        with pytest.raises(asyncio.CancelledError):
            await task
        connection.handler.data_received(chunk(b"data: 2\n\n") + LAST_CHUNK)
        assert taken == [] and connection.content.read_nowait() == b"data: 1\n\ndata: 2\n\n"

    run(work)


@pytest.mark.parametrize("size", [1, 100, 100_000])
def test_what_nobody_takes_is_bounded(size: int) -> None:
    """The replica waits while nobody takes what it has sent, in few large pieces or in many small ones, and goes on once it is
    taken: all of it arrives."""

    async def work(connection: Connection) -> None:
        taken: list[bytes] = []
        event, sent = chunk(b"x" * size), 0
        (await taking(connection, lambda data: False)).cancel()
        while not connection.transport.paused:
            connection.handler.data_received(event)
            sent += 1
        assert sent * size <= 3 * _BUFFER and sent <= 1 << 15
        task = await taking(connection, Kept(taken))
        assert connection.reads()
        connection.handler.data_received(LAST_CHUNK)
        await task
        assert b"".join(taken) == b"x" * (size * sent)

    run(work)


def test_an_answer_without_a_body() -> None:
    """There is nothing to take, and the reader that all such answers share stays as it is."""

    async def work() -> None:
        connection = Connection()
        await connection.begin(b"HTTP/1.1 204 No Content\r\ncontent-type: text/event-stream\r\n\r\n")
        kind = type(connection.content)
        await take_all(connection.content, lambda data: False)
        assert type(connection.content) is kind

    asyncio.run(asyncio.wait_for(work(), 60))


@pytest.mark.parametrize("more", [b"HTTP/1.1 204 No Content\r\n\r\n", CHUNKED + chunk(b"data: smuggled\n\n")])
@pytest.mark.parametrize("apart", [False, True])
def test_an_answer_to_no_request_closes_the_connection(more: bytes, apart: bool) -> None:
    """An answer behind the end of the one that was asked for is no part of it, and closes the connection, whether it has a body
    or not, and whether it comes in the same packet."""

    async def work(connection: Connection) -> None:
        taken: list[bytes] = []
        task = await taking(connection, Kept(taken))
        connection.handler.data_received(chunk(b"data: 1\n\n"))
        for data in [LAST_CHUNK, more] if apart else [LAST_CHUNK + more]:
            connection.handler.data_received(data)
        await task
        assert taken == [b"data: 1\n\n"] and connection.transport.closed

    run(work)


@pytest.mark.parametrize("early", [CHUNKED, CHUNKED + chunk(b"data: smuggled\n\n") + LAST_CHUNK, b"H"])
def test_bytes_before_the_first_request_close_the_connection(early: bytes) -> None:
    """Bytes that come before anything was asked are the answer to nothing: the connection is closed, and they are no answer to
    a request that follows."""

    async def work() -> None:
        transport = Transport()
        handler = ReplicaConnection(asyncio.get_running_loop())
        handler.connection_made(transport)
        handler.data_received(early)
        assert transport.closed and not handler.is_connected()
        handler.set_response_params(read_bufsize=_BUFFER, read_until_eof=True)
        handler.connection_lost(None)
        with pytest.raises(aiohttp.ServerDisconnectedError):
            await handler.read()

    asyncio.run(asyncio.wait_for(work(), 60))
