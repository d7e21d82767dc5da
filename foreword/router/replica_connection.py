"""Connections to replicas. aiohttp makes them, keeps them, and parses what comes.

A stream of events is taken in the turn of the event loop in which it comes: a future and a task that wake up for each token, as
aiohttp has them, are as much work as all else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import aiohttp
from aiohttp.client_proto import ResponseHandler


class ReplicaConnection(ResponseHandler):
    """A connection that does not take what comes between two requests for the answer to the second, and on which a body ends
    where it cannot be parsed. aiohttp's takes an answer at any time, and leaves whoever reads such a body to its timeouts.

    Attributes:
        take: gets what comes of the present body, until it returns False; None while `take_all` does not wait.
    """

    take: Callable[[bytes], bool] | None = None
    _asked = False

    def set_response_params(self, **params: Any) -> None:
        self._asked, self.take = True, None
        super().set_response_params(**params)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.take is not None and (body := self._payload) is not None:
            self._hand_on(body, self.take)

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

    def _hand_on(self, body: Any, take: Callable[[bytes], bool]) -> None:
        """What has come together is parsed."""
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
                self.take = None
            if not waiter.done():  # `take` may have closed the response
                waiter.set_result(None)
        except Exception as error:  # noqa: BLE001 - raised where the stream is read
            if not waiter.done():
                waiter.set_exception(error)
        del waiter  # an error, whose traceback has this frame, would refer to itself


async def take_all(content: aiohttp.StreamReader, take: Callable[[bytes], bool]) -> None:
    """Hand what has come of a response, and what comes, to `take`, until it returns False, or the end has come. Raises what
    `take` raises, and what aiohttp's readers raise."""
    while not content.at_eof():
        connection: Any = content._protocol
        if content._buffer:
            # For each piece that it hands out aiohttp asks its parser and its transport for more.
            whole = b"".join(content._buffer)
            content._buffer.clear()
            content._buffer.append(whole)
            if not take(content.read_nowait()):
                return
        elif (error := content.exception()) is not None:
            raise error
        else:
            connection.take = take
            try:
                await content.wait_eof()
            finally:
                going, connection.take = connection.take is not None, None
            if not going:
                return
