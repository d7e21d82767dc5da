"""Redis URLs: one server, a cluster, or servers that Sentinel watches. redis-py parses the options.

A node of a cluster that fails is skipped from then on, so it costs one call its deadline and no further one. A background
thread asks it and reloads the map of slots until it replies again or another node has taken its slots over.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Final
from urllib.parse import urlsplit

from redis.connection import AbstractConnection, Connection, SSLConnection, parse_url
from redis.crc import key_slot
from redis.exceptions import RedisError

from foreword.errors import StoreConfigError, StoreError, StoreTimeout, StoreUnavailable
from foreword.store.background import background_thread, renew_in_child
from foreword.store.background_jobs import BackgroundJobs
from foreword.store.base import time_left
from foreword.store.redact import ESCAPES, redacted, split_url
from foreword.store.redis.nodes import INFO, PLACES, RedisNode
from foreword.store.redis.resp import Command, ErrorReply, Reply, make_command

Address = tuple[str, int]

_SLOTS: Final = 16384
_ROUNDS: Final = 6  # how often commands are sent again while slots migrate
_PAUSE: Final = 0.05  # seconds between these rounds
_THREADS: Final = 64  # of one store, for calls to several nodes
# Seconds before the deadline at which nodes that have not replied are given up, at most a fifth of the time. The replies of
# the other nodes reach the caller in time.
_RESERVE: Final = 0.03
_SHORT: Final = 0.02  # seconds; a node that does not reply in so little time has not failed
_PROBE_TIMEOUT: Final = 1.0
_PROBE_PAUSES: Final = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)  # seconds between attempts to reach failed nodes
_PING: Final = make_command(b"", b"PING")


class ClusterNodes:
    """The nodes of a cluster and the map from slots to nodes, which is loaded when it is needed and when it is outdated.

    Args:
        seeds: addresses of some nodes, to load the map from.
    """

    def __init__(self, kind: type[AbstractConnection], options: dict[str, Any], seeds: Sequence[Address]) -> None:
        self._kind = kind
        self._options = options
        self._seeds = seeds
        self._known: dict[Address, RedisNode] = {}
        self._slots: list[Address | None] = []
        self._pool = _NodePool()
        self._down: set[Address] = set()  # failed nodes, which calls skip
        self._watching: threading.Thread | None = None
        self._closed = threading.Event()
        self.after_fork()
        renew_in_child(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self._down.clear()  # the child has no thread that would find them up again
        self._watching = None

    def run(self, commands: Sequence[Command], deadline: float) -> list[Reply]:
        """The replies in the order of the commands. A StoreError stands for each one that did not come."""
        replies: list[Reply] = [None] * len(commands)
        waiting = list(range(len(commands)))
        try:
            for _ in range(_ROUNDS):
                waiting = self._round(commands, waiting, replies, deadline)
                if not waiting:
                    break
                time.sleep(min(_PAUSE, time_left(deadline)))
                self._load_slots(deadline)
        except StoreError as error:
            for index in waiting:
                replies[index] = replies[index] or error
        return replies

    places = PLACES

    def skips(self, key: bytes) -> bool:
        """Whether commands for this key are not sent, since its node is down."""
        return bool(self._down and self._slots) and self._slots[key_slot(key)] in self._down

    def primaries(self, deadline: float) -> list[RedisNode]:
        """All nodes that have slots."""
        return [self._node(address) for address in self._owners(deadline)]

    def info(self, deadline: float) -> list[Reply]:
        """The reply of each node that has slots to INFO."""
        jobs = {address: [INFO] for address in self._owners(deadline)}
        return [reply for replies in self._ask_nodes(jobs, deadline).values() for reply in replies]

    @property
    def usable(self) -> bool:
        """Whether some nodes reply: the failure of others is then not one of the whole store."""
        return any(address not in self._down for address in {*self._slots} - {None})

    def close(self) -> None:
        self._closed.set()
        self._pool.close()
        for node in list(self._known.values()):
            node.close()

    def _owners(self, deadline: float) -> list[Address]:
        slots = self._slots or self._load_slots(deadline)
        return sorted({address for address in slots if address is not None})

    def _round(
        self, commands: Sequence[Command], waiting: list[int], replies: list[Reply], deadline: float
    ) -> list[int]:
        """Send the commands with these indexes once and store their replies. Returns the indexes to send again."""
        slots = self._slots or self._load_slots(deadline)
        groups: dict[Address, list[int]] = {}
        for index in waiting:
            address = slots[key_slot(commands[index].key)]
            if address is None:
                replies[index] = StoreUnavailable("no node of the cluster has this slot")
            else:
                groups.setdefault(address, []).append(index)
        jobs = {address: [commands[index] for index in indexes] for address, indexes in groups.items()}
        again = []
        for address, answers in self._ask_nodes(jobs, deadline).items():
            for index, answer in zip(groups[address], answers, strict=True):
                if isinstance(answer, ErrorReply) and answer.code == "ASK":
                    [answer] = self._ask_there(answer, commands[index], address, deadline)
                replies[index] = answer
                if self._may_succeed(answer, address):
                    again.append(index)
        return again

    def _may_succeed(self, answer: Reply, address: Address) -> bool:
        """Whether to send a command again after this reply. Learns the new node of a slot that has moved."""
        if isinstance(answer, ErrorReply) and answer.code == "MOVED":
            moved = _redirection(answer, address)
            if moved is not None and self._slots:
                self._slots[moved[0]] = moved[1]
            return True
        if isinstance(answer, ErrorReply):
            return answer.code == "TRYAGAIN"
        # Another node may have replaced one that refuses connections. One that was skipped is being watched already.
        return isinstance(answer, StoreUnavailable) and not isinstance(answer, _Skipped)

    def _ask_nodes(self, jobs: dict[Address, list[Command]], deadline: float) -> dict[Address, list[Reply]]:
        """Send commands to several nodes at once. Failed nodes are skipped, as StoreErrors in place of the replies."""
        todo = {address: commands for address, commands in jobs.items() if address not in self._down}
        calls = [(self._node(address), commands) for address, commands in todo.items()]
        left = deadline - time.monotonic()
        patient = left > _SHORT
        deadline -= min(_RESERVE, max(left, 0.0) / 5)
        replies = dict(zip(todo, self._pool.run(calls, deadline), strict=True))
        for address, answers in replies.items():
            if isinstance(answers[0], StoreUnavailable) or (patient and isinstance(answers[0], StoreTimeout)):
                self._watch(address)
        for address in jobs.keys() - todo.keys():
            error = _Skipped(f"the cluster's node {address[0]}:{address[1]} does not reply")
            replies[address] = [error] * len(jobs[address])
        return replies

    def _ask_there(self, error: ErrorReply, command: Command, asked: Address, deadline: float) -> list[Reply]:
        """Follow `ASK slot host:port`: the slot is migrating to that node."""
        redirection = _redirection(error, asked)
        if redirection is None:
            return [StoreUnavailable(f"the cluster redirects to an unreadable address: {error.text}")]
        return self._node(redirection[1]).run_in_order([make_command(b"", b"ASKING"), command], deadline)[1:]

    def _load_slots(self, deadline: float) -> list[Address | None]:
        """Load the map of slots from the first node that answers."""
        addresses = list(dict.fromkeys([*self._known, *self._seeds]))
        addresses = [address for address in addresses if address not in self._down] or addresses
        last: StoreError = StoreUnavailable("the cluster has no nodes")
        for index, address in enumerate(addresses):
            share = time_left(deadline) / min(3, len(addresses) - index)
            [answer] = self._node(address).run([make_command(b"", b"CLUSTER", b"SLOTS")], time.monotonic() + share)
            try:
                if isinstance(answer, StoreError):
                    raise answer
                self._slots = _read_slots(answer, address[0])
            except (StoreTimeout, StoreUnavailable) as error:
                last = error
            else:
                return self._slots
        raise last

    def _node(self, address: Address) -> RedisNode:
        with self._lock:
            node = self._known.get(address)
            if node is None:
                node = RedisNode(self._kind, self._options | {"host": address[0], "port": address[1]})
                self._known[address] = node
            return node

    # Failed nodes

    def _watch(self, address: Address) -> None:
        """Skip a node until it replies."""
        with self._lock:
            self._down.add(address)
            if self._watching is None or not self._watching.is_alive():  # or it is the parent's, before a fork
                self._watching = background_thread(self._watch_failed, "redis-watch")

    def _watch_failed(self) -> None:
        """Ask failed nodes and reload the map of slots until no failed node is left."""
        attempts = 0
        while not self._closed.is_set():
            for address in list(self._down):
                self._probe(address)
            with self._lock:
                if not self._down:
                    self._watching = None
                    return
            with contextlib.suppress(StoreError):
                self._load_slots(time.monotonic() + _PROBE_TIMEOUT)
            self._closed.wait(_PROBE_PAUSES[min(attempts, len(_PROBE_PAUSES) - 1)])
            attempts += 1

    def _probe(self, address: Address) -> None:
        [reply] = self._node(address).run([_PING], time.monotonic() + _PROBE_TIMEOUT)
        if not isinstance(reply, StoreTimeout | StoreUnavailable):
            with self._lock:
                self._down.discard(address)


class _Skipped(StoreUnavailable):
    """A command was not sent, since its node has failed before."""


class _NodePool:
    """Threads that ask several nodes at once."""

    def __init__(self) -> None:
        self._jobs = BackgroundJobs("redis", most=None, threads=_THREADS)

    def run(self, calls: Sequence[tuple[RedisNode, Sequence[Command]]], deadline: float) -> list[list[Reply]]:
        """The replies of each node."""
        if len(calls) < 2:
            return [node.run(commands, deadline) for node, commands in calls]
        try:
            running = [self._jobs.submit(node.run, commands, deadline) for node, commands in calls]
        except RuntimeError:  # the pool was shut down
            return [[StoreUnavailable("the store is closed")] * len(commands) for _, commands in calls]
        return [_reply_of(future, commands, deadline) for future, (_, commands) in zip(running, calls, strict=True)]

    def close(self) -> None:
        self._jobs.stop()


def _reply_of(future: Future[list[Reply]], commands: Sequence[Command], deadline: float) -> list[Reply]:
    """The replies of one node. It ends by itself at the deadline, unless the resolver of host names hangs."""
    try:
        return future.result(max(deadline - time.monotonic(), 0) + _RESERVE / 2)
    except TimeoutError:
        future.cancel()
        return [StoreTimeout("Redis did not reply in time")] * len(commands)


def _redirection(error: ErrorReply, asked: Address) -> tuple[int, Address] | None:
    """Slot and address in `MOVED slot host:port` or `ASK slot host:port`. Without a host it is the one that replied."""
    words = error.text.split(" ")
    host, _, port = words[-1].rpartition(":")
    if len(words) != 3 or not words[1].isdigit() or not port.isdigit():
        return None
    slot, number = int(words[1]), int(port)
    return (slot, (host or asked[0], number)) if slot < _SLOTS and 0 < number < 1 << 16 else None


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


class SentinelNodes:
    """The current primary. Sentinel is asked before the first call, and again when the primary fails or became a replica.

    Args:
        sentinels: addresses of Sentinel processes.
        sentinel_options: their connection options, such as a password.
        name: of the primary, as Sentinel's configuration has it.
    """

    def __init__(
        self,
        kind: type[AbstractConnection],
        options: dict[str, Any],
        sentinels: Sequence[Address],
        sentinel_options: dict[str, Any],
        name: str,
    ) -> None:
        self._kind = kind
        self._options = options
        self._name = name
        self._sentinels = [RedisNode(kind, sentinel_options | {"host": host, "port": port}) for host, port in sentinels]
        self._primary: tuple[Address, RedisNode] | None = None
        self._doubtful = True  # ask Sentinel before the next call

    def run(self, commands: Sequence[Command], deadline: float) -> list[Reply]:
        """The replies in the order of the commands. A StoreError stands for each one that did not come."""
        try:
            node = self._find(deadline)
        except StoreError as error:
            return [error] * len(commands)
        replies = node.run(commands, deadline)
        # Replies which show that the server is not the primary any more.
        lost = [
            index
            for index, reply in enumerate(replies)
            if isinstance(reply, StoreUnavailable | StoreTimeout)
            or (isinstance(reply, ErrorReply) and reply.code == "READONLY")
        ]
        self._doubtful = bool(lost)
        if lost and time.monotonic() < deadline:
            self._run_again(node, commands, lost, replies, deadline)
        return replies

    places = 1

    def skips(self, key: bytes) -> bool:
        return False

    def primaries(self, deadline: float) -> list[RedisNode]:
        """All servers to scan: the primary."""
        return [self._find(deadline)]

    def info(self, deadline: float) -> list[Reply]:
        """The primary's reply to INFO."""
        return self.run([INFO], deadline)

    @property
    def usable(self) -> bool:
        """Whether other servers may reply when one has failed: False, only the primary has the data."""
        return False

    def close(self) -> None:
        for node in [*self._sentinels, *([self._primary[1]] if self._primary else [])]:
            node.close()

    def _run_again(
        self, node: RedisNode, commands: Sequence[Command], lost: list[int], replies: list[Reply], deadline: float
    ) -> None:
        """Send the commands that were lost to the new primary, if there is one already."""
        try:
            new = self._find(deadline)
        except StoreError:
            return
        if new is node:
            return
        for index, reply in zip(lost, new.run([commands[index] for index in lost], deadline), strict=True):
            replies[index] = reply

    def _find(self, deadline: float) -> RedisNode:
        if self._primary is None or self._doubtful:
            address = self._ask(deadline)
            if self._primary is None or self._primary[0] != address:
                if self._primary is not None:
                    self._primary[1].close()
                options = self._options | {"host": address[0], "port": address[1]}
                self._primary = (address, RedisNode(self._kind, options))
            self._doubtful = False
        return self._primary[1]

    def _ask(self, deadline: float) -> Address:
        """The primary's address from the first Sentinel that replies with one."""
        question = make_command(b"", b"SENTINEL", b"get-master-addr-by-name", self._name.encode())
        last: StoreError = StoreUnavailable("there is no Sentinel")
        for index, sentinel in enumerate(self._sentinels):
            share = time_left(deadline) / min(3, len(self._sentinels) - index)
            [reply] = sentinel.run([question], time.monotonic() + share)
            match reply:
                case [bytes() as host, bytes() as port] if port.isdigit():
                    return host.decode(), int(port)
                case StoreError():
                    last = reply
                case ErrorReply():
                    last = reply.error()
                case _:
                    last = StoreConfigError(f"Sentinel does not know a primary called {self._name!r}")
        raise last


_UNKNOWN_OPTION = re.compile(r"unexpected keyword argument '(\w+)'")
_HOST = re.compile(r"(\[[^\]]*\]|[^:\[\]]*)(:\d*)?")

Nodes = RedisNode | ClusterNodes | SentinelNodes
_SENTINEL_PORT: Final = 26379


def open_nodes(url: str) -> Nodes:
    """Parse a Redis URL, without connecting. Raises StoreConfigError."""
    parts = split_url(url)
    user, at, hosts = parts.netloc.rpartition("@")
    scheme, _, kind = parts.scheme.partition("+")
    if (
        scheme not in {"redis", "rediss", "unix"}
        or kind not in {"", "cluster", "sentinel"}
        or (scheme == "unix" and kind)
    ):
        raise StoreConfigError(
            f"a Redis URL starts with redis://, rediss://, unix://, redis+cluster:// or redis+sentinel://, unlike {scheme}://"
        )
    several = [host for host in hosts.split(",") if host]
    if not all(map(_HOST.fullmatch, several)) or (scheme != "unix" and "@" in parts.path):
        raise StoreConfigError(f"the Redis URL's host and port cannot be read; {ESCAPES}")
    if scheme == "unix" and hosts:
        raise StoreConfigError(
            f"a Unix socket has no host: write unix:///path or unix://user:password@/path; {ESCAPES}"
        )
    name, _, db = parts.path.strip("/").partition("/") if kind == "sentinel" else ("", "", parts.path)
    if kind == "sentinel" and not name:
        raise StoreConfigError("a Sentinel URL names the primary: redis+sentinel://host1,host2/name")
    if kind and not (several and all(urlsplit(f"//{host}").hostname for host in several)):
        raise StoreConfigError(f"a {kind} URL names hosts: {scheme}+{kind}://host1,host2" + "/name" * bool(name))
    if scheme != "unix" and db.strip("/") and not db.strip("/").isdecimal():
        raise StoreConfigError(f"a Redis URL ends with the number of a database, not {db.strip('/')!r}")
    first = user + at + (several[0] if several else "")
    try:
        path = f"/{db}" if kind == "sentinel" else parts.path
        options = dict(parse_url(f"{scheme}://{first}{path}?{parts.query}"))
        login = {key: options.pop(f"sentinel_{key}", None) for key in ("username", "password")}
        default: type[AbstractConnection] = SSLConnection if scheme == "rediss" else Connection
        connection = options.pop("connection_class", default)
        for key in ("socket_timeout", "socket_connect_timeout"):
            options.pop(key, None)  # deadlines replace them
        connection(**options)
        if not kind and len(several) <= 1:
            return RedisNode(connection, options)
        if not kind:
            raise StoreConfigError("several hosts need the scheme redis+cluster://")
        port = _SENTINEL_PORT if kind == "sentinel" else 6379
        split = (urlsplit(f"//{host}") for host in several)
        seeds = [(one.hostname or "localhost", one.port or port) for one in split]
        if kind == "sentinel":
            own = {key: value for key, value in options.items() if key not in {"db", "username", "password"}}
            return SentinelNodes(connection, options, seeds, own | login, name)
        if options.pop("db", 0):
            raise StoreConfigError("a cluster has database 0 only")
        return ClusterNodes(connection, options, seeds)
    except (TypeError, ValueError, RedisError) as error:
        unknown = _UNKNOWN_OPTION.search(str(error))
        wrong = f"unknown option {unknown[1]!r}" if unknown else redacted(str(error))
        raise StoreConfigError(f"the Redis URL is wrong: {wrong}") from None
