"""Requests to replicas whose body is there as a whole: it is sent with the head. aiohttp would start a task for it."""

from __future__ import annotations

import asyncio
from typing import Any, Final, cast

import aiohttp
from aiohttp.connector import Connection

# Longer bodies wait until the replica reads.
_MOST_BYTES: Final = 1 << 16


class WholeRequest(aiohttp.ClientRequest):
    """A request with a body of bytes, or without one."""

    def __init__(self, *given: Any, headers: Any, data: bytes | None = None, **more: Any) -> None:
        self._whole = data if data is not None and len(data) <= _MOST_BYTES else None
        if self._whole is not None:
            headers["content-length"] = str(len(self._whole))
            data = None
        super().__init__(*given, headers=headers, data=data, **more)

    async def send(self, conn: Connection) -> aiohttp.ClientResponse:
        protocol = conn.protocol
        if self._whole is None:
            return await super().send(conn)
        if protocol is None or protocol.transport is None or protocol.writing_paused:
            self.update_body_from_data(self._whole)
            return await super().send(conn)
        transport = protocol.transport
        # Nothing is awaited before it is put back.
        protocol.transport = cast(asyncio.Transport, _WithBody(transport, self._whole))
        try:
            return await super().send(conn)
        finally:
            if protocol.transport is not None:
                protocol.transport = transport


class _WithBody:
    """A transport to which one head is written: the body goes with it, in one call of the system."""

    __slots__ = ("_body", "_transport")

    def __init__(self, transport: asyncio.Transport, body: bytes) -> None:
        self._transport, self._body = transport, body

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def write(self, head: bytes) -> None:
        self._transport.write(head + self._body)
