"""Read the bodies of requests within limits: bytes of one body, and of all bodies that are in memory."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from starlette.requests import Request

from foreword.api.errors import BodyTooLarge, UnsupportedMediaType
from foreword.errors import QueueFull


class Bodies:
    """The bodies that are being read and parsed. Runs on the event loop's thread.

    Args:
        total: bytes of all bodies.
    """

    def __init__(self, total: int = 256 << 20) -> None:
        self._total = total
        self._used = 0

    @asynccontextmanager
    async def read(self, request: Request, limit: int) -> AsyncGenerator[bytes, None]:
        """The JSON body of a request. Its bytes count until the end of the block.

        Raises UnsupportedMediaType, BodyTooLarge for more than `limit` bytes, QueueFull if other bodies take all memory.
        """
        _check_media_type(request)
        if _declared_length(request) > limit:
            raise BodyTooLarge(limit)
        body = bytearray()
        try:
            async for chunk in request.stream():
                self._used += len(chunk)
                body += chunk
                if len(body) > limit:
                    raise BodyTooLarge(limit)
                # The first body is always read, however small the total is.
                if self._used > max(self._total, limit):
                    raise QueueFull("Too many large requests are being read; retry later")
            yield bytes(body)
        finally:
            self._used -= len(body)


def _check_media_type(request: Request) -> None:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise UnsupportedMediaType("Send the body as JSON, with the header Content-Type: application/json")


def _declared_length(request: Request) -> int:
    text = request.headers.get("content-length", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else 0
