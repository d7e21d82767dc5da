"""A front on aiohttp: requests, whole answers, streams, and clients that leave."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Final

import aiohttp
from aiohttp import web

from foreword.api.errors import CLIENT_GONE
from foreword.api.front import Front
from foreword.api.outcomes import ClientGone
from foreword.errors import BadRequest
from foreword.router.connections import ClientConnections

_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_SERVER: Final = {"server": "foreword"}

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


def handler_of(front: Front, connections: ClientConnections) -> Handler:
    """What aiohttp calls for each request. It cancels the call when the client leaves."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        exchange = _Exchange(request)
        with connections.serving(request):
            answer = await front.serve(exchange)
        if answer is not None:
            return web.Response(body=answer.body, status=answer.status, headers={**answer.headers, **_SERVER})
        return exchange.out or web.Response(status=CLIENT_GONE)

    return handle


class _EventStream(web.StreamResponse):
    # aiohttp then sends the head together with the first event.
    _send_headers_immediately = False


class _Exchange:
    def __init__(self, request: web.BaseRequest) -> None:
        self._request = request
        self.method = request.method
        self.headers: Mapping[str, str] = request.headers
        self.address = request.remote
        self.path, self.query = request.rel_url.raw_path, request.rel_url.raw_query_string
        self.out: _EventStream | None = None

    def arrived(self, limit: int) -> bytes | None:
        request = self._request
        length = request.content_length
        if length is None or length > limit or not request.content.is_eof() or "content-encoding" in self.headers:
            return None
        return request.content.read_nowait()

    async def pieces(self) -> AsyncIterator[bytes]:
        request = self._request
        try:
            if self.headers.get("expect", "").lower() == "100-continue":
                await request.writer.write(_CONTINUE)
                request.writer.output_size = 0  # the head of the answer is still to come
            while piece := await request.content.readany():
                yield piece
        except (ConnectionError, aiohttp.ClientConnectionError) as error:
            raise ClientGone from error
        except (aiohttp.ClientPayloadError, web.RequestPayloadError) as error:
            raise BadRequest(f"The body cannot be read: {error}") from None

    def watch(self) -> None:
        """aiohttp always does."""

    async def open(self, status: int, headers: Mapping[str, str]) -> _Exchange:
        self.out = _EventStream(status=status, headers={**headers, **_SERVER})
        try:
            await self.out.prepare(self._request)
        except (ConnectionError, aiohttp.ClientConnectionError) as error:
            raise ClientGone from error
        return self

    async def write(self, data: bytes) -> None:
        assert self.out is not None
        try:
            await self.out.write(data)
        except (ConnectionError, aiohttp.ClientConnectionError) as error:
            raise ClientGone from error

    async def end(self, data: bytes = b"") -> None:
        assert self.out is not None
        try:
            await self.out.write_eof(data)
        except (ConnectionError, aiohttp.ClientConnectionError) as error:
            raise ClientGone from error
