"""Requests to replicas, and connections to them, which aiohttp makes, keeps and reads."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from yarl import URL

_MOST_BYTES: Final = 1 << 16  # longer bodies of requests wait until the replica reads
_MOST_KNOWN: Final = 4096


class ReplicaConnection(ResponseHandler):
    """A connection that does not take what comes between two requests for the answer to the second, and on which a body ends
    where it cannot be parsed. aiohttp's takes an answer at any time, and tells nothing to who reads such a body."""

    # A body, and what gets all that comes of it in the turn of the event loop in which it comes, until that returns False.
    taking: tuple[Any, Callable[[bytes], bool]] | None = None
    _asked = False

    def set_response_params(self, **params: Any) -> None:
        self._asked, self.taking = True, None
        super().set_response_params(**params)

    def data_received(self, data: bytes) -> None:
        if self._parser is None and self.transport is not None:  # before the first request: the answer to none
            self.transport.close()
            return
        super().data_received(data)
        if self.taking is None:
            return
        body, take = self.taking
        waiter = body._eof_waiter
        if not body._buffer or waiter is None or waiter.done():
            return
        try:
            if not self._reading_paused:  # otherwise the task takes it, and lets the parser go on
                data = b"".join(body._buffer)
                body._buffer.clear()
                body._size = 0
                if body._http_chunk_splits:
                    body._http_chunk_splits.clear()
                if take(data):
                    return
                self.taking = None
            if not waiter.done():  # `take` may have closed the response
                waiter.set_result(None)
        except Exception as error:  # noqa: BLE001 - raised where the stream is read
            if not waiter.done():
                waiter.set_exception(error)
        del waiter  # an error, whose traceback has this frame, would refer to itself

    def feed_data(self, data: Any, size: int = 0) -> None:
        if self._asked:
            self._asked = 100 <= data[0].code < 200
            super().feed_data(data, size)
        elif self.transport is not None:
            self.transport.close()

    def set_exception(self, exc: BaseException, *cause: BaseException) -> None:
        body = self._payload
        if body is not None and not body.is_eof() and body.exception() is None:
            body.set_exception(exc if isinstance(exc, aiohttp.ClientError) else aiohttp.ClientPayloadError(str(exc)))
        super().set_exception(exc, *cause)


async def take_all(content: Any, take: Callable[[bytes], bool]) -> None:
    """Hand what has come of a body (`response.content`), and what comes, to `take`, until it returns False or the end has come.
    Raises what `take` raises, and what aiohttp's readers raise."""
    while not content.at_eof():
        if content._buffer:
            whole = b"".join(content._buffer)
            content._buffer.clear()
            content._buffer.append(whole)
            if not take(content.read_nowait()):
                return
        elif (error := content.exception()) is not None:
            raise error
        else:
            content._protocol.taking = content, take
            try:
                await content.wait_eof()
            finally:
                going, content._protocol.taking = content._protocol.taking is not None, None
            if not going:
                return


class WholeRequest(aiohttp.ClientRequest):
    """A request to a replica. A body that is there as a whole is sent with the head: aiohttp would start a task for it.

    Args:
        known: requests of the session with such bodies, by what differs beside headers, body and time limit. aiohttp takes
            as many steps to make one as the router takes to place it; so it makes the first, which is copied.
    """

    def __init__(
        self, known: dict[Any, aiohttp.ClientRequest], method: str, url: URL, *, headers: Any, data: Any, **more: Any
    ) -> None:
        self._whole = data if isinstance(data, bytes) and len(data) <= _MOST_BYTES and not more.get("params") else None
        if self._whole is None:
            super().__init__(method, url, headers=headers, data=data, **more)
            return
        key = method, url, more.get("auth")
        first = known.get(key)
        if first is None:
            if len(known) >= _MOST_KNOWN:
                known.clear()
            first = known[key] = aiohttp.ClientRequest(method, url, **{**more, "timer": None})
        vars(self).update(vars(first), _whole=self._whole, _timer=more["timer"], headers=first.headers.copy())
        self.headers.update(headers)
        self.headers["content-length"] = str(len(data))

    async def send(self, conn: Connection) -> aiohttp.ClientResponse:
        protocol = conn.protocol
        if self._whole is None:
            return await super().send(conn)
        if protocol is None or protocol.transport is None or protocol.writing_paused:
            self.update_body_from_data(self._whole)
            return await super().send(conn)
        transport = protocol.transport
        # The body goes with the head, in one call of the system. Nothing is awaited before it is put back.
        both: Any = SimpleNamespace(
            is_closing=transport.is_closing, write=lambda head: transport.write(head + self._whole)
        )
        protocol.transport = both
        try:
            return await super().send(conn)
        finally:
            if protocol.transport is not None:
                protocol.transport = transport
