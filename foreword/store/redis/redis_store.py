"""Blocks in Redis, Valkey, or a cluster of them.

What lies there, `P` being the prefix:

    P:b:<name in hex>    a string: the frame, written with one SET
    P:records            a hash: word -> record
    P:pinned             a set: the names (48 bytes) that are pinned

A server bounds itself, with `maxmemory`, and knows neither chains nor pins:

- `allkeys-lru` evicts whatever was not used for long: a chain's head as soon as its tail, and pins and records too. What is
  lost is a miss, and a gap: a lookup ends there.
- `volatile-lru` together with a `ttl` here evicts (and lets expire) only blocks that are not pinned: `pin` takes a block's
  time to live away. Choose this where named prefixes matter.
- `noeviction` evicts nothing: a full server refuses blocks with `StoreFull`.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from foreword.blocks.layout import NAME_BYTES
from foreword.errors import BadFrame, StoreConfigError, StoreError, StoreUnavailable
from foreword.store.base import Name, Store, StoredBlock, StoreStatus, check_record, check_record_key, time_left
from foreword.store.frame import HEADER_BYTES, Frame, read_header
from foreword.store.redis.nodes import Cluster, Node, Single, open_nodes
from foreword.store.redis.resp import Command, Refusal, Reply, as_number, as_value, as_values, encode, words

# Names asked for in the first round trip of a lookup; each further one asks for 8 times as many.
_FIRST_BATCH: Final = 64
_SCAN_BATCH: Final = 512
_STATUS_AGE: Final = 1.0
_STATUS_WAIT: Final = 0.25
_PREFIX = re.compile(r"[A-Za-z0-9._:-]{1,100}")


class RedisStore(Store):
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
        self._nodes: Single | Cluster = open_nodes(url)
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
            lengths.append(as_number(reply))
        if wrong:  # a key that is no string can never become a block, so it must not keep one from being written
            self._run([words(key, b"UNLINK", key) for key in wrong], deadline)
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
        commands = [words(key, b"UNLINK", key) for key in keys]
        commands.append(words(self._pinned, b"SREM", self._pinned, *names))
        return sum(as_number(reply) for reply in self._ask(commands, deadline)[:-1])

    def pin(self, names: Sequence[Name], *, pinned: bool = True, deadline: float) -> int:
        """Note names as pinned, and let their blocks live without end where there is a `ttl`.

        There is no budget of its own: whether the server keeps them depends on its policy (the module's docstring).
        """
        there = self._there(names, deadline)
        found = [name for name, known in zip(names, there, strict=True) if known]
        if found:
            word = b"SADD" if pinned else b"SREM"
            commands = [words(self._pinned, word, self._pinned, *found)]
            if self._ttl is not None:
                life = (b"PERSIST",) if pinned else (b"PEXPIRE", self._ttl)
                commands += [words(key, life[0], key, *life[1:]) for key in map(self._key, found)]
            self._ask(commands, deadline)
        return len(found)

    def scan(self, *, deadline: float) -> Iterator[StoredBlock]:
        """All blocks. Reads each one's header, so the server takes them all for used just now; `used_at` is from before."""
        [members] = self._ask([words(self._pinned, b"SMEMBERS", self._pinned)], deadline)
        pinned = set(as_values(members))
        seen: set[Name] = set()
        for node in self._nodes.primaries(deadline):
            for keys in _scan_keys(node, self._blocks + b"*", deadline):
                names = {name: key for key in keys if (name := self._name(key)) is not None and name not in seen}
                seen.update(names)
                self._check_open()
                yield from _entries(node, names, pinned, deadline)

    def put_record(self, word: str, data: bytes, *, deadline: float) -> None:
        self._ask([words(self._records, b"HSET", self._records, _word(word), check_record(data))], deadline)

    def get_record(self, word: str, *, deadline: float) -> bytes | None:
        [value] = self._ask([words(self._records, b"HGET", self._records, _word(word))], deadline)
        return None if value is None else as_value(value)

    def delete_record(self, word: str, *, deadline: float) -> bool:
        [count] = self._ask([words(self._records, b"HDEL", self._records, _word(word))], deadline)
        return as_number(count) > 0

    def records(self, start: str, *, deadline: float) -> list[str]:
        [reply] = self._ask([words(self._records, b"HKEYS", self._records)], deadline)
        known = (value.decode("ascii", "replace") for value in as_values(reply))
        return sorted(word for word in known if word.startswith(start))

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
            answers = [node.run([words(b"", b"INFO")], deadline)[0] for node in self._nodes.primaries(deadline)]
            self._status = _read_status([as_value(answer) for answer in answers])
        except StoreError:
            self._status = replace(self._status, notes={"unreachable": 1})
        self._status_at = time.monotonic()

    def _there(self, names: Sequence[Name], deadline: float) -> list[bool]:
        keys = [self._key(name) for name in names]
        return [as_number(reply) > 0 for reply in self._ask([words(key, b"EXISTS", key) for key in keys], deadline)]

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


@dataclass(frozen=True, slots=True)
class _Header:
    """Parent and depth of a block, where its header can be read."""

    parent: bytes = b""
    depth: int = 0


def _word(word: str) -> bytes:
    return check_record_key(word).encode()


def _scan_keys(node: Node, pattern: bytes, deadline: float) -> Iterator[list[bytes]]:
    """The keys of one server in batches; Redis may repeat some."""
    cursor = b"0"
    while True:
        [reply] = node.run([words(b"", b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"%d" % _SCAN_BATCH)], deadline)
        if isinstance(reply, Refusal):
            raise reply.error()
        if not isinstance(reply, list) or len(reply) != 2:
            raise StoreUnavailable("Redis answered something else than a cursor and keys")
        cursor = as_value(reply[0])
        yield as_values(reply[1])
        if cursor == b"0":
            return


def _entries(node: Node, names: dict[Name, bytes], pinned: set[bytes], deadline: float) -> Iterator[StoredBlock]:
    """What a server knows of these blocks; those that went away meanwhile are left out."""
    commands = []
    for key in names.values():
        commands.append(words(key, b"OBJECT", b"IDLETIME", key))  # before the others, which make it 0
        commands.append(words(key, b"STRLEN", key))
        commands.append(words(key, b"GETRANGE", key, b"0", b"%d" % (HEADER_BYTES - 1)))
    replies = iter(node.run(commands, deadline) if commands else [])
    now = time.time()
    for name, idle, size, head in zip(names, replies, replies, replies, strict=True):
        if not isinstance(size, int) or not size or not isinstance(head, bytes):
            continue
        header = _header(head, name)
        used_at = now - idle if isinstance(idle, int) else 0.0
        yield StoredBlock(name, header.parent, header.depth, size, used_at=used_at, pinned=name in pinned)


def _header(head: bytes, name: Name) -> _Header:
    try:
        header = read_header(head)
    except BadFrame:
        return _Header()
    return _Header(header.parent, header.depth) if header.name == name else _Header()


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
