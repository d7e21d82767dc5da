"""A tiered store: several stores as one, fastest first, where the failure of a store is a cache miss.

`TieredStore` counts every error and timeout of a tier and looks for the block in the next tier. A circuit breaker skips
a tier that keeps failing. Every frame is verified (checksum, name, length) before a caller sees it; a frame that does
not pass is counted and deleted from its tier.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

from foreword.errors import BadFrame, StoreError
from foreword.store.base import Name, Store, StoredBlock, StoreStatus
from foreword.store.circuit_breaker import CircuitBreaker
from foreword.store.frame import Frame, check

log = logging.getLogger("foreword.store")

Result = TypeVar("Result")

_DELETE_TIMEOUT: Final = 1.0
_RATE_LIFETIME: Final = 60.0  # seconds until a measured rate expires; then one load is tried again
_RATE_WEIGHT: Final = 0.3
_CORES: Final = os.cpu_count() or 1
_PART_BYTES: Final = 2 << 20  # a batch is divided among threads in parts of at least this size
_readers = ThreadPoolExecutor(_CORES, "foreword-read")


def _after_fork() -> None:
    """Replace the pool: the threads of the parent do not exist in the child."""
    global _readers
    _readers = ThreadPoolExecutor(_CORES, "foreword-read")


os.register_at_fork(after_in_child=_after_fork)


@dataclass(slots=True)
class TierCounters:
    """Counters of one tier since the start. `errors` and `bad` (frames that failed verification) count by kind."""

    hit_blocks: int = 0
    missed_blocks: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    written_blocks: int = 0
    written_bytes: int = 0
    write_seconds: float = 0.0
    lookups: int = 0
    lookup_seconds: float = 0.0
    skipped: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    bad: Counter[str] = field(default_factory=Counter)


class Rate:
    """Measured bytes per second as an exponential moving average. 0.0 if there is no recent measurement."""

    __slots__ = ("_at", "_clock", "_value")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._value = 0.0
        self._at = 0.0

    def note(self, amount: float, seconds: float) -> None:
        """Add a measurement."""
        value = amount / max(seconds, 1e-9)
        known = self.value
        self._value = value if not known else known + _RATE_WEIGHT * (value - known)
        self._at = self._clock()

    @property
    def value(self) -> float:
        return self._value if self._clock() - self._at < _RATE_LIFETIME else 0.0


class StoreTier:
    """One store of a tiered store, with its counters, circuit breaker and measured read rate.

    Args:
        writable: whether blocks are written to and deleted from the store.
    """

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic, *, writable: bool = True) -> None:
        self.store = store
        self.label = store.label
        self.writable = writable
        self.counters = TierCounters()
        self.breaker = CircuitBreaker(clock)
        self.read_rate = Rate(clock)
        self._lock = threading.Lock()
        self._listener: Callable[[bool, Sequence[Name]], None] | None = None

    def subscribe(self, listener: Callable[[bool, Sequence[Name]], None]) -> None:
        """Call `listener(stored, names)` whenever blocks are stored in or removed from this tier by this process."""
        self._listener = listener
        self.store.on_evicted = lambda name: listener(False, [name])

    def attempt(self, call: Callable[[], Result], default: Result) -> Result:
        """Return the call's result, or `default` if it raises or the circuit breaker is open."""
        if not self.breaker.allows():
            with self._lock:
                self.counters.skipped += 1
            return default
        try:
            result = call()
        except Exception as error:  # noqa: BLE001 - the only place where a store's failure becomes a miss
            if self.breaker.failed():
                reason = error.message if isinstance(error, StoreError) else type(error).__name__
                log.warning("tier %s is not used for now, after repeated errors: %s", self.label, reason)
            self.count_error(error)
            return default
        if self.breaker.succeeded():
            log.info("tier %s works again", self.label)
        return result

    def count_error(self, error: Exception) -> None:
        kind = error.code if isinstance(error, StoreError) else type(error).__name__
        with self._lock:
            self.counters.errors[kind] += 1

    def lookup(self, names: Sequence[Name], deadline: float) -> int:
        return self._timed_lookup(lambda: self.store.lookup(names, deadline=deadline), 0)

    def present(self, names: Sequence[Name], deadline: float) -> list[bool]:
        return self._timed_lookup(lambda: self.store.present(names, deadline=deadline), [False] * len(names))

    def _timed_lookup(self, call: Callable[[], Result], default: Result) -> Result:
        started = time.perf_counter()
        found = self.attempt(call, default)
        with self._lock:
            self.counters.lookups += 1
            self.counters.lookup_seconds += time.perf_counter() - started
        return found

    def get(self, names: Sequence[Name], buffers: Sequence[memoryview], deadline: float) -> list[Frame | None]:
        """Read and verify frames. None for each one that is missing or bad."""
        started = time.perf_counter()
        parts = _parts(buffers, min(self.store.readers, _CORES))
        later = [_readers.submit(self._get_part, names[part], buffers[part], deadline) for part in parts[1:]]
        frames = self._get_part(names[parts[0]], buffers[parts[0]], deadline)
        for one in later:
            frames += one.result()
        found = sum(frame is not None for frame in frames)
        read = sum(len(frame.data) for frame in frames if frame is not None)
        seconds = time.perf_counter() - started
        with self._lock:
            self.counters.hit_blocks += found
            self.counters.missed_blocks += len(names) - found
            self.counters.read_bytes += read
            self.counters.read_seconds += seconds
            if read:
                self.read_rate.note(read, seconds)
        return frames

    def _get_part(self, names: Sequence[Name], buffers: Sequence[memoryview], deadline: float) -> list[Frame | None]:
        nothing = [0] * len(names)
        sizes = self.attempt(lambda: self.store.get(names, buffers, deadline=deadline), nothing)
        return [self._checked(*item) for item in zip(names, buffers, sizes, strict=True)]

    def _checked(self, name: Name, buffer: memoryview, size: int) -> Frame | None:
        if not size:
            return None
        try:
            return check(buffer[:size], name)
        except BadFrame as error:
            with self._lock:
                self.counters.bad[error.reason] += 1
            if self.writable:
                self.attempt(lambda: self.delete([name], time.monotonic() + _DELETE_TIMEOUT), 0)
            return None

    def put(self, frames: Sequence[Frame], deadline: float) -> int:
        """Store frames. Returns how many are present now, 0 if the store failed."""
        started = time.perf_counter()
        kept = self.attempt(lambda: self._put(frames, deadline), 0)
        with self._lock:
            self.counters.written_blocks += kept
            if kept:
                self.counters.written_bytes += sum(len(frame.data) for frame in frames) * kept // len(frames)
            self.counters.write_seconds += time.perf_counter() - started
        return kept

    def _put(self, frames: Sequence[Frame], deadline: float) -> int:
        kept = self.store.put(frames, deadline=deadline)
        if self._listener is not None:
            names = [frame.name for frame in frames]
            self._notify(True, names if kept == len(names) else self._present(names, deadline))
        return kept

    def _present(self, names: Sequence[Name], deadline: float) -> list[Name]:
        """Those of `names` that the store has. Empty if the store fails: then nothing is reported as stored."""
        present: list[Name] = []
        with contextlib.suppress(StoreError):
            known = self.store.present(names, deadline=deadline)
            present += [name for name, there in zip(names, known, strict=True) if there]
        return present

    def delete(self, names: Sequence[Name], deadline: float) -> int:
        """Delete blocks, even if the circuit breaker is open. Returns how many were present. Raises StoreError."""
        count = self.store.delete(names, deadline=deadline)
        self._notify(False, names)
        return count

    def _notify(self, stored: bool, names: Sequence[Name]) -> None:
        if self._listener is not None and names:
            self._listener(stored, names)


def _parts(buffers: Sequence[memoryview], readers: int) -> list[slice]:
    """Divide a batch among reading threads: the copies in the kernel take one core each."""
    count = min(readers, max(sum(len(buffer) for buffer in buffers) // _PART_BYTES, 1), max(len(buffers), 1))
    bounds = [len(buffers) * number // count for number in range(count + 1)]
    return [slice(low, high) for low, high in itertools.pairwise(bounds)]


@dataclass(frozen=True, slots=True)
class FetchedBlock:
    """A verified frame that `TieredStore.fetch` has read, and the index of the tier that it came from."""

    frame: Frame
    tier: int


class TieredStore(Store):
    """Several stores as one, fastest first. A failing tier never makes a block operation raise.

    Args:
        stores: the tiers.
        persistent: indexes of the tiers that outlive the process (None: all). Records are written to these if there are
            any. They are read from the last tier first, which is the one shared by the most instances.
        writable: indexes of the tiers that take writes (None: all). The other tiers are only read: blocks are never
            put, promoted, pinned or deleted there, and records are written there only if there is no other tier.

    Attributes:
        writable: indexes of the tiers that take writes.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        persistent: Sequence[int] | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        writable: Sequence[int] | None = None,
    ) -> None:
        self.writable = tuple(range(len(stores)) if writable is None else sorted(writable))
        self.tiers = [StoreTier(store, clock, writable=index in self.writable) for index, store in enumerate(stores)]
        self.label = " > ".join(tier.label for tier in self.tiers)
        chosen = sorted(persistent or ()) or self.writable or range(len(stores))
        self._record_tiers = [self.tiers[index] for index in chosen][::-1]

    def subscribe(self, listener: Callable[[int, bool, Sequence[Name]], None]) -> None:
        """Call `listener(tier, stored, names)` whenever this process stores blocks in a writable tier or removes them.

        Evictions by a server such as Redis, and changes that other processes make, are not reported. The listener is
        called on any thread and possibly under a store's lock: it must be quick and must not raise.
        """
        for index in self.writable:
            self.tiers[index].subscribe(partial(listener, index))

    # Blocks

    def locate(self, names: Sequence[Name], *, deadline: float) -> list[int]:
        """The tier of each of `names`, up to the first that is missing everywhere. A hint: only `fetch` verifies."""
        places: list[int] = []
        while len(places) < len(names):
            before = len(places)
            for index, tier in enumerate(self.tiers):
                # Do not start a lookup after the deadline: it would count as a failure of this tier, not of the slow one.
                if len(places) < len(names) and (index == 0 or time.monotonic() < deadline):
                    places += [index] * tier.lookup(names[len(places) :], deadline)
            if len(places) == before or len(self.tiers) == 1 or time.monotonic() >= deadline:
                break
        return places

    def find(self, names: Sequence[Name], *, deadline: float) -> list[int]:
        """The tier of each of `names`, each by itself; -1 for one that is missing everywhere. A hint: only `fetch` verifies."""
        places = [-1] * len(names)
        for index, tier in enumerate(self.tiers):
            missing = [i for i, place in enumerate(places) if place < 0]
            if not missing or (index and time.monotonic() >= deadline):
                break
            known = tier.present([names[i] for i in missing], deadline)
            for i, there in zip(missing, known, strict=True):
                if there:
                    places[i] = index
        return places

    def present(self, names: Sequence[Name], *, deadline: float) -> list[bool]:
        return [place >= 0 for place in self.find(names, deadline=deadline)]

    def tokens_by_tier(self, places: Iterable[int], block_size: int) -> dict[str, int]:
        """Count tokens by the label of their tier, given the result of `locate`."""
        counts: dict[str, int] = {}
        for place in places:
            label = self.tiers[place].label
            counts[label] = counts.get(label, 0) + block_size
        return counts

    def lookup(self, names: Sequence[Name], *, deadline: float) -> int:
        return len(self.locate(names, deadline=deadline))

    def fetch(
        self, names: Sequence[Name], buffers: Sequence[memoryview], *, deadline: float
    ) -> list[FetchedBlock | None]:
        """Read and verify each block from the fastest tier that has a good copy."""
        found: list[FetchedBlock | None] = [None] * len(names)
        for index, tier in enumerate(self.tiers):
            missing = [i for i, one in enumerate(found) if one is None]
            if not missing or time.monotonic() >= deadline:
                break
            frames = tier.get([names[i] for i in missing], [buffers[i] for i in missing], deadline)
            for i, frame in zip(missing, frames, strict=True):
                if frame is not None:
                    found[i] = FetchedBlock(frame, index)
        return found

    def get(self, names: Sequence[Name], buffers: Sequence[memoryview], *, deadline: float) -> list[int]:
        found = self.fetch(names, buffers, deadline=deadline)
        return [0 if one is None else len(one.frame.data) for one in found]

    def put(self, frames: Sequence[Frame], *, deadline: float) -> int:
        """Store frames in every writable tier. Returns the largest number that one tier kept."""
        return max((self.tiers[index].put(frames, deadline) for index in self.writable), default=0)

    def promotion_targets(self, tier: int) -> tuple[int, ...]:
        """The faster, writable tiers to which a block found in this tier is copied."""
        return tuple(index for index in self.writable if index < tier)

    def delete(self, names: Sequence[Name], *, deadline: float) -> int:
        return max(self.delete_by_tier(names, deadline=deadline).values(), default=0)

    def delete_by_tier(self, names: Sequence[Name], *, deadline: float) -> dict[str, int]:
        """Delete blocks from every tier, even where the circuit breaker is open. Returns the count of each tier by label.

        Raises StoreError if a tier fails: a deletion must not be reported as complete when it is not.
        """
        return {tier.label: tier.delete(names, deadline) for tier in self.tiers}

    def pin(self, names: Sequence[Name], *, pinned: bool = True, deadline: float) -> int:
        def in_tier(tier: StoreTier) -> int:
            return tier.attempt(lambda: tier.store.pin(names, pinned=pinned, deadline=deadline), 0)

        return max((in_tier(self.tiers[index]) for index in self.writable), default=0)

    def scan(self, *, deadline: float) -> Iterator[StoredBlock]:
        """List the blocks of all tiers. A block in several tiers is listed several times."""
        for tier in self.tiers:
            yield from tier.store.scan(deadline=deadline)

    # Records

    def put_record(self, key: str, data: bytes, *, deadline: float) -> None:
        """Write to every tier that keeps records. Raises StoreError if all of them failed."""
        failures = []
        for tier in self._record_tiers:
            try:
                tier.store.put_record(key, data, deadline=deadline)
            except StoreError as error:
                tier.count_error(error)
                failures.append(error)
        if len(failures) == len(self._record_tiers):
            raise failures[0]

    def get_record(self, key: str, *, deadline: float) -> bytes | None:
        for tier in self._record_tiers:
            found = tier.attempt(lambda tier=tier: tier.store.get_record(key, deadline=deadline), None)  # type: ignore[misc]
            if found is not None:
                return bytes(found)
        return None

    def delete_record(self, key: str, *, deadline: float) -> bool:
        """Delete from every tier. Raises StoreError if one fails: the record would come back from there."""
        gone = [tier.store.delete_record(key, deadline=deadline) for tier in self._record_tiers]
        return any(gone)

    def records(self, prefix: str, *, deadline: float) -> list[str]:
        """Raises StoreError if a tier fails: an incomplete list would look as if records had been deleted."""
        keys: set[str] = set()
        for tier in self._record_tiers:
            keys.update(tier.store.records(prefix, deadline=deadline))
        return sorted(keys)

    # Status

    def status(self) -> StoreStatus:
        """Sums over the tiers; -1 blocks if one tier does not know."""
        each = [tier.store.status() for tier in self.tiers]
        blocks = -1 if any(one.blocks < 0 for one in each) else sum(one.blocks for one in each)
        return StoreStatus(
            blocks,
            sum(one.bytes for one in each),
            sum(one.budget for one in each),
            sum(one.pinned_bytes for one in each),
            sum(one.evictions for one in each),
        )

    def close(self) -> None:
        for tier in self.tiers:
            try:
                tier.store.close()
            except StoreError as error:
                tier.count_error(error)
