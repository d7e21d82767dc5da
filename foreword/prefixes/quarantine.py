"""Chains in quarantine: the audit has found their cached KV to be wrong.

A record `quarantine/<model>/<tenant>/<key of the first bad block>` in the stores tells it to all instances. Each of them drops
the tenant's blocks from its device, and does not reuse or store the chain until an hour has passed since it first saw the
record, or the record is gone. The instance that found the chain deletes it from every tier. For so long, nothing is read from
the tier that the block came from: the model computes instead.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Final

import msgspec

from foreword.blocks.layout import ROOT_BYTES
from foreword.blocks.public_blocks import roots_behind
from foreword.errors import StoreError
from foreword.prefixes.erasure import forget_chain
from foreword.prefixes.lease_records import remove_expired
from foreword.prefixes.mismatch import DEVICE, Mismatch
from foreword.store.background_jobs import BackgroundJobs
from foreword.store.machine import clock_id
from foreword.store.shared_records import RecordKind, SharedRecords
from foreword.store.tiered import TieredStore

log = logging.getLogger(__name__)

QUARANTINE_SECONDS: Final = 3600.0
MAX_CHAINS: Final = 1024
_SCAN_SECONDS: Final = 15.0
_FLUSH_SECONDS: Final = 10.0


class QuarantinedChain(msgspec.Struct, frozen=True):
    """A chain.

    Attributes:
        root: hexadecimal root key of the chain; its first 32 digits are the tenant's digest.
        key: hexadecimal key of the first bad block.
        source: where the bad block came from (`Mismatch.source`).
        until: seconds since the epoch, for people and earlier builds.
        clock, ends_at: as in `RecordKind.ends`.
    """

    root: str
    key: str
    source: str
    until: float
    clock: str = ""
    ends_at: float = 0.0

    def __post_init__(self) -> None:
        bytes.fromhex(self.root + self.key)


QUARANTINE: Final = RecordKind(
    "quarantine",
    QuarantinedChain,
    of_tenants=True,
    name=lambda chain: chain.key,
    lasts=lambda chain: QUARANTINE_SECONDS,
    ends=lambda chain: (chain.clock, chain.ends_at),
    most=MAX_CHAINS,
)


class ChainQuarantine:
    """The chains in quarantine of one model, here and in the stores. It follows the stores on a thread of its own.

    Args:
        store: None if the engine has no stores.
        fingerprint: of the model, hexadecimal.
        erasing: the context of a sweep, given the first bytes of roots: no such block is written by this instance meanwhile.

    Attributes:
        keys, roots, device: see `engine.hit_audit.Quarantine`.
        on_change: called on this class's thread when another instance has found a chain, or one has expired.
    """

    def __init__(
        self,
        store: TieredStore | None,
        fingerprint: str,
        erasing: Callable[[Sequence[bytes]], AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        self.keys: frozenset[bytes] = frozenset()
        self.roots: frozenset[bytes] = frozenset()
        self.device = False
        self.on_change: Callable[[], object] = lambda: None
        self._store = store
        self._erasing = erasing
        self._records = None if store is None else SharedRecords(store, QUARANTINE)
        self._model = fingerprint[:32]
        self._lock = threading.Lock()
        self._chains: dict[str, QuarantinedChain] = {}
        self._ends: dict[str, float] = {}  # of these, on this process's monotonic clock
        self._own: set[str] = set()  # record keys of what was found here
        # Chains, with depths, that the queue had no room for.
        self._refused: dict[str, tuple[QuarantinedChain, int]] = {}
        self._jobs: BackgroundJobs | None = None
        if store is not None:
            self.scan()
            self._jobs = BackgroundJobs("quarantine", most=MAX_CHAINS, tick=self._follow, every=_SCAN_SECONDS)

    @property
    def chains(self) -> list[QuarantinedChain]:
        return list(self._chains.values())

    def add(self, mismatch: Mismatch) -> None:
        """Take a chain into quarantine: here at once, in the stores on another thread."""
        key = mismatch.keys[-1].hex()
        ends = time.monotonic() + QUARANTINE_SECONDS
        until = time.time() + QUARANTINE_SECONDS
        chain = QuarantinedChain(mismatch.root.hex(), key, mismatch.source, until, clock=clock_id(), ends_at=ends)
        record = QUARANTINE.key(self._model, chain.root[:32], key)
        with self._lock:
            self._own.add(record)
            self._chains[record] = chain
            self._ends[record] = ends
            self._publish()
        if self._jobs is not None and not self._jobs.add(lambda: self._remove(record, chain, mismatch.block)):
            self._refused[record] = chain, mismatch.block
            log.error("quarantine: the chain %s is removed from the stores later: too many wait", key)

    def flush(self, timeout: float) -> bool:
        """Wait until the stores have no block of the chains that were found here."""
        return self._jobs is None or (self._jobs.flush(timeout) and not self._refused)

    def close(self) -> None:
        if self._jobs is not None:
            self._jobs.close(_FLUSH_SECONDS)

    def _publish(self) -> None:
        """Tell the engine and the tiers. Under the lock."""
        chains = self._chains.values()
        self.roots = frozenset(bytes.fromhex(one.root) for one in chains)
        keys = frozenset(bytes.fromhex(one.key) for one in chains)
        here = {self._chains[record].source for record in self._own if record in self._chains}
        self.device = DEVICE in here
        if self._store is not None:
            shared = {one.source for one in chains}
            for tier in self._store.tiers:
                tier.suspended = tier.label in (shared if tier in self._store.record_tiers else here)
        if keys != self.keys:
            self.keys = keys

    # The thread

    def _remove(self, record: str, chain: QuarantinedChain, depth: int) -> None:
        """Write the record, then delete the chain from every tier. `depth`: number of its bad block."""
        assert self._store is not None and self._records is not None
        try:
            self._records.put(record, chain)
            with self._erasing([roots_behind(bytes.fromhex(chain.root)[:ROOT_BYTES])]):
                receipt = forget_chain(self._store, bytes.fromhex(chain.root), bytes.fromhex(chain.key), depth)
        except StoreError as error:
            log.error("quarantine: the stores could not be told of the chain %s: %s", chain.key, error.message)
            return
        log.error("quarantine: removed the chain %s from the stores: %s", chain.key, receipt.removed)

    def _follow(self) -> None:
        while self._refused:
            record, (chain, depth) = self._refused.popitem()
            self._remove(record, chain, depth)
        self.scan()

    def scan(self) -> None:
        """Read the records, and delete those that have expired."""
        assert self._records is not None
        try:
            found = self._records.scan(QUARANTINE.key(self._model, ""), known=self._chains)
        except StoreError as error:
            log.warning("quarantine: the records cannot be read: %s", error.message)
            return
        now = time.monotonic()
        with self._lock:
            before = self._chains
            chains = {record: one for record, one in before.items() if record in found.keys or record in self._own}
            for record, one in found.values.items():
                chains[record] = one
                self._ends[record] = now + self._records.left(record, one)
            self._chains = {record: one for record, one in chains.items() if self._ends[record] > now}
            self._ends = {record: self._ends[record] for record in self._chains}
            changed = self._chains.keys() != before.keys()
            if changed:
                self._publish()
        for record in [*found.expired, *(chains.keys() - self._chains.keys())]:
            with contextlib.suppress(StoreError):  # it is tried again
                remove_expired(self._records, record)
        if changed:
            self.on_change()
