"""`foreword copy`: the contents of a store into another one, of any type.

Nothing but the two stores says how far a copy has come. So one that is killed is continued by the same call: what the target
has already is verified and left. Each block is verified when it is read from the source, and again as the target returns it.

A store that is late or fails is asked again, with growing waits, until it has failed for `patience` seconds. Then the copy ends
and names it. A block that cannot be read while its store answers other calls is named and left out; the copy continues.
All calls but listings are made on the caller's thread: no write is abandoned, whose late effect could bring back a block that
was erased.

What is copied: blocks, pins, and records of layouts, models, prefixes, retentions and quarantined chains. What is not: open
erasures and what they erase; the identity of a folder; records of an unknown kind, such as those of a key store, in which
a copy would bring back data keys that were destroyed.

An erasure may come while a store is copied. It removes blocks and records of the source, perhaps after they were copied. So
what the source has lost at the end, the target loses too, and what an erasure names that has begun meanwhile and not ended.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol, TypeVar

from foreword.blocks.keys import FINGERPRINT_BYTES, KEY_BYTES, named_root
from foreword.errors import StoreConfigError, StoreError, StoreFull, StoreTimeout, StoreUnreadable
from foreword.prefixes.erasure import SCAN_WITHIN
from foreword.prefixes.open_erasures import ERASURES
from foreword.prefixes.tier_erasure import stream
from foreword.store.base import FAILED, FOREIGN, MISSING, Name, StoredBlock, record_tenant
from foreword.store.frame import Frame
from foreword.store.shared_records import checksum_of
from foreword.store.tier import Outcome, StoreTier

Result = TypeVar("Result")
Listed = TypeVar("Listed", covariant=True)

# The folders of records that are copied.
RECORDS: Final = ("layouts", "namespaces", "encoders", "prefixes", "retained", "quarantine")
# Seconds for which a store may fail before the copy ends, the tries that they have room for, and the longest call.
PATIENCE: Final = 300.0
_TRIES: Final = 5
_CALL_WITHIN: Final = 60.0
# Seconds before the second try. Each further wait is twice as long, up to the longest one.
_FIRST_WAIT: Final = 0.1
_LONGEST_WAIT: Final = 15.0
# Reads of a block without a result, from a store that answers other calls.
_READS: Final = 4
_NAMED: Final = 1000
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
        named: the blocks that are `damaged`, `unread` or `lost`, as layout/root/key in hexadecimal, each with the reason; at
            most 1,000.
        ended: the store that has failed, and its error; "" if the copy has reached its end.
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
    named: list[str] = field(default_factory=list)
    ended: str = ""

    @property
    def complete(self) -> bool:
        """Whether the target has all that can be verified and is to be copied."""
        return not (self.ended or self.foreign or self.unread or self.lost or self.damaged or self.bad_records)

    def name(self, name: Name, reason: str) -> None:
        """Note that a block is not in the target, and why."""
        if len(self.named) < _NAMED:
            layout, root, key = name[:FINGERPRINT_BYTES], name[FINGERPRINT_BYTES:-KEY_BYTES], name[-KEY_BYTES:]
            self.named.append(f"{layout.hex()}/{root.hex()}/{key.hex()}: {reason}")


def copy_store(
    source: StoreTier,
    target: StoreTier,
    progress: Callable[[int, int], None] = lambda done, blocks: None,
    *,
    shown: tuple[str, str] = ("the source", "the target"),
    patience: float = PATIENCE,
    late: Callable[[str], None] = lambda problem: None,
) -> StoreCopy:
    """Copy a store into another one.

    Args:
        progress: called with the number of blocks that are done, and of all.
        shown: how messages name the two stores.
        patience: seconds for which a store may be late or fail before the copy ends.
        late: called with a sentence when a store begins to be late or to fail.

    Raises StoreConfigError if the target is too small, before anything is written, or if a store refuses this caller. Any other
    failure of a store ends the copy: `StoreCopy.ended` names it.
    """
    old, new = (_PatientTier(*each, patience, late) for each in zip((source, target), shown, strict=True))
    return _Copier(old, new, progress).run()


class _Listing(Protocol[Listed]):
    def __call__(self, *, deadline: float) -> Iterator[Listed]: ...


class _PatientTier:
    """A store whose calls are repeated while it is late or fails.

    Args:
        shown: how messages name it.
        patience: seconds from the first failure in succession to the end of the copy.
    """

    def __init__(self, tier: StoreTier, shown: str, patience: float, late: Callable[[str], None]) -> None:
        self.tier, self.store, self.shown = tier, tier.store, shown
        self._patience, self._late = patience, late
        self._answered = False

    def soon(self) -> float:
        """The deadline of a call that begins now, which leaves time to repeat it."""
        return time.monotonic() + min(_CALL_WITHIN, max(self._patience / _TRIES, 1.0))

    def ask(self, call: Callable[[], Result]) -> Result:
        """The result of a call, which may be repeated. Raises StoreError, which names the store.

        A store that has never answered and cannot be reached is a mistake of the caller's, who need not wait.
        """
        until, wait = math.inf, _FIRST_WAIT
        while True:
            try:
                result = call()
            except StoreError as error:
                hopeless = not error.retry or isinstance(error, StoreFull | StoreUnreadable)
                if hopeless or not (self._answered or isinstance(error, StoreTimeout)):
                    raise type(error)(f"{self.shown}: {error.message}") from None
                until = min(until, time.monotonic() + self._patience)
                if time.monotonic() + wait >= until:
                    raise type(error)(f"{self.shown} has failed for {self._patience:.0f} s: {error.message}") from None
                if wait == _FIRST_WAIT:
                    self._late(f"{self.shown}: {error.message}; it is asked again for up to {self._patience:.0f} s")
            else:
                self._answered = True
                return result
            time.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT)

    def listed(self, listing: _Listing[Result]) -> list[Result]:
        """All results of a listing, which begins again when it breaks off."""
        # A step of a listing is a call: a store may look through much before its first block.
        within = self.soon() - time.monotonic()
        return self.ask(lambda: [*stream(self.tier, lambda: listing(deadline=time.monotonic() + SCAN_WITHIN), within)])

    def keys(self, prefix: str) -> list[str]:
        return self.ask(lambda: self.store.records(prefix, deadline=self.soon()))

    def record(self, key: str) -> bytes | None:
        return self.ask(lambda: self.store.get_record(key, deadline=self.soon()))

    def present(self, before: Sequence[Name], names: Sequence[Name]) -> list[bool]:
        """Tell which blocks the store has. `before`: those before them in their chain, which a store may need to find them."""
        self.store.note_chain(before, names)
        return self._found(names)

    def _found(self, names: Sequence[Name]) -> list[bool]:
        return self.ask(lambda: self.store.present(names, deadline=self.soon()))

    def delete(self, names: Sequence[Name]) -> int:
        return self.ask(lambda: self.store.delete(names, deadline=self.soon()))

    def read(self, blocks: Sequence[StoredBlock]) -> list[Outcome]:
        """Verified frames, or why there is none. A block is FAILED if it was not read while the store answered other calls.

        Raises StoreError if it does not.
        """
        outcomes: list[Outcome] = [FAILED] * len(blocks)
        left, tries, wait = [*range(len(blocks))], 0, _FIRST_WAIT
        while left and tries < _READS:
            if tries:
                if wait == _FIRST_WAIT:
                    self._late(
                        f"{self.shown} has not returned {len(left)} of {len(blocks)} blocks; they are read again"
                    )
                self._found(
                    [blocks[one].name for one in left]
                )  # ends the copy if the store does not answer this either
                time.sleep(wait)
                wait = min(2 * wait, _LONGEST_WAIT)
            sizes = [blocks[one].size or _LARGEST_FRAME for one in left]
            read = self.tier.examine([blocks[one].name for one in left], sizes, self.soon())
            for one, outcome in zip(left, read, strict=True):
                outcomes[one] = outcome
            failed = [one for one in left if outcomes[one] == FAILED]
            tries = 1 if len(failed) < len(left) else tries + 1
            left = failed
        return outcomes


class _Copier:
    def __init__(self, source: _PatientTier, target: _PatientTier, progress: Callable[[int, int], None]) -> None:
        self._source, self._target, self._progress = source, target, progress
        self._done = StoreCopy()
        self._erased: set[bytes] = set()

    def run(self) -> StoreCopy:
        """Raises StoreConfigError."""
        try:
            self._copy_all()
        except StoreConfigError:
            raise
        except StoreError as error:
            self._done.ended = error.message
        return self._done

    def _copy_all(self) -> None:
        self._note_erasures()
        listed = self._source.listed(self._source.store.scan)
        found = {block.name: block for block in listed if not self._is_erased(block.name[FINGERPRINT_BYTES:])}
        self._check_room([*found.values()])
        written: set[Name] = set()
        done = 0
        for before, batch in _in_chains(found):
            written |= self._copy(before, batch)
            done += len(batch)
            self._progress(done, len(found))
        self._remove_lost(written, self._copy_records())

    def _note_erasures(self) -> None:
        """The erasures that are open in either store. Raises StoreError if one cannot be read: what it names is not known."""
        for tier in (self._source, self._target):
            for key in tier.keys(ERASURES.key("")):
                if (data := tier.record(key)) is not None:
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
            there = self._target.present(before, [block.name for block in batch])
            missing += sum(block.size for block, found in zip(batch, there, strict=True) if not found)
        if missing + status.bytes > status.budget:
            raise StoreConfigError(
                f"{self._target.shown} has room for {status.budget - status.bytes:,} bytes more, and {missing:,} are to be "
                "copied: give it a larger size="
            )

    def _copy(self, before: Sequence[Name], batch: Sequence[StoredBlock]) -> set[Name]:
        """Copy blocks that follow each other in a chain; returns the names of those that the target has then."""
        names = [block.name for block in batch]
        there, sound = self._target.present(before, names), set[Name]()
        self._source.store.note_chain(before, names)
        old = [block for block, found in zip(batch, there, strict=True) if found]
        for block, outcome in zip(old, self._target.read(old), strict=True):
            if isinstance(outcome, Frame):
                sound.add(block.name)
            elif isinstance(outcome, str):
                self._target.delete([block.name])  # it is damaged
        self._done.present += len(sound)
        wanted = [block for block in batch if block.name not in sound]
        read = zip(wanted, self._source.read(wanted), strict=True)
        frames = [frame for block, outcome in read if (frame := self._verified(block, outcome)) is not None]
        if frames:
            sound |= self._write(frames)
        pinned = [block.name for block in batch if block.pinned and block.name in sound]
        if pinned:
            store = self._target.store
            self._done.unpinned += len(pinned) - self._target.ask(
                lambda: store.pin(pinned, deadline=self._target.soon())
            )
        return sound

    def _write(self, frames: Sequence[Frame]) -> set[Name]:
        """Write blocks into the target and read them there; returns the names of those that are as they were written."""
        sound, left = set[Name](), frames
        for _ in range(2):  # one that a late call has not written is written once more
            self._target.ask(partial(self._put, left))
            back = self._target.read([StoredBlock(frame.name, size=len(frame.data)) for frame in left])
            pairs = [*zip(left, back, strict=True)]
            sound |= {frame.name for frame, one in pairs if isinstance(one, Frame) and one.data == frame.data}
            left = [frame for frame, one in pairs if one == MISSING]
            if not left:
                break
        for frame in frames:
            if frame.name in sound:
                self._done.blocks += 1
                self._done.bytes += len(frame.data)
            else:
                self._done.lost += 1
                self._done.name(frame.name, "the target does not return it as it was written")
        return sound

    def _put(self, frames: Sequence[Frame]) -> int:
        return self._target.store.put(frames, deadline=self._target.soon())

    def _verified(self, block: StoredBlock, outcome: Outcome) -> Frame | None:
        """A block of the source that is whole; any other one is counted."""
        if isinstance(outcome, Frame):
            return outcome
        if isinstance(outcome, str):
            self._done.damaged[outcome] += 1
            self._done.name(block.name, f"damaged ({outcome})")
        elif outcome == FOREIGN:
            self._done.foreign += 1
        elif outcome != MISSING:  # a missing one was evicted or erased meanwhile
            self._done.unread += 1
            self._done.name(block.name, "could not be read")
        return None

    def _copy_records(self) -> set[str]:
        """Copy the records; returns the keys of those that the target has then as the source has them."""
        target, copied = self._target, set[str]()
        for key in self._source.keys(""):
            folder = key.partition("/")[0]
            if folder not in RECORDS:
                self._done.left_records += folder not in ("location", ERASURES.folder)
                continue
            tenant = record_tenant(key)
            if tenant and self._is_erased(bytes.fromhex(tenant)):
                continue
            data = self._source.record(key)
            if data is None:
                continue
            if not _is_whole(bytes(data)):
                self._done.bad_records += 1
                continue
            there = target.ask(partial(self._add_record, key, bytes(data)))
            if bytes(there) == bytes(data):
                self._done.records += 1
                copied.add(key)
            else:
                self._done.kept_records += 1
        return copied

    def _add_record(self, key: str, data: bytes) -> bytes:
        return self._target.store.add_record(key, data, deadline=self._target.soon())

    def _remove_lost(self, written: set[Name], copied: set[str]) -> None:
        """Remove from the target what the source has no more. A block that was evicted there is no loss: it is a miss there."""
        self._note_erasures()  # those that began meanwhile: what they erase may still be in the source
        # All of it or none: a block that a broken listing has not shown would be removed from the target.
        listed = self._source.listed(self._source.store.list_names)
        left = {name for batch in listed for name in batch if not self._is_named(name[FINGERPRINT_BYTES:])}
        for names in _slices(sorted(written - left)):
            self._done.removed += self._target.delete(names)
        erased = {key for key in copied if (tenant := record_tenant(key)) and self._is_named(bytes.fromhex(tenant))}
        for key in erased | (copied - {*self._source.keys("")}):
            self._target.ask(partial(self._delete_record, key))
            self._done.records -= 1

    def _delete_record(self, key: str) -> bool:
        return self._target.store.delete_record(key, deadline=self._target.soon())


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
