"""The door of an instance: listens, connects, keeps the transfers, and watches the clock for them.

endpoint = Endpoint(TransferConfig(bind="127.0.0.1:0"), service)
address = endpoint.listen()
connection = endpoint.connect("10.0.0.7:9100")      # the one that there is, or a new one
destination = connection.want(request, keys, have=3)
endpoint.close()
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from foreword.config import TransferConfig, parse_bytes
from foreword.errors import ConfigError, PeerGone, PeerRejected, TransferError, TransferUnavailable
from foreword.transfer import fetch
from foreword.transfer.connection import Connection, Side
from foreword.transfer.handshake import LINKS, Identity, agree
from foreword.transfer.messages import Get, Locate, Query
from foreword.transfer.nixl_agent import missing
from foreword.transfer.protocol import Event, Outcome, State, Timings
from foreword.transfer.service import Idle, Service
from foreword.transfer.shm import remove_stale
from foreword.transfer.sockets import Address, Stream, connect, listen, parse_address, peer_is_local, tune

log = logging.getLogger("foreword.transfer")

_TICK: Final = 0.2
_ASK_EVERY: Final = 0.5
_WORKERS: Final = 4
_WAITING: Final = 64
_REMEMBERED: Final = 1 << 16


@dataclass(slots=True)
class Traffic:
    """What went over one kind of link since the start. `seconds` were spent sending messages with a payload."""

    bytes_sent: int = 0
    bytes_received: int = 0
    payloads_sent: int = 0
    payloads_received: int = 0
    seconds: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def note_sent(self, size: int, seconds: float) -> None:
        if size:
            with self._lock:
                self.bytes_sent += size
                self.payloads_sent += 1
                self.seconds += seconds

    def note_received(self, size: int) -> None:
        if size:
            with self._lock:
                self.bytes_received += size
                self.payloads_received += 1


@dataclass(frozen=True, slots=True)
class EndpointStatus:
    """Now, and since the start.

    Attributes:
        connections: live ones, by link.
        transfers: under way, by `role, state`.
        queued_bytes: payloads that wait to be sent.
        ended: transfers by outcome, or by reason where they were not taken.
        counts: connections that failed, peers that were rejected, messages ignored, and other rare things.
        traffic: by link.
    """

    address: str
    connections: dict[str, int]
    transfers: dict[str, int]
    queued_bytes: int
    ended: dict[str, int]
    counts: dict[str, int]
    traffic: dict[str, Traffic]


class Endpoint:
    """One per instance. Threads may call at once.

    Args:
        config: see `TransferConfig`.
        service: what this instance does for others; the default refuses everything and can only fetch.

    Raises ConfigError for an address that may not be bound without a secret.
    """

    def __init__(self, config: TransferConfig, service: Service | None = None) -> None:
        self.config = config
        self.service: Service = service if service is not None else Idle()
        self.timings = Timings(config.answer_timeout, config.progress_timeout, config.lease_seconds)
        self.instance = secrets.token_bytes(16)
        self._bind = _bind_address(config)
        self._links = _links(config)
        self._queue = parse_bytes(config.queue)
        self._ring = parse_bytes(config.ring)
        self._lock = threading.Lock()
        self._sides: dict[bytes, Side] = {}
        self._taken: OrderedDict[bytes, float] = OrderedDict()
        self._asked: dict[bytes, float] = {}
        self._connections: list[Connection] = []
        self._dialling: dict[str, threading.Lock] = {}
        self._counts: Counter[str] = Counter()
        self._ended: Counter[str] = Counter()
        self._traffic = {name: Traffic() for name in LINKS}
        self._workers = ThreadPoolExecutor(_WORKERS, "foreword-transfer")
        self._places = threading.BoundedSemaphore(_WAITING)
        self._greeting = threading.BoundedSemaphore(config.max_connections)
        self._listener: socket.socket | None = None
        self.address = ""
        self._closing = threading.Event()
        self._clock = threading.Thread(target=self._watch, name="foreword-transfer-clock", daemon=True)
        self._clock.start()
        remove_stale()

    # Connections

    def listen(self) -> str:
        """Begin to accept connections; returns the address, with the port that was taken. Raises ConfigError."""
        if self._listener is None:
            self._listener, bound = listen(self._bind)
            self.address = self.config.advertise or str(bound)
            threading.Thread(target=self._accept, name="foreword-transfer-accept", daemon=True).start()
        return self.address

    def connect(self, address: str, *, deadline: float | None = None) -> Connection:
        """The connection to the instance that listens at `address`, a new one if there is none.

        Raises ConfigError for what is no address, PeerRejected where the two do not fit, PeerGone where nobody listens, other
        TransferErrors.
        """
        where = parse_address(address)
        if not self.config.secret and not where.is_local:
            raise ConfigError(f"{address} is another host: set transfer.secret, the same on all instances")
        limit = time.monotonic() + self.config.connect_timeout
        limit = limit if deadline is None else min(limit, deadline)
        with self._lock:
            dialling = self._dialling.setdefault(str(where), threading.Lock())
        if not dialling.acquire(timeout=max(limit - time.monotonic(), 0)):
            raise TransferUnavailable(f"{address} is being connected to and does not answer")
        try:
            return self._known(str(where)) or self._dial(where, limit)
        finally:
            dialling.release()

    def _known(self, address: str) -> Connection | None:
        with self._lock:
            return next((one for one in self._connections if one.alive and address in one.known_as), None)

    def _dial(self, where: Address, deadline: float) -> Connection:
        if self._closing.is_set():
            raise TransferUnavailable("this endpoint is closed")
        stream = Stream(connect(where, deadline=deadline))
        try:
            connection = self._open(stream, client=True, deadline=deadline)
        except BaseException:
            stream.close()
            raise
        connection.known_as.add(str(where))
        threading.Thread(target=connection.read, name=f"foreword-receive-{where}", daemon=True).start()
        return connection

    def _open(self, stream: Stream, *, client: bool, deadline: float) -> Connection:
        config, layout = self.config, self.service.layout
        identity = Identity(
            self.instance, config.secret or "", self._links, layout, self.address, config.beat_seconds, self._ring
        )
        link, peer = agree(stream, identity, client=client, deadline=deadline)
        traffic = self._traffic[link.capabilities.name]
        connection = Connection(self, link, peer, layout, traffic, beat=config.beat_seconds, queue=self._queue)
        if peer.address:
            connection.known_as.add(peer.address)
        with self._lock:
            if self._closing.is_set() or len(self._connections) >= config.max_connections:
                raise TransferUnavailable("this endpoint has as many connections as it may, or is closed")
            self._connections.append(connection)
        connection.start()
        return connection

    def _accept(self) -> None:
        assert self._listener is not None
        while not self._closing.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._closing.is_set():
                    return
                self._closing.wait(_TICK)  # out of descriptors, for example: others may be given back
                continue
            if not self._greeting.acquire(blocking=False):
                sock.close()
                self.count("connections_refused")
                continue
            threading.Thread(target=self._greet, args=(sock,), name="foreword-receive", daemon=True).start()

    def _greet(self, sock: socket.socket) -> None:
        """A peer has connected: agree, then read, on this thread."""
        stream = Stream(sock)
        connection: Connection | None = None
        try:
            tune(sock)
            if not self.config.secret and not peer_is_local(sock):
                raise PeerRejected("a peer from another host, and no transfer.secret")
            deadline = time.monotonic() + self.config.connect_timeout
            connection = self._open(stream, client=False, deadline=deadline)
        except (TransferError, OSError) as error:
            self.count("peers_rejected" if isinstance(error, PeerRejected) else "greetings_failed")
            log.warning("a peer did not come in: %s", error)
            stream.close()
        finally:
            self._greeting.release()
        if connection is not None:
            connection.read()

    # What connections need (connection.Host)

    def add(self, side: Side) -> bool:
        with self._lock:
            if len(self._sides) >= self.config.max_transfers or self._closing.is_set():
                return False
            self._sides[side.id] = side
            return True

    def find(self, transfer: bytes) -> Side | None:
        return self._sides.get(transfer)

    def forget(self, side: Side) -> None:
        with self._lock:
            self._sides.pop(side.id, None)
            self._asked.pop(side.id, None)
            taken = side.outcome is Outcome.TAKEN
            self._ended["taken" if taken else str(side.reason)] += 1

    def remember(self, side: Side) -> None:
        """That it was taken, for longer than the source can ask: it waits a lease, then asks for another one."""
        with self._lock:
            now = time.monotonic()
            while self._taken and (next(iter(self._taken.values())) < now or len(self._taken) >= _REMEMBERED):
                self._taken.popitem(last=False)
            self._taken[side.id] = now + 3 * max(side.opening.seconds, self.timings.lease)

    def was_taken(self, transfer: bytes) -> bool:
        return transfer in self._taken

    def ask(self, side: Side) -> None:
        with self._lock:
            self._asked[side.id] = 0.0

    def count(self, word: str) -> None:
        with self._lock:
            self._counts[word] += 1

    def serve(self, connection: Connection, transfer: bytes, message: Locate | Get) -> bool:
        if not self._places.acquire(blocking=False):
            return False

        def work() -> None:
            try:
                fetch.answer(connection, self.service, transfer, message, self.config.progress_timeout)
            finally:
                self._places.release()

        try:
            self._workers.submit(work)
        except RuntimeError:  # closed
            self._places.release()
            return False
        return True

    def sides_of(self, connection: Connection) -> list[Side]:
        with self._lock:
            return [side for side in self._sides.values() if side.connection is connection]

    def closed(self, connection: Connection, sides: Sequence[Side]) -> None:
        with self._lock:
            self._connections = [one for one in self._connections if one is not connection]
            self._counts["connections_ended"] += 1
        text = connection.error.message if connection.error is not None else ""
        for side in sides:
            side.world(Event.BROKEN, text)

    # The clock

    def _watch(self) -> None:
        while not self._closing.wait(_TICK):
            now = time.monotonic()
            with self._lock:
                sides = list(self._sides.values())
            for side in sides:
                side.tick(now)
            self._ask_again(now)

    def _ask_again(self, now: float) -> None:
        with self._lock:
            due = [number for number, at in self._asked.items() if at <= now and number in self._sides]
            for number in due:
                self._asked[number] = now + _ASK_EVERY
            sides = [self._sides[number] for number in due]
        for side in sides:
            with contextlib.suppress(RuntimeError):
                self._workers.submit(self._ask, side)

    def _ask(self, side: Side) -> None:
        """Ask the destination whether it has taken a request, over the connection of before or a new one."""
        if side.state is not State.DOUBT:
            return
        peer = side.connection.peer
        try:
            connection = side.connection
            if not connection.alive:
                address = peer.address or next(iter(connection.known_as), "")
                if not address:
                    return
                connection = self.connect(address)
            if connection.peer.instance != peer.instance:
                side.world(Event.GONE, "the instance was started again")
            else:
                connection.post(Query(), side.id)
        except PeerGone as error:
            side.world(Event.GONE, error.message)
        except (TransferError, ConfigError) as error:
            log.info("asking for the fate of a request: %s", error)

    # The rest

    def status(self) -> EndpointStatus:
        """Never blocks for long."""
        with self._lock:
            links = Counter(one.link.capabilities.name for one in self._connections)
            transfers = Counter(f"{side.role}, {side.state}" for side in self._sides.values())
            queued = sum(one.queued for one in self._connections)
            return EndpointStatus(
                self.address,
                dict(links),
                dict(transfers),
                queued,
                dict(self._ended),
                dict(self._counts),
                self._traffic,
            )

    def close(self) -> None:
        """End every connection and all transfers; those in doubt end as unknown. The last thing that goes is the listener:
        whoever finds nobody listening may conclude that nothing goes on here."""
        if self._closing.is_set():
            return
        with self._lock:
            self._closing.set()
            connections = list(self._connections)
        for connection in connections:
            connection.close("the instance stops")
        for connection in connections:
            connection.join(1.0)
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._give_up()
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()

    def _give_up(self) -> None:
        """Let every transfer's clock run out."""
        for _ in range(len(State)):
            with self._lock:
                sides = list(self._sides.values())
            for side in sides:
                side.tick(float("inf"), patience=1.0)


def _bind_address(config: TransferConfig) -> Address:
    address = parse_address(config.bind)
    if not address.is_local and not config.secret:
        raise ConfigError(
            f"transfer.bind is {config.bind}, which other hosts can reach: set transfer.secret (16 characters or more, the "
            "same on all instances), or bind 127.0.0.1"
        )
    return address


def _links(config: TransferConfig) -> tuple[str, ...]:
    """Those that are configured and can be used here."""
    reason = missing() if "nixl" in config.links else ""
    if not reason:
        return config.links
    log.warning("transfer.links names nixl, but %s; going on without it", reason)
    return tuple(name for name in config.links if name != "nixl")
