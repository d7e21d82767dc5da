"""`foreword copy`: the contents of a store into another one, of any type.

Nothing but the two stores says how far a copy has come. So one that is killed is continued by the same call: what the target
has already is verified and left. Each block is verified when it is read from the source, and again as the target returns it.

What is copied: blocks, pins, and records of layouts, models, prefixes, retentions and quarantined chains. What is not: open
erasures and what they erase; the identity of a folder; records of an unknown kind, such as those of a key store, in which
a copy would bring back data keys that were destroyed.

An erasure may come while a store is copied. It removes blocks and records of the source, perhaps after they were copied. So
what the source has lost at the end, the target loses too, and what an erasure names that has begun meanwhile and not ended.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from foreword.blocks.keys import FINGERPRINT_BYTES, KEY_BYTES, named_root
from foreword.errors import StoreConfigError
from foreword.prefixes.erasure import SCAN_WITHIN
from foreword.prefixes.open_erasures import ERASURES
from foreword.store.base import FOREIGN, MISSING, Name, Store, StoredBlock, record_tenant
from foreword.store.frame import Frame
from foreword.store.shared_records import checksum_of
from foreword.store.tier import Outcome, StoreTier

# The folders of records that are copied.
RECORDS: Final = ("layouts", "namespaces", "encoders", "prefixes", "retained", "quarantine")
_CALL_WITHIN: Final = 60.0
_BATCH_BLOCKS: Final = 64
_BATCH_BYTES: Final = 32 << 20
# The buffer for a frame whose size the store does not list.
_LARGEST_FRAME: Final = 64 << 20


@dataclass(slots=True)
class StoreCopy:
    """Counts of a copy of a store.

    Attributes:
        blocks: copied and verified in the target. bytes: of these frames.
        present: blocks that the target had already, verified there.
        damaged: of the source, by reason; not copied.
        foreign: of another key or version, which cannot be verified here; not copied.
        unread: of the source, which could not be read; not copied.
        lost: blocks that the target does not return as they were written: it is full, or damaged.
        removed: blocks that the source lost meanwhile, by an erasure or eviction, and that were removed from the target again.
        erased: blocks and records that an open erasure names; not copied.
        unpinned: blocks that are pinned in the source and not in the target, which has no room for more pins.
        records: copied, or in the target already with this content.
        kept_records: the target has another record of this name, which stays.
        left_records: of kinds that are not copied.
        bad_records: damaged ones; not copied.
    """

    blocks: int = 0
    bytes: int = 0
    present: int = 0
    damaged: Counter[str] = field(default_factory=Counter)
    foreign: int = 0
    unread: int = 0
    lost: int = 0
    removed: int = 0
    erased: int = 0
    unpinned: int = 0
    records: int = 0
    kept_records: int = 0
    left_records: int = 0
    bad_records: int = 0

    @property
    def complete(self) -> bool:
        """Whether the target has all that can be verified and is to be copied."""
        return not (self.foreign or self.unread or self.lost or self.damaged or self.bad_records)


def copy_store(
    source: StoreTier, target: StoreTier, progress: Callable[[int, int], None] = lambda done, blocks: None
) -> StoreCopy:
    """Copy a store into another one. `progress` is called with the number of blocks that are done, and of all.

    Raises StoreConfigError if the target is too small, before anything is written, and StoreError if a store cannot be listed,
    or takes no blocks.
    """
    return _Copier(source, target, progress).run()


class _Copier:
    def __init__(self, source: StoreTier, target: StoreTier, progress: Callable[[int, int], None]) -> None:
        self._source, self._target, self._progress = source, target, progress
        self._done = StoreCopy()
        self._erased: set[bytes] = set()

    def run(self) -> StoreCopy:
        self._note_erasures()
        listed = self._source.store.scan(deadline=time.monotonic() + SCAN_WITHIN)
        found = {block.name: block for block in listed if not self._is_erased(block.name[FINGERPRINT_BYTES:])}
        self._check_room([*found.values()])
        written: set[Name] = set()
        done = 0
        for before, batch in _in_chains(found):
            written |= self._copy(before, batch)
            done += len(batch)
            self._progress(done, len(found))
        self._remove_lost(written, self._copy_records())
        return self._done

    def _note_erasures(self) -> None:
        """The erasures that are open in either store. Raises StoreError if one cannot be read: what it names is not known."""
        for tier in (self._source, self._target):
            for key in self._keys(tier.store, ERASURES.key("")):
                data = tier.store.get_record(key, deadline=_soon())
                if data is not None:
                    self._erased |= {bytes.fromhex(one) for one in ERASURES.decode(key, bytes(data)).prefixes}

    def _is_named(self, root: bytes) -> bool:
        """Whether an open erasure names this tenant."""
        return any(root.startswith(one) for one in self._erased)

    def _is_erased(self, root: bytes) -> bool:
        found = self._is_named(root)
        self._done.erased += found
        return found

    def _check_room(self, blocks: Sequence[StoredBlock]) -> None:
        status = self._target.store.status()
        if not status.budget or sum(block.size for block in blocks) + status.bytes <= status.budget:
            return
        missing = 0
        for before, batch in _in_chains({block.name: block for block in blocks}):
            there = self._present(before, [block.name for block in batch])
            missing += sum(block.size for block, found in zip(batch, there, strict=True) if not found)
        if missing + status.bytes > status.budget:
            raise StoreConfigError(
                f"{self._target.label} has room for {status.budget - status.bytes:,} bytes more, and {missing:,} are to be "
                "copied: give it a larger size="
            )

    def _present(self, before: Sequence[Name], names: Sequence[Name]) -> list[bool]:
        """Which blocks the target has. `before`: those before them in their chain, which a store may need to find them."""
        self._target.store.note_chain(before, names)
        return self._target.store.present(names, deadline=_soon())

    def _copy(self, before: Sequence[Name], batch: Sequence[StoredBlock]) -> set[Name]:
        """Copy blocks that follow each other in a chain; returns the names of those that the target has then."""
        store, names = self._target.store, [block.name for block in batch]
        there, sound = self._present(before, names), set[Name]()
        self._source.store.note_chain(before, names)
        old = [block for block, found in zip(batch, there, strict=True) if found]
        for block, outcome in zip(old, self._examined(self._target, old), strict=True):
            if isinstance(outcome, Frame):
                sound.add(block.name)
            elif isinstance(outcome, str):
                store.delete([block.name], deadline=_soon())  # it is damaged
        self._done.present += len(sound)
        wanted = [block for block in batch if block.name not in sound]
        frames = [frame for frame in map(self._verified, self._examined(self._source, wanted)) if frame is not None]
        if frames:
            store.put(frames, deadline=_soon())
            sizes = [len(frame.data) for frame in frames]
            back = self._target.examine([frame.name for frame in frames], sizes, _soon())
            for frame, outcome in zip(frames, back, strict=True):
                if isinstance(outcome, Frame) and outcome.data == frame.data:
                    self._done.blocks += 1
                    self._done.bytes += len(frame.data)
                    sound.add(frame.name)
                else:
                    self._done.lost += 1
        pinned = [block.name for block in batch if block.pinned and block.name in sound]
        if pinned:
            self._done.unpinned += len(pinned) - store.pin(pinned, deadline=_soon())
        return sound

    def _examined(self, tier: StoreTier, blocks: Sequence[StoredBlock]) -> list[Outcome]:
        sizes = [block.size or _LARGEST_FRAME for block in blocks]
        return tier.examine([block.name for block in blocks], sizes, _soon()) if blocks else []

    def _verified(self, outcome: Outcome) -> Frame | None:
        """A block of the source that is whole; any other one is counted."""
        if isinstance(outcome, Frame):
            return outcome
        if isinstance(outcome, str):
            self._done.damaged[outcome] += 1
        elif outcome == FOREIGN:
            self._done.foreign += 1
        elif outcome != MISSING:  # what is missing was evicted or erased meanwhile
            self._done.unread += 1
        return None

    def _copy_records(self) -> set[str]:
        """Copy the records; returns the keys of those that the target has then as the source has them."""
        source, target, copied = self._source.store, self._target.store, set[str]()
        for key in self._keys(source, ""):
            folder = key.partition("/")[0]
            if folder not in RECORDS:
                self._done.left_records += folder not in ("location", ERASURES.folder)
                continue
            tenant = record_tenant(key)
            if tenant and self._is_erased(bytes.fromhex(tenant)):
                continue
            data = source.get_record(key, deadline=_soon())
            if data is None:
                continue
            if not _is_whole(bytes(data)):
                self._done.bad_records += 1
                continue
            there = target.add_record(key, bytes(data), deadline=_soon())
            if bytes(there) == bytes(data):
                self._done.records += 1
                copied.add(key)
            else:
                self._done.kept_records += 1
        return copied

    def _remove_lost(self, written: set[Name], copied: set[str]) -> None:
        """Remove from the target what the source has no more. A block that was evicted there is no loss: it is a miss there."""
        self._note_erasures()  # those that began meanwhile: what they erase may still be in the source
        left = {
            name
            for batch in self._source.store.list_names(deadline=time.monotonic() + SCAN_WITHIN)
            for name in batch
            if not self._is_named(name[FINGERPRINT_BYTES:])
        }
        for names in _slices(sorted(written - left)):
            self._done.removed += self._target.store.delete(names, deadline=_soon())
        erased = {key for key in copied if (tenant := record_tenant(key)) and self._is_named(bytes.fromhex(tenant))}
        for key in erased | (copied - {*self._keys(self._source.store, "")}):
            self._target.store.delete_record(key, deadline=_soon())
            self._done.records -= 1

    @staticmethod
    def _keys(store: Store, prefix: str) -> list[str]:
        return store.records(prefix, deadline=_soon())


def _soon() -> float:
    return time.monotonic() + _CALL_WITHIN


def _in_chains(found: Mapping[Name, StoredBlock]) -> Iterator[tuple[list[Name], list[StoredBlock]]]:
    """All blocks in batches, each a part of one chain, and the names of those before it. The chains of a tenant and layout that
    was used last come last, since a store evicts the others first."""
    used: dict[bytes, float] = {}
    parents: dict[Name, Name] = {}
    after: dict[Name, list[StoredBlock]] = {}
    for name, block in found.items():
        layout, root = name[:FINGERPRINT_BYTES], name[FINGERPRINT_BYTES:-KEY_BYTES]
        used[name[:-KEY_BYTES]] = max(used.get(name[:-KEY_BYTES], 0.0), block.used_at)
        parent = layout + named_root(root, block.parent) + block.parent if block.parent else b""
        if parent in found and found[parent].depth == block.depth - 1:
            parents[name] = parent
            after.setdefault(parent, []).append(block)
    firsts = [block for name, block in found.items() if name not in parents]
    left = sorted(firsts, key=lambda one: (used[one.name[:-KEY_BYTES]], one.name), reverse=True)
    while left:
        batch = [left.pop()]
        above, before = parents.get(batch[0].name), list[Name]()
        while above is not None:
            before.append(above)
            above = parents.get(above)
        size = batch[0].size or _LARGEST_FRAME
        while following := after.get(batch[-1].name):
            size += following[0].size or _LARGEST_FRAME
            if len(batch) == _BATCH_BLOCKS or size > _BATCH_BYTES:
                left += following
                break
            left += following[1:]
            batch.append(following[0])
        yield before[::-1], batch


def _slices(names: Sequence[Name]) -> Iterator[Sequence[Name]]:
    for low in range(0, len(names), _BATCH_BLOCKS):
        yield names[low : low + _BATCH_BLOCKS]


def _is_whole(data: bytes) -> bool:
    """Whether a record of any kind has its checksum, or is of a version before 0.2, which wrote none."""
    try:
        fields = json.loads(data)
        return isinstance(fields, dict) and fields.pop("checksum", None) in (None, checksum_of(fields))
    except (ValueError, RecursionError):
        return False
