"""Erasures that are not complete yet. They are repeated where they are open until they are, also after a restart.

A record `erasures/<id>` in the stores that can be reached names what is erased, digests of tenants and salts, and where it is
open: everywhere, until it was swept for the first time. It is written before an answer says that something is open. A process
that starts adopts the records that it finds, since the one that wrote them may be gone. Several may repeat an erasure. One that
has not all of the places erases its own, and leaves the record to those that have the others.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from foreword.blocks.salt import DIGEST_BYTES, TENANT_BYTES, Salt, ungenerated
from foreword.errors import StoreError
from foreword.prefixes.erasure import (
    KEY_STORE,
    SYNC_WITHIN,
    KeysDestroyed,
    Place,
    PlaceOutcome,
    Receipt,
    described,
    destroy_keys,
    erase_prefixes,
)
from foreword.store.background_jobs import BackgroundJobs
from foreword.store.shared_records import RecordKind, SharedRecords, leave
from foreword.store.tiered import TieredStore

if TYPE_CHECKING:
    from foreword.store.key_interfaces import TenantKeys

log = logging.getLogger(__name__)

_FIRST_PAUSE: Final = 5.0
_LONGEST_PAUSE: Final = 20.0  # so that what is left goes within half a minute of a place's return
_MAX: Final = 1024
_TIMEOUT: Final = 5.0


@dataclass(slots=True)
class OpenErasure:
    """An erasure.

    Attributes:
        prefixes: first bytes of the roots of what is erased.
        tiers: labels of the tiers where it is not complete.
        recorded: stores may have its record.
        adopted: another process began it, and several may go on with it.
        elsewhere: locations where it is not complete, which this instance does not have.
        receipt: what was done so far.
    """

    id: str
    prefixes: tuple[bytes, ...]
    what: str
    tiers: frozenset[str]
    receipt: Receipt
    elsewhere: frozenset[str] = frozenset()
    recorded: bool = True
    adopted: bool = False


class ErasureRecord(msgspec.Struct, frozen=True):
    """An erasure as other instances repeat it. `prefixes`: hexadecimal. `tiers`: locations where it is open."""

    prefixes: list[str]
    what: str
    tiers: list[str]

    def __post_init__(self) -> None:
        # An empty prefix would name the blocks of all tenants.
        if not self.prefixes or {len(bytes.fromhex(one)) for one in self.prefixes} - {TENANT_BYTES, DIGEST_BYTES}:
            raise ValueError("prefixes")


ERASURES: Final = RecordKind("erasures", ErasureRecord, most=_MAX)


class OpenErasures:
    """The erasures of one engine.

    Args:
        erasing: the context of a sweep, given the first bytes of roots: drops what waits to be written of their chains, and
            lets no load bring such blocks into a tier meanwhile; gives how many blocks are being written.
        keys: of tenants, if blocks are encrypted.
        pause: seconds before the first repetition.
    """

    def __init__(
        self,
        store: TieredStore,
        erasing: Callable[[Sequence[bytes]], AbstractContextManager[int]],
        keys: TenantKeys | None = None,
        *,
        pause: float = _FIRST_PAUSE,
    ) -> None:
        self._store, self._erasing, self._keys, self._first_pause = store, erasing, keys, pause
        self._records = SharedRecords(store, ERASURES)
        self._locations = {tier.label: tier.location for tier in store.tiers if tier.location}
        self._locations |= {} if keys is None else {KEY_STORE: KEY_STORE}
        self._lock = threading.Lock()
        self._known: dict[str, OpenErasure] = {}
        self._pause = self._next = 0.0
        self._jobs = BackgroundJobs("erasures", most=None, tick=self._repeat_open, every=pause)
        self._jobs.add(self._adopt)

    def destroy_keys(self, salts: Sequence[Salt]) -> KeysDestroyed:
        """The first step of an erasure, to be followed by `erase`. In its first generation a tenant may have plain blocks, so
        those are erased in any."""
        first = (Salt(ungenerated(one.tenant), one.client) for one in salts)
        return destroy_keys(self._keys, dict.fromkeys(one.prefix for one in (*salts, *first)))

    def erase(self, salts: Sequence[Salt], destroyed: KeysDestroyed | None = None) -> tuple[str, Receipt]:
        """Erase what these tenants, or requests with these salts, have stored. Returns the erasure's id and its receipt. It is
        repeated in the background where it is not complete."""
        what, destroyed = described(salts), destroyed or self.destroy_keys(salts)
        prefixes = destroyed.prefixes
        begun = destroyed.noted(Receipt(what, []))
        everywhere = self._locations.keys() - {KEY_STORE} | _open_tiers(begun)
        one = OpenErasure(os.urandom(12).hex(), prefixes, what, frozenset(everywhere), begun)
        record = self._write_soon(one)
        with self._erasing(prefixes) as queued:
            swept = erase_prefixes(self._store, prefixes, what, queued=queued, sync_within=SYNC_WITHIN)
            one.receipt = destroyed.noted(swept)
        one.tiers = _open_tiers(one.receipt)
        if one.tiers:
            # The thread may be busy with others, and this process may end right after its answer.
            if record.cancel():
                self._write(one)
            else:
                record.result()
        with self._lock:
            while len(self._known) >= _MAX:
                self._known.pop(
                    next((name for name, old in self._known.items() if not old.tiers), next(iter(self._known)))
                )
            self._known[one.id] = one
        self._jobs.add(lambda: self._settle(one))
        self._pause = self._next = 0.0
        return one.id, one.receipt

    def get(self, name: str) -> OpenErasure | None:
        """An erasure by its id: one that was made here or adopted, until 1,024 others have followed."""
        return self._known.get(name)

    def close(self) -> None:
        self._jobs.close(_TIMEOUT)

    def _write_soon(self, one: OpenErasure) -> Future[None]:
        """Write the record on the thread. Who cancels that before it begins writes it; after `close` it never begins."""
        with contextlib.suppress(RuntimeError):
            return self._jobs.submit(self._write, one)
        return Future()

    def _write(self, one: OpenErasure) -> None:
        places = one.elsewhere | {self._locations[tier] for tier in one.tiers if tier in self._locations}
        if not places:
            return  # what is open ends with this process
        try:
            record = ErasureRecord([prefix.hex() for prefix in one.prefixes], one.what, sorted(places))
            self._records.put(ERASURES.key(one.id), record)
        except StoreError as error:
            log.warning("erasure %s: it ends with this process, no store takes its record: %s", one.id, error.message)

    # The thread

    def _repeat_open(self) -> None:
        """Is called every few seconds. The pause between two repetitions grows until there is another erasure."""
        if time.monotonic() >= self._next:
            for one in [one for one in list(self._known.values()) if one.tiers or one.recorded]:
                self._repeat(one)
            self._pause = min(max(2 * self._pause, self._first_pause), _LONGEST_PAUSE)
            self._next = time.monotonic() + self._pause

    def _repeat(self, one: OpenErasure) -> None:
        if one.adopted and self._is_over(one):
            one.tiers, one.recorded = frozenset(), False
        elif one.tiers:
            destroyed = KeysDestroyed(one.prefixes)
            if KEY_STORE in one.tiers:
                destroyed = destroy_keys(self._keys, one.prefixes)
                one.prefixes = destroyed.prefixes
            with self._erasing(one.prefixes) as queued:
                receipt = erase_prefixes(self._store, one.prefixes, one.what, queued=queued, only=one.tiers)
            one.receipt = one.receipt.followed_by(destroyed.noted(receipt))
            one.tiers = _open_tiers(one.receipt)
            if not one.tiers:
                log.info("erasure %s is complete%s", one.id, " here" if one.elsewhere else "")
        if one.recorded and not one.tiers:
            self._settle(one)

    def _is_over(self, one: OpenErasure) -> bool:
        """Whether another instance has completed it: what its tenant has stored since is not to be erased."""
        with contextlib.suppress(StoreError):
            return self._records.get(ERASURES.key(one.id)) is None
        return False

    def _settle(self, one: OpenErasure) -> None:
        """Make the stores' record say where the erasure is open. One that is left would be repeated at the next start."""
        try:
            if not (one.tiers or one.elsewhere):
                self._records.remove(ERASURES.key(one.id))
            elif one.tiers or self._records.get(ERASURES.key(one.id)) is not None:
                self._write(one)
            one.recorded = bool(one.tiers)
        except StoreError as error:
            log.warning("erasure %s: its record is left for now: %s", one.id, error.message)

    def _adopt(self) -> None:
        """Read the records that are in the stores. What cannot be read is adopted at the next start."""
        for key, record in self._records.scan(failed=leave).values.items():
            name, prefixes = key.rpartition("/")[2], tuple(map(bytes.fromhex, record.prefixes))
            mine = frozenset(label for label, location in self._locations.items() if location in record.tiers)
            others = frozenset(record.tiers) - set(self._locations.values())
            if not mine:
                log.info("erasure %s is left to instances with %s: %s", name, ", ".join(sorted(others)), record.what)
                continue
            places = [Place(one, "", PlaceOutcome.ELSEWHERE, 0, 0, "another instance has it") for one in sorted(others)]
            one = OpenErasure(name, prefixes, record.what, mine, Receipt(record.what, places), others, adopted=True)
            log.info("erasure %s is continued: %s", name, one.what)
            with self._lock:
                self._known.setdefault(name, one)


def _open_tiers(receipt: Receipt) -> frozenset[str]:
    """The tiers where an erasure may be completed by a repetition: all of them while blocks are still being written."""
    queued = any(one.outcome is PlaceOutcome.QUEUED for one in receipt.places)
    open_ = receipt.places if queued else receipt.open
    return frozenset(one.tier for one in open_ if one.outcome not in (PlaceOutcome.ELSEWHERE, PlaceOutcome.READ_ONLY))
