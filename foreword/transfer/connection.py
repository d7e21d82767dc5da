"""A connection to a peer: it carries any number of transfers and fetches, in both directions.

A channel's thread writes; another thread reads and dispatches. Any failure of the link ends the connection once: both threads
stop, queued payloads are released, and every transfer is notified.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from foreword.transfer.channel import Channel, LinkTraffic
from foreword.transfer.errors import ProtocolViolation, TransferError, TransferTimeout, TransferUnavailable
from foreword.transfer.fetch import FetchClient, FetchServer
from foreword.transfer.link import Received
from foreword.transfer.protocol import Role, TransferEvent
from foreword.transfer.transfers import KVDestination, KVSource, TransferRegistry, TransferSide
from foreword.transfer.wire_format import (
    ID_BYTES,
    NO_TRANSFER,
    Frames,
    Get,
    Goodbye,
    Heartbeat,
    Hello,
    LinkResult,
    Locate,
    Located,
    OwnershipAnswer,
    OwnershipQuery,
    PullRequest,
    PushRequest,
    Reason,
    Refuse,
    SharedSegment,
    TransferMessage,
    join_keys,
)
from foreword.transfer_config import ALL_RIGHTS

MISSED_HEARTBEATS: Final = 5
_MOST_UNSENT: Final = 8192
_RIGHTS: Final[dict[type[TransferMessage], str]] = {PullRequest: "pull", PushRequest: "push", Locate: "get", Get: "get"}
Side = TypeVar("Side", KVSource, KVDestination)


class Connection:
    """Made by an endpoint. Thread-safe.

    Args:
        on_closed: called once, when the connection has ended.

    Attributes:
        channel: its sending half.
        known_as: the addresses at which the peer was reached or says that it listens.
    """

    def __init__(
        self,
        channel: Channel,
        registry: TransferRegistry,
        server: FetchServer,
        traffic: LinkTraffic,
        on_closed: Callable[[Connection], None],
    ) -> None:
        self.channel = channel
        self.peer = channel.peer
        self.link = channel.link
        # A peer with limited rights may claim an address, and is not trusted to be the instance there.
        trusted = channel.peer.rights == ALL_RIGHTS
        self.known_as = {channel.peer.address} - {""} if trusted else set()
        self._registry = registry
        self._server = server
        self._traffic = traffic
        self._on_closed = on_closed
        self._fetches = FetchClient(channel)

    @property
    def alive(self) -> bool:
        return self.channel.alive

    # Transfers that begin here

    def pull(
        self, request: bytes, keys: Sequence[bytes] = (), *, have: int = 0, context: object = None
    ) -> KVDestination:
        """Request that the peer computes KV and sends it.

        Args:
            request: a description that the peer's service understands.
            keys: of the prompt's full blocks.
            have: leading blocks that are here already.
            context: set on the transfer from the start, for the service.

        Raises TransferUnavailable, and TransferError if there are too many transfers or no common layout.
        """
        opening = PullRequest(request, join_keys(keys), have, self._registry.timings.progress)
        return self._begin(KVDestination, Role.PULL_DESTINATION, opening, context)

    def push(self, request: bytes, keys: Sequence[bytes], tokens: int, *, context: object = None) -> KVSource:
        """Migrate a running request to the peer. `tokens` have KV so far; `keys` are those of its full blocks."""
        opening = PushRequest(request, join_keys(keys), tokens, self._registry.timings.lease)
        return self._begin(KVSource, Role.PUSH_SOURCE, opening, context)

    def _begin(self, kind: type[Side], role: Role, opening: PullRequest | PushRequest, context: object) -> Side:
        assert self.channel.layout is not None  # raises TransferError if there is no common layout
        side = kind(self.channel, secrets.token_bytes(ID_BYTES), role, opening, self._registry)
        side.context = context
        if not self._registry.add(side):
            raise TransferError("this instance has too many transfers", reason=Reason.FULL)
        self.channel.post(opening, side.id)
        self._end_if_broken(side)
        return side

    # Fetching

    def locate(self, names: Sequence[bytes], *, deadline: float) -> int:
        """How many of these blocks, from the first on, the peer can send. Raises TransferError."""
        return self._fetches.locate(names, deadline)

    def get(self, names: Sequence[bytes], buffers: Sequence[memoryview], *, deadline: float) -> list[int]:
        """Read the frame of each name into the buffer beside it; returns the length of each, 0 for a missing one.

        The frames are not checked here. Raises TransferError; after that nothing is written to the buffers.
        """
        return self._fetches.get(names, buffers, deadline)

    # Receiving

    def start(self) -> None:
        """Start the writer's thread. The caller runs `read` on a thread."""
        self.channel.start(self.fail)

    def read(self) -> None:
        """Receive and dispatch messages until the connection ends."""
        try:
            while self.alive:
                self._dispatch(self._next())
                if self.channel.unsent_answers > _MOST_UNSENT:
                    raise TransferUnavailable("the peer sends messages and does not read the answers")
        except TransferError as error:
            self.fail(error)

    def _next(self) -> Received:
        silence = MISSED_HEARTBEATS * self.peer.heartbeat
        began = time.monotonic()
        while True:
            try:
                return self.link.receive(deadline=max(self.link.last_received, began) + silence)
            except TransferTimeout:
                if time.monotonic() - max(self.link.last_received, began) >= silence:
                    raise TransferUnavailable(f"no heartbeat of the peer for {silence:g} s") from None

    def _dispatch(self, received: Received) -> None:
        message, transfer = received.message, received.head.transfer
        self._traffic.note_received(received.head.payload)
        match message:
            case Heartbeat():
                return
            case Goodbye():
                raise TransferUnavailable(message.message or "the peer has closed the connection")
            case PullRequest() | PushRequest() | Locate() | Get():
                self._got_opening(message, transfer)
            case Located() | Frames():
                self._fetches.got(received)
            case Hello() | SharedSegment() | LinkResult():
                raise ProtocolViolation(f"a {type(message).__name__} after the handshake")
            case OwnershipQuery():
                self._got_query(received, transfer)
            case _:
                self._got_other(received, transfer)

    def _got_opening(self, message: PullRequest | PushRequest | Locate | Get, transfer: bytes) -> None:
        right = _RIGHTS[type(message)]
        if right not in self.peer.rights:
            self._registry.count("rights_refused")
            self.channel.post(Refuse(Reason.ROLE, f"the peer's secret does not give the right to {right}"), transfer)
        elif isinstance(message, Locate | Get):
            self._server.serve(self.channel, transfer, message)
        else:
            self._got_request(message, transfer)

    def _got_request(self, message: PullRequest | PushRequest, transfer: bytes) -> None:
        if self._registry.find(transfer) is not None:
            raise ProtocolViolation("a transfer began twice")
        if not self.channel.has_layout:
            self.channel.post(Refuse(Reason.LAYOUT, "one of the two instances has no blocks"), transfer)
            return
        registry = self._registry
        if isinstance(message, PullRequest):
            source = KVSource(self.channel, transfer, Role.PULL_SOURCE, message, registry)
            self._admit(source, lambda: registry.service.pull_requested(source))
        else:
            destination = KVDestination(self.channel, transfer, Role.PUSH_DESTINATION, message, registry)
            self._admit(destination, lambda: registry.service.push_requested(destination))

    def _admit(self, side: TransferSide, notify: Callable[[], None]) -> None:
        if self._registry.add(side):
            side.begin(notify)
        else:
            self.channel.post(Refuse(Reason.FULL, "this instance has too many transfers"), side.id)
        self._end_if_broken(side)

    def _end_if_broken(self, side: TransferSide) -> None:
        """End a transfer that began while the connection ended: `fail` may not have seen it."""
        if self.error is not None:
            side.handle(TransferEvent.BROKEN, Reason.LOST, self.error.message)

    def _got_query(self, received: Received, transfer: bytes) -> None:
        side, taken = self._registry.find(transfer), self._registry.was_taken(transfer)
        if side is not None and not taken:
            side.got(received)
        else:
            self.channel.post(OwnershipAnswer(taken), transfer)

    def _got_other(self, received: Received, transfer: bytes) -> None:
        """A message about a transfer or a fetch. An unknown transfer has ended here while the message was on its way."""
        if self._fetches.got(received):
            return
        side = self._registry.find(transfer)
        if side is None:
            received.payload.release()
            self._registry.count("ignored_messages")
        elif side.channel is not self.channel and not isinstance(received.message, OwnershipAnswer):
            raise ProtocolViolation("a message about a transfer of another connection")
        else:
            side.got(received)

    # The end

    def fail(self, error: TransferError) -> None:
        """End the connection because of this error; later errors are ignored."""
        if not self.channel.close(error):
            return
        self._fetches.fail(error)
        self._on_closed(self)
        for side in self._registry.of_channel(self.channel):
            side.handle(TransferEvent.BROKEN, Reason.LOST, error.message)

    def close(self, message: str = "") -> None:
        """Say goodbye if the peer can receive it, and end. Transfers in progress are notified that the connection broke."""
        if self.alive and not self.channel.queued_bytes:
            sent = threading.Event()
            self.channel.post(Goodbye(message), NO_TRANSFER, sent.set)
            sent.wait(1.0)
        self.fail(TransferUnavailable(message or "this side has closed the connection"))

    @property
    def error(self) -> TransferError | None:
        """Why it ended; None while it is alive."""
        return self.channel.error
