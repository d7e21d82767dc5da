"""The messages that wait to be sent on one connection. Messages without a payload always fit; payloads wait for room."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from foreword.errors import TransferUnavailable
from foreword.transfer.link import BATCH_BYTES
from foreword.transfer.messages import Buffer, TransferMessage

_BATCH_MESSAGES: Final = 32


@dataclass(frozen=True, slots=True)
class QueuedMessage:
    """One message.

    Attributes:
        sent: called once, when the buffers are not read any more, whether or not the message was sent.
        dropped: whether the message is obsolete and need not be sent.
    """

    message: TransferMessage
    transfer: bytes
    buffers: Sequence[Buffer] = ()
    size: int = 0
    checksum: bool = True
    sent: Callable[[], None] | None = None
    dropped: Callable[[], bool] | None = None

    def done(self) -> None:
        if self.sent is not None:
            self.sent()

    def obsolete(self) -> bool:
        return self.dropped is not None and self.dropped()


class SendQueue:
    """First in, first out; holds at most `limit` bytes of payload, or one payload.

    The memory belongs to the callers. The bound keeps a slow peer from holding all of it.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._messages: deque[QueuedMessage] = deque()
        self._bytes = 0
        self._without_payload = 0
        self._closed = False
        self._changed = threading.Condition()

    @property
    def queued_bytes(self) -> int:
        """Bytes of queued payloads."""
        return self._bytes

    @property
    def without_payload(self) -> int:
        """The number of messages without a payload that wait."""
        return self._without_payload

    @property
    def closed(self) -> bool:
        return self._closed

    def post(self, message: QueuedMessage) -> None:
        """Queue a message without payload. Does nothing after `close`."""
        with self._changed:
            if not self._closed:
                self._messages.append(message)
                self._without_payload += 1
                self._changed.notify_all()

    def put(self, message: QueuedMessage, wait: float) -> bool:
        """Queue a message with a payload; False if there is no room within `wait` seconds.

        The message is `done` in any case, now or later. Raises TransferUnavailable after `close`.
        """

        def settled() -> bool:
            fits = not self._bytes or self._bytes + message.size <= self._limit
            return self._closed or fits or message.obsolete()

        with self._changed:
            queued = self._changed.wait_for(settled, wait) and not self._closed
            if queued:
                self._messages.append(message)
                self._bytes += message.size
                self._without_payload += not message.size
                self._changed.notify_all()
        if not queued:
            message.done()
            if self._closed:
                raise TransferUnavailable("the connection is closed")
        return queued

    def take(self, timeout: float) -> list[QueuedMessage]:
        """The next batch: one message, and small ones that wait behind it.

        Empty if there is none within `timeout` seconds, or after `close`. Its payloads count until `release`.
        """
        ends = time.monotonic() + timeout
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._messages or self._closed, max(ends - time.monotonic(), 0))
                if not self._messages:
                    return []
                batch = self._take_batch()
            useful: list[QueuedMessage] = []
            for message in batch:
                if message.obsolete():
                    self.release(message)
                else:
                    useful.append(message)
            if useful:
                return useful

    def _take_batch(self) -> list[QueuedMessage]:
        batch = [self._messages.popleft()]
        size = batch[0].size
        while self._messages and len(batch) < _BATCH_MESSAGES and size + self._messages[0].size <= BATCH_BYTES:
            batch.append(self._messages.popleft())
            size += batch[-1].size
        return batch

    def release(self, message: QueuedMessage) -> None:
        """The message was sent, or will not be."""
        with self._changed:
            self._bytes -= message.size
            self._without_payload -= not message.size
            self._changed.notify_all()
        message.done()

    def close(self) -> None:
        """Accept no more messages; release the queued ones."""
        with self._changed:
            self._closed = True
            messages = list(self._messages)
            self._messages.clear()
            self._changed.notify_all()
        for message in messages:
            self.release(message)

    def wake(self) -> None:
        """A transfer ended: threads that wait in `put` check again whether their message is obsolete."""
        with self._changed:
            self._changed.notify_all()
