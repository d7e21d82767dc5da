"""Pins of leases in the stores: blocks that stay as long as a record says so (`lease_records.py`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from foreword.blocks.keys import PUBLIC_ROOT, is_public
from foreword.errors import StoreError
from foreword.offload.search import StoredGroup
from foreword.prefixes.lease_records import PREFIXES, RETENTIONS, Chain
from foreword.store.base import Name
from foreword.store.shared_records import SharedRecords, leave
from foreword.store.tiered import TieredStore

_PIN_SECONDS: Final = 5.0
_MAX_PENDING: Final = 4096


class StorePins:
    """Pins what continuing behind a lease needs, and unpins what no other lease needs: those of this process, and those of
    other processes, which have records in the stores. A lease is given by its root key and its block keys. A tenant's lease
    leaves public blocks to the public prefix that they are of.

    Args:
        model: what names the KV, hexadecimal.
        weights: fingerprint, hexadecimal, where builds of a server name their KV differently: named prefixes are those of all.
        run: runs what sets and takes pins. By default at once; behind a queue of writes, so that blocks are there.
        seconds: within which a store sets or takes pins, when `run` says so.
        tries: how often `tick` looks for blocks that were not there yet; 0 where it is not called, or where blocks are there.
            With tries, pins are set, taken and looked after on one thread.

    Attributes:
        groups: KV groups of the stored blocks.
        needed: functions that return this process's leases of a tenant, given its digest.
    """

    def __init__(
        self,
        store: TieredStore,
        model: str,
        groups: Sequence[StoredGroup],
        weights: str = "",
        *,
        run: Callable[[Callable[[], object]], object] = lambda work: work(),
        seconds: float = _PIN_SECONDS,
        tries: int = 0,
    ) -> None:
        self.model, self.groups, self._weights = model, groups, weights
        self.needed: list[Callable[[str], Iterable[Chain]]] = []
        self._store, self._run, self._seconds, self._tries = store, run, seconds, tries
        self._records: list[SharedRecords[Any]] = [SharedRecords(store, kind) for kind in (PREFIXES, RETENTIONS)]
        self._epochs = [0] * len(store.tiers)
        self._pending: dict[tuple[bytes, bytes], tuple[Chain, int]] = {}  # tries left, by root and last key

    @property
    def named(self) -> str:
        """The model, in the record keys of named prefixes."""
        return (self._weights or self.model)[:32]

    def pin(self, root: bytes, keys: Chain, failed: Callable[[], object] = lambda: None) -> None:
        """Pin a prefix whose record is written. `failed` is called, on any thread, for each tier that fails."""

        def work() -> None:
            if (
                not self._pin_now(root, keys, self._seconds, failed)
                and self._tries
                and len(self._pending) < _MAX_PENDING
            ):
                self._pending[root, keys[-1]] = keys, self._tries

        self._run(work)

    def _pin_now(
        self,
        root: bytes,
        keys: Chain,
        seconds: float = _PIN_SECONDS,
        failed: Callable[[], object] = lambda: None,
    ) -> bool:
        """Pin the blocks that are stored already. Whether these are all."""
        names = [name for group in self.groups for name in group.names(root, own_keys(root, group.behind(keys)))]
        return self._set(names, seconds, pinned=True, failed=failed) == len(names)

    def unpin(self, tenant: str, root: bytes, keys: Chain) -> None:
        """Unpin the blocks of a prefix whose record is deleted."""
        if keys:
            self._pending.pop((root, keys[-1]), None)
        alone = self.alone(tenant, keys)
        names = [name for group, own in zip(self.groups, alone, strict=True) for name in group.names(root, own)]
        self._run(lambda: self._set(names, self._seconds, pinned=False))

    def unneeded(self, tenant: str, root: bytes, keys: Chain) -> list[Name]:
        """Names of those of these blocks, in all groups, that no lease of the tenant needs."""
        alone = zip(self.groups, self.alone(tenant, keys, whole=True), strict=True)
        return [name for group, own in alone for name in group.names(root, own)]

    def alone(self, tenant: str, keys: Chain, *, whole: bool = False) -> list[list[bytes]]:
        """By KV group, the keys of the blocks that continuing behind a prefix needs, or of all with `whole`, and that no other
        lease needs."""
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

    def _set(
        self, names: Sequence[Name], seconds: float, *, pinned: bool, failed: Callable[[], object] = lambda: None
    ) -> int:
        until = time.monotonic() + seconds
        return self._store.pin(names, pinned=pinned, deadline=until, failed=failed) if names else 0

    def tick(self) -> None:
        """Is called about once a second: tries again to pin what was not written yet."""
        self._restore()
        pending, self._pending = self._pending, {}
        for (root, last), (keys, tries) in pending.items():
            if not self._pin_now(root, keys) and tries > 1:
                self._pending[root, last] = keys, tries - 1

    def _restore(self) -> None:
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
                self._pin_now(bytes.fromhex(one.root), one.chain)
            # A record that was deleted meanwhile may have been unpinned before it was pinned here.
            here = records.scan(prefix, known=found, failed=leave).keys
            for key, one in found.items() if not failures else ():
                if key not in here:
                    self.unpin(key.split("/")[2], bytes.fromhex(one.root), one.chain)
        if not failures:
            self._epochs = epochs


def own_keys(root: bytes, keys: Chain) -> list[bytes]:
    """The blocks of a prefix that are its tenant's, given the first bytes of its root."""
    return [key for key in keys if is_public(key) == root.startswith(PUBLIC_ROOT)]
