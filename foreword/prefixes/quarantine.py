"""Chains in quarantine: the audit has found their cached KV to be wrong.

A record `quarantine/<model>/<tenant>/<key of the first bad block>` in the stores tells it to all instances. Each of them drops
the tenant's blocks from its device, and does not reuse or store the chain until the record expires. The instance that found it
deletes the chain from every tier. Until the record expires, nothing is read from the tier that the block came from: the model
computes instead.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from foreword.blocks.layout import ROOT_BYTES
from foreword.engine.hit_audit import DEVICE, Mismatch
from foreword.errors import StoreError
from foreword.prefixes.erasure import forget_chain
from foreword.store.background import use_background_cores
from foreword.store.tiered import TieredStore

log = logging.getLogger(__name__)

QUARANTINE_SECONDS: Final = 3600.0
MAX_CHAINS: Final = 1024
_SCAN_SECONDS: Final = 15.0
_TIMEOUT: Final = 5.0
_FLUSH_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class QuarantinedChain:
    """One chain.

    Attributes:
        root: hexadecimal root key of the chain; its first 32 digits are the tenant's digest.
        key: hexadecimal key of the first bad block.
        source: where the bad block came from (`Mismatch.source`).
        until: seconds since the epoch.
    """

    root: str
    key: str
    source: str
    until: float


class ChainQuarantine:
    """The chains in quarantine of one model, here and in the stores. It follows the stores on a thread of its own.

    Args:
        store: None if the engine has no stores.
        fingerprint: of the model, hexadecimal.
        drop: drops what waits to be written of chains whose roots begin with these bytes.

    Attributes:
        keys, roots, device: see `engine.hit_audit.Quarantine`.
        on_change: called on this class's thread when another instance has found a chain, or one has expired.
    """

    def __init__(
        self,
        store: TieredStore | None,
        fingerprint: str,
        drop: Callable[[Sequence[bytes]], object] = lambda _: None,
    ) -> None:
        self.keys: frozenset[bytes] = frozenset()
        self.roots: frozenset[bytes] = frozenset()
        self.device = False
        self.on_change: Callable[[], object] = lambda: None
        self._store = store
        self._drop = drop
        self._prefix = f"quarantine/{fingerprint[:32]}/"
        self._lock = threading.Lock()
        self._chains: dict[str, QuarantinedChain] = {}
        self._own: set[str] = set()  # record keys of what was found here
        self._new: queue.SimpleQueue[tuple[str, QuarantinedChain, int] | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._thread: threading.Thread | None = None
        if store is not None:
            self.scan()
            self._thread = threading.Thread(target=self._run, name="foreword-quarantine", daemon=True)
            self._thread.start()

    @property
    def chains(self) -> list[QuarantinedChain]:
        return list(self._chains.values())

    def add(self, mismatch: Mismatch) -> None:
        """Take a chain into quarantine: here at once, in the stores on another thread."""
        key = mismatch.keys[-1].hex()
        chain = QuarantinedChain(mismatch.root.hex(), key, mismatch.source, time.time() + QUARANTINE_SECONDS)
        record = f"{self._prefix}{chain.root[:32]}/{key}"
        with self._lock:
            self._own.add(record)
            self._chains[record] = chain
            self._publish()
        if self._store is not None:
            self._idle.clear()
            self._new.put((record, chain, mismatch.block))

    def flush(self, timeout: float) -> bool:
        """Wait until the stores have no block of the chains that were found here."""
        return self._idle.wait(timeout)

    def close(self) -> None:
        self._new.put(None)
        if self._thread is not None:
            self._thread.join(_FLUSH_SECONDS)

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

    def _run(self) -> None:
        use_background_cores()
        while True:
            try:
                found = self._new.get(timeout=_SCAN_SECONDS)
            except queue.Empty:
                self.scan()
                continue
            if found is None:
                return
            self._remove(*found)
            if self._new.empty():
                self._idle.set()

    def _remove(self, record: str, chain: QuarantinedChain, depth: int) -> None:
        """Write the record, then delete the chain from every tier. `depth`: number of its bad block."""
        assert self._store is not None
        try:
            data = json.dumps(asdict(chain), sort_keys=True).encode()
            self._store.put_record(record, data, deadline=time.monotonic() + _TIMEOUT)
            self._drop([bytes.fromhex(chain.root)[:ROOT_BYTES]])
            receipt = forget_chain(self._store, bytes.fromhex(chain.root), bytes.fromhex(chain.key), depth)
        except StoreError as error:
            log.error("quarantine: the stores could not be told of the chain %s: %s", chain.key, error.message)
            return
        log.error("quarantine: removed the chain %s from the stores: %s", chain.key, receipt.removed)

    def scan(self) -> None:
        """Read the records, and delete those that have expired."""
        assert self._store is not None
        try:
            names = self._store.records(self._prefix, deadline=time.monotonic() + _TIMEOUT)[:MAX_CHAINS]
            found = {name: self._chains.get(name) or self._read(name) for name in names}
            now = time.time()
            expired = [name for name, one in found.items() if one is not None and one.until <= now]
            for name in expired:
                self._store.delete_record(name, deadline=time.monotonic() + _TIMEOUT)
        except StoreError as error:
            log.warning("quarantine: the records cannot be read: %s", error.message)
            return
        with self._lock:
            waiting = {name: self._chains[name] for name in self._own if name in self._chains}
            chains = {name: one for name, one in {**found, **waiting}.items() if one is not None and one.until > now}
            changed = chains.keys() != self._chains.keys()
            self._chains = chains
            if changed:
                self._publish()
        if changed:
            self.on_change()

    def _read(self, name: str) -> QuarantinedChain | None:
        assert self._store is not None
        data = self._store.get_record(name, deadline=time.monotonic() + _TIMEOUT)
        if data is None:
            return None
        try:
            read = json.loads(data)
            root, key = bytes.fromhex(read["root"]), bytes.fromhex(read["key"])
            until = min(float(read["until"]), time.time() + QUARANTINE_SECONDS)
            return QuarantinedChain(root.hex(), key.hex(), str(read["source"]), until)
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
