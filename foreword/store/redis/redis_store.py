"""Blocks in Redis, Valkey, or a cluster of them.

Keys, where `P` is the prefix:

    P:b:<name in hex>      a string: the frame, written with one SET
    P:b:<name in hex>:<n>  the same in a cluster, n from 1 to 3, where the node of the key before it was down
    P:records              a hash: record key -> record
    P:pinned               a set: the names (64 bytes) of pinned blocks

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

import contextlib
import re
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from foreword.blocks.keys import FINGERPRINT_BYTES
from foreword.blocks.layout import NAME_BYTES
from foreword.errors import BadFrame, StoreConfigError, StoreError, StoreTimeout, StoreUnavailable
from foreword.store.background import renew_in_child
from foreword.store.base import (
    BAD,
    FAILED,
    MISSING,
    Erased,
    Name,
    Store,
    StoredBlock,
    StoreStatus,
    check_record,
    check_record_key,
    copy_error,
    step_deadline,
    time_left,
)
from foreword.store.frame import HEADER_BYTES, Frame, read_header
from foreword.store.redis.addresses import open_nodes
from foreword.store.redis.nodes import PLACES, RedisNode
from foreword.store.redis.resp import Command, ErrorReply, Reply, encode, error_of, expect, make_command

# Names in the first round trip of a lookup; each further one has 8 times as many.
_FIRST_BATCH: Final = 64
_SCAN_BATCH: Final = 512
# Their keys are a reply of some 10 to 60 MiB, which the server makes at once.
_MOST_RECORDS: Final = 1 << 18
_STATUS_AGE: Final = 1.0
_STATUS_TIMEOUT: Final = 0.25
_SPARE = re.compile(rb":[1-3]$")
_PREFIX = re.compile(r"[A-Za-z0-9._:-]{1,100}")


class RedisStore(Store):
    """A store in a Redis or Valkey server or cluster. The module's docstring describes the eviction policies.

    Nothing is connected before the first call. After a failure the next call connects again. Deadlines bound everything
    except the time that the system's resolver takes to look up host names.

    Args:
        url: `redis://[user:password@]host[:port][/db]`, `rediss://` (TLS), `unix:///path.sock`, or
            `redis+cluster://host[:port],host[:port]` (`rediss+cluster://`) with any nodes of a cluster, or
            `redis+sentinel://host[:port],host[:port]/name[/db]` (`rediss+sentinel://`) with Sentinels and the name of
            a primary. `sentinel_password=` and `sentinel_username=` are for the Sentinels. Other query
            parameters are those of redis-py, such as `ssl_ca_certs=`.
        prefix: first part of all keys. Stores with different prefixes are independent.
        ttl: seconds until a block expires after it was last written or read, unless it is pinned; None: never. Needs
            Redis 7 or Valkey; older servers do not renew it.
    """

    def __init__(self, url: str, *, label: str = "redis", prefix: str = "foreword", ttl: float | None = None) -> None:
        if not _PREFIX.fullmatch(prefix):
            raise StoreConfigError(f"a key prefix has letters, digits and ._:- only, unlike {prefix!r}")
        if ttl is not None and not 0.001 <= ttl <= 1e12:
            raise StoreConfigError(f"ttl is at least a millisecond and at most 1e12 s, not {ttl} s")
        self.label = label
        self._nodes = open_nodes(url)
        self._blocks = f"{prefix}:b:".encode()
        self._records = f"{prefix}:records".encode()
        self._pinned = f"{prefix}:pinned".encode()
        self._ttl = None if ttl is None else b"%d" % round(ttl * 1000)
        self._closed = False
        self._status = StoreStatus()
        self._status_at = float("-inf")
        self.after_fork()
        renew_in_child(self)

    def after_fork(self) -> None:
        self._status_lock = threading.Lock()

    def lookup(self, names: Sequence[Name], *, deadline: float) -> int:
        found, size = 0, _FIRST_BATCH
        while found < len(names):
            if found and time.monotonic() >= deadline:
                return found
            try:
                present = self.present(names[found : found + size], deadline=deadline)
            except StoreError:
                if found:
                    return found
                raise
            if not all(present):
                return found + present.index(False)
            found += len(present)
            size *= 8
        return found

    def present(self, names: Sequence[Name], *, deadline: float) -> list[bool]:
        commands = [make_command(key, b"EXISTS", key) for key in map(self._key, names)]
        # False, too, if its server failed.
        return [error_of(one) is None and expect(one, int) > 0 for one in self._run(commands, deadline)]

    def get(self, names: Sequence[Name], buffers: Sequence[memoryview], *, deadline: float) -> list[int]:
        """Read frames. Renews the time to live of the blocks, if there is one."""
        keys = [self._key(name) for name in names]
        views = [buffer.cast("B") for buffer in buffers]
        reads = [Command(key, (encode(b"GET", key),), view) for key, view in zip(keys, views, strict=True)]
        replies = self._run([*reads, *self._renewals(keys)], deadline)
        return [_length(reply, view) for reply, view in zip(replies, views, strict=False)]

    def put(self, frames: Sequence[Frame], *, deadline: float) -> int:
        """Store frames. A value of another length than the frame is not that block: it is replaced."""
        sizes = self._sizes(frames, deadline)
        known = [frame for frame, size in zip(frames, sizes, strict=True) if size == len(frame.data)]
        absent = [frame for frame, size in zip(frames, sizes, strict=True) if size == 0]
        wrong = [frame for frame, size in zip(frames, sizes, strict=True) if size not in {0, FAILED, len(frame.data)}]
        commands = [self._set(frame, b"NX") for frame in absent] + [self._set(frame, b"KEEPTTL") for frame in wrong]
        replies = self._run([*commands, *self._renewals(self._key(frame.name) for frame in known)], deadline)
        stored = replies[: len(commands)]
        # NX has no effect on a block that another writer has stored since, and on an empty value.
        refused = [frame for frame, reply in zip(absent, stored, strict=False) if reply is None]
        kept = len(known) + sum(reply == b"OK" for reply in stored) + self._replace_wrong(refused, deadline)
        error = next((reply.error() for reply in stored if isinstance(reply, ErrorReply)), None)
        if error is not None and not (kept and self._nodes.usable):
            raise error
        return kept

    def delete(self, names: Sequence[Name], *, deadline: float) -> int:
        if not names:
            return 0
        places = self._nodes.places
        first = (self._blocks + name.hex().encode() for name in names)
        keys = [key for one in first for key in (one, *_spare_keys(one, places))]
        commands = [make_command(key, b"UNLINK", key) for key in keys]
        commands.append(make_command(self._pinned, b"SREM", self._pinned, *names))
        removed = [expect(reply, int) for reply in self._run_checked(commands, deadline)[:-1]]
        return sum(any(removed[at : at + places]) for at in range(0, len(removed), places))

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

    def list_names(self, layout: bytes = b"", root: bytes = b"", *, deadline: float) -> Iterator[Sequence[Name]]:
        """List names. The servers go through all their keys, and send those that match."""
        for node in self._nodes.primaries(deadline):
            for keys in _scan_keys(node, self._matching(layout, root), deadline):
                self._check_open()
                if names := [name for name in map(self._name, keys) if name is not None]:
                    yield names

    def erase_steps(
        self, layout: bytes = b"", root: bytes = b"", *, chosen: Collection[Name] | None = None, deadline: float
    ) -> Iterator[Erased]:
        """Erase as in the contract. Each server is a place."""
        try:
            self._check_open()
            nodes = self._nodes.primaries(step_deadline(deadline))
        except StoreError as error:
            yield Erased.failed(error)
            return
        for node in nodes:
            try:
                for keys in _scan_keys(node, self._matching(layout, root), deadline):
                    found = {name: key for key in keys if (name := self._name(key)) is not None}
                    mine = {name: key for name, key in found.items() if chosen is None or name in chosen}
                    yield Erased(self._unlink(node, mine, step_deadline(deadline)) if mine else 0)
            except StoreError as error:
                yield Erased.failed(error, node.name if len(nodes) > 1 else "")

    def _unlink(self, node: RedisNode, keys: Mapping[Name, bytes], deadline: float) -> int:
        """Delete keys where they were listed. Returns how many were there."""
        with contextlib.suppress(StoreError):  # a name that stays in the set of pinned ones costs 64 bytes
            self._call(b"SREM", self._pinned, *keys, deadline=deadline)
        replies = node.run([make_command(key, b"UNLINK", key) for key in keys.values()], deadline)
        error = next((error for reply in replies if (error := error_of(reply)) is not None), None)
        if error is not None:
            raise error
        return sum(expect(reply, int) for reply in replies)

    def _matching(self, layout: bytes, root: bytes) -> bytes:
        """The pattern of the keys of blocks with this layout and roots that begin with these bytes."""
        return self._blocks + (layout.hex().encode() or b"?" * (2 * FINGERPRINT_BYTES)) + root.hex().encode() + b"*"

    def put_record(self, key: str, data: bytes, *, deadline: float) -> None:
        self._call(b"HSET", self._records, _record_key(key), check_record(data), deadline=deadline)

    def get_record(self, key: str, *, deadline: float) -> bytes | None:
        value = self._call(b"HGET", self._records, _record_key(key), deadline=deadline)
        return None if value is None else expect(value, bytes)

    def add_record(self, key: str, data: bytes, *, deadline: float) -> bytes:
        self._call(b"HSETNX", self._records, _record_key(key), check_record(data), deadline=deadline)
        return self.get_record(key, deadline=deadline) or data

    def delete_record(self, key: str, *, deadline: float) -> bool:
        return expect(self._call(b"HDEL", self._records, _record_key(key), deadline=deadline), int) > 0

    def records(self, prefix: str, *, deadline: float) -> list[str]:
        # Not in steps: a cursor means nothing to a server that has taken the place of another one, and an erasure must see all.
        count = expect(self._call(b"HLEN", self._records, deadline=deadline), int)
        if count > _MOST_RECORDS:
            what = f"the hash {self._records.decode()} has {count} records, and {_MOST_RECORDS} are listed at most"
            raise StoreUnavailable(f"{what}: see which kind they are (HSCAN), and delete those that nothing needs")
        keys = _values(self._call(b"HKEYS", self._records, deadline=deadline))
        return sorted(key for key in (value.decode("ascii", "replace") for value in keys) if key.startswith(prefix))

    def status(self) -> StoreStatus:
        """Memory use and evictions as reported by the servers, including the keys of other programs. At most a second old.

        `notes["unreachable"]` counts the servers that did not reply. If none did, the other numbers are those of the last
        successful query.
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
            replies = self._nodes.info(deadline)
        except StoreError as error:
            replies = [error]
        reached = [reply for reply in replies if isinstance(reply, bytes)]
        unreachable = len(replies) - len(reached)
        status = _read_status(reached) if reached else self._status
        self._status = replace(status, notes={**status.notes, "unreachable": unreachable})
        self._status_at = time.monotonic()

    def _sizes(self, frames: Sequence[Frame], deadline: float) -> list[int]:
        """The length of each stored value; 0 for none or an empty one, BAD for another type, FAILED if it is unknown."""
        commands = [make_command(key, b"STRLEN", key) for key in (self._key(frame.name) for frame in frames)]
        return [_size(reply) for reply in self._run(commands, deadline)]

    def _replace_wrong(self, frames: Sequence[Frame], deadline: float) -> int:
        """Store those frames whose values have another length. Returns how many of `frames` are present now."""
        if not frames:
            return 0
        sizes = self._sizes(frames, deadline)
        wrong = [frame for frame, size in zip(frames, sizes, strict=True) if size not in {FAILED, len(frame.data)}]
        replies = self._run([self._set(frame, b"KEEPTTL") for frame in wrong], deadline)
        return len(frames) - sizes.count(FAILED) - len(wrong) + sum(reply == b"OK" for reply in replies)

    def _renewals(self, keys: Iterable[bytes]) -> list[Command]:
        """Renew the time to live of these keys, where they have one: pinned blocks do not expire."""
        ttl = self._ttl
        return [] if ttl is None else [make_command(key, b"PEXPIRE", key, ttl, b"XX") for key in keys]

    def _set(self, frame: Frame, condition: bytes) -> Command:
        """SET a key. The payload is sent without a copy.

        Args:
            condition: NX, if the key does not exist, or KEEPTTL, to replace its value.
        """
        key, data = self._key(frame.name), frame.data.cast("B")
        options = [condition] if self._ttl is None or condition != b"NX" else [condition, b"PX", self._ttl]
        # *<arguments> SET <key> <data> <options>, where each argument is $<length>\r\n<bytes>\r\n
        head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (3 + len(options), len(key), key, len(data))
        tail = b"\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(one), one) for one in options)
        return Command(key, (head, data, tail))

    def _key(self, name: Name) -> bytes:
        """Where a block is now: the first of its keys whose node is not down."""
        key = self._blocks + name.hex().encode()
        if not self._nodes.skips(key):
            return key
        return next((other for other in _spare_keys(key, PLACES) if not self._nodes.skips(other)), key)

    def _name(self, key: bytes) -> Name | None:
        """The block name in a key. None if it is not the key of a block."""
        digits = _SPARE.sub(b"", key[len(self._blocks) :])
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
        """Replies in the order of the commands. Raises the first error, after all replies were read."""
        replies = self._run(commands, deadline)
        for reply in replies:
            if (error := error_of(reply)) is not None:
                raise error
        return replies

    def _run(self, commands: Sequence[Command], deadline: float) -> list[Reply]:
        """Replies in the order of the commands, errors too. Raises if all failed, unless it is only a part of a cluster."""
        self._check_open()
        time_left(deadline)
        replies = self._nodes.run(commands, deadline) if commands else []
        errors = [_failure(reply) for reply in replies]
        if errors and errors[0] is not None and None not in errors:
            unreachable = all(isinstance(reply, StoreTimeout | StoreUnavailable) for reply in replies)
            if not (unreachable and self._nodes.usable):
                raise copy_error(errors[0])
        return replies

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailable(f"the store {self.label!r} is closed")


def _spare_keys(key: bytes, places: int) -> Iterator[bytes]:
    """Where else a block with `places` keys in all may be."""
    return (b"%b:%d" % (key, number) for number in range(1, places))


def _failure(reply: Reply) -> StoreError | None:
    """The exception for a command that failed. A key of another type is no failure of the server."""
    return None if isinstance(reply, ErrorReply) and reply.code == "WRONGTYPE" else error_of(reply)


def _length(reply: Reply, buffer: memoryview) -> int:
    """The result of `get` for the reply to GET."""
    if error_of(reply) is not None:
        return FAILED if _failure(reply) is not None else BAD
    if reply is None:
        return MISSING
    length = expect(reply, int)
    return length if 0 < length <= len(buffer) else BAD


def _size(reply: Reply) -> int:
    """The result of `_sizes` for the reply to STRLEN."""
    if error_of(reply) is not None:
        return FAILED if _failure(reply) is not None else BAD
    return max(expect(reply, int), 0)


def _record_key(key: str) -> bytes:
    return check_record_key(key).encode()


def _values(reply: Reply) -> list[bytes]:
    return [expect(one, bytes) for one in expect(reply, list)]


def _scan_keys(node: RedisNode, pattern: bytes, deadline: float) -> Iterator[list[bytes]]:
    """The keys of one server in batches. Redis may repeat keys."""
    cursor = b"0"
    while True:
        [reply] = node.run(
            [make_command(b"", b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"%d" % _SCAN_BATCH)],
            step_deadline(deadline),
        )
        parts = expect(reply, list)
        if len(parts) != 2:
            raise StoreUnavailable("Redis did not reply with a cursor and keys")
        cursor = expect(parts[0], bytes)
        yield _values(parts[1])
        if cursor == b"0":
            return


def _entries(node: RedisNode, names: dict[Name, bytes], pinned: set[bytes], deadline: float) -> Iterator[StoredBlock]:
    """Metadata of these blocks on one server. Blocks that have been removed in the meantime are skipped."""
    commands = []
    for key in names.values():
        commands.append(make_command(key, b"OBJECT", b"IDLETIME", key))  # first, since the other commands reset it
        commands.append(make_command(key, b"STRLEN", key))
        commands.append(make_command(key, b"GETRANGE", key, b"-%d" % HEADER_BYTES, b"-1"))
    replies = iter(node.run(commands, deadline) if commands else [])
    now = time.time()
    for name, idle, size, head in zip(names, replies, replies, replies, strict=True):
        if isinstance(head, StoreError):
            raise head
        if not isinstance(size, int) or not size or not isinstance(head, bytes):
            continue
        used_at = now - idle if isinstance(idle, int) else 0.0
        yield _described(name, head, size, used_at, pinned=name in pinned)


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


def _described(name: Name, end: bytes, size: int, used_at: float, *, pinned: bool) -> StoredBlock:
    """A block as the last bytes of its frame say. Parent and depth stay unknown if these are not its header."""
    parent, depth = b"", 0
    with contextlib.suppress(BadFrame):
        header = read_header(end)
        if header.name == name:
            parent, depth = header.parent, header.depth
    return StoredBlock(name, parent, depth, size, used_at=used_at, pinned=pinned)
