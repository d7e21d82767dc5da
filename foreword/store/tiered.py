"""Fast over slow: several stores as one, and the one place where a store's failure becomes a miss.

Whatever a tier raises, and however long it is silent, ends here: it is counted, the block is looked for further down, and a
tier that keeps failing is left alone for a while (a circuit breaker). Whatever a tier delivers is checked here to the last
byte before anybody else sees it; what does not pass is counted and removed from that tier.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, TypeVar

from foreword.errors import BadFrame, StoreError
from foreword.store.base import Entry, Name, Store, StoreStatus
from foreword.store.frame import Frame, check

Result = TypeVar("Result")

_FAILURES_TO_OPEN: Final = 3
_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 30.0
_REMOVE_WITHIN: Final = 1.0
# A measured rate is believed so long; then one load is tried again.
_BELIEVED: Final = 60.0
_WEIGHT: Final = 0.3
_CORES: Final = os.cpu_count() or 1
_PART_BYTES: Final = 2 << 20
_readers = ThreadPoolExecutor(_CORES, "foreword-read")


def _after_fork() -> None:
    """The parent's threads are not in the child."""
    global _readers
    _readers = ThreadPoolExecutor(_CORES, "foreword-read")


os.register_at_fork(after_in_child=_after_fork)


@dataclass(slots=True)
class TierCounters:
    """What happened in one tier since the start. `errors` and `bad` count by kind."""

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


class Breaker:
    """Lets calls through until several in a row failed; then none for a while, and one to try again."""

    __slots__ = ("_clock", "_failures", "_lock", "_open_until", "_pause")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._pause = _FIRST_PAUSE
        self._open_until = 0.0

    def allows(self) -> bool:
        with self._lock:
            now = self._clock()
            if now < self._open_until:
                return False
            if self._open_until:  # one call tries; the others wait for what it finds
                self._open_until = now + self._pause
            return True

    def succeeded(self) -> None:
        with self._lock:
            self._failures = 0
            self._pause = _FIRST_PAUSE
            self._open_until = 0.0

    def failed(self) -> None:
        with self._lock:
            self._failures += 1
            if self._failures >= _FAILURES_TO_OPEN:
                self._open_until = self._clock() + self._pause
                self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    @property
    def is_open(self) -> bool:
        return self._clock() < self._open_until


class Rate:
    """Bytes per second as last seen, an exponential average; 0.0 while nothing recent is known."""

    __slots__ = ("_at", "_clock", "_value")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._value = 0.0
        self._at = 0.0

    def note(self, amount: float, seconds: float) -> None:
        value = amount / max(seconds, 1e-9)
        known = self.value
        self._value = value if not known else known + _WEIGHT * (value - known)
        self._at = self._clock()

    @property
    def value(self) -> float:
        return self._value if self._clock() - self._at < _BELIEVED else 0.0


class Tier:
    """One store, what is known of it, and how it is called."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic, *, written: bool = True) -> None:
        self.store = store
        self.label = store.label
        self.written = written
        self.counters = TierCounters()
        self.breaker = Breaker(clock)
        self.read_rate = Rate(clock)
        self._lock = threading.Lock()

    def attempt(self, call: Callable[[], Result], otherwise: Result) -> Result:
        """The call's result, or `otherwise` if it fails or the tier is left alone for now."""
        if not self.breaker.allows():
            with self._lock:
                self.counters.skipped += 1
            return otherwise
        try:
            result = call()
        except Exception as error:  # noqa: BLE001 - here, and nowhere else, a failing store becomes a miss
            self.breaker.failed()
            self.count_error(error)
            return otherwise
        self.breaker.succeeded()
        return result

    def count_error(self, error: Exception) -> None:
        kind = error.code if isinstance(error, StoreError) else type(error).__name__
        with self._lock:
            self.counters.errors[kind] += 1

    def lookup(self, names: Sequence[Name], deadline: float) -> int:
        started = time.perf_counter()
        found = self.attempt(lambda: self.store.lookup(names, deadline=deadline), 0)
        with self._lock:
            self.counters.lookups += 1
            self.counters.lookup_seconds += time.perf_counter() - started
        return found

    def get(self, names: Sequence[Name], buffers: Sequence[memoryview], deadline: float) -> list[Frame | None]:
        """Frames that are whole and what they should be; None for the others."""
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
            if self.written:
                self.attempt(lambda: self.store.delete([name], deadline=time.monotonic() + _REMOVE_WITHIN), 0)
            return None

    def put(self, frames: Sequence[Frame], deadline: float) -> int:
        started = time.perf_counter()
        kept = self.attempt(lambda: self.store.put(frames, deadline=deadline), 0)
        with self._lock:
            self.counters.written_blocks += kept
            if kept:
                self.counters.written_bytes += sum(len(frame.data) for frame in frames) * kept // len(frames)
            self.counters.write_seconds += time.perf_counter() - started
        return kept


def _parts(buffers: Sequence[memoryview], readers: int) -> list[slice]:
    """A batch in pieces that are read side by side: a kernel's copies take one core each."""
    count = min(readers, max(sum(len(buffer) for buffer in buffers) // _PART_BYTES, 1), max(len(buffers), 1))
    bounds = [len(buffers) * number // count for number in range(count + 1)]
    return [slice(low, high) for low, high in itertools.pairwise(bounds)]


@dataclass(frozen=True, slots=True)
class Found:
    """What `TieredStore.fetch` brought for one name: a frame that was checked, and the tier that had it."""

    frame: Frame
    tier: int


class TieredStore:
    """Several stores, the fastest first. Implements `Store`, and never raises for a tier's failure.

    Args:
        stores: at least one.
        lasting: which of them outlive the process (None: all). Records (named prefixes) go to those, if there are any, and
            are read from the last first: that is the one which the most instances share.
        written: which of them take writes (None: all). The others are only read: nothing is put, promoted or pinned there,
            what is bad there stays, and records go there only if there is no other tier.

    Attributes:
        written: numbers of the tiers that take writes.
    """

    def __init__(
        self,
        stores: Sequence[Store],
        lasting: Sequence[int] | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        written: Sequence[int] | None = None,
    ) -> None:
        self.written = tuple(range(len(stores)) if written is None else sorted(written))
        self.tiers = [Tier(store, clock, written=number in self.written) for number, store in enumerate(stores)]
        self.label = " > ".join(tier.label for tier in self.tiers)
        self.readers = 1
        chosen = sorted(lasting or ()) or self.written or range(len(stores))
        self._record_tiers = [self.tiers[number] for number in chosen][::-1]

    # Blocks

    def locate(self, names: Sequence[Name], *, deadline: float) -> list[int]:
        """The tier of each of `names`, as far as they are there without a gap. A hint: only `fetch` knows."""
        places: list[int] = []
        while len(places) < len(names):
            before = len(places)
            for number, tier in enumerate(self.tiers):
                # A tier that is asked too late would seem to fail, though it was another one that took the time.
                if len(places) < len(names) and (number == 0 or time.monotonic() < deadline):
                    places += [number] * tier.lookup(names[len(places) :], deadline)
            if len(places) == before or len(self.tiers) == 1 or time.monotonic() >= deadline:
                break
        return places

    def tokens_by_tier(self, places: Iterable[int], block_size: int) -> dict[str, int]:
        """Tokens by the label of the tier that has them, for what `locate` found."""
        counts: dict[str, int] = {}
        for place in places:
            label = self.tiers[place].label
            counts[label] = counts.get(label, 0) + block_size
        return counts

    def lookup(self, names: Sequence[Name], *, deadline: float) -> int:
        return len(self.locate(names, deadline=deadline))

    def fetch(self, names: Sequence[Name], buffers: Sequence[memoryview], *, deadline: float) -> list[Found | None]:
        """Each block from the fastest tier that has it whole."""
        found: list[Found | None] = [None] * len(names)
        for number, tier in enumerate(self.tiers):
            open_ = [i for i, one in enumerate(found) if one is None]
            if not open_ or time.monotonic() >= deadline:
                break
            frames = tier.get([names[i] for i in open_], [buffers[i] for i in open_], deadline)
            for i, frame in zip(open_, frames, strict=True):
                if frame is not None:
                    found[i] = Found(frame, number)
        return found

    def get(self, names: Sequence[Name], buffers: Sequence[memoryview], *, deadline: float) -> list[int]:
        found = self.fetch(names, buffers, deadline=deadline)
        return [0 if one is None else len(one.frame.data) for one in found]

    def put(self, frames: Sequence[Frame], *, deadline: float) -> int:
        """Into every tier that takes writes; returns the most that one of them kept."""
        return max((self.tiers[number].put(frames, deadline) for number in self.written), default=0)

    def above(self, tier: int) -> tuple[int, ...]:
        """Tiers that a block from this one goes up into: those before it that take writes."""
        return tuple(number for number in self.written if number < tier)

    def delete(self, names: Sequence[Name], *, deadline: float) -> int:
        return max(self.forget(names, deadline=deadline).values(), default=0)

    def forget(self, names: Sequence[Name], *, deadline: float) -> dict[str, int]:
        """Remove from every tier, whatever its breaker says; how many each one had. Raises StoreError if one cannot: what
        is to be forgotten must not be left behind without a word."""
        return {tier.label: tier.store.delete(names, deadline=deadline) for tier in self.tiers}

    def pin(self, names: Sequence[Name], *, pinned: bool = True, deadline: float) -> int:
        def in_tier(tier: Tier) -> int:
            return tier.attempt(lambda: tier.store.pin(names, pinned=pinned, deadline=deadline), 0)

        return max((in_tier(self.tiers[number]) for number in self.written), default=0)

    def scan(self, *, deadline: float) -> Iterator[Entry]:
        """Every tier's blocks; one that lies in several comes several times."""
        for tier in self.tiers:
            yield from tier.store.scan(deadline=deadline)

    # Records

    def put_record(self, word: str, data: bytes, *, deadline: float) -> None:
        """Into every tier that keeps records. Raises StoreError if none took it."""
        failures = []
        for tier in self._record_tiers:
            try:
                tier.store.put_record(word, data, deadline=deadline)
            except StoreError as error:
                tier.count_error(error)
                failures.append(error)
        if len(failures) == len(self._record_tiers):
            raise failures[0]

    def get_record(self, word: str, *, deadline: float) -> bytes | None:
        for tier in self._record_tiers:
            found = tier.attempt(lambda tier=tier: tier.store.get_record(word, deadline=deadline), None)  # type: ignore[misc]
            if found is not None:
                return bytes(found)
        return None

    def delete_record(self, word: str, *, deadline: float) -> bool:
        """From every tier. Raises StoreError if one cannot: it would come back."""
        gone = [tier.store.delete_record(word, deadline=deadline) for tier in self._record_tiers]
        return any(gone)

    def records(self, start: str, *, deadline: float) -> list[str]:
        """Raises StoreError if one tier does not say: a list with gaps would read as if something had been removed."""
        words: set[str] = set()
        for tier in self._record_tiers:
            words.update(tier.store.records(start, deadline=deadline))
        return sorted(words)

    # All of it

    def status(self) -> StoreStatus:
        """Sums over the tiers; -1 blocks if one does not know."""
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
