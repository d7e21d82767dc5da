"""The stream to a client: its head, events, and comments while there are none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

import aiohttp
from aiohttp import web

_COMMENT: Final = b": keep-alive\n\n"


class ClientDisconnected(Exception):
    """The client closed the connection."""


class _EventStream(web.StreamResponse):
    # aiohttp then sends the head together with the first event.
    _send_headers_immediately = False


class ClientStream:
    """A streamed response. It begins with the first event, or with a comment if the first event takes long: from then on errors
    are events too.

    Args:
        headers: makes the headers from those of a replica's response.
        keep_alive: seconds without an event after which a comment is sent, so that proxies keep the connection open.
    """

    def __init__(
        self,
        http_request: web.BaseRequest,
        headers: Callable[[Mapping[str, str]], Mapping[str, str]],
        keep_alive: float,
    ) -> None:
        self._http_request = http_request
        self._headers = headers
        self._keep_alive = keep_alive
        self._out: web.StreamResponse | None = None
        self._ended = False
        self._writes = self._seen = 0
        self._timer: asyncio.TimerHandle | None = None
        self._comment: asyncio.Task[None] | None = None

    @property
    def begun(self) -> bool:
        """The head was sent."""
        return self._out is not None

    def send_comments(self) -> None:
        """Send comments from now on, until `stop`."""
        self._timer = asyncio.get_running_loop().call_later(self._keep_alive, self._check)

    def stop(self) -> None:
        """Send no more comments."""
        if self._timer is not None:
            self._timer.cancel()
        if self._comment is not None:
            self._comment.cancel()

    async def write(self, data: bytes, given: Mapping[str, str] | None = None, *, last: bool = False) -> None:
        """Send whole events. Raises ClientDisconnected.

        Args:
            given: headers of the replica's response.
            last: these are the last events; the stream is ended with them, in one packet.
        """
        self._writes += 1
        try:
            if self._out is None:
                self._out = _EventStream(headers=self._headers(given or {}))
                await self._out.prepare(self._http_request)
            if last:
                await self._end(self._out, data)
            elif data and not self._ended:
                await self._out.write(data)
        except (ConnectionError, aiohttp.ClientConnectionError) as error:
            raise ClientDisconnected from error

    async def close(self) -> web.StreamResponse:
        """End a stream that has begun, if it has not ended. Raises ClientDisconnected."""
        assert self._out is not None
        await self.write(b"", last=True)
        return self._out

    async def _end(self, out: web.StreamResponse, data: bytes) -> None:
        if not self._ended:
            self._ended = True
            self.stop()
            await out.write_eof(data)

    def _check(self) -> None:
        if self._writes == self._seen and (self._comment is None or self._comment.done()):
            self._comment = asyncio.ensure_future(self._send_comment())
        self._seen = self._writes
        self.send_comments()

    async def _send_comment(self) -> None:
        try:
            await self.write(_COMMENT)
            self._seen = self._writes
        except ClientDisconnected:
            self.stop()
