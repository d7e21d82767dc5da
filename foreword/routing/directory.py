"""Which replica holds which block, and in which tier: a bounded table that events keep up to date. Pure: no I/O.

A wrong entry costs time and never correctness: whoever is sent to a replica that lacks the block computes it there. So the
table may forget whatever it likes. It is a set-associative cache: the key of a block picks a bucket, a bucket is one
`bytearray` of records of 12 bytes, and the table never holds more records than it was told to.

    record = key[0:5] | replica (uint16) | tiers (uint8) | epoch of the last use (uint16) | depth in the chain (uint16)

The five bytes and the bucket's number together tell 2**54 keys apart in a table of 10 million blocks. In a full bucket the
records of replicas that are gone go first, then those used longest ago, and of those used in one epoch the deepest of their
chains, because a block without the ones before it is worth nothing.

A lookup relies on the chain: whoever holds a block held the blocks before it when it was stored, and pools give up the tail of
a chain before its head. So it gallops and bisects over the depth, a logarithm of the prompt's blocks for each place where the
holders change. A gap in the middle of a chain may be overlooked, which is again only a matter of time.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from foreword.errors import ConfigError

_WAYS: Final = 48
_TAG: Final = 5
_NEEDLE: Final = _TAG + 2
_RECORD = struct.Struct("<5sHBHH")
_SIZE: Final = _RECORD.size
_TIER_BITS: Final = 0x7F
_SECOND_COPY: Final = 0x80
_DEEPEST: Final = 0xFFFF
_EPOCHS: Final = 1 << 16
# Of a full bucket one part in eight goes at once: sorting a bucket costs as much as some twenty insertions.
_PARTS: Final = 8
_MOST_REPLICAS: Final = 1 << 15
_SHARED_SLOT: Final = 0


class Tier(IntEnum):
    """Where a block lies, the fastest first. What is in `SHARED` every replica can reach."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    SHARED = 3


NUM_TIERS: Final = len(Tier)
Reach = tuple[int, ...]
"""Leading blocks of a chain that are found in tiers 0 to t, for each tier t: never decreasing, `NUM_TIERS` numbers."""
NOTHING: Final[Reach] = (0,) * NUM_TIERS


@dataclass(frozen=True, slots=True)
class Holdings:
    """What a lookup found.

    Attributes:
        replicas: reach of each replica that holds something of its own, the shared tier included.
        shared: reach of everybody else.
    """

    replicas: Mapping[str, Reach]
    shared: Reach = NOTHING

    def of(self, replica: str) -> Reach:
        """Leading blocks that this replica finds in its tiers 0 to t, for each tier t."""
        return self.replicas.get(replica, self.shared)


class Directory:
    """Which replica and tier hold which block of which chain.

    One thread calls it. Replicas are known by any name from the first time they are mentioned.

    Args:
        max_blocks: records at most, one for each block and replica that holds it (in however many tiers). A record takes
            about 20 bytes. The table forgets a few percent before it is quite full.

    Raises ConfigError for less than one block.
    """

    def __init__(self, max_blocks: int = 4_000_000) -> None:
        if max_blocks < 1:
            raise ConfigError(f"the directory needs room for at least one block, not {max_blocks}")
        self.max_blocks = max_blocks
        self._ways = min(_WAYS, max_blocks)
        self._buckets: list[bytearray | None] = [None] * (max_blocks // self._ways)
        self._names: dict[int, str] = {}
        self._slots: dict[str, int] = {}
        self._counts: dict[int, int] = {_SHARED_SLOT: 0}
        self._next_slot = 1
        self._epoch = 0
        self._writes = 0
        self._epoch_writes = max(max_blocks // 64, 1)
        self._scrub_from = 0
        # Slots whose records are to be dropped, and the scrubbed buckets that each still has to see.
        self._dead: dict[int, int] = {}
        self.evicted = 0

    # What events say

    def stored(
        self, replica: str, tier: Tier, parent: bytes | None, keys: Iterable[bytes], *, counted: bool = False
    ) -> None:
        """`keys` (a stretch of a chain, 32 bytes each, in order) lie in a tier; `parent` is the key before the first.

        `counted`: the replica tells of every copy of a block, and of the removal of every copy; two copies are
        remembered, so that the removal of one of them does not hide the other.
        """
        slot = self._slot(replica, tier)
        depth = first = self._depth_after(parent, slot)
        width = slot.to_bytes(2, "little")
        bit = 1 << tier
        for key in keys:
            bucket = self._bucket(key)
            at = _find(bucket, key[:_TAG] + width)
            if at < 0:
                self._insert(bucket, key, slot, bit, min(depth, _DEEPEST))
            else:
                tiers = bucket[at + _NEEDLE]
                if counted and tier == Tier.DEVICE and tiers & bit:
                    tiers |= _SECOND_COPY
                bucket[at + _NEEDLE] = tiers | bit
                _set_epoch(bucket, at, self._epoch)
            depth += 1
        # Not in the middle of a chain: its head would count as older than its tail.
        self._note_writes(depth - first)
        if self._dead:
            self.scrub(1)

    def removed(self, replica: str, tier: Tier, keys: Iterable[bytes]) -> None:
        """`keys` are gone from a tier. Unknown ones are ignored."""
        slot = self._known_slot(replica, tier)
        if slot is None:
            return
        width = slot.to_bytes(2, "little")
        bit = 1 << tier
        for key in keys:
            bucket = self._buckets[self._number(key)]
            at = -1 if bucket is None else _find(bucket, key[:_TAG] + width)
            if bucket is None or at < 0:
                continue
            tiers = bucket[at + _NEEDLE]
            if tier == Tier.DEVICE and tiers & _SECOND_COPY:
                bucket[at + _NEEDLE] = tiers & ~_SECOND_COPY
            elif tiers & ~bit & _TIER_BITS:
                bucket[at + _NEEDLE] = tiers & ~bit
            else:
                _drop(bucket, at)
                self._counts[slot] -= 1

    def cleared(self, replica: str) -> None:
        """A replica holds nothing any more in any tier of its own (it was restarted, or its events have a gap that nobody can
        fill), or is gone. Takes no time; the memory comes back as `scrub` and insertions pass over the table."""
        slot = self._slots.pop(replica, None)
        if slot is None:
            return
        del self._names[slot]
        if self._counts[slot]:
            self._dead[slot] = len(self._buckets)
        else:
            del self._counts[slot]

    def cleared_shared(self) -> None:
        """The shared tier was emptied."""
        for bucket in self._buckets:
            if bucket is not None:
                self._drop_of(bucket, (_SHARED_SLOT,))

    def touched(self, replica: str, keys: Sequence[bytes]) -> None:
        """A request that uses these blocks was sent to a replica: they are the youngest now, the shared ones too."""
        slots = [slot for slot in (self._slots.get(replica), _SHARED_SLOT) if slot is not None]
        widths = [slot.to_bytes(2, "little") for slot in slots if self._counts.get(slot)]
        for width in widths:
            if keys and self._is_young(keys[0], width) and self._is_young(keys[-1], width):
                continue
            for key in keys:
                bucket = self._buckets[self._number(key)]
                at = -1 if bucket is None else _find(bucket, key[:_TAG] + width)
                if bucket is not None and at >= 0:
                    _set_epoch(bucket, at, self._epoch)

    def _is_young(self, key: bytes, width: bytes) -> bool:
        """Whether a block was used in the epoch of now."""
        bucket = self._buckets[self._number(key)]
        at = -1 if bucket is None else _find(bucket, key[:_TAG] + width)
        return bucket is not None and at >= 0 and bucket[at + 8] | bucket[at + 9] << 8 == self._epoch

    # What placement asks

    def held(self, keys: Sequence[bytes]) -> Holdings:
        """Who holds how much of a chain, given the keys of its full blocks."""
        runs = self._runs(keys)
        if not runs:
            return Holdings({})
        slots = {entry >> 8 for _, holders in runs for entry in holders}
        shared = _reach(runs, _SHARED_SLOT)
        return Holdings({self._names[slot]: _reach(runs, slot) for slot in slots if slot != _SHARED_SLOT}, shared)

    def _runs(self, keys: Sequence[bytes]) -> list[tuple[int, tuple[int, ...]]]:
        """Stretches of the chain with the same holders: `(end, holders)`, up to the first block that nobody holds."""
        runs: list[tuple[int, tuple[int, ...]]] = []
        low, count = 0, len(keys)
        holders = self._holders(keys[0]) if count else ()
        while holders:
            # Invariant: block `low` has these holders, block `high` (or the end) has others.
            high, step = low + 1, 1
            others: tuple[int, ...] = ()
            while high < count and (others := self._holders(keys[high])) == holders:
                low, step = high, step * 2
                high = low + step
            if high >= count:
                high, others = count, ()
            while high - low > 1:
                middle = (low + high) // 2
                found = self._holders(keys[middle])
                if found == holders:
                    low = middle
                else:
                    high, others = middle, found
            runs.append((high, holders))
            low, holders = high, others
        return runs

    def _holders(self, key: bytes) -> tuple[int, ...]:
        """`slot << 8 | tiers` of everybody who holds a block, in a fixed order."""
        bucket = self._buckets[self._number(key)]
        if bucket is None:
            return ()
        found: list[int] = []
        tag = key[:_TAG]
        names = self._names
        at = bucket.find(tag)
        while at >= 0:
            if at % _SIZE:
                at = bucket.find(tag, at + 1)
                continue
            slot = bucket[at + 5] | bucket[at + 6] << 8
            if slot in names or slot == _SHARED_SLOT:
                found.append(slot << 8 | bucket[at + _NEEDLE] & _TIER_BITS)
            at = bucket.find(tag, at + _SIZE)
        if len(found) > 1:
            found.sort()
        return tuple(found)

    # Accounts

    def __len__(self) -> int:
        """Records, those of replicas that are gone and not scrubbed yet included."""
        return sum(self._counts.values())

    def blocks(self, replica: str) -> int:
        """Blocks that a replica holds in tiers of its own, as far as is remembered."""
        slot = self._slots.get(replica)
        return self._counts[slot] if slot is not None else 0

    @property
    def shared_blocks(self) -> int:
        return self._counts[_SHARED_SLOT]

    def scrub(self, buckets: int) -> None:
        """Drop what is left of replicas that are gone from the next few buckets: call it now and then with a few hundred."""
        for _ in range(min(buckets, len(self._buckets))):
            if not self._dead:
                return
            bucket = self._buckets[self._scrub_from]
            self._scrub_from = (self._scrub_from + 1) % len(self._buckets)
            if bucket is not None:
                self._drop_of(bucket, self._dead)
            self._forget_dead()

    def _drop_of(self, bucket: bytearray, slots: Container[int]) -> None:
        """Take out all records of these replicas."""
        records = list(_RECORD.iter_unpack(bucket))
        self._drop_all(bucket, records, [i for i, record in enumerate(records) if record[1] in slots])

    def _forget_dead(self) -> None:
        for slot in list(self._dead):
            self._dead[slot] -= 1
            if not self._dead[slot] or not self._counts[slot]:
                del self._dead[slot], self._counts[slot]

    # Records

    def _slot(self, replica: str, tier: Tier) -> int:
        if tier == Tier.SHARED:
            return _SHARED_SLOT
        slot = self._slots.get(replica)
        return slot if slot is not None else self._new_slot(replica)

    def _known_slot(self, replica: str, tier: Tier) -> int | None:
        return _SHARED_SLOT if tier == Tier.SHARED else self._slots.get(replica)

    def _new_slot(self, replica: str) -> int:
        if len(self._counts) >= _MOST_REPLICAS:
            self.scrub(len(self._buckets))
        while self._next_slot in self._counts:
            self._next_slot = self._next_slot % (_MOST_REPLICAS * 2 - 1) + 1
        slot = self._next_slot
        self._next_slot = slot % (_MOST_REPLICAS * 2 - 1) + 1
        self._slots[replica], self._names[slot], self._counts[slot] = slot, replica, 0
        return slot

    def _number(self, key: bytes) -> int:
        return int.from_bytes(key[_TAG : _TAG + 4], "little") % len(self._buckets)

    def _bucket(self, key: bytes) -> bytearray:
        number = self._number(key)
        bucket = self._buckets[number]
        if bucket is None:
            bucket = self._buckets[number] = bytearray()
        return bucket

    def _depth_after(self, parent: bytes | None, slot: int) -> int:
        if parent is None:
            return 0
        bucket = self._buckets[self._number(parent)]
        at = -1 if bucket is None else _find(bucket, parent[:_TAG] + slot.to_bytes(2, "little"))
        if bucket is None or at < 0:
            return 0
        return 1 + (bucket[at + 10] | bucket[at + 11] << 8)

    def _insert(self, bucket: bytearray, key: bytes, slot: int, tiers: int, depth: int) -> None:
        if len(bucket) >= self._ways * _SIZE:
            self._evict(bucket)
        bucket += _RECORD.pack(key[:_TAG], slot, tiers, self._epoch, depth)
        self._counts[slot] += 1

    def _evict(self, bucket: bytearray) -> None:
        """Make room in a full bucket."""
        records = list(_RECORD.iter_unpack(bucket))
        gone = [i for i, record in enumerate(records) if record[1] in self._dead] if self._dead else []
        if not gone:
            epoch = self._epoch
            age = [(epoch - record[3]) % _EPOCHS << 16 | record[4] for record in records]
            gone = sorted(range(len(age)), key=age.__getitem__)[-max(self._ways // _PARTS, 1) :]
            gone.sort()
            self.evicted += len(gone)
        self._drop_all(bucket, records, gone)

    def _drop_all(
        self, bucket: bytearray, records: Sequence[tuple[bytes, int, int, int, int]], gone: Sequence[int]
    ) -> None:
        """Take out the records with these numbers, which ascend."""
        for number in reversed(gone):
            self._counts[records[number][1]] -= 1
            _drop(bucket, number * _SIZE)

    def _note_writes(self, count: int) -> None:
        self._writes += count
        if self._writes >= self._epoch_writes:
            self._writes = 0
            self._epoch = (self._epoch + 1) % _EPOCHS


def leading(count: int, holds: Callable[[int], bool]) -> int:
    """How many of `count` blocks lead up to the first one that is not held, if whoever holds one holds all before it."""
    low, step = 0, 1  # Invariant: all blocks before `low` are held.
    while low < count and holds(min(low + step, count) - 1):
        low, step = min(low + step, count), step * 2
    high = min(low + step, count) - 1  # Invariant: block `high` is not held, unless all are.
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            low = middle + 1
        else:
            high = middle
    return low


def _find(bucket: bytearray, needle: bytes) -> int:
    """Where the record that begins so lies; -1 if there is none."""
    at = bucket.find(needle)
    while at >= 0 and at % _SIZE:  # the bytes happen to lie across two fields
        at = bucket.find(needle, at + 1)
    return at


def _drop(bucket: bytearray, at: int) -> None:
    """Take a record out; the last one takes its place."""
    bucket[at : at + _SIZE] = bucket[-_SIZE:]
    del bucket[-_SIZE:]


def _set_epoch(bucket: bytearray, at: int, epoch: int) -> None:
    bucket[at + 8] = epoch & 0xFF
    bucket[at + 9] = epoch >> 8


def _reach(runs: Sequence[tuple[int, tuple[int, ...]]], slot: int) -> Reach:
    """The reach of one replica; what the shared tier holds counts for all."""
    tiers = [
        (end, sum(entry & _TIER_BITS for entry in holders if entry >> 8 in (slot, _SHARED_SLOT)))
        for end, holders in runs
    ]
    return tuple(_leading(tiers, (2 << tier) - 1) for tier in range(NUM_TIERS))


def _leading(tiers: Iterable[tuple[int, int]], mask: int) -> int:
    reached = 0
    for end, held in tiers:
        if not held & mask:
            break
        reached = end
    return reached
