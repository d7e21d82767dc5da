"""Incoming connections whose peers have not authenticated yet: a bounded number, shared among their addresses."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from typing import Final

from foreword.transfer.sockets import SocketStream

_LIMIT: Final = 256
_LIMIT_PER_ADDRESS: Final = 64


class PendingConnections:
    """At a limit, the oldest connection is closed for a new one.

    A peer with the secret authenticates within milliseconds, so it is never the oldest for long: clients that connect and do
    not authenticate displace each other. The total limit displaces a connection of the address that has the most, so one
    address does not displace others.
    """

    def __init__(self, limit: int = _LIMIT, per_address: int = _LIMIT_PER_ADDRESS) -> None:
        self._limit = limit
        self._per_address = per_address
        self._hosts: dict[SocketStream, str] = {}
        self._counts: Counter[str] = Counter()
        self._displaced: set[SocketStream] = set()
        self._lock = threading.Lock()

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
