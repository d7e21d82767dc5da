"""Updates that this process has not yet written to the index of a disk store: uses of blocks, and finished writes.

Every transaction of the index begins by applying them. If it fails, finished writes are kept for the next transaction.
Uses may be lost: they only affect the order of eviction.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from foreword.store.base import Name
from foreword.store.disk.files import BlockFiles
from foreword.store.disk.index_rows import IndexTransaction, PendingRow, block_id, tenant_id


@dataclass(slots=True)
class UpdateBatch:
    """The updates that one transaction applies.

    Attributes:
        uses: by block id: the order of the last use in this batch, the number of uses, and the time of the last use.
        written, dropped: rows whose files are complete, or were given up.
        removed: blocks whose files were removed without the index.
        tenants: the time of the last use by each tenant.
        order: the order of the latest use.
    """

    uses: dict[int, tuple[int, int, float]] = field(default_factory=dict)
    written: list[PendingRow] = field(default_factory=list)
    dropped: list[PendingRow] = field(default_factory=list)
    removed: list[Name] = field(default_factory=list)
    tenants: dict[int, float] = field(default_factory=dict)
    order: int = 0

    def apply(self, transaction: IndexTransaction, files: BlockFiles, registered: Callable[[], bool]) -> None:
        """Write the updates to the index. `registered` returns whether the index still knows this process as a writer."""
        if self.uses:
            clock = transaction.clock
            transaction.note_uses((clock + order, hits, at, id_) for id_, (order, hits, at) in self.uses.items())
            transaction.clock += self.order
            for tenant, used_at in self.tenants.items():
                transaction.note_tenant(tenant, used_at)
        if self.removed:
            for gone in transaction.find(block_id(name) for name in self.removed).values():
                if files.size(gone.name) < 0:
                    transaction.remove(gone)
        if not self.written and not self.dropped:
            return
        if registered():
            if self.written:
                transaction.finish(self.written)
            if self.dropped:
                transaction.drop(self.dropped)
            return
        # The index was rebuilt in the meantime from the files that were complete then. Remove files that it does not count.
        ids = [row.id for row in self.written]
        known = transaction.find(ids).keys() | transaction.find_pending(ids).keys()
        for row in self.written:
            if row.id not in known:
                files.remove(row.name)


class PendingUpdates:
    """Collects updates for the next transaction. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._batch = UpdateBatch()

    def note_reads(self, names: Sequence[Name]) -> None:
        """Note that these blocks were read in one call."""
        if not names:
            return
        clock = time.time()
        with self._lock:
            batch = self._batch
            batch.order += 1
            batch.tenants[tenant_id(names[0])] = clock
            for name in names:
                id_ = block_id(name)
                _, hits, _ = batch.uses.get(id_, (0, 0, 0.0))
                batch.uses[id_] = (batch.order, hits + 1, clock)

    def note_writes(self, written: Sequence[PendingRow], dropped: Sequence[PendingRow]) -> None:
        """Note that the files of these rows are complete, or were given up."""
        with self._lock:
            self._batch.written += written
            self._batch.dropped += dropped

    def note_removed(self, name: Name) -> None:
        """Note that the file of a block was removed without the index."""
        with self._lock:
            self._batch.removed.append(name)

    def give_up(self, rows: Sequence[PendingRow]) -> None:
        """Note that files of complete blocks were removed again before the index learned of them."""
        with self._lock:
            batch = self._batch
            ids = {row.id for row in rows}
            batch.dropped += [row for row in batch.written if row.id in ids]
            batch.written = [row for row in batch.written if row.id not in ids]

    def put_back(self, batch: UpdateBatch) -> None:
        """Keep the updates of a transaction that failed, apart from uses."""
        with self._lock:
            self._batch.written += batch.written
            self._batch.dropped += batch.dropped
            self._batch.removed += batch.removed

    def take(self) -> UpdateBatch:
        """Return all updates and start with none."""
        with self._lock:
            batch, self._batch = self._batch, UpdateBatch()
        return batch
