"""Blocks in Redis, Valkey, or a cluster of them.

What lies there, `P` being the prefix:

    P:b:<name in hex>    a string: the frame, written with one SET
    P:records            a hash: word -> record
    P:pinned             a set: the names (48 bytes) that are pinned

redis-py reads the URL and opens the sockets (TLS, Unix, keep-alive); what is said on them is said by `store/resp.py`.

A server bounds itself, with `maxmemory`, and knows neither chains nor pins:

- `allkeys-lru` evicts whatever was not used for long: a chain's head as soon as its tail, and pins and records too. What is
  lost is a miss, and a gap: a lookup ends there.
- `volatile-lru` together with a `ttl` here evicts (and lets expire) only blocks that are not pinned: `pin` takes a block's
  time to live away. Choose this where named prefixes matter.
- `noeviction` evicts nothing: a full server refuses blocks with `StoreFull`.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import urlsplit

from redis.backoff import NoBackoff
from redis.connection import AbstractConnection, Connection, SSLConnection, parse_url
from redis.crc import key_slot
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeout
from redis.retry import Retry

from foreword.blocks.layout import NAME_BYTES
from foreword.errors import BadFrame, StoreConfigError, StoreError, StoreTimeout, StoreUnavailable
from foreword.store.base import Entry, Name, StoreStatus, check_record, check_word, time_left
from foreword.store.frame import HEADER_BYTES, Frame, read_header
from foreword.store.redact import redacted, split_url
from foreword.store.resp import Command, ConnectionLost, Refusal, Reply, Wire, encode

_FIRST_BATCH: Final = (
    64  # names asked for in the first round trip of a lookup; each further one asks for 8 times as many
)
_SCAN_BATCH: Final = 512
_IDLE: Final = 32  # connections kept per node
_SLOTS: Final = 16384
_ROUNDS: Final = 6  # how often commands follow slots that move
_PAUSE: Final = 0.05  # seconds between these rounds
_STATUS_AGE: Final = 1.0
_STATUS_WAIT: Final = 0.25
_SHUT: Final = {"ERR", "NOAUTH", "NOPERM", "WRONGPASS"}  # refusals of a greeting that will be the same next time
_PREFIX = re.compile(r"[A-Za-z0-9._:-]{1,100}")
_HOST = re.compile(r"(\[[^\]]*\]|[^:\[\]]*)(:\d*)?")


class RedisStore:
    """A store in a Redis or Valkey server or cluster (the module's docstring says what it evicts).

    Nothing is connected before the first call; after a failure the next call connects anew. Host names are looked up by the
    system's resolver, whose own time is the only one that a deadline does not bound.

    Args:
        url: `redis://[user:password@]host[:port][/db]`, `rediss://` (TLS), `unix:///path.sock`, or
            `redis+cluster://host[:port],host[:port]` (`rediss+cluster://`) with any nodes of a cluster. Query parameters are
            those of redis-py, such as `ssl_ca_certs=`.
        prefix: first part of all keys; stores with different prefixes see nothing of each other.
        ttl: seconds that a block lives after it was written unless it is pinned; None for no end.
    """

    def __init__(self, url: str, *, label: str = "redis", prefix: str = "foreword", ttl: float | None = None) -> None:
        if not _PREFIX.fullmatch(prefix):
            raise StoreConfigError(f"a prefix of keys has letters, digits and ._:- only, unlike {prefix!r}")
        if ttl is not None and ttl < 0.001:
            raise StoreConfigError(f"ttl is at least a millisecond, not {ttl} s")
        self.label = label
        self.readers = 1
        self._nodes: _Single | _Cluster = _open(url)
        self._blocks = f"{prefix}:b:".encode()
        self._records = f"{prefix}:records".encode()
        self._pinned = f"{prefix}:pinned".encode()
        self._ttl = None if ttl is None else b"%d" % round(ttl * 1000)
        self._closed = False
        self._status = StoreStatus()
        self._status_at = float("-inf")
        self._status_lock = threading.Lock()

    def lookup(self, names: Sequence[Name], *, deadline: float) -> int:
        found, size = 0, _FIRST_BATCH
        while found < len(names):
            there = self._there(names[found : found + size], deadline)
            if not all(there):
                return found + there.index(False)
            found += len(there)
            size *= 8
        return found

    def get(self, names: Sequence[Name], buffers: Sequence[memoryview], *, deadline: float) -> list[int]:
        commands = []
        for name, buffer in zip(names, buffers, strict=True):
            key = self._key(name)
            commands.append(Command(key, (encode(b"GET", key),), buffer.cast("B")))
        lengths, wrong = [], []
        for command, reply in zip(commands, self._run(commands, deadline), strict=True):
            if isinstance(reply, Refusal) and reply.code == "WRONGTYPE":
                wrong.append(command.key)
                reply = 0
            lengths.append(_number(reply))
        if wrong:  # a key that is no string can never become a block, so it must not keep one from being written
            self._run([_words(key, b"UNLINK", key) for key in wrong], deadline)
        return lengths

    def put(self, frames: Sequence[Frame], *, deadline: float) -> int:
        there = self._there([frame.name for frame in frames], deadline)
        absent = [frame for frame, known in zip(frames, there, strict=True) if not known]
        self._ask([self._set(frame) for frame in absent], deadline)
        return len(frames)

    def delete(self, names: Sequence[Name], *, deadline: float) -> int:
        if not names:
            return 0
        keys = [self._key(name) for name in names]
        commands = [_words(key, b"UNLINK", key) for key in keys]
        commands.append(_words(self._pinned, b"SREM", self._pinned, *names))
        return sum(_number(reply) for reply in self._ask(commands, deadline)[:-1])

    def pin(self, names: Sequence[Name], *, pinned: bool = True, deadline: float) -> int:
        """Note names as pinned, and let their blocks live without end where there is a `ttl`.

        There is no budget of its own: whether the server keeps them depends on its policy (the module's docstring).
        """
        there = self._there(names, deadline)
        found = [name for name, known in zip(names, there, strict=True) if known]
        if found:
            word = b"SADD" if pinned else b"SREM"
            commands = [_words(self._pinned, word, self._pinned, *found)]
            if self._ttl is not None:
                life = (b"PERSIST",) if pinned else (b"PEXPIRE", self._ttl)
                commands += [_words(key, life[0], key, *life[1:]) for key in map(self._key, found)]
            self._ask(commands, deadline)
        return len(found)

    def scan(self, *, deadline: float) -> Iterator[Entry]:
        """All blocks. Reads each one's header, so the server takes them all for used just now; `used_at` is from before."""
        [members] = self._ask([_words(self._pinned, b"SMEMBERS", self._pinned)], deadline)
        pinned = set(_values(members))
        seen: set[Name] = set()
        for node in self._nodes.primaries(deadline):
            for keys in _scan_keys(node, self._blocks + b"*", deadline):
                names = {name: key for key in keys if (name := self._name(key)) is not None and name not in seen}
                seen.update(names)
                self._check_open()
                yield from _entries(node, names, pinned, deadline)

    def put_record(self, word: str, data: bytes, *, deadline: float) -> None:
        self._ask([_words(self._records, b"HSET", self._records, _word(word), check_record(data))], deadline)

    def get_record(self, word: str, *, deadline: float) -> bytes | None:
        [value] = self._ask([_words(self._records, b"HGET", self._records, _word(word))], deadline)
        return None if value is None else _value(value)

    def delete_record(self, word: str, *, deadline: float) -> bool:
        [count] = self._ask([_words(self._records, b"HDEL", self._records, _word(word))], deadline)
        return _number(count) > 0

    def records(self, start: str, *, deadline: float) -> list[str]:
        [words] = self._ask([_words(self._records, b"HKEYS", self._records)], deadline)
        return sorted(
            word for word in (value.decode("ascii", "replace") for value in _values(words)) if word.startswith(start)
        )

    def status(self) -> StoreStatus:
        """What the servers say of all their memory, other programs' keys included. At most a second old where they answer.

        `notes["unreachable"]` is 1 where the last attempt failed; the other numbers are then those of the last that did not.
        """
        if not self._closed and self._status_lock.acquire(blocking=False):
            try:
                self._refresh_status()
            finally:
                self._status_lock.release()
        return self._status

    def close(self) -> None:
        self._closed = True
        self._nodes.close()

    def _refresh_status(self) -> None:
        if time.monotonic() < self._status_at + _STATUS_AGE:
            return
        deadline = time.monotonic() + _STATUS_WAIT
        try:
            answers = [node.run([_words(b"", b"INFO")], deadline)[0] for node in self._nodes.primaries(deadline)]
            self._status = _read_status([_value(answer) for answer in answers])
        except StoreError:
            self._status = replace(self._status, notes={"unreachable": 1})
        self._status_at = time.monotonic()

    def _there(self, names: Sequence[Name], deadline: float) -> list[bool]:
        keys = [self._key(name) for name in names]
        return [_number(reply) > 0 for reply in self._ask([_words(key, b"EXISTS", key) for key in keys], deadline)]

    def _set(self, frame: Frame) -> Command:
        """SET of what is not there; the payload goes out from where it lies."""
        key, data = self._key(frame.name), frame.data.cast("B")
        ttl = self._ttl
        head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (4 if ttl is None else 6, len(key), key, len(data))
        tail = b"\r\n$2\r\nNX\r\n" if ttl is None else b"\r\n$2\r\nNX\r\n$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(ttl), ttl)
        return Command(key, (head, data, tail))

    def _key(self, name: Name) -> bytes:
        return self._blocks + name.hex().encode()

    def _name(self, key: bytes) -> Name | None:
        """The name that a key stands for; None for a key that is not one of ours."""
        digits = key[len(self._blocks) :]
        if len(digits) != 2 * NAME_BYTES or digits != digits.lower():
            return None
        try:
            return bytes.fromhex(digits.decode())
        except ValueError:
            return None

    def _ask(self, commands: Sequence[Command], deadline: float) -> list[Reply]:
        """Answers in the order of the commands. Raises what the first refusal means, after all were read."""
        replies = self._run(commands, deadline)
        for reply in replies:
            if isinstance(reply, Refusal):
                raise reply.error()
        return replies

    def _run(self, commands: Sequence[Command], deadline: float) -> list[Reply]:
        self._check_open()
        time_left(deadline)
        return self._nodes.run(commands, deadline) if commands else []

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailable(f"the store {self.label!r} is closed")


class _Node:
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
                    text = redacted(
                        reply.text, str(self.options.get("password") or "")
                    )  # a server may repeat the command
                    raise (StoreUnavailable if later else StoreConfigError)(f"Redis does not let us in: {text}")
            ready = True
        finally:
            if not ready:
                wire.close()
        return wire


class _Single:
    """One server, or one address in front of several."""

    def __init__(self, node: _Node) -> None:
        self._node = node
        self.run = node.run
        self.close = node.close

    def primaries(self, deadline: float) -> list[_Node]:
        return [self._node]


class _Cluster:
    """The nodes of a cluster, and which of them has which slot; asked for when it is needed and when it turns out wrong."""

    def __init__(
        self, kind: type[AbstractConnection], options: dict[str, Any], seeds: Sequence[tuple[str, int]]
    ) -> None:
        self._kind = kind
        self._options = options
        self._seeds = seeds
        self._known: dict[tuple[str, int], _Node] = {}
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

    def primaries(self, deadline: float) -> list[_Node]:
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
        return self._node((host, int(port))).run([_words(b"", b"ASKING"), command], deadline)[1]

    def _learn(self, deadline: float) -> list[tuple[str, int] | None]:
        """Ask the nodes in turn which of them has which slot; the first that knows is believed."""
        addresses = list(dict.fromkeys([*self._known, *self._seeds]))
        last: StoreError = StoreUnavailable("the cluster has no node")
        for number, address in enumerate(addresses):
            share = time_left(deadline) / min(3, len(addresses) - number)
            try:
                [answer] = self._node(address).run([_words(b"", b"CLUSTER", b"SLOTS")], time.monotonic() + share)
                self._slots = _read_slots(answer, address[0])
            except (StoreTimeout, StoreUnavailable) as error:
                last = error
            else:
                return self._slots
        raise last

    def _node(self, address: tuple[str, int]) -> _Node:
        with self._lock:
            node = self._known.get(address)
            if node is None:
                node = _Node(self._kind, self._options | {"host": address[0], "port": address[1]})
                self._known[address] = node
            return node


@dataclass(frozen=True, slots=True)
class _Header:
    """Parent and depth of a block, where its header can be read."""

    parent: bytes = b""
    depth: int = 0


def _open(url: str) -> _Single | _Cluster:
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
        raise StoreConfigError(
            "the Redis URL's host and port cannot be read; in a user name or password write / as %2F, ? as %3F, # as %23, : as "
            "%3A and @ as %40"
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
            return _Single(_Node(connection, options))
        if not kind:
            raise StoreConfigError("several hosts make a cluster: redis+cluster://")
        if options.pop("db", 0):
            raise StoreConfigError("a cluster has database 0 only")
        seeds = [(split.hostname or "localhost", split.port or 6379) for split in (urlsplit(f"//{h}") for h in several)]
        return _Cluster(connection, options, seeds)
    except (TypeError, ValueError, RedisError) as error:
        raise StoreConfigError(f"the Redis URL is wrong: {redacted(str(error))}") from None


def _say_nothing(connection: AbstractConnection) -> None:
    """In place of redis-py's greeting, whose every step may take the whole time: ours is `_greeting`, in one round trip."""


def _greeting(options: dict[str, Any]) -> list[Command]:
    commands = []
    if options.get("password") or options.get("username"):
        user = (options["username"].encode(),) if options.get("username") else ()
        commands.append(_words(b"", b"AUTH", *user, (options.get("password") or "").encode()))
    if options.get("db"):
        commands.append(_words(b"", b"SELECT", b"%d" % options["db"]))
    return commands


def _words(key: bytes, *words: bytes) -> Command:
    return Command(key, (encode(*words),))


def _word(word: str) -> bytes:
    return check_word(word).encode()


def _number(reply: Reply) -> int:
    if isinstance(reply, Refusal):
        raise reply.error()
    if not isinstance(reply, int):
        raise StoreUnavailable("Redis answered something else than a number")
    return reply


def _value(reply: Reply) -> bytes:
    if isinstance(reply, Refusal):
        raise reply.error()
    if not isinstance(reply, bytes):
        raise StoreUnavailable("Redis answered something else than a value")
    return reply


def _values(reply: Reply) -> list[bytes]:
    if isinstance(reply, Refusal):
        raise reply.error()
    if not isinstance(reply, list):
        raise StoreUnavailable("Redis answered something else than a list")
    return [_value(element) for element in reply]


def _scan_keys(node: _Node, pattern: bytes, deadline: float) -> Iterator[list[bytes]]:
    """The keys of one server in batches; Redis may repeat some."""
    cursor = b"0"
    while True:
        [reply] = node.run([_words(b"", b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"%d" % _SCAN_BATCH)], deadline)
        if isinstance(reply, Refusal):
            raise reply.error()
        if not isinstance(reply, list) or len(reply) != 2:
            raise StoreUnavailable("Redis answered something else than a cursor and keys")
        cursor = _value(reply[0])
        yield _values(reply[1])
        if cursor == b"0":
            return


def _entries(node: _Node, names: dict[Name, bytes], pinned: set[bytes], deadline: float) -> Iterator[Entry]:
    """What a server knows of these blocks; those that went away meanwhile are left out."""
    commands = []
    for key in names.values():
        commands.append(_words(key, b"OBJECT", b"IDLETIME", key))  # before the others, which make it 0
        commands.append(_words(key, b"STRLEN", key))
        commands.append(_words(key, b"GETRANGE", key, b"0", b"%d" % (HEADER_BYTES - 1)))
    replies = iter(node.run(commands, deadline) if commands else [])
    now = time.time()
    for name, idle, size, head in zip(names, replies, replies, replies, strict=True):
        if not isinstance(size, int) or not size or not isinstance(head, bytes):
            continue
        header = _header(head, name)
        used_at = now - idle if isinstance(idle, int) else 0.0
        yield Entry(name, header.parent, header.depth, size, used_at=used_at, pinned=name in pinned)


def _header(head: bytes, name: Name) -> _Header:
    try:
        header = read_header(head)
    except BadFrame:
        return _Header()
    return _Header(header.parent, header.depth) if header.name == name else _Header()


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


def _read_status(answers: Sequence[bytes]) -> StoreStatus:
    """The sum over all servers of what INFO says."""
    total = {"used_memory": 0, "maxmemory": 0, "evicted_keys": 0, "expired_keys": 0}
    for answer in answers:
        for line in answer.splitlines():
            name, _, number = line.decode("ascii", "replace").partition(":")
            if name in total and number.isdigit():
                total[name] += int(number)
    notes = {"expired": total["expired_keys"], "unreachable": 0}
    return StoreStatus(-1, total["used_memory"], total["maxmemory"], evictions=total["evicted_keys"], notes=notes)
