"""Blocks in Redis, Valkey, or a cluster of them.

Keys, where `P` is the prefix:

    P:b:<name in hex>    a string: the frame, written with one SET
    P:records            a hash: record key -> record
    P:pinned             a set: the names (48 bytes) of pinned blocks

The server limits its memory itself with `maxmemory`. It knows neither chains nor pins:

- `allkeys-lru` evicts any key that was not used for long: the first blocks of a chain as well as the last ones, pinned
blocks
  and records. An evicted block is a miss and a gap, where lookups of its chain end.
- `volatile-lru` with a `ttl` evicts (and expires) only blocks that are not pinned, since `pin` removes the time to live
of a
  block. Choose it if named prefixes matter.
- `noeviction` evicts nothing: a full server refuses blocks, and `put` raises `StoreFull`.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from foreword.blocks.layout import NAME_BYTES
from foreword.errors import StoreConfigError, StoreError, StoreUnavailable
from foreword.store.base import Name, Store, StoredBlock, StoreStatus, check_record, check_record_key, time_left
from foreword.store.frame import HEADER_BYTES, Frame
from foreword.store.redis.nodes import RedisNode, open_nodes
from foreword.store.redis.resp import Command, ErrorReply, Reply, encode, expect, make_command

# Names in the first round trip of a lookup; each further one has 8 times as many.
_FIRST_BATCH: Final = 64
_SCAN_BATCH: Final = 512
_STATUS_AGE: Final = 1.0
_STATUS_TIMEOUT: Final = 0.25
_PREFIX = re.compile(r"[A-Za-z0-9._:-]{1,100}")


class RedisStore(Store):
    """A store in a Redis or Valkey server or cluster. The module's docstring describes the eviction policies.

    Nothing is connected before the first call. After a failure the next call connects again. Deadlines bound everything
    except the time that the system's resolver takes to look up host names.

    Args:
        url: `redis://[user:password@]host[:port][/db]`, `rediss://` (TLS), `unix:///path.sock`, or
            `redis+cluster://host[:port],host[:port]` (`rediss+cluster://`) with any nodes of a cluster. Query
            parameters are those of redis-py, such as `ssl_ca_certs=`.
        prefix: first part of all keys. Stores with different prefixes are independent.
        ttl: seconds until a block expires after it was written, unless it is pinned; None: never.
    """

    def __init__(self, url: str, *, label: str = "redis", prefix: str = "foreword", ttl: float | None = None) -> None:
        if not _PREFIX.fullmatch(prefix):
            raise StoreConfigError(f"a key prefix has letters, digits and ._:- only, unlike {prefix!r}")
        if ttl is not None and ttl < 0.001:
            raise StoreConfigError(f"ttl is at least a millisecond, not {ttl} s")
        self.label = label
        self._nodes = open_nodes(url)
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
            present = self.present(names[found : found + size], deadline=deadline)
            if not all(present):
                return found + present.index(False)
            found += len(present)
            size *= 8
        return found

    def present(self, names: Sequence[Name], *, deadline: float) -> list[bool]:
        commands = [make_command(key, b"EXISTS", key) for key in map(self._key, names)]
        return [expect(reply, int) > 0 for reply in self._run_checked(commands, deadline)]

    def get(self, names: Sequence[Name], buffers: Sequence[memoryview], *, deadline: float) -> list[int]:
        commands = []
        for name, buffer in zip(names, buffers, strict=True):
            key = self._key(name)
            commands.append(Command(key, (encode(b"GET", key),), buffer.cast("B")))
        lengths, wrong_type = [], []
        for command, reply in zip(commands, self._run(commands, deadline), strict=True):
            if isinstance(reply, ErrorReply) and reply.code == "WRONGTYPE":
                wrong_type.append(command.key)
                reply = 0
            lengths.append(expect(reply, int))
        if wrong_type:  # a key of another type would prevent the block from being written
            self._run([make_command(key, b"UNLINK", key) for key in wrong_type], deadline)
        return lengths

    def put(self, frames: Sequence[Frame], *, deadline: float) -> int:
        present = self.present([frame.name for frame in frames], deadline=deadline)
        absent = [frame for frame, known in zip(frames, present, strict=True) if not known]
        self._run_checked([self._set(frame) for frame in absent], deadline)
        return len(frames)

    def delete(self, names: Sequence[Name], *, deadline: float) -> int:
        if not names:
            return 0
        keys = [self._key(name) for name in names]
        commands = [make_command(key, b"UNLINK", key) for key in keys]
        commands.append(make_command(self._pinned, b"SREM", self._pinned, *names))
        return sum(expect(reply, int) for reply in self._run_checked(commands, deadline)[:-1])

    def pin(self, names: Sequence[Name], *, pinned: bool = True, deadline: float) -> int:
        """Mark blocks as pinned, and remove their time to live if there is a `ttl`.

        There is no budget for pins. Whether the server keeps pinned blocks depends on its policy (see the module).
        """
        present = self.present(names, deadline=deadline)
        found = [name for name, known in zip(names, present, strict=True) if known]
        if found:
            verb = b"SADD" if pinned else b"SREM"
            commands = [make_command(self._pinned, verb, self._pinned, *found)]
            if self._ttl is not None:
                expiry = (b"PERSIST",) if pinned else (b"PEXPIRE", self._ttl)
                commands += [make_command(key, expiry[0], key, *expiry[1:]) for key in map(self._key, found)]
            self._run_checked(commands, deadline)
        return len(found)

    def scan(self, *, deadline: float) -> Iterator[StoredBlock]:
        """List all blocks. Reading their headers counts as a use for the server; `used_at` is the time before that."""
        pinned = set(_values(self._call(b"SMEMBERS", self._pinned, deadline=deadline)))
        seen: set[Name] = set()
        for node in self._nodes.primaries(deadline):
            for keys in _scan_keys(node, self._blocks + b"*", deadline):
                names = {name: key for key in keys if (name := self._name(key)) is not None and name not in seen}
                seen.update(names)
                self._check_open()
                yield from _entries(node, names, pinned, deadline)

    def put_record(self, key: str, data: bytes, *, deadline: float) -> None:
        self._call(b"HSET", self._records, _record_key(key), check_record(data), deadline=deadline)

    def get_record(self, key: str, *, deadline: float) -> bytes | None:
        value = self._call(b"HGET", self._records, _record_key(key), deadline=deadline)
        return None if value is None else expect(value, bytes)

    def delete_record(self, key: str, *, deadline: float) -> bool:
        return expect(self._call(b"HDEL", self._records, _record_key(key), deadline=deadline), int) > 0

    def records(self, prefix: str, *, deadline: float) -> list[str]:
        keys = _values(self._call(b"HKEYS", self._records, deadline=deadline))
        return sorted(key for key in (value.decode("ascii", "replace") for value in keys) if key.startswith(prefix))

    def status(self) -> StoreStatus:
        """Memory use and evictions as reported by the servers, including the keys of other programs. At most a second old.

        `notes["unreachable"]` is 1 if the last query failed; the other numbers are then those of the last successful
        one.
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
        deadline = time.monotonic() + _STATUS_TIMEOUT
        try:
            answers = [node.run([make_command(b"", b"INFO")], deadline)[0] for node in self._nodes.primaries(deadline)]
            self._status = _read_status([expect(answer, bytes) for answer in answers])
        except StoreError:
            self._status = replace(self._status, notes={"unreachable": 1})
        self._status_at = time.monotonic()

    def _set(self, frame: Frame) -> Command:
        """SET a key if it does not exist. The payload is sent without a copy."""
        key, data = self._key(frame.name), frame.data.cast("B")
        ttl = self._ttl
        # *<arguments> SET <key> <data> NX [PX <ttl>], where each argument is $<length>\r\n<bytes>\r\n
        head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (4 if ttl is None else 6, len(key), key, len(data))
        tail = b"\r\n$2\r\nNX\r\n" if ttl is None else b"\r\n$2\r\nNX\r\n$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(ttl), ttl)
        return Command(key, (head, data, tail))

    def _key(self, name: Name) -> bytes:
        return self._blocks + name.hex().encode()

    def _name(self, key: bytes) -> Name | None:
        """The block name in a key. None if it is not the key of a block."""
        digits = key[len(self._blocks) :]
        if len(digits) != 2 * NAME_BYTES or digits != digits.lower():
            return None
        try:
            return bytes.fromhex(digits.decode())
        except ValueError:
            return None

    def _call(self, verb: bytes, key: bytes, *arguments: bytes, deadline: float) -> Reply:
        [reply] = self._run_checked([make_command(key, verb, key, *arguments)], deadline)
        return reply

    def _run_checked(self, commands: Sequence[Command], deadline: float) -> list[Reply]:
        """Replies in the order of the commands. Raises the exception for the first error reply, after all were read."""
        replies = self._run(commands, deadline)
        for reply in replies:
            if isinstance(reply, ErrorReply):
                raise reply.error()
        return replies

    def _run(self, commands: Sequence[Command], deadline: float) -> list[Reply]:
        self._check_open()
        time_left(deadline)
        return self._nodes.run(commands, deadline) if commands else []

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailable(f"the store {self.label!r} is closed")


def _record_key(key: str) -> bytes:
    return check_record_key(key).encode()


def _values(reply: Reply) -> list[bytes]:
    return [expect(one, bytes) for one in expect(reply, list)]


def _scan_keys(node: RedisNode, pattern: bytes, deadline: float) -> Iterator[list[bytes]]:
    """The keys of one server in batches. Redis may repeat keys."""
    cursor = b"0"
    while True:
        [reply] = node.run(
            [make_command(b"", b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"%d" % _SCAN_BATCH)], deadline
        )
        if isinstance(reply, ErrorReply):
            raise reply.error()
        if not isinstance(reply, list) or len(reply) != 2:
            raise StoreUnavailable("Redis did not reply with a cursor and keys")
        cursor = expect(reply[0], bytes)
        yield _values(reply[1])
        if cursor == b"0":
            return


def _entries(node: RedisNode, names: dict[Name, bytes], pinned: set[bytes], deadline: float) -> Iterator[StoredBlock]:
    """Metadata of these blocks on one server. Blocks that have been removed in the meantime are skipped."""
    commands = []
    for key in names.values():
        commands.append(make_command(key, b"OBJECT", b"IDLETIME", key))  # first, since the other commands reset it
        commands.append(make_command(key, b"STRLEN", key))
        commands.append(make_command(key, b"GETRANGE", key, b"0", b"%d" % (HEADER_BYTES - 1)))
    replies = iter(node.run(commands, deadline) if commands else [])
    now = time.time()
    for name, idle, size, head in zip(names, replies, replies, replies, strict=True):
        if not isinstance(size, int) or not size or not isinstance(head, bytes):
            continue
        used_at = now - idle if isinstance(idle, int) else 0.0
        yield StoredBlock.from_header(name, head, size, used_at=used_at, pinned=name in pinned)


def _read_status(answers: Sequence[bytes]) -> StoreStatus:
    """Sum the replies of all servers to INFO."""
    total = {"used_memory": 0, "maxmemory": 0, "evicted_keys": 0, "expired_keys": 0}
    for answer in answers:
        for line in answer.splitlines():
            name, _, number = line.decode("ascii", "replace").partition(":")
            if name in total and number.isdigit():
                total[name] += int(number)
    notes = {"expired": total["expired_keys"], "unreachable": 0}
    return StoreStatus(-1, total["used_memory"], total["maxmemory"], evictions=total["evicted_keys"], notes=notes)
