"""One connection: a link, a thread that reads, a thread that writes, and many transfers between two instances.

Whatever goes wrong with the link ends the connection, once: both threads stop, every payload that waited is let go of, and
every transfer hears that the connection broke.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from foreword.blocks.layout import Layout
from foreword.errors import ProtocolViolation, TransferError, TransferTimeout, TransferUnavailable
from foreword.transfer.fetch import Fetches, locate, read_frames
from foreword.transfer.link import Link, Received
from foreword.transfer.messages import (
    ID_BYTES,
    Agent,
    Answer,
    Beat,
    Buffer,
    Bye,
    Chosen,
    Frames,
    Get,
    Introduce,
    Locate,
    Located,
    Message,
    Offer,
    Part,
    Query,
    Reason,
    Refuse,
    Segment,
    Want,
    join_keys,
)
from foreword.transfer.outbox import Item, Outbox
from foreword.transfer.protocol import Event, Role, Timings
from foreword.transfer.service import Service
from foreword.transfer.transfers import Destination, Source

if TYPE_CHECKING:
    from foreword.transfer.endpoint import Traffic

log = logging.getLogger("foreword.transfer")
Side = Source | Destination
Begun = TypeVar("Begun", Source, Destination)
SILENT_BEATS: Final = 5


class Host(Protocol):
    """What a connection needs of its endpoint."""

    service: Service
    timings: Timings

    def add(self, side: Side) -> bool: ...
    def find(self, transfer: bytes) -> Side | None: ...
    def forget(self, side: Side) -> None: ...
    def remember(self, side: Side) -> None: ...
    def was_taken(self, transfer: bytes) -> bool: ...
    def ask(self, side: Side) -> None: ...
    def count(self, word: str) -> None: ...
    def serve(self, connection: Connection, transfer: bytes, message: Locate | Get) -> bool: ...
    def closed(self, connection: Connection, sides: Sequence[Side]) -> None: ...
    def sides_of(self, connection: Connection) -> list[Side]: ...


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end.

    Attributes:
        instance: of the endpoint; another one at the same address means that the process was started again.
        address: where it listens, "" if nowhere.
        layout: fingerprint of its blocks' layout, b"" if it has none.
        beat: seconds between its signs of life.
        largest: bytes of a payload that it receives.
    """

    instance: bytes
    address: str
    layout: bytes
    beat: float
    largest: int
    name: str = field(default="")


class Connection:
    """Made by an endpoint. Threads may call at once.

    Attributes:
        peer: the other end.
        known_as: the addresses under which it was reached or says that it listens.
        largest: the longest payload of a part.
    """

    def __init__(
        self, host: Host, link: Link, peer: Peer, layout: Layout | None, traffic: Traffic, *, beat: float, queue: int
    ) -> None:
        self.host = host
        self.peer = peer
        self.link = link
        self.known_as: set[str] = set()
        self.largest = min(link.capabilities.largest, peer.largest)
        self._layout = layout
        self._traffic = traffic
        self._beat = beat
        self._outbox = Outbox(queue)
        self._fetches = Fetches()
        self._lock = threading.Lock()
        self._error: TransferError | None = None
        self._over = threading.Event()
        self._writer = threading.Thread(target=self._write, name=f"foreword-send-{peer.name}", daemon=True)

    @property
    def layout(self) -> Layout:
        """Of both sides. Raises TransferError if one of them has no blocks."""
        if self._layout is None or not self.peer.layout:
            raise TransferError("one of the two instances has no blocks of its own", reason=Reason.LAYOUT)
        return self._layout

    @property
    def alive(self) -> bool:
        return self._error is None

    @property
    def queued(self) -> int:
        """Bytes of payload that wait to be sent."""
        return self._outbox.waiting

    # Transfers that begin here

    def want(self, request: bytes, keys: Sequence[bytes] = (), *, have: int = 0, context: object = None) -> Destination:
        """Ask the peer to compute KV and to send it (pull).

        Args:
            request: its description, as the peer's service understands it.
            keys: of the prompt's full blocks.
            have: leading blocks that are here already.
            context: kept in the transfer from the start, for the service.

        Raises TransferUnavailable, and TransferError where there are too many transfers or no layout in common.
        """
        opening = Want(request, join_keys(keys), have, self.host.timings.progress)
        side = Destination(self, secrets.token_bytes(ID_BYTES), Role.PULL_DESTINATION, opening, self.host.timings)
        return self._begin(side, opening, context)

    def offer(self, request: bytes, keys: Sequence[bytes], tokens: int, *, context: object = None) -> Source:
        """Offer a running request to the peer (push). `tokens` have KV so far, `keys` name its full blocks."""
        opening = Offer(request, join_keys(keys), tokens, self.host.timings.lease)
        assert self.layout is not None  # or it raises
        side = Source(self, secrets.token_bytes(ID_BYTES), Role.PUSH_SOURCE, opening, self.host.timings)
        return self._begin(side, opening, context)

    def _begin(self, side: Begun, opening: Message, context: object) -> Begun:
        side.context = context
        if not self.host.add(side):
            raise TransferError("this instance has as many transfers as it may", reason=Reason.FULL)
        self.post(opening, side.id)
        self._notice(side)
        return side

    # Fetching

    def locate(self, names: Sequence[bytes], *, deadline: float) -> int:
        """How many of these blocks, from the first on, the peer could give. Raises TransferError."""
        return locate(self, self._fetches, names, deadline)

    def get(self, names: Sequence[bytes], buffers: Sequence[memoryview], *, deadline: float) -> list[int]:
        """Read the frame of each name into the buffer beside it; returns the length of each, 0 for a missing one. Frames are
        not checked here. Raises TransferError; then nothing is written to the buffers any more."""
        return read_frames(self, self._fetches, names, buffers, deadline)

    # Sending

    def post(self, message: Message, transfer: bytes) -> None:
        """Queue a message without a payload; nothing if the connection is closed."""
        self._outbox.post(Item(message, transfer))

    def put(
        self,
        message: Part | Frames,
        transfer: bytes,
        buffers: Sequence[Buffer],
        sent: Callable[[], None] | None,
        wait: float,
        dropped: Callable[[], bool],
    ) -> bool:
        """Queue a message with a payload; see `Source.send`."""
        summed = isinstance(message, Part)
        item = Item(message, transfer, buffers, sum(map(len, buffers)), summed, sent, dropped)
        try:
            queued = self._outbox.put(item, wait)
        except TransferUnavailable:
            item.done()
            raise
        if not queued:
            item.done()
        return queued

    def nudge(self) -> None:
        """A transfer ended: whoever waits to send a part of it need not."""
        self._outbox.nudge()

    def _write(self) -> None:
        try:
            while not self._outbox.closed:
                items = self._outbox.take(self._beat)
                if items:
                    self._send(items)
                elif not self._outbox.closed:
                    self._deliver(Item(Beat(), bytes(ID_BYTES)), more=False)
        except TransferError as error:
            self.fail(error)

    def _send(self, items: Sequence[Item]) -> None:
        """Each is let go of once, whatever becomes of it."""
        left = deque(items)
        try:
            while left:
                self._deliver(left[0], more=len(left) > 1)
                self._outbox.release(left.popleft())
        finally:
            for item in left:
                self._outbox.release(item)

    def _deliver(self, item: Item, *, more: bool) -> None:
        started = time.monotonic()
        deadline = started + self.host.timings.progress
        self.link.send(item.message, item.transfer, item.buffers, deadline=deadline, checksum=item.checksum, more=more)
        self._traffic.note_sent(item.size, time.monotonic() - started)

    # Receiving

    def start(self) -> None:
        """Begin to write; whoever calls `read` reads."""
        self._writer.start()

    def read(self) -> None:
        """The reader's thread: until the connection ends."""
        try:
            while self._error is None:
                self._dispatch(self._next())
        except TransferError as error:
            self.fail(error)

    def _next(self) -> Received:
        silence = SILENT_BEATS * self.peer.beat
        began = time.monotonic()
        while True:
            try:
                return self.link.receive(deadline=max(self.link.heard, began) + silence)
            except TransferTimeout:
                if time.monotonic() - max(self.link.heard, began) >= silence:
                    raise TransferUnavailable(f"the peer gave no sign of life for {silence:g} s") from None

    def _dispatch(self, received: Received) -> None:
        message, transfer = received.message, received.head.transfer
        self._traffic.note_received(received.head.payload)
        match message:
            case Beat():
                return
            case Bye():
                raise TransferUnavailable(message.message or "the peer has closed the connection")
            case Want() | Offer():
                self._incoming(message, transfer)
            case Locate() | Get():
                if not self.host.serve(self, transfer, message):
                    self.post(Refuse(Reason.FULL, "too many requests at once"), transfer)
            case Located() | Frames():
                self._fetches.got(received)
            case Introduce() | Segment() | Agent() | Chosen():
                raise ProtocolViolation(f"a {type(message).__name__} after the connection was agreed upon")
            case _:
                self._about(received, transfer)

    def _incoming(self, message: Want | Offer, transfer: bytes) -> None:
        if self.host.find(transfer) is not None:
            raise ProtocolViolation("a transfer began twice")
        service, timings = self.host.service, self.host.timings
        if self._layout is None or not self.peer.layout:
            self.post(Refuse(Reason.LAYOUT, "one of the two instances has no blocks of its own"), transfer)
            return
        side: Side
        if isinstance(message, Want):
            side = Source(self, transfer, Role.PULL_SOURCE, message, timings)
        else:
            side = Destination(self, transfer, Role.PUSH_DESTINATION, message, timings)
        if not self.host.add(side):
            self.post(Refuse(Reason.FULL, "this instance has as many transfers as it may"), transfer)
        elif isinstance(side, Source):
            side.begin(lambda: service.wanted(side))
        else:
            side.begin(lambda: service.offered(side))
        self._notice(side)

    def _notice(self, side: Side) -> None:
        """A transfer that began while the connection ended was not among those that were told."""
        if self._error is not None:
            side.world(Event.BROKEN, self._error.message)

    def _about(self, received: Received, transfer: bytes) -> None:
        """A message of a transfer that has begun. One that nobody knows has ended here and crossed its end."""
        if self._fetches.got(received):
            return
        side = self.host.find(transfer)
        if isinstance(received.message, Query):
            if side is not None and not self.host.was_taken(transfer):
                side.got(received)
            else:
                self.post(Answer(self.host.was_taken(transfer)), transfer)
        elif side is None:
            received.payload.release()
            self.host.count("ignored_messages")
        elif side.connection is not self and not isinstance(received.message, Answer):
            raise ProtocolViolation("a message about a transfer of another connection")
        else:
            side.got(received)

    # The end

    def fail(self, error: TransferError) -> None:
        """End the connection because of this; the first reason counts."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
        self.link.close()
        self._outbox.close()
        self._fetches.fail(error)
        self.host.closed(self, self.host.sides_of(self))
        self._over.set()

    def close(self, message: str = "") -> None:
        """Say good-bye, if the peer listens, and end. Transfers under way hear that the connection broke."""
        if self._error is None and not self._outbox.waiting:
            said = threading.Event()
            self._outbox.post(Item(Bye(message), bytes(ID_BYTES), sent=said.set))
            said.wait(1.0)
        self.fail(TransferUnavailable(message or "this side has closed the connection"))

    @property
    def error(self) -> TransferError | None:
        """Why it ended; None while it lives."""
        return self._error

    def join(self, timeout: float) -> None:
        """Wait for the writer's thread."""
        self._over.wait(timeout)
        with contextlib.suppress(RuntimeError):
            self._writer.join(timeout)
