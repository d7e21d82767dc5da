"""Connections to replicas. aiohttp makes them, keeps them, and parses what comes.

A stream of events is taken in the turn of the event loop in which it comes. aiohttp's own way, a future and a task that wakes up
for each token, stays for what comes while nobody takes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, cast

import aiohttp
from aiohttp.client_proto import ResponseHandler

# Pieces of a stream that nobody takes: with more, the replica waits, however short they are.
_MOST_PIECES: Final = 1 << 14


class ReplicaConnection(ResponseHandler):
    """A connection that does not take what comes between two requests for the answer to the second, and on which a body ends
    where it cannot be parsed. aiohttp's takes an answer at any time, and leaves whoever reads such a body to its timeouts.

    Attributes:
        reader: of the stream that is being taken.
    """

    _asked = False
    reader: _EventReader | None = None

    def set_response_params(self, **params: Any) -> None:
        self._asked = True
        super().set_response_params(**params)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.reader is not None:
            self.reader.hand_on()

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


async def take_all(content: aiohttp.StreamReader, take: Callable[[bytes], bool]) -> None:
    """Hand what has come of a response, and what comes, to `take`, until it returns False, or the end has come. Raises what
    `take` raises, and what aiohttp's readers raise."""
    if type(content) is aiohttp.StreamReader:
        # aiohttp's parser makes readers, and lets nobody choose their class.
        content.__class__, content._http_chunk_splits = cast(Any, _EventReader), None
    if not content.at_eof():
        await cast(_EventReader, content).take_all(take)


class _Reading(asyncio.Future[bool]):
    """Waits until no more is to be taken (True), or nothing more comes."""

    def __init__(self, take: Callable[[bytes], bool]) -> None:
        super().__init__()
        self.take = take


class _EventReader(aiohttp.StreamReader):
    """A reader that aiohttp's parser has filled so far. Its waiter is a `_Reading` while that takes what comes."""

    __slots__ = ()

    async def take_all(self, take: Callable[[bytes], bool]) -> None:
        while True:
            while self._buffer:
                # For each piece that it hands out aiohttp asks its parser and its transport for more.
                whole = b"".join(self._buffer)
                self._buffer.clear()
                self._buffer.append(whole)
                if not take(self.read_nowait()):
                    return
            if self._exception is not None:
                raise self._exception
            if self._eof:
                return
            self._waiter, self._protocol.reader = _Reading(take), self
            try:
                if await self._waiter:
                    return
            finally:
                self._waiter = self._protocol.reader = None

    def hand_on(self) -> None:
        """What has come together is parsed."""
        reading = self._waiter
        if not self._buffer or reading is None or reading.done():
            return
        try:
            if self._protocol._reading_paused:  # its task goes on with what is still to be parsed
                reading.set_result(False)
            else:
                data = b"".join(self._buffer)
                self._buffer.clear()
                self._size = 0
                if reading.take(data):
                    return
                if not reading.done():  # `take` may have closed the response
                    reading.set_result(True)
        except Exception as error:  # noqa: BLE001 - raised where the stream is read
            if not reading.done():
                reading.set_exception(error)
        self._waiter = reading = None  # an error, whose traceback has this frame, would refer to itself

    # What the parser calls

    def feed_data(self, data: bytes, size: int = 0) -> bool:
        if data:
            self._buffer.append(data)
            self._size += len(data)
            if self._size > self._high_water or len(self._buffer) > _MOST_PIECES:
                self._protocol.pause_reading()
        return False

    def begin_http_chunk_receiving(self) -> None:
        """Where chunks begin and end is of no interest."""

    def end_http_chunk_receiving(self) -> None:
        """As their beginning."""
