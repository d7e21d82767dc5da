"""Admission and eviction in a disk store: which blocks of a batch are written, and which are evicted for them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from foreword.errors import StoreError
from foreword.store.base import Name
from foreword.store.disk.files import BlockFiles, is_name
from foreword.store.disk.index_rows import BlockRow, IndexTransaction, PendingRow, block_id, parent_id, tenant_id
from foreword.store.disk.recovery import recover_dead_writers
from foreword.store.frame import Frame

_GROUP_FRAMES: Final = 64  # limits of one transaction: other processes wait while it removes files
_GROUP_BYTES: Final = 64 << 20
_UNUSUAL: Final = 8  # more than this part of the budget over it: the index's totals may be wrong
_FEW: Final = 4  # a file system may have no room for further files rather than bytes
_STUCK: Final = 16  # at most this number of files that cannot be removed are skipped in a search


@dataclass(slots=True)
class AdmittedBlocks:
    """The result of admitting a group of frames.

    Attributes:
        frames: frames to write, by block id, and their rows in the index.
        present: number of frames that were present.
        full: whether there was no room for a frame.
    """

    frames: dict[int, Frame] = field(default_factory=dict)
    rows: list[PendingRow] = field(default_factory=list)
    present: int = 0
    full: bool = False


def in_groups(frames: Sequence[Frame]) -> Iterator[list[Frame]]:
    """Divide a batch into groups that are small enough for one transaction."""
    group: list[Frame] = []
    size = 0
    for one in frames:
        if group and (len(group) == _GROUP_FRAMES or size + len(one.data) > _GROUP_BYTES):
            yield group
            group, size = [], 0
        group.append(one)
        size += len(one.data)
    if group:
        yield group


class BlockBudget:
    """Keeps the blocks of a disk store within `size` bytes by evicting the least recently used leaves.

    Args:
        size: bytes of blocks.
        notes: counters `missing` and `recovered` to increment.
        quota: bytes of blocks of one tenant.

    Attributes:
        evictions: number of blocks that this process has evicted.
        on_evicted: if set, called with the name of each of them.
    """

    def __init__(self, files: BlockFiles, size: int, notes: Counter[str], quota: int) -> None:
        self.size = size
        self._quota = quota
        self.evictions = 0
        self.on_evicted: Callable[[Name], None] | None = None
        self._files = files
        self._notes = notes

    def admit(self, transaction: IndexTransaction, frames: Sequence[Frame], now: int, writer: int) -> AdmittedBlocks:
        """Choose the frames to write, in order while there is room, and evict blocks for them.

        Blocks used at the time `now` or later are not evicted.
        """
        admitted = AdmittedBlocks()
        to_write: dict[int, int] = {}  # bytes by tenant
        for id_, one in self._new_frames(transaction, frames, admitted, now, writer).items():
            tenant = tenant_id(one.name)
            more = {**to_write, tenant: to_write.get(tenant, 0) + len(one.data)}
            if not self._make_room(transaction, more, now, writer):
                admitted.full = True
                break
            to_write = more
            admitted.frames[id_] = one
        return admitted

    def note_evicted(self, names: Sequence[Name]) -> None:
        """Count blocks that were evicted, and report them."""
        self.evictions += len(names)
        if self.on_evicted is not None:
            for name in names:
                self.on_evicted(name)

    def discard(self, transaction: IndexTransaction, row: BlockRow) -> None:
        """Remove a block whose file is missing or has the wrong length."""
        self._files.remove(row.name)
        transaction.remove(row)
        self._notes["missing"] += 1

    def _recover(self, transaction: IndexTransaction, writer: int) -> None:
        self._notes["recovered"] += recover_dead_writers(transaction, self._files, writer)

    def _new_frames(
        self, transaction: IndexTransaction, frames: Sequence[Frame], admitted: AdmittedBlocks, now: int, writer: int
    ) -> dict[int, Frame]:
        """The frames that have to be written, by id. Counts those present, and notes a use of them and of all parents."""
        ids = [block_id(one.name) for one in frames]
        pending = transaction.find_pending(ids)
        if any(row.writer != writer for row in pending.values()):
            self._recover(transaction, writer)
            pending = transaction.find_pending(ids)
        rows = transaction.find(ids)
        new: dict[int, Frame] = {}
        unlisted = transaction.unlisted() > 0
        for id_, one in zip(ids, frames, strict=True):
            row = rows.get(id_)
            if row is not None and self._files.size(row.name) == row.size:
                admitted.present += row.name == one.name
                continue
            if row is not None:
                self.discard(transaction, row)
                del rows[id_]
            if id_ in new:
                admitted.present += new[id_].name == one.name
            elif unlisted and self._files.size(one.name) == len(one.data):
                admitted.present += 1
            elif id_ not in pending and len(one.data) <= self.size and is_name(one.name):
                new[id_] = one
        transaction.touch(rows.keys() | {parent_id(one.header) for one in new.values()} - new.keys(), now)
        return new

    def _make_room(self, transaction: IndexTransaction, to_write: Mapping[int, int], now: int, writer: int) -> bool:
        """Evict until these bytes of tenants fit into the budget too. False if that is impossible."""
        need = sum(to_write.values())
        if transaction.bytes + need - self.size > self.size // _UNUSUAL:
            transaction.check_totals()
        recovered = False
        while (full := transaction.bytes + need > self.size) or self._over_quota(transaction, to_write):
            if self._evict_one(transaction, now, to_write, () if full else self._over_quota(transaction, to_write)):
                continue
            if recovered:
                transaction.check_leaves()
                return False
            self._recover(transaction, writer)
            recovered = True
        return True

    def _over_quota(self, transaction: IndexTransaction, to_write: Mapping[int, int]) -> list[int]:
        """The tenants that would have more than they may."""
        if self._quota >= self.size:
            return []
        return [one for one, more in to_write.items() if transaction.tenant_bytes(one) + more > self._quota]

    def evict(self, transaction: IndexTransaction, need: int, now: int) -> int:
        """Evict blocks of at least `need` bytes and not fewer than a few, last used before `now`. Returns how many."""
        goal = transaction.bytes - need
        count = 0
        while (transaction.bytes > goal or count < _FEW) and self._evict_one(transaction, now, {}, prune=True):
            count += 1
        return count

    def _evict_one(
        self,
        transaction: IndexTransaction,
        now: int,
        to_write: Mapping[int, int],
        tenants: Sequence[int] = (),
        *,
        prune: bool = False,
    ) -> bool:
        """Evict the block that was least recently used before `now`. False if there is none.

        `tenants`: those to evict from; (): any. With `prune`, the block's folder is removed too if it is empty.
        """
        for _ in range(_STUCK):
            row = transaction.victim(now, self.size, time.time(), to_write, tenants)
            if row is None:
                return False
            try:
                self._files.remove(row.name)
            except StoreError:
                self._notes["stuck"] += 1
                transaction.touch([row.id], now)
                continue
            if prune:
                self._files.remove_empty_folder(row.name)
            transaction.remove(row)
            self.note_evicted([row.name])
            return True
        return False
