"""Retentions in an engine's stores, where they outlive the process and other instances find them.

A record `retained/<model>/<tenant>/<last block key>` says until when the blocks are kept, which are pinned in the stores. Each
instance renews the records of what its requests use. When a retention's time is over, the instances that know it look at the
record; the one that finds it expired deletes it and unpins the blocks.
"""

from __future__ import annotations

import binascii
import json
import logging
import math
import queue
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol

from foreword.blocks.keys import KEY_BYTES
from foreword.blocks.retention import MAX_PRIORITY, Retained, RetentionBook
from foreword.errors import StoreError
from foreword.store.background import use_background_cores
from foreword.store.base import RECORD_BYTES, Store

logger = logging.getLogger(__name__)

FORMAT: Final = 2
MAX_RECORDS: Final = 16_384
_TIMEOUT: Final = 5.0
_SCAN_SECONDS: Final = 15.0
# The store's listing may still lack a record that was written within the last seconds.
_SETTLED_SECONDS: Final = 10.0
# A record is renewed when this share of its ttl has passed since it was written.
_RENEWAL: Final = 0.25


class Pins(Protocol):
    """Pins of blocks in the stores, by the root key of a prefix and the keys of its blocks.

    Attributes:
        needed: functions that return prefixes whose blocks stay pinned.
    """

    needed: list[Callable[[], Iterable[Sequence[bytes]]]]

    def pin(self, root: bytes, keys: Sequence[bytes]) -> object: ...
    def unpin(self, root: bytes, keys: Sequence[bytes]) -> None: ...
    def tick(self) -> None:
        """Is called about once a second."""
        ...


class StoredRetentions:
    """Writes, renews and removes the records of a book's retentions, and adopts those of other instances.

    It follows the book on one thread of its own, which also ends what has expired.

    Args:
        fingerprint: of the model, hexadecimal.
    """

    def __init__(self, book: RetentionBook, store: Store, pins: Pins, fingerprint: str, block_size: int) -> None:
        self._book = book
        self._store = store
        self._pins = pins
        self._prefix = f"retained/{fingerprint[:32]}/"
        self._block_size = block_size
        self._written: dict[bytes, tuple[float, float]] = {}  # what the record says, and when it was written or read
        self._lock = threading.Lock()
        self._due: dict[bytes, Retained] = {}
        self._wake: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        pins.needed.append(lambda: [one.keys for one in book.all() if one.stored])
        book.listener = self
        self.scan()
        self._thread = threading.Thread(target=self._run, name="foreword-retention", daemon=True)
        self._thread.start()

    # Called by the book, under its lock

    def kept(self, one: Retained) -> None:
        """A retention begins or is used: its record is written if it lags behind."""
        written = self._written.get(one.key)
        if written is None or _lags(one, written[0]):
            self._later(one)

    def dropped(self, one: Retained) -> None:
        """A retention ends here."""
        self._later(one)

    def _later(self, one: Retained) -> None:
        with self._lock:
            waiting = one.key in self._due
            self._due[one.key] = one
            self._idle.clear()
        if not waiting:
            self._wake.put(one.key)

    # The thread

    def _run(self) -> None:
        use_background_cores()
        scanned = time.monotonic()
        while True:
            try:
                key = self._wake.get(timeout=1.0)
                if key is None:
                    return
                self._follow(key)
            except queue.Empty:
                self._book.expire()
                self._tick()
            if time.monotonic() - scanned >= _SCAN_SECONDS:
                self.scan()
                scanned = time.monotonic()

    def _follow(self, key: bytes) -> None:
        with self._lock:
            one = self._due.pop(key)
        try:
            if one in self._book:
                self._write(one)
            else:
                self._remove(one)
        except StoreError as error:
            logger.warning("the record of a retained prefix: %s", error.message)
        with self._lock:
            if not self._due:
                self._idle.set()

    def _tick(self) -> None:
        try:
            self._pins.tick()
        except StoreError as error:
            logger.warning("pinning a retained prefix: %s", error.message)

    def _write(self, one: Retained) -> None:
        expires = one.expires
        data = _encode(one, expires, self._block_size)
        if len(data) > RECORD_BYTES:
            return
        self._store.put_record(self._key(one), data, deadline=time.monotonic() + _TIMEOUT)
        self._written[one.key] = expires, time.time()
        self._pins.pin(one.root, one.keys)

    def _remove(self, one: Retained) -> None:
        self._written.pop(one.key, None)
        renewed = self._read(self._key(one)) if one.expires <= time.time() else None
        if renewed is not None and renewed.expires > time.time() and self._book.adopt(renewed):
            self._written[one.key] = renewed.expires, time.time()
            return
        self._store.delete_record(self._key(one), deadline=time.monotonic() + _TIMEOUT)
        self._pins.unpin(one.root, one.keys)

    def scan(self) -> None:
        """Adopt what other instances or earlier processes keep; end here what they have ended; remove what has expired."""
        self._book.expire()
        try:
            listed = set(self._store.records(self._prefix, deadline=time.monotonic() + _TIMEOUT))
        except StoreError:
            return
        known = {self._key(one): one for one in self._book.all()}
        for name in sorted(listed - known.keys())[:MAX_RECORDS]:
            self._adopt(name)
        for name, one in known.items():
            written = self._written.get(one.key)
            if name not in listed and written is not None and time.time() - written[1] > _SETTLED_SECONDS:
                self._book.release(one.tenant, [one.key])

    def _adopt(self, name: str) -> None:
        found = self._read(name)
        if found is None:
            return
        if found.expires <= time.time():
            self._later(found)
        elif self._book.adopt(found):
            self._written[found.key] = found.expires, time.time()

    def _read(self, name: str) -> Retained | None:
        """None if there is no record of a retention of this engine's blocks."""
        try:
            data = self._store.get_record(name, deadline=time.monotonic() + _TIMEOUT)
        except StoreError:
            return None
        tenant, _, key = name.removeprefix(self._prefix).partition("/")
        limit = time.time() + self._book.longest
        found = None if data is None else _decode(data, tenant, self._block_size, limit)
        return found if found is not None and found.key.hex() == key else None

    def _key(self, one: Retained) -> str:
        return f"{self._prefix}{one.tenant}/{one.key.hex()}"

    def flush(self, timeout: float) -> bool:
        """Wait until all records are written. False if that takes longer."""
        return self._idle.wait(timeout)

    def close(self, timeout: float) -> None:
        """Write what is due, and end the thread."""
        self.flush(timeout)
        self._wake.put(None)
        self._thread.join(timeout)


def _lags(one: Retained, written: float) -> bool:
    """Whether the expiry in a retention's record is outdated."""
    if one.ttl is None:
        return written != math.inf
    return one.expires - written > _RENEWAL * one.ttl


def _encode(one: Retained, expires: float, block_size: int) -> bytes:
    record = {
        "format": FORMAT,
        "num_tokens": one.tokens,
        "block_size": block_size,
        "ttl": one.ttl,
        "expires": None if expires == math.inf else expires,
        "priority": one.priority,
        "root": one.root.hex(),
        "keys": b64encode(b"".join(one.keys)).decode(),
    }
    return json.dumps(record).encode()


def _decode(data: bytes, tenant: str, block_size: int, latest: float) -> Retained | None:
    """A retention from its record. None if it is malformed, or of another format or block size."""
    try:
        read: dict[str, Any] = json.loads(data)
        joined, root = b64decode(read["keys"], validate=True), bytes.fromhex(read["root"])
        ttl, expires, priority = read["ttl"], read["expires"], int(read["priority"])
        fine = read["format"] == FORMAT and read["block_size"] == block_size and (ttl is None) == (expires is None)
        ttl, expires = (None, math.inf) if ttl is None else (float(ttl), min(float(expires), latest))
    except (ValueError, TypeError, KeyError, binascii.Error, RecursionError):
        return None
    keys = [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]
    fine = fine and bool(keys) and len(joined) % KEY_BYTES == 0 and len(root) == KEY_BYTES
    fine = fine and read["num_tokens"] == len(keys) * block_size
    if not fine or not 0 <= priority <= MAX_PRIORITY or (ttl is not None and not 0 < ttl < math.inf):
        return None
    return Retained(tenant, root, keys, len(keys) * block_size, ttl, priority, expires, 0, stored=True)
