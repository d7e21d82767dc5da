"""The sending half of a connection: a queue, and the thread that sends what is in it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from foreword.blocks.layout import Layout
from foreword.errors import TransferError
from foreword.transfer.handshake import Peer
from foreword.transfer.link import Link
from foreword.transfer.messages import NO_TRANSFER, Buffer, Frames, Heartbeat, KVPart, Reason, TransferMessage
from foreword.transfer.send_queue import QueuedMessage, SendQueue


@dataclass(slots=True)
class LinkTraffic:
    """Payloads over one kind of link since the start. `seconds` were spent sending messages with a payload."""

    bytes_sent: int = 0
    bytes_received: int = 0
    seconds: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def note_sent(self, size: int, seconds: float) -> None:
        if size:
            with self._lock:
                self.bytes_sent += size
                self.seconds += seconds

    def note_received(self, size: int) -> None:
        if size:
            with self._lock:
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
        self.error: TransferError | None = None
        self._layout = layout
        self._traffic = traffic
        self._heartbeat = heartbeat
        self._timeout = timeout
        self._queue = SendQueue(queue_bytes)
        self._lock = threading.Lock()
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
        self._writer = threading.Thread(target=self._write, name=f"foreword-send-{self.peer.name}", daemon=True)
        self._writer.start()

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
        with self._lock:
            if self.error is not None:
                return False
            self.error = error
        self.link.close()
        self._queue.close()
        return True

    def join(self, timeout: float) -> None:
        """Wait for the writer's thread."""
        if self._writer is not None:
            with contextlib.suppress(RuntimeError):  # called on that thread
                self._writer.join(timeout)
