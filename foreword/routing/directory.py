"""The replicas that hold each block, and in which tier. A bounded table, kept up to date by KV events. Pure: no I/O.

A wrong entry costs time and never correctness: a replica that lacks the block recomputes it. So the table may forget
anything. It is a set-associative cache: the block's key selects a bucket, and a bucket is one `bytearray` of 12-byte records.
The table does not exceed its configured number of records, except by further holders of a block that many replicas hold.

    record = key[0:5] | replica (uint16) | tiers (uint8) | epoch of the last use (uint16) | depth in the chain (uint16)

The five bytes together with the bucket number distinguish 2**54 keys in a table of 10 million blocks. A full bucket evicts
first the records of removed replicas, then the least recently used ones, and within one epoch the deepest blocks of their
chains, because a block is useless without the blocks before it.

A lookup relies on the chain property: a replica that holds a block also held the blocks before it when the block was stored,
and pools evict the end of a chain before its start. So the lookup gallops and bisects over the depth, in logarithmic time for
each point where the set of holders changes. It may overlook a gap in the middle of a chain, which again costs only time.
Where many replicas hold prefixes of many lengths, the lengths are rounded down, except the longest ones.

Where a replica sends no KV events, its blocks are estimated. `EstimatedBlocks` models its cache as an LRU of the prompts sent
there. The `cached_tokens` of its responses correct the model: a replica that finds more than expected has more room than its
device (tiers below it, or a store). Of a response only the length is known. That the next turn repeats the response is a guess
and is accounted as one. `InFlightPrefixes` tracks prompts that are being computed, which events do not report either: the next
request with the same prefix should follow instead of computing it on another replica.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import groupby, repeat
from typing import Final

from foreword.blocks.public_blocks import PublicBlocks
from foreword.errors import ConfigError
from foreword.newest import Newest

# Estimates: bounds and steps of the factor that corrects them.
_MIN_FACTOR: Final = 1 / 16
_SHRINK: Final = 0.95
_GROW: Final = 1.01
# Growth when more was found than expected.
_GROW_BEYOND: Final = 1.1
# Upper bound of tracked blocks, unless the capacity itself is larger.
_MAX_BLOCKS: Final = 1 << 19
_MAX_OUTPUTS: Final = 1 << 12
_WAYS: Final = 48
_TAG: Final = 5
_NEEDLE: Final = _TAG + 2
_RECORD = struct.Struct("<5sHBHH")
_SIZE: Final = _RECORD.size
_TIER_BITS: Final = 0x0F
# After how many gaps, of eight, the copies in device memory were counted.
_GAP: Final = 0x10
_GAPS: Final = 0x70
_SECOND_COPY: Final = 0x80
_MAX_DEPTH: Final = 0xFFFF
_NUM_EPOCHS: Final = 1 << 16
# A full bucket evicts one record in eight at once: sorting a bucket costs as much as about twenty insertions.
_EVICTED_PART: Final = 8
_MAX_REPLICAS: Final = 1 << 15
# Tokens between the places at which prompts in flight are compared.
_COMPARED: Final = 256
_SEEN: Final = 4  # records of a full bucket that are looked at
# A lookup finds all points where the holders change until it has seen this number of holders. Then it looks at 16 points of
# the blocks with many holders.
_MAX_LOOKUP_WORK: Final = 256
_FEW_HOLDERS: Final = 8
_COARSE_RUNS: Final = 16
_SHARED_SLOT: Final = 0


class CacheTier(IntEnum):
    """Where a block is stored, fastest first. Every replica can reach `SHARED`."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    SHARED = 3


NUM_TIERS: Final = len(CacheTier)
# For each tier t the number of leading blocks found in tiers 0 to t: `NUM_TIERS` numbers, never decreasing.
Reach = tuple[int, ...]
NOTHING: Final[Reach] = (0,) * NUM_TIERS


@dataclass(frozen=True, slots=True)
class Holdings:
    """Result of a lookup.

    Attributes:
        replicas: reach of each replica with blocks in its own tiers, including the shared tier.
        shared: reach of all other replicas.
    """

    replicas: Mapping[str, Reach]
    shared: Reach = NOTHING

    def of(self, replica: str) -> Reach:
        """The reach of a replica."""
        return self.replicas.get(replica, self.shared)

    def or_else(self, other: Holdings) -> Holdings:
        """The longer reach of two chains of one prompt."""
        names = {*self.replicas, *other.replicas}
        longer = {name: tuple(map(max, self.of(name), other.of(name))) for name in names}
        return Holdings(longer, tuple(map(max, self.shared, other.shared)))


class Directory:
    """Maps block keys to replicas and tiers. Not thread-safe. A replica is created when it is first mentioned.

    Args:
        max_blocks: maximum number of records, one per block and replica (whatever the number of tiers). A record takes
            about 20 bytes. Eviction starts a few percent below the limit.

    Attributes:
        public: blocks of which a replica has said that they are public. Some may not be any more.

    Raises ConfigError for less than one block.
    """

    def __init__(self, max_blocks: int = 4_000_000) -> None:
        if max_blocks < 1:
            raise ConfigError(f"the directory needs a capacity of at least one block, not {max_blocks}")
        self.max_blocks = max_blocks
        self._ways = min(_WAYS, max_blocks)
        self._buckets: list[bytearray | None] = [None] * (max_blocks // self._ways)
        self._names: dict[int, str] = {}
        self._slots: dict[str, int] = {}
        self._counts: dict[int, int] = {_SHARED_SLOT: 0}
        self._next_slot = 1
        self._gaps: dict[int, int] = {}
        self._epoch = 0
        self._writes = 0
        self._epoch_writes = max(max_blocks // 64, 1)
        self._scrub_from = 0
        # Slots of removed replicas -> buckets that `scrub` still has to visit for them.
        self._dead: dict[int, int] = {}
        # Holders of blocks in buckets with more than `_ways` records, by bucket and tag, until the bucket changes.
        self._crowds: dict[int, dict[bytes, tuple[int, ...]]] = {}
        self.evicted = 0
        self.public = PublicBlocks()

    # Updates by events

    def stored(
        self, replica: str, tier: CacheTier, parent: bytes | None, keys: Iterable[bytes], *, counted: bool = False
    ) -> None:
        """Add `keys` (consecutive blocks of a chain, 32 bytes each) in a tier; `parent` is the key before the first.

        `counted`: the replica reports every copy of a block and every removal of a copy. Up to two copies are counted, so
        that removing one of them does not hide the other.
        """
        slot = self._slot(replica, tier)
        depth = first = self._depth_after(parent, slot)
        width = slot.to_bytes(2, "little")
        bit, gaps = 1 << tier, self._gaps.get(slot, 0)
        added = width + bytes((bit | gaps,)) + self._epoch.to_bytes(2, "little")
        full, buckets = self._ways * _SIZE, self._buckets
        num_buckets = len(buckets)
        for key in keys:
            number = int.from_bytes(key[_TAG : _TAG + 4], "little") % num_buckets
            bucket = buckets[number]
            if bucket is None:
                bucket = buckets[number] = bytearray()
            self._crowds.pop(number, None)
            tag = key[:_TAG]
            at = find_record(bucket, tag + width, _SIZE)
            if at < 0:
                if len(bucket) >= full and not self._may_grow(bucket, tag):
                    self._evict(bucket)
                bucket += tag + added + (depth if depth < _MAX_DEPTH else _MAX_DEPTH).to_bytes(2, "little")
                self._counts[slot] += 1
            else:
                tiers = bucket[at + _NEEDLE]
                if counted and tier == CacheTier.DEVICE:
                    known = tiers & bit and tiers & _GAPS == gaps
                    tiers = tiers | _SECOND_COPY if known else tiers & _TIER_BITS | gaps
                bucket[at + _NEEDLE] = tiers | bit
                _set_epoch(bucket, at, self._epoch)
            depth += 1
        # After the loop: within one chain all blocks get the same epoch.
        self._note_writes(depth - first)
        if self._dead:
            self.scrub(1)

    def _may_grow(self, bucket: bytearray, tag: bytes) -> bool:
        """Whether a full bucket takes more, for a block that fills most of it, as the tag or a few records tell: every replica
        of a large fleet holds the first block of a common system prompt, and only its known holders are found."""
        some = range(0, len(bucket), max(len(bucket) // _SIZE // _SEEN, 1) * _SIZE)
        most = max(map(bucket.count, {tag, *(bytes(bucket[at : at + _TAG]) for at in some)}))
        return most > self._ways // 2 and len(bucket) < (self._ways + most) * _SIZE and len(self) < self.max_blocks

    def removed(self, replica: str, tier: CacheTier, keys: Iterable[bytes]) -> None:
        """Remove `keys` from a tier. Unknown keys are ignored."""
        slot = _SHARED_SLOT if tier == CacheTier.SHARED else self._slots.get(replica)
        if slot is None:
            return
        width = slot.to_bytes(2, "little")
        bit = 1 << tier
        for key in keys:
            bucket, at = self._record(key, width)
            if at < 0:
                continue
            number = self._bucket_index(key)
            self._crowds.pop(number, None)
            tiers = bucket[at + _NEEDLE]
            if tier == CacheTier.DEVICE and tiers & _SECOND_COPY:
                bucket[at + _NEEDLE] = tiers & ~_SECOND_COPY
            elif tiers & ~bit & _TIER_BITS:
                bucket[at + _NEEDLE] = tiers & ~bit
            else:
                _drop(bucket, at)
                self._counts[slot] -= 1
                self._buckets[number] = bucket or None  # blocks that have left leave no objects

    def missed(self, replica: str) -> None:
        """Events of a replica were lost, removals among them, perhaps. The next copy of a block that it reports is its only
        one: of another one it would have made use."""
        if (slot := self._slots.get(replica)) is not None:
            self._gaps[slot] = self._gaps.get(slot, 0) + _GAP & _GAPS

    def cleared(self, replica: str) -> None:
        """Forget all blocks in a replica's own tiers: it restarted, was removed, or has cleared them.

        Takes constant time; `scrub` and insertions free the memory later.
        """
        slot = self._slots.pop(replica, None)
        if slot is None:
            return
        self._crowds.clear()
        self._gaps.pop(slot, None)
        del self._names[slot]
        if self._counts[slot]:
            self._dead[slot] = len(self._buckets)
        else:
            del self._counts[slot]

    def touched(self, replica: str, keys: Sequence[bytes]) -> None:
        """Mark these blocks, also shared ones, as just used: a request for them was sent to a replica."""
        slots = [slot for slot in (self._slots.get(replica), _SHARED_SLOT) if slot is not None]
        widths = [slot.to_bytes(2, "little") for slot in slots if self._counts.get(slot)]
        for width in widths:
            if keys and self._is_current(keys[0], width) and self._is_current(keys[-1], width):
                continue
            for key in keys:
                bucket, at = self._record(key, width)
                if at >= 0:
                    _set_epoch(bucket, at, self._epoch)

    def _is_current(self, key: bytes, width: bytes) -> bool:
        """Whether a block was used in the present epoch."""
        bucket, at = self._record(key, width)
        return at >= 0 and bucket[at + 8] | bucket[at + 9] << 8 == self._epoch

    # Lookups

    def lookup(self, keys: Sequence[bytes]) -> Holdings:
        """Find which replicas hold how many leading blocks of a chain."""
        runs = self._runs(keys)
        if not runs:
            return Holdings({})
        by_slot = [(end, {entry >> 8: entry & _TIER_BITS for entry in holders}) for end, holders in runs]
        by_run = [holders for _, holders in by_slot]
        # Without a shared copy of the first block, only its holders reach it.
        slots = list(set[int]().union(*by_run if _SHARED_SLOT in by_run[0] else by_run[:1]) - {_SHARED_SLOT})
        paths = zip(*(map(holders.get, slots, repeat(0)) for holders in by_run), strict=True)
        # Most holders of a common first block have the same tiers of the same blocks.
        reaches: dict[tuple[int, ...], Reach] = {}
        found: dict[str, Reach] = {}
        for slot, path in zip(slots, paths, strict=True):
            if path not in reaches:
                reaches[path] = _reach(by_slot, slot)
            found[self._names[slot]] = reaches[path]
        return Holdings(found, _reach(by_slot, _SHARED_SLOT))

    def _runs(self, keys: Sequence[bytes]) -> list[tuple[int, tuple[int, ...]]]:
        """Runs of blocks with the same holders: `(end, holders)`, up to the first block that no replica holds."""
        runs: list[tuple[int, tuple[int, ...]]] = []
        low, count = 0, len(keys)
        holders = self._holders(keys[0]) if count else ()
        work = 0
        while holders:
            work += len(holders)
            if work > _MAX_LOOKUP_WORK and len(holders) > _FEW_HOLDERS:
                runs += self._coarse_runs(keys, low)
                low = runs[-1][0]
                holders = self._holders(keys[low]) if low < count else ()
                continue
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

    def _coarse_runs(self, keys: Sequence[bytes], start: int) -> list[tuple[int, tuple[int, ...]]]:
        """The runs from block `start`, which many replicas hold, up to a block that few hold, at a bounded number of points.

        The end of a run is a point that its holders reach, so what they hold is never overestimated.
        """
        low, high = start, len(keys)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if len(self._holders(keys[middle])) > _FEW_HOLDERS else (low, middle)
        ends = sorted({start + -(-(high - start) * i // _COARSE_RUNS) for i in range(1, _COARSE_RUNS + 1)})
        runs = groupby(ends, lambda end: self._holders(keys[end - 1]))
        return [(list(some)[-1], holders) for holders, some in runs]

    def _holders(self, key: bytes) -> tuple[int, ...]:
        """`slot << 8 | tiers` of all holders of a block, sorted."""
        number = self._bucket_index(key)
        bucket = self._buckets[number]
        if bucket is None:
            return ()
        found: list[int] = []
        tag = key[:_TAG]
        crowd = self._crowds.setdefault(number, {}) if len(bucket) > self._ways * _SIZE else {}
        if tag in crowd:
            return crowd[tag]
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
        holders = tuple(sorted(found))
        if holders:  # lookups of unknown blocks leave nothing here
            crowd[tag] = holders
        return holders

    # Sizes

    def __len__(self) -> int:
        """Number of records, including those of removed replicas that are not scrubbed yet."""
        return sum(self._counts.values())

    def blocks(self, replica: str) -> int:
        """Number of known blocks in a replica's own tiers."""
        slot = self._slots.get(replica)
        return self._counts[slot] if slot is not None else 0

    def scrub(self, buckets: int) -> None:
        """Drop records of removed replicas from the next `buckets` buckets. Call it regularly with a few hundred."""
        for _ in range(min(buckets, len(self._buckets))):
            if not self._dead:
                return
            number, bucket = self._scrub_from, self._buckets[self._scrub_from]
            self._scrub_from = (number + 1) % len(self._buckets)
            if bucket is not None:
                self._drop_replicas(bucket, self._dead)
                self._buckets[number] = bucket or None
            self._forget_dead()

    def _drop_replicas(self, bucket: bytearray, slots: Container[int]) -> None:
        """Remove all records of these replicas from a bucket."""
        records = list(_RECORD.iter_unpack(bucket))
        self._drop_all(bucket, records, [i for i, record in enumerate(records) if record[1] in slots])

    def _forget_dead(self) -> None:
        for slot in list(self._dead):
            self._dead[slot] -= 1
            if not self._dead[slot] or not self._counts[slot]:
                del self._dead[slot], self._counts[slot]

    # Records

    def _slot(self, replica: str, tier: CacheTier) -> int:
        if tier == CacheTier.SHARED:
            return _SHARED_SLOT
        slot = self._slots.get(replica)
        return slot if slot is not None else self._new_slot(replica)

    def _new_slot(self, replica: str) -> int:
        if len(self._counts) >= _MAX_REPLICAS:
            self.scrub(len(self._buckets))
        while self._next_slot in self._counts:
            self._next_slot = self._next_slot % (_MAX_REPLICAS * 2 - 1) + 1
        slot = self._next_slot
        self._next_slot = slot % (_MAX_REPLICAS * 2 - 1) + 1
        self._slots[replica], self._names[slot], self._counts[slot] = slot, replica, 0
        return slot

    def _bucket_index(self, key: bytes) -> int:
        return int.from_bytes(key[_TAG : _TAG + 4], "little") % len(self._buckets)

    def _record(self, key: bytes, width: bytes) -> tuple[bytearray, int]:
        """The bucket of a block, and where a replica's record of it begins there; -1 if there is none."""
        bucket = self._buckets[self._bucket_index(key)] or bytearray()
        return bucket, find_record(bucket, key[:_TAG] + width, _SIZE)

    def _depth_after(self, parent: bytes | None, slot: int) -> int:
        if parent is None:
            return 0
        bucket, at = self._record(parent, slot.to_bytes(2, "little"))
        return 1 + (bucket[at + 10] | bucket[at + 11] << 8) if at >= 0 else 0

    def _evict(self, bucket: bytearray) -> None:
        """Evict records from a full bucket."""
        records = list(_RECORD.iter_unpack(bucket))
        gone = [i for i, record in enumerate(records) if record[1] in self._dead] if self._dead else []
        if not gone:
            epoch = self._epoch
            age = [(epoch - record[3]) % _NUM_EPOCHS << 16 | record[4] for record in records]
            gone = sorted(range(len(age)), key=age.__getitem__)[-max(self._ways // _EVICTED_PART, 1) :]
            gone.sort()
            self.evicted += len(gone)
        self._drop_all(bucket, records, gone)

    def _drop_all(
        self, bucket: bytearray, records: Sequence[tuple[bytes, int, int, int, int]], gone: Sequence[int]
    ) -> None:
        """Remove the records with these indices, which ascend."""
        for number in reversed(gone):
            self._counts[records[number][1]] -= 1
            _drop(bucket, number * _SIZE)

    def _note_writes(self, count: int) -> None:
        self._writes += count
        if self._writes >= self._epoch_writes:
            self._writes = 0
            self._epoch = (self._epoch + 1) % _NUM_EPOCHS


def leading(keys: Sequence[bytes], held: Container[bytes], guess: int = 0) -> int:
    """Number of leading blocks that are held, where holding a block implies holding all blocks before it.

    Takes two comparisons if it is `guess`.
    """
    count = len(keys)
    if 0 < guess <= count and keys[guess - 1] in held and (guess == count or keys[guess] not in held):
        return guess
    low, high = 0, 1  # Invariant: all blocks before `low` are held.
    while low < count and keys[high - 1] in held:
        low, high = high, (2 * high + 1 if 2 * high < count else count)
    high -= 1  # Invariant: block `high` is not held, unless all are.
    while low < high:
        middle = (low + high) // 2
        if keys[middle] in held:
            low = middle + 1
        else:
            high = middle
    return low


def find_record(bucket: bytearray, needle: bytes, size: int) -> int:
    """Offset of the record of `size` bytes that starts with `needle`, or -1."""
    at = bucket.find(needle)
    while at >= 0 and at % size:  # a match that is not aligned to a record
        at = bucket.find(needle, at + 1)
    return at


def _drop(bucket: bytearray, at: int) -> None:
    """Remove a record by moving the last one into its place."""
    bucket[at : at + _SIZE] = bucket[-_SIZE:]
    del bucket[-_SIZE:]


def _set_epoch(bucket: bytearray, at: int, epoch: int) -> None:
    bucket[at + 8] = epoch & 0xFF
    bucket[at + 9] = epoch >> 8


def _reach(runs: Sequence[tuple[int, Mapping[int, int]]], slot: int) -> Reach:
    """The reach of one replica, including the shared tier. `runs`: `(end, tiers by slot)`."""
    reach, slowest = [0] * NUM_TIERS, 0
    for end, holders in runs:
        tiers = holders.get(slot, 0) | holders.get(_SHARED_SLOT, 0)
        if not tiers:
            break
        slowest = max(slowest, (tiers & -tiers).bit_length() - 1)
        for tier in range(slowest, NUM_TIERS):
            reach[tier] = end
    return tuple(reach)


@dataclass(slots=True)
class EstimateAccuracy:
    """Expected and actual cached prompt tokens, summed over all responses that report them."""

    expected_tokens: int = 0
    actual_tokens: int = 0
    overestimated_tokens: int = 0
    underestimated_tokens: int = 0

    def record(self, expected: int, actual: int) -> None:
        self.expected_tokens += expected
        self.actual_tokens += actual
        self.overestimated_tokens += max(expected - actual, 0)
        self.underestimated_tokens += max(actual - expected, 0)


class EstimatedBlocks:
    """An LRU of block keys. The last blocks of a prompt count as older than its first ones, so they are evicted first.

    Args:
        capacity_blocks: capacity of the replica's device. An entry takes about 200 bytes. At most half a million are kept,
            or the capacity if that is more.
    """

    def __init__(self, capacity_blocks: int) -> None:
        if capacity_blocks < 1:
            raise ConfigError(f"a replica's capacity must be at least one block, not {capacity_blocks}")
        self.capacity_blocks = capacity_blocks
        self.factor = 1.0
        self._max_blocks = max(_MAX_BLOCKS, capacity_blocks)
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        # Last full block of finished prompts -> blocks that their output filled.
        self._outputs: Newest[bytes, int] = Newest(_MAX_OUTPUTS)

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def limit(self) -> int:
        """Estimated capacity in blocks: the configured capacity times a learned factor of at least 1/16."""
        return max(min(int(self.capacity_blocks * self.factor), self._max_blocks), 1)

    def sent(self, keys: Sequence[bytes]) -> None:
        """Note that a prompt was sent to the replica."""
        known = self.known(keys)
        if 0 < known < len(keys):
            # The prompt shows what follows the earlier prompt: the guessed output is not needed any more.
            self._outputs.pop(keys[known - 1], None)
        held, limit = self._keys, self.limit
        held.update(dict.fromkeys(keys))
        deque(map(held.move_to_end, reversed(keys)), maxlen=0)
        while len(held) > limit:
            held.popitem(last=False)

    def output(self, keys: Sequence[bytes], blocks: int) -> None:
        """Note that a prompt's output filled `blocks` blocks after the prompt's full ones."""
        if keys and blocks > 0:
            self._outputs[keys[-1]] = blocks

    def known(self, keys: Sequence[bytes], guess: int = 0) -> int:
        """Leading blocks that were sent to the replica and are probably still cached. Faster if they are `guess`."""
        return leading(keys, self._keys, guess)

    def leading(self, keys: Sequence[bytes], guess: int = 0) -> int:
        """Leading blocks that are probably cached: the known ones plus the output of a prompt that ended there."""
        known = leading(keys, self._keys, guess)
        guessed = self._outputs.get(keys[known - 1], 0) if known and self._outputs else 0
        return min(known + guessed, len(keys)) if guessed else known

    def correct(self, keys: Sequence[bytes], expected: int, actual: int, known: int | None = None) -> None:
        """Adjust the limit: `expected` blocks of a prompt should be cached, `known` (None: all) without guessing, and
        `actual` were.

        Fewer than known: the limit shrinks by 5 % and the oldest blocks are forgotten. More than expected: the limit grows
        by 10 %, also beyond the device's capacity. As expected: it grows by 1 % up to the capacity. The prompt's own blocks
        are cached now in any case.
        """
        if actual < min(expected, expected if known is None else known):
            self.factor = max(self.factor * _SHRINK, _MIN_FACTOR)
        elif actual > expected:
            self.factor = min(self.factor * _GROW_BEYOND, self._max_blocks / self.capacity_blocks)
        elif expected:
            self.factor = max(min(self.factor * _GROW, 1.0), self.factor)
        self.sent(keys)


class InFlightPrefixes:
    """Blocks of prompts that were sent to one replica and have no first token yet."""

    def __init__(self) -> None:
        self._users = Counter[bytes]()

    def add(self, keys: Sequence[bytes]) -> None:
        self._users.update(keys)

    def remove(self, keys: Sequence[bytes]) -> None:
        """Undo one `add`."""
        _uncount(self._users, keys)

    def leading(self, keys: Sequence[bytes], above: int = 0) -> int:
        """Leading blocks that are being computed; 0 if they are not more than `above`."""
        is_more = above < len(keys) and keys[above] in self._users
        return leading(keys, self._users) if is_more else 0

    def __len__(self) -> int:
        return len(self._users)


class PromptMemory:
    """KV memory of the prompts in flight on one replica: what several begin with is there once.

    Prompts are compared at every 256 tokens, or at every block if blocks are longer, which takes a sixteenth of the time.

    Attributes:
        tokens: tokens of all prompts together, each without what follows its last comparison.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._users = Counter[bytes]()

    def add(self, keys: Sequence[bytes], block_size: int) -> int:
        """Add a prompt of these blocks. Returns how many of its tokens are counted."""
        ends, each = _ends(keys, block_size)
        before = len(self._users)
        self._users.update(ends)
        self.tokens += (len(self._users) - before) * each
        return len(ends) * each

    def remove(self, keys: Sequence[bytes], block_size: int) -> int:
        """Undo one `add`. Returns the same."""
        ends, each = _ends(keys, block_size)
        self.tokens -= _uncount(self._users, ends) * each
        return len(ends) * each

    def shared(self, keys: Sequence[bytes], block_size: int) -> int:
        """Tokens at the start of this prompt that are there already."""
        ends, each = _ends(keys, block_size)
        return leading(ends, self._users) * each


def _uncount(users: dict[bytes, int], keys: Sequence[bytes]) -> int:
    """Count each key once less. Returns how many have no users any more."""
    before, pop = len(users), users.pop  # a counter's `del` is not native
    for key in keys:
        if (count := pop(key)) > 1:
            users[key] = count - 1
    return before - len(users)


def _ends(keys: Sequence[bytes], block_size: int) -> tuple[Sequence[bytes], int]:
    """The keys at which prompts are compared, and how many tokens each ends."""
    step = max(_COMPARED // block_size, 1)
    return keys[step - 1 :: step], step * block_size
