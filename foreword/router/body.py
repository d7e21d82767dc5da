"""Reads the bodies of requests within limits: bytes of one body, of all bodies in memory, and time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

from aiohttp import web

from foreword.api.dialects.limits import Limits
from foreword.api.errors import BodyTooLarge, UnsupportedMediaType
from foreword.errors import BadRequest, QueueFull

# A body may take longer than its limit if it comes at least this fast, in bytes per second.
_RATE: Final = 16 << 10
_TOTAL_BYTES: Final = 256 << 20


class BodyTimeout(BadRequest, status=408, code="request_timeout"):
    """The client sent the body of its request too slowly."""


class RequestBodies:
    """The bodies that are in memory. Runs on the event loop.

    Args:
        seconds: for one body, or longer if it comes at 16 KiB per second.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._used = 0

    def arrived(self, request: web.Request, limit: int) -> bytes | None:
        """The JSON body of a request if all of it, of at most `limit` bytes, came with the head, as small bodies do. The caller
        does not wait before it has parsed it. Raises UnsupportedMediaType."""
        check_media_type(request)
        length = request.content_length
        if length is None or length > limit or not request.content.is_eof() or "content-encoding" in request.headers:
            return None
        return request.content.read_nowait()

    @asynccontextmanager
    async def read(self, request: web.Request, limit: int) -> AsyncGenerator[bytes, None]:
        """The JSON body of a request. Its bytes count until the end of the block.

        Raises UnsupportedMediaType, BodyTooLarge for more than `limit` bytes, BodyTimeout, or QueueFull if other bodies take
        all memory.
        """
        check_media_type(request)
        if (request.content_length or 0) > limit:
            raise BodyTooLarge(limit)
        body = bytearray()
        try:
            await self._fill(body, request, limit)
            yield bytes(body)
        finally:
            self._used -= len(body)

    async def whole(self, request: web.Request, limits: Limits) -> bytes:
        """The JSON body of a request. Raises as `read`."""
        async with self.read(request, limits.body_bytes) as raw:
            return raw

    async def _fill(self, body: bytearray, request: web.Request, limit: int) -> None:
        began = asyncio.get_running_loop().time()
        allowed = self._seconds
        try:
            async with asyncio.timeout_at(began + allowed) as timeout:
                while piece := await request.content.readany():
                    self._add(body, piece, limit)
                    if len(body) > allowed * _RATE:
                        allowed = len(body) / _RATE
                        timeout.reschedule(began + allowed)
        except TimeoutError:
            raise BodyTimeout(f"The body did not arrive within {allowed:.0f} s") from None

    def _add(self, body: bytearray, piece: bytes, limit: int) -> None:
        body += piece
        self._used += len(piece)
        if len(body) > limit:
            raise BodyTooLarge(limit)
        # The first body is always read, however small the total is.
        if self._used > max(_TOTAL_BYTES, limit):
            raise QueueFull("Too many large requests are being read; retry later")


def check_media_type(request: web.Request) -> None:
    """Raises UnsupportedMediaType for what a web page could send from another site without being asked first."""
    if request.content_type != "application/json" and not request.content_type.endswith("+json"):
        raise UnsupportedMediaType("Send the body as JSON, with the header Content-Type: application/json")
