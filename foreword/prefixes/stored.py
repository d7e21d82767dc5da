"""What is kept in the stores outlives the process: blocks of kept prefixes are pinned, and retentions have records
(`kept_records.py`), so that all instances share them.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from foreword.blocks.public import PUBLIC_ROOT, is_public
from foreword.blocks.retention_book import Retained, RetentionBook
from foreword.errors import StoreError
from foreword.offload.search import StoredGroup
from foreword.prefixes.kept_records import PREFIXES, RETENTIONS, Chain, RetainedRecord
from foreword.store.background_jobs import BackgroundJobs
from foreword.store.base import Name
from foreword.store.machine import clock_id
from foreword.store.shared_records import SharedRecords, leave
from foreword.store.tiered import TieredStore

logger = logging.getLogger(__name__)

_PIN_SECONDS: Final = 5.0
_RETENTIONS_SECONDS: Final = 15.0
# A record of a retention is renewed when this share of its ttl has passed since it was written.
_RENEWAL: Final = 0.25


class PrefixPins:
    """Pins what continuing behind a kept prefix needs, and unpins what no other one needs: those of this process, and those of
    other processes, which have records in the stores. A prefix is given by its root key and its block keys. A tenant's prefix
    leaves public blocks to the public prefix that they are of.

    Args:
        model: what names the KV, hexadecimal.
        weights: fingerprint, hexadecimal, where builds of a server name their KV differently: named prefixes are those of all.

    Attributes:
        groups: KV groups of the stored blocks.
        needed: functions that return this process's kept prefixes of a tenant, given its digest.
    """

    def __init__(self, store: TieredStore, model: str, groups: Sequence[StoredGroup], weights: str = "") -> None:
        self.model, self.groups, self._weights = model, groups, weights
        self.needed: list[Callable[[str], Iterable[Chain]]] = []
        self._store = store
        self._records: list[SharedRecords[Any]] = [SharedRecords(store, kind) for kind in (PREFIXES, RETENTIONS)]
        self._epochs = [0] * len(store.tiers)

    @property
    def named(self) -> str:
        """The model, in the record keys of named prefixes."""
        return (self._weights or self.model)[:32]

    def pin(self, root: bytes, keys: Chain) -> None:
        """Pin a prefix whose record is written."""
        self.pin_now(root, keys)

    def pin_now(self, root: bytes, keys: Chain) -> bool:
        """Pin the blocks that are stored already. Whether these are all."""
        names = [name for group in self.groups for name in group.names(root, own_keys(root, group.behind(keys)))]
        return self._set(names, pinned=True) == len(names)

    def unpin(self, tenant: str, root: bytes, keys: Chain) -> None:
        """Unpin the blocks of a prefix whose record is deleted."""
        for number, alone in enumerate(self.alone(tenant, keys)):
            self.unpin_keys(root, number, alone)

    def unpin_keys(self, root: bytes, number: int, keys: Chain) -> None:
        """Unpin blocks of the KV group with this number."""
        self._set(self.names(root, number, keys), pinned=False)

    def names(self, root: bytes, number: int, keys: Chain) -> list[Name]:
        """Names of blocks of the KV group with this number."""
        return self.groups[number].names(root, keys)

    def unneeded(self, tenant: str, root: bytes, keys: Chain) -> list[Name]:
        """Names of those of these blocks, in all groups, that no kept prefix of the tenant needs."""
        alone = enumerate(self.alone(tenant, keys, whole=True))
        return [name for number, own in alone for name in self.names(root, number, own)]

    def alone(self, tenant: str, keys: Chain, *, whole: bool = False) -> list[list[bytes]]:
        """By KV group, the keys of the blocks that continuing behind a prefix needs, or of all with `whole`, and that no other
        kept prefix needs."""
        others = [chain for source in self.needed for chain in source(tenant)]
        others += self._recorded(tenant, others)
        found = []
        for group in self.groups:
            shared = {key for other in others for key in group.behind(other)}
            wanted = keys if whole else group.behind(keys)
            found.append([key for key in own_keys(bytes.fromhex(tenant), wanted) if key not in shared])
        return found

    def _recorded(self, tenant: str, known: Iterable[Chain]) -> Iterator[Chain]:
        """Kept blocks by the records in the stores that can be read."""
        read = {RETENTIONS.key(self.model[:32], tenant, chain[-1].hex()) for chain in known if chain}
        for records, model in zip(self._records, (self.named, self.model[:32]), strict=True):
            prefix = records.kind.key(model, tenant, "")
            yield from (one.chain for one in records.scan(prefix, known=read, failed=leave).values.values())

    def _set(self, names: Sequence[Name], *, pinned: bool) -> int:
        return self._store.pin(names, pinned=pinned, deadline=time.monotonic() + _PIN_SECONDS) if names else 0

    def tick(self) -> None:
        """Is called about once a second."""
        self.restore()

    def restore(self) -> None:
        """Pin again what the records say is kept, for all tenants, if a store may have lost its pins since this was done
        last."""
        epochs = [tier.store.pin_epoch for tier in self._store.tiers]
        if epochs == self._epochs:
            return
        failures = list[StoreError]()
        for records, model in zip(self._records, (self.named, self.model[:32]), strict=True):
            prefix = records.kind.key(model, "")
            found = records.scan(prefix, failed=lambda _, error: failures.append(error)).values
            for one in found.values():
                self._pin_stored(bytes.fromhex(one.root), one.chain)
            # A record that was deleted meanwhile may have been unpinned before it was pinned here.
            here = records.scan(prefix, known=found, failed=leave).keys
            for key, one in found.items() if not failures else ():
                if key not in here:
                    self.unpin(key.split("/")[2], bytes.fromhex(one.root), one.chain)
        if not failures:
            self._epochs = epochs

    def _pin_stored(self, root: bytes, keys: Chain) -> None:
        """Pin those blocks of a prefix that are stored already."""
        for number, group in enumerate(self.groups):
            self._set(self.names(root, number, own_keys(root, group.behind(keys))), pinned=True)


def own_keys(root: bytes, keys: Chain) -> list[bytes]:
    """The blocks of a prefix that are its tenant's, given the first bytes of its root."""
    return [key for key in keys if is_public(key) == root.startswith(PUBLIC_ROOT)]


class StoredRetentions:
    """Writes, renews and removes the records of a book's retentions, and adopts those of other instances.

    Each instance renews the records of what its requests use. When a retention's time is over, the instances that know it look
    at the record; the one that finds it expired deletes it and unpins the blocks. It follows the book on one thread of its
    own, which also ends what has expired.
    """

    def __init__(self, book: RetentionBook, store: TieredStore, pins: PrefixPins, block_size: int) -> None:
        self._book, self._pins, self._model, self._block_size = book, pins, pins.model[:32], block_size
        self._records = SharedRecords(store, RETENTIONS)
        self._written: dict[bytes, float] = {}  # until when the record says that it is kept, on the book's clock
        self._lock = threading.Lock()
        self._due: dict[bytes, Retained] = {}
        pins.needed.append(lambda tenant: [one.keys for one in book.of(tenant) if one.stored])
        book.listener = self
        self._scanned = time.monotonic()
        self._restore_pins()  # before the first request evicts anything
        self._jobs = BackgroundJobs("retention", most=None, tick=self._tick, every=1.0)
        self.scan()

    # Called by the book, under its lock

    def kept(self, one: Retained) -> None:
        """A retention begins or is used: its record is written if it lags behind."""
        written = self._written.get(one.key)
        if written is None or _lags(one, written):
            self._later(one)

    def dropped(self, one: Retained) -> None:
        """A retention ends here."""
        self._later(one)

    def _later(self, one: Retained) -> None:
        with self._lock:
            waiting = one.key in self._due
            self._due[one.key] = one
        if not waiting:
            self._jobs.add(lambda: self._follow(one.key))

    # The thread

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

    def _tick(self) -> None:
        self._book.expire()
        self._restore_pins()
        if time.monotonic() - self._scanned >= _RETENTIONS_SECONDS:
            self.scan()
            self._scanned = time.monotonic()

    def _restore_pins(self) -> None:
        try:
            self._pins.tick()
        except StoreError as error:
            logger.warning("pinning a retained prefix: %s", error.message)

    def _write(self, one: Retained) -> None:
        expires = None if one.ttl is None else time.time() + one.expires - time.monotonic()
        record = RetainedRecord(
            one.tokens,
            self._block_size,
            one.root.hex(),
            b"".join(one.keys),
            ttl=one.ttl,
            expires=expires,
            priority=one.priority,
            clock="" if expires is None else clock_id(),
            ends_at=0.0 if expires is None else one.expires,
        )
        self._records.put(self._key(one), record)
        self._written[one.key] = one.expires
        self._pins.pin(one.root, one.keys)

    def _remove(self, one: Retained) -> None:
        self._written.pop(one.key, None)
        if one.expires > time.monotonic():
            self._records.remove(self._key(one))
        else:
            renewed = self._records.expire(self._key(one))
            if renewed is not None:
                self._adopt(self._key(one), renewed)
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
                self._later(self._retained(key, record))
        for key, one in known.items():
            if key not in found.keys and one.key in self._written:
                self._book.release(one.tenant, [one.key])

    def _adopt(self, key: str, record: RetainedRecord) -> None:
        """Keep what another instance keeps, if it has the same blocks."""
        one = self._retained(key, record)
        if record.block_size == self._block_size and self._book.adopt(one):
            self._written[one.key] = one.expires

    def _retained(self, key: str, record: RetainedRecord) -> Retained:
        left = self._records.left(key, record)
        ends = time.monotonic() + (left if math.isinf(left) else min(left, self._book.longest))
        tenant, root = key.split("/")[2], bytes.fromhex(record.root)
        return Retained(
            tenant, root, record.chain, record.num_tokens, record.ttl, record.priority, ends, 0, stored=True
        )

    def _key(self, one: Retained) -> str:
        return RETENTIONS.key(self._model, one.tenant, one.key.hex())

    def flush(self, timeout: float) -> bool:
        """Wait until all records are written. False if that takes longer."""
        return self._jobs.flush(timeout)

    def close(self, timeout: float) -> None:
        """Write what is due, and end the thread."""
        self._jobs.close(timeout)


def _lags(one: Retained, written: float) -> bool:
    """Whether the expiry in a retention's record is outdated."""
    if one.ttl is None:
        return written != math.inf
    return one.expires - written > _RENEWAL * one.ttl
