"""The endpoint of an instance: it listens, connects, and runs the clock of all transfers.

endpoint = TransferEndpoint(TransferConfig(bind="127.0.0.1:0"), service)
address = endpoint.listen()
connection = endpoint.connect("10.0.0.7:9100")      # the existing connection, or a new one
destination = connection.pull(request, keys, have=3)
endpoint.close()
"""

from __future__ import annotations

import contextlib
import functools
import logging
import secrets
import socket
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Final

from foreword.config import parse_bytes
from foreword.errors import ConfigError
from foreword.store.background import background_thread
from foreword.store.background_jobs import BackgroundJobs
from foreword.transfer.channel import Channel, LinkTraffic
from foreword.transfer.connection import Connection
from foreword.transfer.errors import PeerGone, PeerRejected, TransferError, TransferUnavailable
from foreword.transfer.fetch import FetchServer
from foreword.transfer.handshake import LINKS, WRONG_SECRET, Identity, agree
from foreword.transfer.protocol import State, Timings, TransferEvent
from foreword.transfer.shm import remove_stale
from foreword.transfer.sockets import Address, SocketStream, connect, listen, parse_address, peer_is_local, tune
from foreword.transfer.tls import TlsSettings
from foreword.transfer.transfers import TransferRegistry, TransferService, TransferSide
from foreword.transfer.wire_format import OwnershipQuery, Reason
from foreword.transfer_config import ALL_RIGHTS, SharedSecret, TransferConfig

_LIMIT: Final = 256
_LIMIT_PER_ADDRESS: Final = 64
log = logging.getLogger("foreword.transfer")

_TICK: Final = 0.2
_WORKERS: Final = 8


class PendingConnections:
    """At a limit, the oldest connection is closed for a new one.

    A peer with the secret authenticates within milliseconds, so it is never the oldest for long: clients that connect and do
    not authenticate displace each other. The total limit displaces a connection of the address that has the most, so one
    address does not displace others. `lock` is the endpoint's.
    """

    def __init__(self, lock: threading.Condition, limit: int = _LIMIT, per_address: int = _LIMIT_PER_ADDRESS) -> None:
        self._limit = limit
        self._per_address = per_address
        self._hosts: dict[SocketStream, str] = {}
        self._counts: Counter[str] = Counter()
        self._displaced: set[SocketStream] = set()
        self._lock = lock

    def __len__(self) -> int:
        return len(self._hosts)

    def add(self, stream: SocketStream) -> None:
        """Add a new connection; closes another one if there are too many."""
        host = _host_of(stream.sock)
        with self._lock:
            victim = self._victim_for(host)
            if victim is not None:
                self._remove(victim)
                self._displaced.add(victim)
            self._hosts[stream] = host
            self._counts[host] += 1
        if victim is not None:
            victim.interrupt()

    def _victim_for(self, host: str) -> SocketStream | None:
        if self._counts[host] >= self._per_address:
            crowded = host
        elif len(self._hosts) >= self._limit:
            crowded = self._counts.most_common(1)[0][0]
        else:
            return None
        return next(stream for stream, other in self._hosts.items() if other == crowded)

    def remove(self, stream: SocketStream) -> bool:
        """The peer has authenticated, or the connection has ended. False if the connection was closed for another one."""
        with self._lock:
            self._remove(stream)
            displaced = stream in self._displaced
            self._displaced.discard(stream)
            return not displaced

    def _remove(self, stream: SocketStream) -> None:
        host = self._hosts.pop(stream, None)
        if host is not None:
            self._counts[host] -= 1
            if not self._counts[host]:
                del self._counts[host]

    def close(self) -> None:
        """Close all."""
        with self._lock:
            streams = list(self._hosts)
        for stream in streams:
            stream.interrupt()


def _host_of(sock: socket.socket) -> str:
    try:
        name = sock.getpeername()
    except OSError:  # it has closed already
        return ""
    return str(name[0]) if isinstance(name, tuple) and name else ""


@dataclass(frozen=True, slots=True)
class EndpointStatus:
    """The endpoint now, and since the start.

    Attributes:
        connections: live ones, by link.
        transfers: in progress, by `role, state`.
        queued_bytes: payloads that wait to be sent.
        ended: transfers by outcome, or by reason if they were not taken.
        counts: connections that failed, peers that were rejected, messages ignored, and other rare events.
        traffic: by link.
    """

    connections: dict[str, int]
    transfers: dict[str, int]
    queued_bytes: int
    ended: dict[str, int]
    counts: dict[str, int]
    traffic: dict[str, LinkTraffic]


class TransferEndpoint:
    """An endpoint, one per instance. Thread-safe.

    Args:
        config: see `TransferConfig`.
        service: what this instance does for its peers; the default refuses everything and can only fetch.

    Raises ConfigError for an address that must not be bound without a secret.
    """

    def __init__(self, config: TransferConfig, service: TransferService | None = None) -> None:
        self.config = config
        self.service = service if service is not None else TransferService()
        self.instance = secrets.token_bytes(16)
        self.address = ""
        self._bind = _bind_address(config)
        self._tls = TlsSettings(config)
        self._secrets = config.shared_secrets() or (SharedSecret(""),)
        timings = Timings(config.answer_timeout, config.progress_timeout, config.lease_seconds)
        # Guards the connections with their counts, the transfers, peers' reads, and attempts to connect, for which threads
        # wait. No call that may wait is made under it.
        self._lock = threading.Condition()
        self._registry = TransferRegistry(self.service, timings, config.max_transfers, self._lock)
        self._workers = BackgroundJobs("transfer", most=None, threads=_WORKERS)
        self._server = FetchServer(self.service, self._workers, config.progress_timeout, self._lock)
        self._traffic = {name: LinkTraffic(self._lock) for name in LINKS}
        self._connections: list[Connection] = []
        self._dialing: set[str] = set()
        self._pending = PendingConnections(self._lock)
        self._listener: socket.socket | None = None
        self._closing = threading.Event()
        background_thread(self._run_clock, "transfer-clock")
        remove_stale()

    # Connections

    def listen(self) -> str:
        """Start to accept connections; returns the address, with the port that was chosen. Raises ConfigError."""
        if not self._tls.can_listen and not self._bind.path:
            raise ConfigError("transfer.tls needs transfer.tls_certificate_file on an instance that listens")
        if self._listener is None:
            self._listener, bound = listen(self._bind)
            self.address = self.config.advertise or str(bound)
            background_thread(functools.partial(self._accept, self._listener), "transfer-accept")
        return self.address

    def connect(self, address: str, *, deadline: float | None = None) -> Connection:
        """The connection to the instance that listens at `address`; a new one if there is none.

        Raises ConfigError for an invalid address, PeerRejected if the two instances do not match, PeerGone if no process
        listens there, and other TransferErrors.
        """
        where = parse_address(address)
        if not self.config.secret and not where.is_local:
            raise ConfigError(f"{address} is another host: set transfer.secret, the same on all instances")
        limit = time.monotonic() + self.config.connect_timeout
        limit = limit if deadline is None else min(limit, deadline)
        name = str(where)
        with self._lock:
            if not self._lock.wait_for(lambda: name not in self._dialing, max(limit - time.monotonic(), 0)):
                raise TransferUnavailable(f"{address} does not answer an earlier attempt to connect")
            self._dialing.add(name)
        try:
            return self._existing(name) or self._dial(where, limit)
        finally:
            with self._lock:
                self._dialing.remove(name)
                self._lock.notify_all()

    def _existing(self, address: str) -> Connection | None:
        with self._lock:
            return next((one for one in self._connections if one.alive and address in one.known_as), None)

    def _dial(self, where: Address, deadline: float) -> Connection:
        if self._closing.is_set():
            raise TransferUnavailable("this endpoint is closed")
        connection = self._open_as_client(where, deadline)
        connection.known_as.add(str(where))
        background_thread(connection.read, f"receive-{where}")
        return connection

    def _open_as_client(self, where: Address, deadline: float) -> Connection:
        """Try the secrets of this instance one after another: while they are changed the peer may know one of them only."""
        *others, last = [secret for secret in self._secrets if secret.rights == ALL_RIGHTS]
        for secret in others:
            try:
                return self._open_with(secret, where, deadline)
            except PeerRejected as error:
                if error.reason != WRONG_SECRET:
                    raise
        return self._open_with(last, where, deadline)

    def _open_with(self, secret: SharedSecret, where: Address, deadline: float) -> Connection:
        stream = self._tls.stream(connect(where, deadline=deadline), client=True)
        try:
            return self._open(stream, (secret,), client=True, deadline=deadline)
        except BaseException:
            stream.close()
            raise

    def _open(
        self, stream: SocketStream, known: tuple[SharedSecret, ...], *, client: bool, deadline: float
    ) -> Connection:
        """Do the handshake and start the connection's writer."""
        stream.begin(deadline)
        config, layout = self.config, self.service.layout
        identity = Identity(
            self.instance,
            known,
            config.links,
            layout,
            self.address,
            config.beat_seconds,
            parse_bytes(config.ring),
        )
        authenticated = functools.partial(self._pending.remove, stream)
        link, peer = agree(stream, identity, client=client, deadline=deadline, authenticated=authenticated)
        traffic = self._traffic[link.name]
        channel = Channel(
            link,
            peer,
            layout,
            traffic,
            heartbeat=config.beat_seconds,
            timeout=config.progress_timeout,
            queue_bytes=parse_bytes(config.ring),
        )
        connection = Connection(channel, self._registry, self._server, traffic, self._forget)
        with self._lock:
            if self._closing.is_set() or len(self._connections) >= config.max_connections:
                raise TransferUnavailable("this endpoint has too many connections, or is closed")
            self._connections.append(connection)
        connection.start()
        return connection

    def _forget(self, connection: Connection) -> None:
        with self._lock:
            self._connections = [one for one in self._connections if one is not connection]
        self._registry.count("connections_ended")

    def _accept(self, listener: socket.socket) -> None:
        while not self._closing.is_set():
            try:
                sock, _ = listener.accept()
            except OSError:
                self._closing.wait(_TICK)  # out of descriptors, for example: try again
                continue
            stream = self._tls.stream(sock, client=False)
            self._pending.add(stream)
            try:
                background_thread(functools.partial(self._serve, stream), "receive")
            except RuntimeError:  # out of threads
                self._pending.remove(stream)
                stream.close()

    def _serve(self, stream: SocketStream) -> None:
        """A peer has connected: do the handshake, then read, on this thread."""
        try:
            connection = self._greet(stream)
        except (TransferError, OSError) as error:
            displaced = not self._pending.remove(stream)
            self._note_failed_greeting(stream, error, displaced)
            stream.close()
        else:
            connection.read()

    def _greet(self, stream: SocketStream) -> Connection:
        tune(stream.sock)
        if not self.config.secret and not peer_is_local(stream.sock):
            raise PeerRejected("a peer from another host, and no transfer.secret")
        deadline = time.monotonic() + self.config.connect_timeout
        return self._open(stream, self._secrets, client=False, deadline=deadline)

    def _note_failed_greeting(self, stream: SocketStream, error: Exception, displaced: bool) -> None:
        if displaced:
            self._registry.count("connections_refused")
            log.debug("a connection was closed for another one: too many had not authenticated")
            return
        self._registry.count("peers_rejected" if isinstance(error, PeerRejected) else "greetings_failed")
        # A process that connects and closes without a byte only checks whether this one still listens.
        probe = isinstance(error, TransferUnavailable) and not stream.greeted
        log.log(logging.DEBUG if probe else logging.WARNING, "a peer failed to connect: %s", error)

    # The clock

    def _run_clock(self) -> None:
        while not self._closing.wait(_TICK):
            now = time.monotonic()
            for side in self._registry.all():
                side.tick(now)
            for side in self._registry.due_queries(now):
                with contextlib.suppress(RuntimeError):  # closed
                    self._workers.submit(self._query_ownership, side)

    def _query_ownership(self, side: TransferSide) -> None:
        """Ask the destination whether it has taken a request, over the same connection or a new one."""
        if side.state is not State.DOUBT:
            return
        channel, peer = side.channel, side.channel.peer
        try:
            if not channel.alive:
                if not peer.address:
                    return
                channel = self.connect(peer.address).channel
            if channel.peer.instance != peer.instance:
                side.handle(TransferEvent.GONE, Reason.LOST, "the instance was restarted")
            else:
                channel.post(OwnershipQuery(), side.id)
        except PeerGone as error:
            side.handle(TransferEvent.GONE, Reason.LOST, error.message)
        except (TransferError, ConfigError) as error:
            log.info("cannot ask whether a request was taken: %s", error)

    # Status and end

    def status(self) -> EndpointStatus:
        """Never blocks for long."""
        transfers, ended, counts = self._registry.status()
        with self._lock:
            links = Counter(one.link.name for one in self._connections)
            queued = sum(one.channel.queued_bytes for one in self._connections)
        return EndpointStatus(dict(links), transfers, queued, ended, counts, self._traffic)

    def close(self) -> None:
        """End all connections and transfers; those in doubt end as unknown.

        The listener is closed last: a peer that finds no listener may conclude that this instance runs no request any more.
        """
        if self._closing.is_set():
            return
        with self._lock:
            self._closing.set()
            connections = list(self._connections)
        self._registry.close()
        self._pending.close()
        for connection in connections:
            connection.close("the instance stops")
        for connection in connections:
            connection.channel.join(1.0)
        self._workers.stop()
        self._expire_transfers()
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()

    def _expire_transfers(self) -> None:
        """Let the deadlines of all transfers pass, in every state."""
        for _ in range(len(State)):
            for side in self._registry.all():
                side.tick(float("inf"), patience=1.0)


def _bind_address(config: TransferConfig) -> Address:
    address = parse_address(config.bind)
    if not address.is_local and not config.secret:
        raise ConfigError(
            f"transfer.bind is {config.bind}, which other hosts can reach: set transfer.secret (16 characters or more, the "
            "same on all instances), or bind 127.0.0.1"
        )
    return address
