"""What waits to be sent on one connection: messages without a payload always fit, payloads wait for room."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from foreword.errors import TransferUnavailable
from foreword.transfer.link import TOGETHER
from foreword.transfer.messages import Buffer, Message

_MOST: Final = 32


@dataclass(frozen=True, slots=True)
class Item:
    """One message. `sent` is called once, when the buffers are not read any more; `dropped` tells that it is of no use now."""

    message: Message
    transfer: bytes
    buffers: Sequence[Buffer] = ()
    size: int = 0
    checksum: bool = True
    sent: Callable[[], None] | None = None
    dropped: Callable[[], bool] | None = None

    def done(self) -> None:
        if self.sent is not None:
            self.sent()


class Outbox:
    """First in, first out; at most `limit` bytes of payload, or one payload.

    The memory is the callers'; the bound is what keeps a slow peer from tying up all of it.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: deque[Item] = deque()
        self._bytes = 0
        self._closed = False
        self._changed = threading.Condition()

    @property
    def waiting(self) -> int:
        """Bytes of payload."""
        return self._bytes

    def post(self, item: Item) -> bool:
        """Queue a message without payload. False if the connection is closed."""
        with self._changed:
            if not self._closed:
                self._items.append(item)
                self._changed.notify_all()
            return not self._closed

    def put(self, item: Item, wait: float) -> bool:
        """Queue a message with a payload; False if there is no room within `wait` seconds. Raises TransferUnavailable once
        closed. The caller sees to `item.done` in both cases."""

        def settled() -> bool:
            return self._closed or not self._bytes or self._bytes + item.size <= self._limit or _useless(item)

        with self._changed:
            fits = self._changed.wait_for(settled, wait)
            if self._closed:
                raise TransferUnavailable("the connection is closed")
            if not fits:
                return False
            self._items.append(item)
            self._bytes += item.size
            self._changed.notify_all()
            return True

    def take(self, timeout: float) -> list[Item]:
        """The next messages that go together: one, and small ones that wait behind it. None come if there is none within
        `timeout` seconds, or ever again (`closed`). A payload counts until `release`."""
        ends = time.monotonic() + timeout
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._items or self._closed, max(ends - time.monotonic(), 0))
                if not self._items:
                    return []
                taken = self._some()
            useful: list[Item] = []
            for item in taken:
                if _useless(item):
                    self.release(item)
                else:
                    useful.append(item)
            if useful:
                return useful

    def _some(self) -> list[Item]:
        taken = [self._items.popleft()]
        size = taken[0].size
        while self._items and len(taken) < _MOST and size + self._items[0].size <= TOGETHER:
            taken.append(self._items.popleft())
            size += taken[-1].size
        return taken

    def release(self, item: Item) -> None:
        """The message was sent, or will not be."""
        with self._changed:
            self._bytes -= item.size
            self._changed.notify_all()
        item.done()

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Nothing more is queued; what waited is let go of."""
        with self._changed:
            self._closed = True
            items = list(self._items)
            self._items.clear()
            self._changed.notify_all()
        for item in items:
            self.release(item)

    def nudge(self) -> None:
        """A transfer ended: whoever waits for room on its behalf looks again."""
        with self._changed:
            self._changed.notify_all()


def _useless(item: Item) -> bool:
    return item.dropped is not None and item.dropped()
