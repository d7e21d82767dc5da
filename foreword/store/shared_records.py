"""Records that instances share through their stores: how each kind of them is written, read, listed, adopted and expired.

A record is a JSON object with a checksum over its other fields (dev/formats.md). Its key says what it is about:

    <kind>/<scope>/<tenant's digest>/<name>     of a tenant: encrypted with the tenant's data key, and erased with the tenant
    <kind>/<name>, <kind>/<scope>/<name>        of none

A damaged record is counted by its tier and logged once. It costs only itself: another tier's copy is used if that is sound.
Only what was read is deleted because its time is over; what cannot be read stays.

No wall clock ends a record (dev/decisions/0039-clocks.md). A record that counts for a time says for how long, and until when
on the monotonic clock of the machine that wrote it. Processes that read the same clock know when its time is over. All others
count from when they first saw it: they may keep it longer, up to twice as long, and never end it early for others.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, TypeVar

import msgspec
import xxhash

from foreword.decoders import convert
from foreword.errors import BadRecord, StoreConfigError, StoreError, StoreTimeout
from foreword.newest import Newest
from foreword.store.base import STEP_SECONDS, PartialListing, record_tenant
from foreword.store.machine import clock_id
from foreword.store.tier import StoreTier
from foreword.store.tiered import OnFailure, TieredStore, raise_failure

log = logging.getLogger("foreword.store")

Shared = TypeVar("Shared", bound=msgspec.Struct)

_WRITE_SECONDS: Final = 10.0
# A store's listing may still lack a record that was written within the last seconds.
_SETTLED_SECONDS: Final = 10.0
_MAX_LOGGED: Final = 4096


@dataclass(frozen=True, slots=True)
class RecordKind(Generic[Shared]):
    """A kind of record.

    Attributes:
        folder: the first part of the record keys.
        type: what a record says.
        of_tenants: each record belongs to a tenant.
        name: the last part of a record's key, where it follows from what the record says; else None.
        lasts: seconds for which a record counts from when it was written.
        ends: the name of the clock that the writer of a record reads (`store/machine.py`), and until when it counts on that
        clock;
            no name in records of earlier builds.
        most: how many records a scan of a tier reads, with those that are known.
    """

    folder: str
    type: type[Shared]
    of_tenants: bool = False
    name: Callable[[Shared], str | None] = lambda _: None
    lasts: Callable[[Shared], float] = lambda _: math.inf
    ends: Callable[[Shared], tuple[str, float]] = lambda _: ("", 0.0)
    most: int = 16_384

    def key(self, *parts: str) -> str:
        """A record key; what record keys begin with if the last part is empty. Raises StoreConfigError for a key of
        this kind that names no tenant although it must, or names one although it must not."""
        key = "/".join((self.folder, *parts))
        if parts[-1] and bool(record_tenant(key)) != self.of_tenants:
            raise StoreConfigError(f"{key!r} is not the key of a record of {self.folder}")
        return key

    def encode(self, value: Shared) -> bytes:
        fields = msgspec.to_builtins(value)
        return json.dumps({**fields, "checksum": checksum_of(fields)}, ensure_ascii=False).encode()

    def decode(self, key: str, data: bytes) -> Shared:
        """Raises BadRecord. A record without a checksum was written by a version before 0.2."""
        try:
            fields = json.loads(data)
            checksum = fields.pop("checksum", None)
            value = convert(fields, self.type)
            named = self.name(value)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise BadRecord(f"the record {key} is damaged, and is not used") from None
        if checksum not in (None, checksum_of(fields)) or named not in (None, key.rpartition("/")[2]):
            raise BadRecord(f"the record {key} is damaged, and is not used")
        return value


def checksum_of(fields: dict[str, Any]) -> str:
    """XXH3-128 of the fields as JSON with sorted names, in hexadecimal."""
    return str(xxhash.xxh3_128_hexdigest(json.dumps(fields, sort_keys=True).encode()))


def leave(tier: StoreTier, error: StoreError) -> None:
    """Leave an unreadable record for the next scan."""


@dataclass(frozen=True, slots=True)
class FoundRecords(Generic[Shared]):
    """Records that a scan found, by record key.

    Attributes:
        values: sound records whose time is not over, without those that were not to be read.
        expired: those whose time is over, by what this process can know; `remove_expired` deletes them.
        keys: of all that the stores have, or may have.
    """

    values: dict[str, Shared]
    expired: dict[str, Shared]
    keys: set[str]


class SharedRecords(Generic[Shared]):
    """The records of one kind in an instance's stores. Thread-safe; calls block.

    Args:
        seconds: within which a tier answers a read.
    """

    def __init__(self, store: TieredStore, kind: RecordKind[Shared], seconds: float = STEP_SECONDS) -> None:
        self.kind = kind
        self._store = store
        self._seconds = seconds
        self._written: dict[str, float] = {}
        self._bad: set[str] = set()
        # When a record was first seen here with this content.
        self._seen: Newest[str, tuple[bytes, float]] = Newest(kind.most)

    def put(self, key: str, value: Shared) -> None:
        """Write a record, replacing the previous one. Raises StoreError if no store takes it."""
        self._store.put_record(key, self.kind.encode(value), deadline=time.monotonic() + _WRITE_SECONDS)
        self._written[key] = time.monotonic()

    def get(self, key: str) -> Shared | None:
        """None if there is no sound record. Raises StoreError if a store that does not answer may have one."""
        for tier, data in self._store.record_copies(key, deadline=time.monotonic() + self._seconds):
            value = self._decoded(tier, key, data)
            if value is not None:
                return value
        return None

    def exists(self, key: str) -> bool:
        """Whether a store has a record, sound or not, now. Raises StoreError if one that does not answer may have it."""
        return any(self._store.record_copies(key, deadline=time.monotonic() + self._seconds))

    def remove(self, key: str) -> bool:
        """Raises StoreError: a record that stays in a store would come back."""
        self._written.pop(key, None)
        return self._store.delete_record(key, deadline=time.monotonic() + _WRITE_SECONDS)

    def left(self, key: str, value: Shared) -> float:
        """Seconds for which a record still counts, by what this process can know; negative or 0 if its time is over."""
        lasts, now = self.kind.lasts(value), time.monotonic()
        if math.isinf(lasts):
            return lasts
        clock, ends_at = self.kind.ends(value)
        if clock == clock_id():
            return min(lasts, ends_at - now)
        content = xxhash.xxh3_128_digest(self.kind.encode(value))
        known = self._seen.get(key)
        if known is None or known[0] != content:
            self._seen[key] = known = content, now
        return known[1] + lasts - now

    def scan(
        self,
        prefix: str = "",
        *,
        known: Collection[str] = (),
        failed: OnFailure = raise_failure,
        unread: OnFailure = leave,
        within: float = math.inf,
    ) -> FoundRecords[Shared]:
        """Read the records whose keys start with `prefix`.

        Args:
            prefix: from `RecordKind.key`; "" for all records of the kind.
            known: record keys that are not read again.
            failed: is called with a tier whose listing may lack some. By default the scan raises its StoreError.
            unread: is called for each record that a tier does not read.
            within: seconds that each tier may take in all.
        """
        before = time.monotonic() - _SETTLED_SECONDS
        for key in [key for key, at in list(self._written.items()) if at < before]:
            self._written.pop(key, None)  # listings have it by now
        found: FoundRecords[Shared] = FoundRecords({}, {}, set(self._written))
        for tier in self._store.record_tiers:
            self._scan_tier(tier, found, prefix or self.kind.key(""), known, failed, unread, time.monotonic() + within)
        return found

    def _scan_tier(
        self,
        tier: StoreTier,
        found: FoundRecords[Shared],
        prefix: str,
        known: Collection[str],
        failed: OnFailure,
        unread: OnFailure,
        end: float,
    ) -> None:
        # A listing that fails says nothing of blocks, so no failure here opens the circuit breaker.
        def call(what: Callable[..., Any], key: str) -> Any:
            until = min(end, time.monotonic() + self._seconds)
            return tier.call(partial(what, key, deadline=until), until)

        try:
            keys = call(tier.store.records, prefix)
        except StoreError as error:
            tier.count_error(error)
            keys = error.keys if isinstance(error, PartialListing) else []
            failed(tier, error)
        found.keys.update(keys)
        seen = {*known, *found.values, *found.expired}
        for key in [key for key in keys if key not in seen][: max(self.kind.most - len(known), 0)]:
            try:
                data = call(tier.store.get_record, key)
            except StoreError as error:
                tier.count_error(error)
                unread(tier, error)
                if isinstance(error, StoreTimeout):
                    return  # the others would probably take as long
                continue
            value = None if data is None else self._decoded(tier, key, data)
            if value is not None:
                (found.values if self.left(key, value) > 0 else found.expired)[key] = value

    def _decoded(self, tier: StoreTier, key: str, data: bytes) -> Shared | None:
        try:
            return self.kind.decode(key, bytes(data))
        except BadRecord as error:
            if key not in self._bad and len(self._bad) < _MAX_LOGGED:
                self._bad.add(key)
                tier.count_error(error)
                log.warning("%s: %s", tier.label, error.message)
            return None
