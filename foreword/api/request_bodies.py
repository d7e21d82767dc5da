"""Reads the bodies of requests within limits: bytes of one body, of all bodies in memory, and time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Final

from foreword.api.errors import BodyTooLarge, UnsupportedMediaType
from foreword.errors import BadRequest
from foreword.request_errors import QueueFull

# A body may take longer than its limit if it comes at least this fast, in bytes per second.
_RATE: Final = 16 << 10
_TOTAL_BYTES: Final = 256 << 20


class BodyTimeout(BadRequest, status=408, code="request_timeout"):
    """The client sent the body of its request too slowly."""


class HeldBody:
    """The bytes of one body, which count until `release`."""

    __slots__ = ("_bodies", "data")

    def __init__(self, bodies: RequestBodies) -> None:
        self._bodies = bodies
        self.data = bytearray()

    def add(self, piece: bytes, limit: int) -> None:
        """Raises BodyTooLarge for more than `limit` bytes, QueueFull if other bodies take all memory."""
        self.data += piece
        self._bodies.used += len(piece)
        if len(self.data) > limit:
            raise BodyTooLarge(limit)
        # The first body is always read, however small the total is.
        if self._bodies.used > max(self._bodies.total, limit):
            raise QueueFull("Too many large requests are being read; retry later")

    def release(self) -> None:
        """May be called again."""
        self._bodies.used -= len(self.data)
        self.data = bytearray()


class RequestBodies:
    """The bodies that are in memory. Runs on the event loop.

    Args:
        seconds: for one body, or longer if it comes at 16 KiB per second.
        total: bytes of all bodies.
    """

    def __init__(self, seconds: float, total: int = _TOTAL_BYTES) -> None:
        self.seconds = seconds
        self.total = total
        self.used = 0

    def hold(self) -> HeldBody:
        return HeldBody(self)

    async def fill(self, held: HeldBody, pieces: AsyncIterator[bytes], declared: int, limit: int) -> None:
        """Read a body of at most `limit` bytes, of which `declared` were announced.

        Raises BodyTooLarge, QueueFull, BodyTimeout, and what `pieces` raises.
        """
        if declared > limit:
            raise BodyTooLarge(limit)
        began, allowed = asyncio.get_running_loop().time(), self.seconds
        try:
            async with asyncio.timeout_at(began + allowed) as timeout:
                async for piece in pieces:
                    held.add(piece, limit)
                    if len(held.data) > allowed * _RATE:
                        allowed = len(held.data) / _RATE
                        timeout.reschedule(began + allowed)
        except TimeoutError:
            raise BodyTimeout(f"The body did not arrive within {allowed:.0f} s") from None


def check_media_type(headers: Mapping[str, str]) -> None:
    """Raises UnsupportedMediaType for what a web page could send from another site without being asked first."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise UnsupportedMediaType("Send the body as JSON, with the header Content-Type: application/json")


def declared_length(headers: Mapping[str, str]) -> int:
    """The length that `Content-Length` says; 0 without it."""
    text = headers.get("content-length", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else 0
