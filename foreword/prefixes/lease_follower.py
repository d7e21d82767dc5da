"""Retentions outlive the process: each has a record in the stores (`lease_records.py`), so that all instances share it, and its
blocks are pinned (`pins.py`).
"""

from __future__ import annotations

import logging
import math
import time
from typing import Any, Final

from foreword.blocks.leases import Lease, Leases
from foreword.errors import StoreError
from foreword.prefixes.lease_records import RETENTIONS, RetentionRecord, remove_expired
from foreword.prefixes.pins import StorePins
from foreword.store.background_jobs import BackgroundJobs
from foreword.store.machine import clock_id
from foreword.store.shared_records import SharedRecords
from foreword.store.tiered import TieredStore

logger = logging.getLogger(__name__)

_RETENTIONS_SECONDS: Final = 15.0
# A record of a retention is renewed when this share of its ttl has passed since it was written.
_RENEWAL: Final = 0.25
# Seconds behind a use in which the blocks of an adopted retention come to faster tiers, and are pinned there once a second; and
# those after which a tier that has failed is asked again for so long, until it has answered.
_COMING: Final = 5
_PAUSE: Final = 5


class LeaseFollower:
    """Writes, renews and removes the records of a book's retentions, and adopts those of other instances.

    Each instance renews the records of what its requests use. When a retention's time is over, the instances that know it look
    at the record; the one that finds it expired deletes it and unpins the blocks. It follows the book on one thread of its
    own, which also ends what has expired.
    """

    def __init__(self, book: Leases[Any], store: TieredStore, pins: StorePins, block_size: int) -> None:
        self._book, self._pins, self._model, self._block_size = book, pins, pins.model[:32], block_size
        self._records = SharedRecords(store, RETENTIONS)
        # By record key, until when the record says that it is kept, on the book's clock.
        self._written: dict[str, float] = {}
        self._due: dict[str, Lease[Any]] = {}  # under the book's lock
        # Those that are not pinned in all tiers, by record key: seconds that are left, if they were used or a tier has failed.
        self._coming: dict[str, int | None] = {}
        pins.needed.append(lambda tenant: [one.keys for one in book.of(tenant) if one.stored])
        book.changed = self._changed
        self._scanned = time.monotonic()
        self._restore_pins()  # before the first request evicts anything
        self._jobs = BackgroundJobs("retention", most=None, tick=self._tick, every=1.0)
        self.scan()

    def _changed(self, one: Lease[Any]) -> None:
        """A retention begins, is used, or has ended: its record is written if it lags behind, or removed. Called by the book,
        under its lock."""
        key = self._key(one)
        if one not in self._book:
            # At once: what begins under this key before the record is removed must be written anew.
            self._written.pop(key, None)
            self._coming.pop(key, None)
        elif key in self._coming and self._coming[key] is None:
            self._coming[key] = _COMING
        written = self._written.get(key)
        if written is None or _lags(one, written):
            self._later(key, one)

    def _later(self, key: str, one: Lease[Any], *, found: bool = False) -> None:
        """Follow a retention. One that a scan has `found` yields to one of the book that waits: that says more."""
        with self._book.lock:
            waiting = key in self._due
            if not (waiting and found):
                self._due[key] = one
        if not waiting:
            self._jobs.add(lambda: self._follow(key))

    # The thread

    def _follow(self, key: str) -> None:
        with self._book.lock:
            one = self._due.pop(key)
        try:
            # By its key: another retention of the same prefix may have begun since.
            kept = self._book.known(one.tenant, one.key)
            if kept is not None and kept.stored:
                self._write(key, kept)
            else:
                self._remove(key, one)
        except StoreError as error:
            logger.warning("the record of a retained prefix: %s", error.message)

    def _tick(self) -> None:
        self._book.expire()
        self._restore_pins()
        if time.monotonic() - self._scanned >= _RETENTIONS_SECONDS:
            self.scan()
            self._scanned = time.monotonic()

    def _restore_pins(self) -> None:
        try:
            self._pins.tick()
            for key, one in self._coming_now():
                self._pin(key, one)
        except StoreError as error:
            logger.warning("pinning a retained prefix: %s", error.message)

    def _pin(self, key: str, one: Lease[Any]) -> None:
        def failed() -> None:
            with self._book.lock:
                if one in self._book:
                    self._coming[key] = _PAUSE + _COMING

        self._pins.pin(one.root, one.keys, failed)

    def _coming_now(self) -> list[tuple[str, Lease[Any]]]:
        """Retentions, by record key, that were adopted and used in the last seconds, or that a tier failed to pin. A slow tier
        may have the pins of an adopted one, and those before it nothing until a request has loaded the blocks from there."""
        with self._book.lock:
            used = {key: left for key, left in self._coming.items() if left is not None}
            for key, left in used.items():
                if left > 1:
                    self._coming[key] = left - 1
                else:
                    del self._coming[key]
            due = [key for key, left in used.items() if left <= _COMING]
            known = [self._book.known(key.split("/")[2], bytes.fromhex(key.rpartition("/")[2])) for key in due]
            return [(key, one) for key, one in zip(due, known, strict=True) if one is not None and one.stored]

    def _write(self, key: str, one: Lease[Any]) -> None:
        ends = one.expires  # a use may move it meanwhile
        expires = None if one.ttl is None else time.time() + ends - time.monotonic()
        record = RetentionRecord(
            one.tokens,
            self._block_size,
            one.root.hex(),
            b"".join(one.keys),
            ttl=one.ttl,
            expires=expires,
            priority=one.priority,
            clock="" if expires is None else clock_id(),
            ends_at=0.0 if expires is None else ends,
        )
        self._records.put(key, record)
        self._written[key] = ends
        self._pin(key, one)

    def _remove(self, key: str, one: Lease[Any]) -> None:
        self._written.pop(key, None)
        if one.expires > time.monotonic():
            self._records.remove(key)
        else:
            renewed = remove_expired(self._records, key)
            if renewed is not None:
                self._adopt(key, renewed)
                return
        self._pins.unpin(one.tenant, one.root, one.keys)

    def scan(self) -> None:
        """Adopt what other instances or earlier processes keep; end here what they have ended; remove what has expired."""
        self._book.expire()
        known = {self._key(one): one for one in self._book.all()}
        try:
            found = self._records.scan(RETENTIONS.key(self._model, ""), known=known)
        except StoreError:
            return
        for key, record in found.values.items():
            self._adopt(key, record)
        for key, record in found.expired.items():
            if record.block_size == self._block_size:
                self._later(key, self._retained(key, record), found=True)
        for key, one in known.items():
            if key not in found.keys and key in self._written:
                self._book.release(one.tenant, [one.key])

    def _adopt(self, key: str, record: RetentionRecord) -> None:
        """Keep what another instance keeps, if it has the same blocks."""
        one = self._retained(key, record)
        with self._book.lock:  # it may be released as soon as it is known
            if record.block_size == self._block_size and self._book.adopt(one):
                self._written[key] = one.expires
                self._coming.setdefault(key, None)

    def _retained(self, key: str, record: RetentionRecord) -> Lease[Any]:
        left = self._records.left(key, record)
        ends = time.monotonic() + (left if math.isinf(left) else min(left, self._book.longest))
        tenant, root = key.split("/")[2], bytes.fromhex(record.root)
        return Lease(tenant, root, record.chain, record.num_tokens, record.ttl, record.priority, ends, stored=True)

    def _key(self, one: Lease[Any]) -> str:
        return RETENTIONS.key(self._model, one.tenant, one.key.hex())

    def flush(self, timeout: float) -> bool:
        """Wait until all records are written. False if that takes longer."""
        return self._jobs.flush(timeout)

    def close(self, timeout: float) -> None:
        """Write what is due, and end the thread."""
        self._jobs.close(timeout)


def _lags(one: Lease[Any], written: float) -> bool:
    """Whether the expiry in a retention's record is outdated."""
    if one.ttl is None:
        return written != math.inf
    return one.expires - written > _RENEWAL * one.ttl
