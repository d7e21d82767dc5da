"""Between an engine and everything off its device: find, load, save, pin, forget.

The engine's thread asks and goes on; threads of this module do the waiting. Three promises hold whatever a store does:

- a step is never held up: saving copies blocks into a staging arena and returns, and when the arena is full the oldest
  blocks that nobody writes yet are dropped (`write_behind.py`);
- a request waits no longer than loading can save: `worth_loading` compares each tier's measured bandwidth with the engine's own
  prefill speed, and a load that turns out slower is cut off where it stands;
- nothing is written into a block that the engine has taken back: `StoreLoad.close` and the copy into the device exclude
  each other.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from foreword.blocks.layout import Layout
from foreword.errors import StoreError
from foreword.offload.staging import Slots, Staging
from foreword.offload.writer import WRITE_BLOCKS, WRITE_WITHIN, WriteBehind
from foreword.store.background import use_background_cores
from foreword.store.base import Name
from foreword.store.frame import RAW, Header
from foreword.store.tiered import FetchedBlock, Rate, TieredStore

_GROUP_BYTES: Final = 8 << 20
_PROBE_BYTES: Final = 1 << 20
# Of the time that computing would take, the part that a search, and the first bytes of an unknown store, may take.
PATIENCE: Final = 0.1
_SHORTEST_PATIENCE: Final = 0.05


@dataclass(frozen=True, slots=True)
class CacheStatus:
    """Blocks since the start, and the queue of now.

    Attributes:
        queued, dropped: blocks that wait to be written, and that never will be because the queue was full.
        dropped_promotions: blocks from a slower tier that were not written into the faster ones: loads needed the room.
        saved, failed: blocks that were written and are in at least one tier, and those that no tier kept.
        loaded, cut, stopped: blocks loaded; loads that brought less than they set out for, and those of them that were
            cut off because computing was sooner.
    """

    queued: int = 0
    dropped: int = 0
    dropped_promotions: int = 0
    saved: int = 0
    failed: int = 0
    loaded: int = 0
    cut: int = 0
    stopped: int = 0
    declined: int = 0


class StoreLoad:
    """One request's search in the store, and its load. The engine's thread owns it; a loading thread fills it.

    Attributes:
        places: tier of each block that the search found, in chain order; None while it is under way.
        loaded: blocks that are on the device, from the first one asked for.
        finished: nothing more will come.
    """

    __slots__ = (
        "_lock",
        "asked",
        "blocks",
        "deadline",
        "finished",
        "loaded",
        "names",
        "places",
        "skip",
        "started",
        "tiers",
    )

    def __init__(self, names: list[Name], deadline: float) -> None:
        self._lock = threading.Lock()
        self.names = names
        self.deadline = deadline
        self.places: list[int] | None = None
        self.skip = 0
        self.asked = 0
        self.blocks: list[int] = []
        self.loaded = 0
        self.tiers: list[int] = []
        self.finished = False
        self.started = 0.0

    @property
    def answered(self) -> bool:
        """Whether the search has ended, or has taken too long."""
        return self.places is not None or time.monotonic() >= self.deadline

    @property
    def done(self) -> bool:
        """Whether the load has ended, or has taken too long."""
        return self.finished or time.monotonic() >= self.deadline

    def close(self) -> list[int]:
        """No block is written from now on; returns the tier of each block that is loaded."""
        with self._lock:
            self.finished = True
            return self.tiers

    def fill(self, count: int, tiers: list[int], copy: Callable[[], None]) -> bool:
        """Copy `count` more blocks into the device, unless the store_load was closed."""
        with self._lock:
            if self.finished:
                return False
            copy()
            self.loaded += count
            self.tiers += tiers
            return True


class OffloadManager:
    """What an engine sees of all tiers together. Calls come from the engine's thread and return at once.

    Args:
        store: the tiers.
        staging: at least four slots. Half of them are the queue of writes, half are for loads.
        layout: of the engine's blocks.
        lookup_timeout: seconds that a request may wait for the search, or a tenth of what computing the blocks takes, if
            that is more.
        load_timeout: seconds that a load may take, if computing takes longer still.
        on_change: called from other threads when a store_load changed: wakes the engine.
    """

    def __init__(
        self,
        store: TieredStore,
        staging: Staging,
        layout: Layout,
        *,
        lookup_timeout: float = 0.25,
        load_timeout: float = 30.0,
        on_change: Callable[[], None] = lambda: None,
        loaders: int = 4,
    ) -> None:
        self.store = store
        self.layout = layout
        self.on_change = on_change
        self.prefill_seconds = Rate()
        self._fingerprint = layout.fingerprint
        self._staging = staging
        half = staging.slots // 2
        self._saving_slots = Slots(range(half))
        self._loading_slots = Slots(range(half, staging.slots))
        self._writes = WriteBehind(store, staging)
        self._lookup_timeout = lookup_timeout
        self._load_timeout = load_timeout
        self._finders = ThreadPoolExecutor(loaders, "foreword-find", use_background_cores)
        self._loaders = ThreadPoolExecutor(loaders, "foreword-load", use_background_cores)
        self._control = ThreadPoolExecutor(1, "foreword-control", use_background_cores)
        self._changed = threading.Condition()
        self.changes = 0
        self._dropped = 0
        self._counting = threading.Lock()  # loads that end at the same time add to the same numbers
        self._counts = dict.fromkeys(("loaded", "cut", "stopped", "declined"), 0)
        self._closed = False

    # Loading

    def find(self, keys: Sequence[bytes]) -> StoreLoad:
        """Search the store for a chain's blocks; the store_load's `places` is set when that is known, or at its deadline."""
        compute = (self._seconds_per_token() or 0.0) * len(keys) * self.layout.block_size
        patience = max(self._lookup_timeout, PATIENCE * compute)
        store_load = StoreLoad([self._fingerprint + key for key in keys], time.monotonic() + patience)

        def search() -> None:
            store_load.places = self.store.locate(store_load.names, deadline=store_load.deadline)
            self._tell()

        self._finders.submit(search)
        return store_load

    def worth_loading(self, store_load: StoreLoad, skip: int, tokens: int) -> int:
        """How many blocks after the first `skip` should be loaded rather than computed; 0 for none. `tokens` is the length of
        the prompt. The engine computes what is not loaded, at the speed that it was measured at."""
        places = store_load.places or []
        found = len(places) - skip
        if found <= 0:
            return 0
        per_token = self._seconds_per_token()
        if per_token is None:
            return found
        per_block = per_token * self.layout.block_size
        best, gained, seconds = 0, 0.0, 0.0
        for count, tier in enumerate(places[skip:], start=1):
            rate = self.store.tiers[tier].read_rate.value
            seconds += self._staging.frame_bytes / rate if rate else 0.0
            if count * per_block - seconds > gained:
                best, gained = count, count * per_block - seconds
        if best == 0:
            self._count(declined=1)
        return best

    def _seconds_per_token(self) -> float | None:
        speed = self.prefill_seconds.value
        return 1 / speed if speed else None

    def tokens_by_tier(self, places: Iterable[int], block_size: int) -> dict[str, int]:
        """Tokens by the label of the tier that has them."""
        return self.store.tokens_by_tier(places, block_size)

    def load(self, store_load: StoreLoad, skip: int, blocks: Sequence[int]) -> None:
        """Load the store_load's blocks from number `skip` on into device blocks, in order."""
        store_load.skip, store_load.blocks, store_load.asked = skip, list(blocks), len(blocks)
        store_load.started = time.monotonic()
        per_token = self._seconds_per_token()
        compute = len(blocks) * self.layout.block_size * per_token if per_token is not None else self._load_timeout
        # Twice as long as computing: a load that is slower than that is cut off by its measured rate long before.
        store_load.deadline = store_load.started + min(self._load_timeout, max(2 * compute, 2 * _SHORTEST_PATIENCE))
        self._loaders.submit(self._load, store_load, compute)

    def _load(self, store_load: StoreLoad, compute: float) -> None:
        try:
            self._load_groups(store_load, compute)
        finally:
            store_load.close()
            self._count(loaded=store_load.loaded, cut=int(store_load.loaded < store_load.asked))
            self._tell()

    def _load_groups(self, store_load: StoreLoad, compute: float) -> None:
        frame_bytes = self._staging.frame_bytes
        done = 0
        while done < store_load.asked and not store_load.finished:
            known = done > 0 or self._rate_known(store_load, store_load.skip)
            size = _GROUP_BYTES if known else _PROBE_BYTES
            count = min(max(size // frame_bytes, 1), store_load.asked - done, self._staging.slots // 4 or 1)
            patience = max(PATIENCE * compute, _SHORTEST_PATIENCE)
            deadline = store_load.deadline if done else min(store_load.deadline, time.monotonic() + patience)
            slots = self._room(self._loading_slots, count) or self._loading_slots.wait_for(count, deadline)
            if slots is None:
                return
            brought = self._load_group(store_load, done, slots, deadline)
            done += brought
            if brought < count:
                return
            if self._slower_than_computing(store_load, done, compute):
                self._count(stopped=1)
                return

    def _rate_known(self, store_load: StoreLoad, number: int) -> bool:
        assert store_load.places is not None
        return bool(self.store.tiers[store_load.places[number]].read_rate.value)

    def _load_group(self, store_load: StoreLoad, done: int, slots: list[int], deadline: float) -> int:
        """Load as many blocks as there are slots; returns how many came, without a gap. What came from a slower tier keeps its
        slots until it is written into the faster ones."""
        first = store_load.skip + done
        names = store_load.names[first : first + len(slots)]
        promoted = 0
        try:
            found = self.store.fetch(names, [self._staging.buffer(slot) for slot in slots], deadline=deadline)
            whole: list[FetchedBlock] = []
            for one in found:
                if one is None or not self._fits(one):
                    break
                whole.append(one)
            count = len(whole)
            targets = store_load.blocks[done : done + count]
            tiers = [one.tier for one in whole]
            if not count or not store_load.fill(count, tiers, lambda: self._staging.scatter(slots[:count], targets)):
                return 0
            promoted = count
            self._promote(whole, slots[:count])
            return count
        finally:
            self._loading_slots.give(slots[promoted:])

    def _promote(self, found: Sequence[FetchedBlock], slots: Sequence[int]) -> None:
        """Hand loaded blocks and their slots on to the threads that write, a tier's at a time."""
        for tier, some in itertools.groupby(zip(found, slots, strict=True), key=lambda pair: pair[0].tier):
            pairs = list(some)
            headers = [one.frame.header for one, _ in pairs]
            self._writes.promote(
                headers, [slot for _, slot in pairs], self._loading_slots, self.store.promotion_targets(tier)
            )

    def _fits(self, found: FetchedBlock) -> bool:
        header = found.frame.header
        return header.codec == RAW and header.length == self._staging.block_bytes

    def _slower_than_computing(self, store_load: StoreLoad, done: int, compute: float) -> bool:
        """Whether what is left of a load would take longer than computing it, at the pace so far."""
        left = store_load.asked - done
        pace = (time.monotonic() - store_load.started) / done
        return left > 0 and left * pace > compute * left / store_load.asked

    def wait(self, seen: int, timeout: float) -> None:
        """Sleep until a store_load changes, unless one has since `changes` was `seen`."""
        with self._changed:
            self._changed.wait_for(lambda: self.changes != seen, timeout)

    def _tell(self) -> None:
        with self._changed:
            self.changes += 1
            self._changed.notify_all()
        self.on_change()

    # Saving

    def save(self, keys: Sequence[bytes], parent: bytes, depth: int, blocks: Sequence[int]) -> None:
        """Keep full, computed blocks, which follow `parent` at number `depth` of their chain. When it returns, the blocks may
        be reused: they were copied. What does not fit into the queue is dropped, the oldest first.

        Whoever computed a block did not find it anywhere, so it is written, whatever was written before.
        """
        if not self.store.writable:
            return
        step = max(min(WRITE_BLOCKS, self._staging.slots // 4), 1)
        for low in range(0, len(keys), step):
            some = keys[low : low + step]
            slots = self._room(self._saving_slots, len(some))
            if slots is None:
                self._dropped += len(keys) - low
                return
            self._staging.gather(blocks[low : low + len(some)], slots)
            before = [keys[low - 1] if low else parent, *some[:-1]]
            headers = [
                self._header(key, above, depth + low + i)
                for i, (key, above) in enumerate(zip(some, before, strict=True))
            ]
            self._writes.add(headers, slots, self._saving_slots, self.store.writable)

    def _room(self, home: Slots, count: int) -> list[int] | None:
        """`count` slots, if need be in place of blocks that wait to be written; None if there are too few even so."""
        slots = home.take(count)
        while slots is None:
            if not self._writes.make_room(home):
                return None
            slots = home.take(count)
        return slots

    def _header(self, key: bytes, parent: bytes, depth: int) -> Header:
        size = self._staging.block_bytes
        return Header(self._fingerprint, key, parent, depth, RAW, size, size)

    # The rest

    def pin(self, keys: Sequence[bytes], *, pinned: bool = True) -> Future[int]:
        """Keep blocks in every tier from eviction, or no longer. What still waits to be written is written first."""
        names = [self._fingerprint + key for key in keys]

        def work() -> int:
            self._writes.flush(WRITE_WITHIN)
            return self.store.pin(names, pinned=pinned, deadline=time.monotonic() + WRITE_WITHIN)

        return self._control.submit(work)

    def describe(self, facts: Mapping[str, object]) -> Future[None]:
        """Leave a record of what blocks of this layout are, for tools: `layouts/<fingerprint>`."""
        record = json.dumps({**facts, "layout": self.layout.describe()}, sort_keys=True).encode()
        word = f"layouts/{self._fingerprint.hex()}"

        def work() -> None:
            with contextlib.suppress(StoreError):  # counted by the tier; blocks are found without it
                self.store.put_record(word, record, deadline=time.monotonic() + WRITE_WITHIN)

        return self._control.submit(work)

    def flush(self, timeout: float = 30.0) -> bool:
        """Wait until everything saved so far is written; False if `timeout` seconds were not enough."""
        return self._writes.flush(timeout)

    def _count(self, **more: int) -> None:
        with self._counting:
            for name, amount in more.items():
                self._counts[name] += amount

    def status(self) -> CacheStatus:
        return CacheStatus(
            queued=self._writes.queued,
            dropped=self._dropped + self._writes.dropped,
            dropped_promotions=self._writes.dropped_promotions,
            saved=self._writes.saved,
            failed=self._writes.failed,
            **self._counts,
        )

    def close(self, timeout: float = 30.0) -> None:
        """Write what is queued, within `timeout` seconds, and close the store."""
        if self._closed:
            return
        self._closed = True
        self._writes.flush(timeout)
        self._writes.close()
        for pool in (self._finders, self._loaders, self._control):
            pool.shutdown(wait=False, cancel_futures=True)
        self.store.close()
