"""Server-sent events to a client: the head, events, and comments while there are none."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import Final

from foreword.api.front import ByteStream, Call
from foreword.api.outcomes import ClientGone
from foreword.tasks import background

_COMMENT: Final = b": keep-alive\n\n"
HEADERS: Final[Mapping[str, str]] = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
# The header in which a reader asks for comments after so many seconds without an event. The answer says how often they come.
COMMENTS: Final = "x-foreword-comments"


class EventStream:
    """A streamed response. It begins with the first event, or with a comment if the first event takes long: from then on errors
    are events too.

    Args:
        headers: makes the headers, from those of a replica's response if there is one.
        keep_alive: seconds without an event after which a comment is sent, so that proxies keep the connection open.
    """

    def __init__(
        self, call: Call, headers: Callable[[Mapping[str, str]], Mapping[str, str]], keep_alive: float
    ) -> None:
        self._call = call
        self._headers = headers
        self._keep_alive = keep_alive
        self._out: ByteStream | None = None
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
        """Send whole events. Raises ClientGone.

        Args:
            given: headers of the replica's response.
            last: these are the last events; the stream is ended with them, in one packet.
        """
        self._writes += 1
        if self._out is None:
            self._out = await self._call.open(self._headers(given or {}), at_once=not data)
        if last:
            await self._end(self._out, data)
        elif data and not self._ended:
            await self._out.write(data)

    def write_now(self, data: bytes) -> bool:
        """Send whole events if that waits for nothing; False if `write` must send them."""
        if self._out is None or self._ended or not self._out.write_now(data):
            return False
        self._writes += 1
        return True

    async def close(self) -> None:
        """End a stream that has begun, if it has not ended. Raises ClientGone."""
        await self.write(b"", last=True)

    async def _end(self, out: ByteStream, data: bytes) -> None:
        if not self._ended:
            self._ended = True
            self.stop()
            await out.end(data)

    def _check(self) -> None:
        if self._writes == self._seen and (self._comment is None or self._comment.done()):
            self._comment = background(self._send_comment(), f"a comment in the answer to request {self._call.id}")
        self._seen = self._writes
        self.send_comments()

    async def _send_comment(self) -> None:
        try:
            await self.write(_COMMENT)
            self._seen = self._writes
        except ClientGone:
            self.stop()


def comments_of(headers: Mapping[str, str]) -> float:
    """The seconds in these headers; 0 if there are none."""
    try:
        found = float(headers.get(COMMENTS, "0"))
    except ValueError:
        return 0.0
    return found if 0.0 < found < math.inf else 0.0
