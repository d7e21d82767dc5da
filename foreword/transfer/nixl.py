"""A link whose payloads travel by NIXL (UCX: RDMA, NVLink, shared memory, TCP), and its messages over the socket that there is.

The sender copies a payload into its ring, which is registered, and sends the message with the payload's place. The receiver
reads from there into a ring of its own, several payloads with one request where several messages have come, and notes the
places behind the read, by which the sender frees them. See `nixl_agent` for who may write where.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from collections.abc import Generator
from typing import Final

from foreword.errors import BadMessage, TransferError, TransferTimeout, TransferUnavailable
from foreword.transfer.link import Capabilities, Payload, Received
from foreword.transfer.messages import MAX_PAYLOAD, Head
from foreword.transfer.nixl_agent import NixlAgent, Reading, Span, nap
from foreword.transfer.ring import Order, Ring, RingLink
from foreword.transfer.sockets import Stream
from foreword.transfer.tcp import SocketReader

_PLACE: Final = struct.Struct("<Q")
_TICK: Final = 0.25
_IDLE: Final = 1.0
_LINGER: Final = 2.0
_STALLED: Final = 30.0
_MOST_AHEAD: Final = 64
_ONE_READ: Final = 1 << 20


class _Waiting:
    """A message that has come, and the read of its payload, if it has one."""

    __slots__ = ("reading", "received")

    def __init__(self, received: Received) -> None:
        self.received = received
        self.reading: Reading | None = None


class NixlLink(RingLink):
    """See `link.Link`. The rings bound what is under way, and what is received and not released.

    A thread makes progress for the peer while it has payloads to read.
    """

    def __init__(self, stream: Stream, agent: NixlAgent, peers: int, *, same_host: bool) -> None:
        largest = min(agent.size // 2, peers // 2, MAX_PAYLOAD)
        super().__init__(Capabilities("nixl", same_host, largest, 2), stream, agent.outgoing)
        self._agent = agent
        self._peers = peers
        self._closed = False
        # What the peer may still read.
        self._unread = Order()
        self._places: dict[int, list[int]] = {}
        self._moved = threading.Condition()
        # What was received and is not released.
        self._in, self._slots, self._held = agent.incoming, Ring(agent.size), Order()
        self._released = threading.Condition()
        self._waiting: deque[_Waiting] = deque()
        self._spans: list[Span] = []
        self._end: TransferError | None = None
        self._reader = SocketReader(stream, self._payload)
        threading.Thread(target=self._pump, name="foreword-nixl", daemon=True).start()

    # Sending

    def _room(self, size: int, deadline: float) -> int:
        place = self._take(size)
        while place is None:
            self._say(deadline)
            with self._moved:
                if self._closed:
                    raise TransferUnavailable("the connection is closed")
                if time.monotonic() >= deadline:
                    raise TransferTimeout("the peer reads nothing")
                self._moved.wait(min(_TICK, max(deadline - time.monotonic(), 0)))
            place = self._take(size)
        return place

    def _take(self, size: int) -> int | None:
        with self._moved:
            return self._ring.take(size)

    def _filled(self, place: int, size: int) -> None:
        with self._moved:
            self._places[place] = self._unread.add(place, size)
            self._moved.notify_all()

    def _pump(self) -> None:
        """While the peer has something to read: make progress, and free what it has read."""
        turn = 0
        ends = None
        try:
            while True:
                with self._moved:
                    if not self._places and not self._closed:
                        self._moved.wait(_IDLE)
                        turn = 0
                    if self._closed and ends is None:
                        ends = time.monotonic() + _LINGER
                    if ends is not None and (not self._places or time.monotonic() >= ends):
                        return
                notes = self._agent.pump()
                turn = 0 if notes else turn + 1
                for note in notes:
                    self._free(note)
                nap(turn)
        except TransferError:
            self._stream.close()
        finally:
            self._agent.close()

    def _free(self, note: bytes) -> None:
        """The peer has read what lies at these places."""
        if len(note) % _PLACE.size:
            raise BadMessage(f"a note of {len(note)} bytes about what was read")
        with self._moved:
            for (place,) in _PLACE.iter_unpack(note):
                item = self._places.pop(place, None)
                if item is None:
                    raise BadMessage(f"the peer has read at {place}, where nothing is")
                upto = self._unread.release(item)
                if upto is not None:
                    self._ring.release(upto)
            self._moved.notify_all()

    # Receiving

    def receive(self, *, deadline: float) -> Received:
        turn = 0
        while True:
            try:
                self._take_in(deadline)
                received = self._arrived()
            except TransferTimeout:
                raise
            except TransferError as error:
                self._waiting.clear()  # what was not read whole is nobody's
                self._end = error
                raise
            if received is not None:
                return received
            if time.monotonic() >= deadline:
                raise TransferTimeout("no message came")
            nap(turn)
            turn += 1

    def _take_in(self, deadline: float) -> None:
        """Messages that have come, and reads of their payloads begun; waits only if there is none yet."""
        while self._end is None and len(self._waiting) < _MOST_AHEAD:
            ahead = bool(self._waiting)
            if ahead and not self._stream.ready():
                break
            try:
                self._waiting.append(_Waiting(self._reader.receive(0.0 if ahead else deadline)))
            except TransferTimeout:
                if not ahead:
                    raise
                break
            except TransferError as error:
                self._end = error  # after what came before it
            if sum(span.length for span in self._spans) >= _ONE_READ:
                self._begin()
        self._begin()
        if self._end is not None and not self._waiting:
            raise self._end

    def _begin(self) -> None:
        """Read what has been announced, with one request."""
        spans, self._spans = self._spans, []
        if not spans:
            return
        reading = self._agent.read([_whole(span, self._peers) for span in spans], b"".join(map(_noted, spans)))
        for waiting in self._waiting:
            if waiting.reading is None and len(waiting.received.payload):
                waiting.reading = reading

    def _arrived(self) -> Received | None:
        """The first message, if its payload is there."""
        if not self._waiting:
            return None
        first = self._waiting[0]
        if first.reading is not None:
            if not self._agent.look(first.reading):
                if time.monotonic() - first.reading.began > _STALLED:
                    raise TransferUnavailable(f"the peer's memory could not be read for {_STALLED:g} s")
                return None
            self._stream.heard = time.monotonic()
        return self._waiting.popleft().received

    def _payload(self, head: Head) -> Generator[None, None, Payload]:
        """A slot for a payload; the read into it begins later."""
        if head.place % self._peers + head.payload > self._peers or head.payload > self.capabilities.largest:
            raise BadMessage(f"{head.payload} bytes at {head.place} are not in the peer's ring")
        while (slot := self._slot(head.payload)) is None:
            self._stream.heard = time.monotonic()  # it is this side that does not listen
            yield
        with self._released:
            item = self._held.add(slot, head.payload)
        start = slot % self._slots.size
        self._spans.append(Span(head.place, start, head.payload))
        return Payload(self._in[start : start + head.payload], lambda: self._release(item))

    def _slot(self, size: int) -> int | None:
        with self._released:
            slot = self._slots.take(size)
            if slot is None and not self._waiting:
                self._released.wait(_TICK)
                slot = self._slots.take(size)
            return slot

    def _release(self, item: list[int]) -> None:
        with self._released:
            upto = self._held.release(item)
            if upto is not None:
                self._slots.release(upto)
                self._released.notify_all()

    def close(self) -> None:
        """The peer may still read what was sent, for a moment; then the agent ends."""
        self._stream.close()
        with self._moved:
            self._closed = True
            self._moved.notify_all()
        with self._released:
            self._released.notify_all()


def _whole(span: Span, ring: int) -> Span:
    """With the place as an offset in the ring."""
    return Span(span.place % ring, span.slot, span.length)


def _noted(span: Span) -> bytes:
    return _PLACE.pack(span.place)
