"""The servers behind a Redis URL: one, or the nodes of a cluster, and the connections to them.

redis-py reads the URL and opens the sockets (TLS, Unix, keep-alive); what is said on them is said by `store/resp.py`. A store
calls `open_nodes`; nothing is connected before the first command.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from redis.backoff import NoBackoff
from redis.connection import AbstractConnection, Connection, SSLConnection, parse_url
from redis.crc import key_slot
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeout
from redis.retry import Retry

from foreword.errors import StoreConfigError, StoreError, StoreTimeout, StoreUnavailable
from foreword.store.base import time_left
from foreword.store.redact import ESCAPES, redacted, split_url
from foreword.store.redis.resp import Command, ConnectionLost, Refusal, Reply, Wire, words

_IDLE: Final = 32  # connections kept per node
_SLOTS: Final = 16384
_ROUNDS: Final = 6  # how often commands follow slots that move
_PAUSE: Final = 0.05  # seconds between these rounds
_SHUT: Final = {"ERR", "NOAUTH", "NOPERM", "WRONGPASS"}  # refusals of a greeting that will be the same next time
_HOST = re.compile(r"(\[[^\]]*\]|[^:\[\]]*)(:\d*)?")


class Node:
    """One server and the connections to it that nobody uses just now.

    A connection is used by one thread at a time and comes back only after every command had its answer. The commands of
    this store may all be repeated, so those that met a connection which the server had closed meanwhile are.
    """

    def __init__(self, kind: type[AbstractConnection], options: dict[str, Any]) -> None:
        self.kind = kind
        self.options = options
        self._idle: deque[Wire] = deque()
        self._process = os.getpid()
        self._closed = False

    def run(self, commands: Sequence[Command], deadline: float) -> list[Reply]:
        wire = self._take()
        if wire is not None:
            try:
                return self._exchange(wire, commands, deadline)
            except ConnectionLost:
                self.forget()  # what lost one connection has most likely lost them all
        return self._exchange(self._connect(deadline), commands, deadline)

    def forget(self) -> None:
        """Close the connections that are not in use."""
        while self._idle:
            try:
                self._idle.pop().close()
            except IndexError:  # another thread took the last one
                return

    def close(self) -> None:
        self._closed = True
        self.forget()

    def _exchange(self, wire: Wire, commands: Sequence[Command], deadline: float) -> list[Reply]:
        whole = False
        try:
            replies = wire.exchange(commands, deadline)
            whole = True
        finally:
            if whole and not self._closed and len(self._idle) < _IDLE:
                self._idle.append(wire)
            else:
                wire.close()
        if self._closed:
            self.forget()
        return replies

    def _take(self) -> Wire | None:
        if self._process != os.getpid():  # the parent process goes on using these sockets
            self._idle, self._process = deque(), os.getpid()
        while self._idle:
            try:
                wire = self._idle.pop()
            except IndexError:
                return None
            if wire.quiet:
                return wire
            wire.close()
        return None

    def _connect(self, deadline: float) -> Wire:
        """A new connection, logged in."""
        half = time_left(deadline) / 2  # one half for the connection, one for TLS
        times: dict[str, Any] = {"socket_connect_timeout": half, "socket_timeout": half, "retry": Retry(NoBackoff(), 0)}
        times["redis_connect_func"] = _say_nothing
        connection = self.kind(**self.options, **times)
        try:
            connection.connect()
        except RedisTimeout as error:
            raise StoreTimeout(f"Redis cannot be reached in time: {error}") from None
        except (RedisError, OSError) as error:
            raise StoreUnavailable(f"Redis cannot be reached: {error}") from None
        sock: Any = connection._sock
        wire = Wire(sock, connection.disconnect)
        greeting = _greeting(self.options)
        ready = False
        try:
            for reply in wire.exchange(greeting, deadline) if greeting else []:
                if isinstance(reply, Refusal):
                    later = reply.code not in _SHUT or "max number of clients" in reply.text
                    # A server may repeat the command.
                    text = redacted(reply.text, str(self.options.get("password") or ""))
                    raise (StoreUnavailable if later else StoreConfigError)(f"Redis does not let us in: {text}")
            ready = True
        finally:
            if not ready:
                wire.close()
        return wire


class Single:
    """One server, or one address in front of several."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.run = node.run
        self.close = node.close

    def primaries(self, deadline: float) -> list[Node]:
        return [self._node]


class Cluster:
    """The nodes of a cluster, and which of them has which slot; asked for when it is needed and when it turns out wrong."""

    def __init__(
        self, kind: type[AbstractConnection], options: dict[str, Any], seeds: Sequence[tuple[str, int]]
    ) -> None:
        self._kind = kind
        self._options = options
        self._seeds = seeds
        self._known: dict[tuple[str, int], Node] = {}
        self._slots: list[tuple[str, int] | None] = []
        self._lock = threading.Lock()

    def run(self, commands: Sequence[Command], deadline: float) -> list[Reply]:
        replies: list[Reply] = [None] * len(commands)
        waiting = list(range(len(commands)))
        for _ in range(_ROUNDS):
            waiting = self._round(commands, waiting, replies, deadline)
            if not waiting:
                return replies
            time.sleep(min(_PAUSE, time_left(deadline)))
            self._learn(deadline)
        raise StoreUnavailable("the slots of the cluster do not come to rest")

    def primaries(self, deadline: float) -> list[Node]:
        """Every node that has slots."""
        slots = self._slots or self._learn(deadline)
        return [self._node(address) for address in sorted({address for address in slots if address is not None})]

    def close(self) -> None:
        for node in list(self._known.values()):
            node.close()

    def _round(
        self, commands: Sequence[Command], waiting: list[int], replies: list[Reply], deadline: float
    ) -> list[int]:
        """Run the commands with these numbers once, and fill in their replies; returns those that found nobody."""
        slots = self._slots or self._learn(deadline)
        groups: dict[tuple[str, int] | None, list[int]] = {}
        for number in waiting:
            groups.setdefault(slots[key_slot(commands[number].key)], []).append(number)
        left = groups.pop(None, [])
        for address, numbers in groups.items():
            if address is None:
                continue
            try:
                answers = self._node(address).run([commands[number] for number in numbers], deadline)
            except StoreTimeout:
                self._slots = []  # for the next call: another node may have taken over
                raise
            except StoreUnavailable:  # it may be gone, and another in its place
                left += numbers
                continue
            for number, answer in zip(numbers, answers, strict=True):
                if isinstance(answer, Refusal) and answer.code == "ASK":
                    answer = self._ask_there(answer, commands[number], deadline)
                if isinstance(answer, Refusal) and answer.code in {"MOVED", "CLUSTERDOWN", "TRYAGAIN", "LOADING"}:
                    left.append(number)
                else:
                    replies[number] = answer
        return left

    def _ask_there(self, refusal: Refusal, command: Command, deadline: float) -> Reply:
        """Follow `ASK slot host:port`: the slot is on its way to that node."""
        host, _, port = refusal.text.split(" ")[-1].rpartition(":")
        if not host or not port.isdigit():
            raise StoreUnavailable(f"the cluster points nowhere: {refusal.text}")
        return self._node((host, int(port))).run([words(b"", b"ASKING"), command], deadline)[1]

    def _learn(self, deadline: float) -> list[tuple[str, int] | None]:
        """Ask the nodes in turn which of them has which slot; the first that knows is believed."""
        addresses = list(dict.fromkeys([*self._known, *self._seeds]))
        last: StoreError = StoreUnavailable("the cluster has no node")
        for number, address in enumerate(addresses):
            share = time_left(deadline) / min(3, len(addresses) - number)
            try:
                [answer] = self._node(address).run([words(b"", b"CLUSTER", b"SLOTS")], time.monotonic() + share)
                self._slots = _read_slots(answer, address[0])
            except (StoreTimeout, StoreUnavailable) as error:
                last = error
            else:
                return self._slots
        raise last

    def _node(self, address: tuple[str, int]) -> Node:
        with self._lock:
            node = self._known.get(address)
            if node is None:
                node = Node(self._kind, self._options | {"host": address[0], "port": address[1]})
                self._known[address] = node
            return node


def open_nodes(url: str) -> Single | Cluster:
    """What a URL leads to; nothing is connected. Raises StoreConfigError."""
    parts = split_url(url)
    user, at, hosts = parts.netloc.rpartition("@")
    scheme, _, kind = parts.scheme.partition("+")
    if scheme not in {"redis", "rediss", "unix"} or kind not in {"", "cluster"} or (scheme == "unix" and kind):
        raise StoreConfigError(
            f"a Redis URL begins with redis://, rediss://, unix:// or redis+cluster://, unlike {scheme}://"
        )
    several = [host for host in hosts.split(",") if host]
    if not all(map(_HOST.fullmatch, several)) or (scheme != "unix" and "@" in parts.path):
        raise StoreConfigError(f"the Redis URL's host and port cannot be read; {ESCAPES}")
    if scheme == "unix" and hosts:
        raise StoreConfigError(
            f"a Unix socket has no host: write unix:///path or unix://user:password@/path; {ESCAPES}"
        )
    first = user + at + (several[0] if several else "")
    try:
        one = f"{scheme}://{first}{parts.path}?{parts.query}"
        options = dict(parse_url(one))
        default: type[AbstractConnection] = SSLConnection if scheme == "rediss" else Connection
        connection = options.pop("connection_class", default)
        for key in ("socket_timeout", "socket_connect_timeout"):
            options.pop(key, None)  # deadlines say how long
        connection(**options)
        if not kind and len(several) <= 1:
            return Single(Node(connection, options))
        if not kind:
            raise StoreConfigError("several hosts make a cluster: redis+cluster://")
        if options.pop("db", 0):
            raise StoreConfigError("a cluster has database 0 only")
        seeds = [(split.hostname or "localhost", split.port or 6379) for split in (urlsplit(f"//{h}") for h in several)]
        return Cluster(connection, options, seeds)
    except (TypeError, ValueError, RedisError) as error:
        raise StoreConfigError(f"the Redis URL is wrong: {redacted(str(error))}") from None


def _say_nothing(connection: AbstractConnection) -> None:
    """In place of redis-py's greeting, whose every step may take the whole time: ours is `_greeting`, in one round trip."""


def _greeting(options: dict[str, Any]) -> list[Command]:
    commands = []
    if options.get("password") or options.get("username"):
        user = (options["username"].encode(),) if options.get("username") else ()
        commands.append(words(b"", b"AUTH", *user, (options.get("password") or "").encode()))
    if options.get("db"):
        commands.append(words(b"", b"SELECT", b"%d" % options["db"]))
    return commands


def _read_slots(reply: Reply, asked: str) -> list[tuple[str, int] | None]:
    """The answer to CLUSTER SLOTS: address of the primary by slot. A node without a name is the one that was asked."""
    if isinstance(reply, Refusal):
        raise StoreConfigError(f"the server is no cluster: {reply.text}")
    slots: list[tuple[str, int] | None] = [None] * _SLOTS
    for row in reply if isinstance(reply, list) else []:
        match row:
            case [int(first), int(last), [host, int(port), *_], *_] if 0 <= first <= last < _SLOTS:
                name = host.decode() if isinstance(host, bytes) and host not in {b"", b"?"} else asked
                slots[first : last + 1] = [(name, port)] * (last + 1 - first)
            case _:
                raise StoreUnavailable("the cluster answered something else than its slots")
    return slots
