"""Requests to replicas whose body is there as a whole: it is sent with the head. aiohttp would start a task for it."""

from __future__ import annotations

from typing import Any, Final

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
        if self._whole is None:
            return await super().send(conn)
        if conn.protocol is None or conn.protocol.writing_paused:
            self.update_body_from_data(self._whole)
            return await super().send(conn)
        response = await super().send(conn)
        if conn.transport is not None:
            conn.transport.write(self._whole)
        return response
