"""The servers behind a Redis URL, one or the nodes of a cluster, and pools of connections to them.

redis-py parses the URL and opens the sockets (TLS, Unix, keep-alive); `resp.py` speaks the protocol on them. A store
calls `open_nodes`. Nothing is connected before the first command.
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
from foreword.store.redis.resp import Command, ConnectionLost, ErrorReply, Reply, RespConnection, make_command

_MAX_IDLE: Final = 32  # connections kept per node
_SLOTS: Final = 16384
_ROUNDS: Final = 6  # how often commands are sent again while slots migrate
_PAUSE: Final = 0.05  # seconds between these rounds
_PERMANENT: Final = {"ERR", "NOAUTH", "NOPERM", "WRONGPASS"}  # login errors that will not go away
_HOST = re.compile(r"(\[[^\]]*\]|[^:\[\]]*)(:\d*)?")


class RedisNode:
    """One server and a pool of idle connections to it.

    A connection is used by one thread at a time, and returns to the pool only after every command had its reply. All
    commands of a store can be repeated, so they are sent again if the server had closed a pooled connection.
    """

    def __init__(self, kind: type[AbstractConnection], options: dict[str, Any]) -> None:
        self.kind = kind
        self.options = options
        self._idle: deque[RespConnection] = deque()
        self._process = os.getpid()
        self._closed = False

    def run(self, commands: Sequence[Command], deadline: float) -> list[Reply]:
        connection = self._take()
        if connection is not None:
            try:
                return self._exchange(connection, commands, deadline)
            except ConnectionLost:
                self.close_idle()  # the other pooled connections are probably lost too
        return self._exchange(self._connect(deadline), commands, deadline)

    def primaries(self, deadline: float) -> list[RedisNode]:
        """All servers to scan: this one."""
        return [self]

    def close_idle(self) -> None:
        """Close the idle connections."""
        while self._idle:
            try:
                self._idle.pop().close()
            except IndexError:  # another thread took the last one
                return

    def close(self) -> None:
        self._closed = True
        self.close_idle()

    def _exchange(self, connection: RespConnection, commands: Sequence[Command], deadline: float) -> list[Reply]:
        try:
            replies = connection.exchange(commands, deadline)
        except BaseException:
            connection.close()
            raise
        if len(self._idle) < _MAX_IDLE:
            self._idle.append(connection)
        else:
            connection.close()
        if self._closed:
            self.close_idle()
        return replies

    def _take(self) -> RespConnection | None:
        if self._process != os.getpid():  # after a fork these sockets belong to the parent
            self._idle, self._process = deque(), os.getpid()
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            if connection.idle:
                return connection
            connection.close()
        return None

    def _connect(self, deadline: float) -> RespConnection:
        """Open a connection and log in."""
        half = time_left(deadline) / 2  # half for the connection, half for TLS
        times: dict[str, Any] = {"socket_connect_timeout": half, "socket_timeout": half, "retry": Retry(NoBackoff(), 0)}
        times["redis_connect_func"] = _no_greeting
        opened = self.kind(**self.options, **times)
        try:
            opened.connect()
        except RedisTimeout as error:
            raise StoreTimeout(f"Redis cannot be reached in time: {error}") from None
        except (RedisError, OSError) as error:
            raise StoreUnavailable(f"Redis cannot be reached: {error}") from None
        sock: Any = opened._sock
        connection = RespConnection(sock, opened.disconnect)
        try:
            self._log_in(connection, deadline)
        except BaseException:
            connection.close()
            raise
        return connection

    def _log_in(self, connection: RespConnection, deadline: float) -> None:
        for reply in connection.exchange(_greeting(self.options), deadline):
            if isinstance(reply, ErrorReply):
                later = reply.code not in _PERMANENT or "max number of clients" in reply.text
                # A server may repeat the command with its password.
                text = redacted(reply.text, str(self.options.get("password") or ""))
                raise (StoreUnavailable if later else StoreConfigError)(f"Redis refuses the login: {text}")


class ClusterNodes:
    """The nodes of a cluster and the map from slots to nodes, which is loaded when it is needed and when it is outdated."""

    def __init__(
        self, kind: type[AbstractConnection], options: dict[str, Any], seeds: Sequence[tuple[str, int]]
    ) -> None:
        self._kind = kind
        self._options = options
        self._seeds = seeds
        self._known: dict[tuple[str, int], RedisNode] = {}
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
            self._load_slots(deadline)
        raise StoreUnavailable("the slots of the cluster keep migrating")

    def primaries(self, deadline: float) -> list[RedisNode]:
        """All nodes that have slots."""
        slots = self._slots or self._load_slots(deadline)
        return [self._node(address) for address in sorted({address for address in slots if address is not None})]

    def close(self) -> None:
        for node in list(self._known.values()):
            node.close()

    def _round(
        self, commands: Sequence[Command], waiting: list[int], replies: list[Reply], deadline: float
    ) -> list[int]:
        """Send the commands with these indexes once and store their replies. Returns the indexes to send again."""
        slots = self._slots or self._load_slots(deadline)
        groups: dict[tuple[str, int] | None, list[int]] = {}
        for index in waiting:
            groups.setdefault(slots[key_slot(commands[index].key)], []).append(index)
        left = groups.pop(None, [])
        for address, indexes in groups.items():
            if address is None:
                continue
            try:
                answers = self._node(address).run([commands[index] for index in indexes], deadline)
            except StoreTimeout:
                self._slots = []  # load the map in the next call: another node may have taken over
                raise
            except StoreUnavailable:  # it may be gone and have been replaced
                left += indexes
                continue
            for index, answer in zip(indexes, answers, strict=True):
                if isinstance(answer, ErrorReply) and answer.code == "ASK":
                    answer = self._ask_there(answer, commands[index], deadline)
                if isinstance(answer, ErrorReply) and answer.code in {"MOVED", "CLUSTERDOWN", "TRYAGAIN", "LOADING"}:
                    left.append(index)
                else:
                    replies[index] = answer
        return left

    def _ask_there(self, error: ErrorReply, command: Command, deadline: float) -> Reply:
        """Follow `ASK slot host:port`: the slot is migrating to that node."""
        host, _, port = error.text.split(" ")[-1].rpartition(":")
        if not host or not port.isdigit():
            raise StoreUnavailable(f"the cluster redirects to an unreadable address: {error.text}")
        return self._node((host, int(port))).run([make_command(b"", b"ASKING"), command], deadline)[1]

    def _load_slots(self, deadline: float) -> list[tuple[str, int] | None]:
        """Load the map of slots from the first node that answers."""
        addresses = list(dict.fromkeys([*self._known, *self._seeds]))
        last: StoreError = StoreUnavailable("the cluster has no nodes")
        for index, address in enumerate(addresses):
            share = time_left(deadline) / min(3, len(addresses) - index)
            try:
                [answer] = self._node(address).run([make_command(b"", b"CLUSTER", b"SLOTS")], time.monotonic() + share)
                self._slots = _read_slots(answer, address[0])
            except (StoreTimeout, StoreUnavailable) as error:
                last = error
            else:
                return self._slots
        raise last

    def _node(self, address: tuple[str, int]) -> RedisNode:
        with self._lock:
            node = self._known.get(address)
            if node is None:
                node = RedisNode(self._kind, self._options | {"host": address[0], "port": address[1]})
                self._known[address] = node
            return node


def open_nodes(url: str) -> RedisNode | ClusterNodes:
    """Parse a Redis URL, without connecting. Raises StoreConfigError."""
    parts = split_url(url)
    user, at, hosts = parts.netloc.rpartition("@")
    scheme, _, kind = parts.scheme.partition("+")
    if scheme not in {"redis", "rediss", "unix"} or kind not in {"", "cluster"} or (scheme == "unix" and kind):
        raise StoreConfigError(
            f"a Redis URL starts with redis://, rediss://, unix:// or redis+cluster://, unlike {scheme}://"
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
            options.pop(key, None)  # deadlines replace them
        connection(**options)
        if not kind and len(several) <= 1:
            return RedisNode(connection, options)
        if not kind:
            raise StoreConfigError("several hosts need the scheme redis+cluster://")
        if options.pop("db", 0):
            raise StoreConfigError("a cluster has database 0 only")
        seeds = [(split.hostname or "localhost", split.port or 6379) for split in (urlsplit(f"//{h}") for h in several)]
        return ClusterNodes(connection, options, seeds)
    except (TypeError, ValueError, RedisError) as error:
        raise StoreConfigError(f"the Redis URL is wrong: {redacted(str(error))}") from None


def _no_greeting(connection: AbstractConnection) -> None:
    """Replaces the greeting of redis-py, where each step may take the full timeout. `_greeting` takes one round trip."""


def _greeting(options: dict[str, Any]) -> list[Command]:
    commands = []
    if options.get("password") or options.get("username"):
        user = (options["username"].encode(),) if options.get("username") else ()
        commands.append(make_command(b"", b"AUTH", *user, (options.get("password") or "").encode()))
    if options.get("db"):
        commands.append(make_command(b"", b"SELECT", b"%d" % options["db"]))
    return commands


def _read_slots(reply: Reply, asked_host: str) -> list[tuple[str, int] | None]:
    """Parse the reply to CLUSTER SLOTS: the primary's address by slot. A node without a name is the one that replied."""
    if isinstance(reply, ErrorReply):
        raise StoreConfigError(f"the server is not a cluster: {reply.text}")
    slots: list[tuple[str, int] | None] = [None] * _SLOTS
    for row in reply if isinstance(reply, list) else []:
        match row:
            case [int(first), int(last), [host, int(port), *_], *_] if 0 <= first <= last < _SLOTS:
                name = host.decode() if isinstance(host, bytes) and host not in {b"", b"?"} else asked_host
                slots[first : last + 1] = [(name, port)] * (last + 1 - first)
            case _:
                raise StoreUnavailable("the cluster did not reply with its slots")
    return slots
