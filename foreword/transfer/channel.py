"""The sending half of a connection: a queue, and the thread that sends what is in it. Messages without a payload always fit;
payloads wait for room."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from foreword.blocks.layout import Layout
from foreword.store.background import background_thread
from foreword.transfer.errors import TransferError, TransferUnavailable
from foreword.transfer.handshake import Peer
from foreword.transfer.link import BATCH_BYTES, Link
from foreword.transfer.wire_format import NO_TRANSFER, Buffer, Frames, Heartbeat, KVPart, Reason, TransferMessage

_BATCH_MESSAGES: Final = 32


@dataclass(frozen=True, slots=True)
class QueuedMessage:
    """A message.

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
        self.queued_bytes = 0  # of payloads
        self.without_payload = 0  # messages without a payload that wait
        self.error: TransferError | None = None  # why it is closed
        self._changed = threading.Condition()

    def post(self, message: QueuedMessage) -> None:
        """Queue a message without payload. Does nothing after `close`."""
        with self._changed:
            if not self.closed:
                self._messages.append(message)
                self.without_payload += 1
                self._changed.notify_all()

    def put(self, message: QueuedMessage, wait: float) -> bool:
        """Queue a message with a payload; False if there is no room within `wait` seconds.

        The message is `done` in any case, now or later. Raises TransferUnavailable after `close`.
        """

        def settled() -> bool:
            fits = not self.queued_bytes or self.queued_bytes + message.size <= self._limit
            return self.closed or fits or message.obsolete()

        with self._changed:
            queued = self._changed.wait_for(settled, wait) and not self.closed
            if queued:
                self._messages.append(message)
                self.queued_bytes += message.size
                self.without_payload += not message.size
                self._changed.notify_all()
        if not queued:
            message.done()
            if self.closed:
                raise TransferUnavailable("the connection is closed")
        return queued

    def take(self, timeout: float) -> list[QueuedMessage]:
        """The next batch: one message, and small ones that wait behind it.

        Empty if there is none within `timeout` seconds, or after `close`. Its payloads count until `release`.
        """
        ends = time.monotonic() + timeout
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._messages or self.closed, max(ends - time.monotonic(), 0))
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
            self.queued_bytes -= message.size
            self.without_payload -= not message.size
            self._changed.notify_all()
        message.done()

    @property
    def closed(self) -> bool:
        return self.error is not None

    def close(self, error: TransferError) -> bool:
        """Accept no more messages. False if it was closed already; the first error is kept."""
        with self._changed:
            if self.error is not None:
                return False
            self.error = error
            self._changed.notify_all()
            return True

    def drop(self) -> None:
        """After `close`: release the queued messages."""
        with self._changed:
            messages = list(self._messages)
            self._messages.clear()
            self._changed.notify_all()
        for message in messages:
            self.release(message)

    def wake(self) -> None:
        """A transfer ended: threads that wait in `put` check again whether their message is obsolete."""
        with self._changed:
            self._changed.notify_all()


@dataclass(slots=True)
class LinkTraffic:
    """Payloads over one kind of link since the start. `seconds` were spent sending messages with a payload. `lock` is the
    endpoint's."""

    lock: threading.Condition = field(repr=False)
    bytes_sent: int = 0
    bytes_received: int = 0
    seconds: float = 0.0

    def note_sent(self, size: int, seconds: float) -> None:
        if size:
            with self.lock:
                self.bytes_sent += size
                self.seconds += seconds

    def note_received(self, size: int) -> None:
        if size:
            with self.lock:
                self.bytes_received += size


class Channel:
    """Sends messages to one peer. Thread-safe.

    Args:
        heartbeat: seconds without a message after which a heartbeat is sent.
        timeout: seconds without progress after which sending fails.
        queue_bytes: bytes of payload that may be queued.

    Attributes:
        peer: the instance at the other end.
        largest: the longest payload of a message.
        error: why the connection ended; None while it is open.
    """

    def __init__(
        self,
        link: Link,
        peer: Peer,
        layout: Layout | None,
        traffic: LinkTraffic,
        *,
        heartbeat: float,
        timeout: float,
        queue_bytes: int,
    ) -> None:
        self.link = link
        self.peer = peer
        self.largest = min(link.largest, peer.largest)
        self._layout = layout
        self._traffic = traffic
        self._heartbeat = heartbeat
        self._timeout = timeout
        self._queue = SendQueue(queue_bytes)
        self._writer: threading.Thread | None = None
        self._on_error: Callable[[TransferError], object] = self.close

    @property
    def has_layout(self) -> bool:
        """Whether both instances have blocks, whose layout is then the same."""
        return self._layout is not None and bool(self.peer.layout)

    @property
    def layout(self) -> Layout:
        """The layout of both instances. Raises TransferError if one of them has no blocks."""
        if self._layout is None or not self.has_layout:
            raise TransferError("one of the two instances has no blocks", reason=Reason.LAYOUT)
        return self._layout

    @property
    def error(self) -> TransferError | None:
        """Why the connection has ended; None while it lives."""
        return self._queue.error

    @property
    def alive(self) -> bool:
        return self.error is None

    @property
    def queued_bytes(self) -> int:
        """Bytes of payload that wait to be sent."""
        return self._queue.queued_bytes

    @property
    def unsent_answers(self) -> int:
        """Messages without a payload that wait to be sent. They are not bounded by the queue."""
        return self._queue.without_payload

    def post(self, message: TransferMessage, transfer: bytes, sent: Callable[[], None] | None = None) -> None:
        """Queue a message without a payload. Does nothing if the connection is closed."""
        self._queue.post(QueuedMessage(message, transfer, sent=sent))

    def put(
        self,
        message: KVPart | Frames,
        transfer: bytes,
        buffers: Sequence[Buffer],
        sent: Callable[[], None] | None,
        wait: float,
        dropped: Callable[[], bool],
    ) -> bool:
        """Queue a message with a payload; see `KVSource.send`. Raises TransferUnavailable if the connection is closed."""
        checksum = isinstance(message, KVPart)
        size = sum(map(len, buffers))
        return self._queue.put(QueuedMessage(message, transfer, buffers, size, checksum, sent, dropped), wait)

    def wake_senders(self) -> None:
        """A transfer ended: a thread that waits to send one of its parts stops waiting."""
        self._queue.wake()

    def start(self, on_error: Callable[[TransferError], None]) -> None:
        """Start the writer's thread. `on_error` is called if the link fails, and ends the connection."""
        self._on_error = on_error
        self._writer = background_thread(self._write, f"send-{self.peer.name}")

    def abort(self, error: TransferError) -> None:
        """End the connection because of this peer. From any thread."""
        self._on_error(error)

    def _write(self) -> None:
        try:
            while not self._queue.closed:
                batch = self._queue.take(self._heartbeat)
                if batch:
                    self._send_batch(batch)
                elif not self._queue.closed:
                    self._send(QueuedMessage(Heartbeat(), NO_TRANSFER), more=False)
        except TransferError as error:
            self._on_error(error)

    def _send_batch(self, batch: Sequence[QueuedMessage]) -> None:
        """Send the messages; each is released once, also if sending fails."""
        left = deque(batch)
        try:
            while left:
                self._send(left[0], more=len(left) > 1)
                self._queue.release(left.popleft())
        finally:
            for message in left:
                self._queue.release(message)

    def _send(self, queued: QueuedMessage, *, more: bool) -> None:
        started = time.monotonic()
        self.link.send(
            queued.message,
            queued.transfer,
            queued.buffers,
            deadline=started + self._timeout,
            checksum=queued.checksum,
            more=more,
        )
        self._traffic.note_sent(queued.size, time.monotonic() - started)

    def close(self, error: TransferError) -> bool:
        """Close the link and release what is queued. False if it was closed already; the first error is kept."""
        if not self._queue.close(error):
            return False
        self.link.close()
        self._queue.drop()
        return True

    def join(self, timeout: float) -> None:
        """Wait for the writer's thread."""
        if self._writer is not None:
            with contextlib.suppress(RuntimeError):  # called on that thread
                self._writer.join(timeout)
