"""The queue of blocks that wait to be written to the stores, and the threads that write them.

The engine's thread adds blocks that lie in staging slots and goes on; each tier has a thread that takes the oldest first, some
at a time. A slot is free again once every tier has written it, or when it is dropped because the queue is full.

Loading threads add what came from a slower tier and goes up into the faster ones (`promote`), with the slots that it was loaded
into: whoever waits for a block does not wait for that. Loads need slots too, so a promotion that nobody writes yet makes room
for them (`make_room`), and all of them together take a bounded part of these slots: the block is still where it came from.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from foreword.offload.staging import Slots, Staging
from foreword.store.background import lower_priority, use_background_cores
from foreword.store.frame import HEADER_BYTES, Frame, Header, seal
from foreword.store.tiered import TieredStore

WRITE_BLOCKS: Final = 32
WRITE_WITHIN: Final = 30.0
# Seconds that a block waits for others, so that decoding writes a few batches and not many single blocks.
_LINGER: Final = 0.2
# Writing threads step back behind those that compute; not far, since a full queue drops blocks.
_WRITE_NICE: Final = 5


@dataclass(slots=True)
class _Batch:
    """Blocks that wait to be written.

    Attributes:
        home: where the slots go back.
        todo: the tiers that have not written them yet; `busy` are writing them now.
        sealed: headers and checksums are in their place.
        promotion: they came from a slower tier.
        kept: how many of them the tier that kept the most has.
    """

    headers: list[Header]
    slots: list[int]
    home: Slots
    todo: set[int]
    since: float
    busy: int = 0
    sealed: bool = False
    promotion: bool = False
    kept: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class WriteBehind:
    """Writes staged blocks into every tier, each on a thread of its own, so that a slow tier holds up no other.

    Attributes:
        dropped: blocks that were never written because the queue was full; `dropped_promotions` were not written into faster
            tiers because loads needed their slots.
        saved, failed: blocks (promotions left out) that at least one tier has now, and that none has.
    """

    def __init__(self, store: TieredStore, staging: Staging) -> None:
        self._store = store
        self._staging = staging
        self._most_promoted = max(staging.slots // 4, 1)
        self._batches: OrderedDict[int, _Batch] = OrderedDict()
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._closing = False
        self._waiting = 0  # blocks added since a thread last looked
        self._idle = 0  # threads that have nothing to write, however slow the others are
        self._hurries = 0
        self.dropped = 0
        self.dropped_promotions = 0
        self.saved = 0
        self.failed = 0
        self._threads = [
            threading.Thread(target=self._run, args=(tier,), name=f"foreword-write-{tier}", daemon=True)
            for tier in store.writable
        ]
        for thread in self._threads:
            thread.start()

    @property
    def queued(self) -> int:
        with self._changed:
            return sum(len(batch.slots) for batch in self._batches.values())

    def add(self, headers: list[Header], slots: list[int], home: Slots, tiers: Iterable[int]) -> None:
        """Queue blocks whose payloads lie in `slots`; headers and checksums come later."""
        self._queue(_Batch(headers, slots, home, set(tiers), time.monotonic()))

    def promote(self, headers: list[Header], slots: list[int], home: Slots, tiers: Iterable[int]) -> None:
        """Queue whole frames that lie in `slots` for these tiers, unless too many wait already. They wait for no company."""
        self._queue(_Batch(headers, slots, home, set(tiers), time.monotonic(), sealed=True, promotion=True))

    def _queue(self, batch: _Batch) -> None:
        with self._changed:
            if batch.promotion and batch.todo and not self._fits(batch):
                self.dropped_promotions += len(batch.slots)
            elif batch.todo and not self._closing:
                self._batches[next(self._numbers)] = batch
                self._waiting += len(batch.slots)
                if self._waiting >= WRITE_BLOCKS or self._idle or batch.promotion:
                    self._changed.notify_all()
                return
        batch.home.give(batch.slots)

    def _fits(self, batch: _Batch) -> bool:
        held = sum(len(one.slots) for one in self._batches.values() if one.promotion)
        return held + len(batch.slots) <= self._most_promoted

    def make_room(self, home: Slots) -> bool:
        """Drop the oldest blocks in slots of `home` that nobody is writing. False if there are none."""
        with self._changed:
            each = self._batches.items()
            number = next((number for number, one in each if one.home is home and not one.busy), None)
            if number is None:
                return False
            batch = self._batches.pop(number)
            if batch.promotion:
                self.dropped_promotions += len(batch.slots)
            else:
                self.dropped += len(batch.slots)
        home.give(batch.slots)
        return True

    def flush(self, timeout: float) -> bool:
        """Wait until everything is written; False if that takes longer than `timeout` seconds."""
        with self._changed:
            self._hurries += 1
            self._changed.notify_all()
            try:
                return self._changed.wait_for(lambda: not self._batches, timeout)
            finally:
                self._hurries -= 1

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(0.5)

    def _run(self, tier: int) -> None:
        use_background_cores()
        lower_priority(_WRITE_NICE)
        while (taken := self._take(tier)) is not None:
            frames = [frame for _, batch in taken for frame in self._sealed(batch)]
            kept = self._store.tiers[tier].put(frames, time.monotonic() + WRITE_WITHIN)
            self._finish(taken, kept)

    def _take(self, tier: int) -> list[tuple[int, _Batch]] | None:
        """The oldest batches that this tier has not written, together up to WRITE_BLOCKS blocks; None at the end."""
        with self._changed:
            while True:
                self._waiting = 0
                mine = [(number, batch) for number, batch in self._batches.items() if tier in batch.todo]
                left = self._linger(mine)
                if mine and left <= 0:
                    return self._claim(tier, mine)
                if not mine and self._closing:
                    return None
                self._idle += not mine
                self._changed.wait(left if mine else None)
                self._idle -= not mine

    def _linger(self, mine: Sequence[tuple[int, _Batch]]) -> float:
        """Seconds until the oldest of these batches has waited long enough for company; 0 if there is enough of it."""
        if not mine or self._closing or self._hurries or sum(len(batch.slots) for _, batch in mine) >= WRITE_BLOCKS:
            return 0.0
        if any(batch.promotion for _, batch in mine):
            return 0.0
        return mine[0][1].since + _LINGER - time.monotonic()

    def _claim(self, tier: int, mine: Sequence[tuple[int, _Batch]]) -> list[tuple[int, _Batch]]:
        taken: list[tuple[int, _Batch]] = []
        size = 0
        for number, batch in mine:
            if taken and size + len(batch.slots) > WRITE_BLOCKS:
                break
            batch.todo.discard(tier)
            batch.busy += 1
            taken.append((number, batch))
            size += len(batch.slots)
        return taken

    def _sealed(self, batch: _Batch) -> list[Frame]:
        """The batch's frames; the first tier that comes writes headers and checksums."""
        buffers = [self._staging.buffer(slot) for slot in batch.slots]
        with batch.lock:
            if not batch.sealed:
                for header, buffer in zip(batch.headers, buffers, strict=True):
                    seal(header, buffer)
                batch.sealed = True
        pairs = zip(batch.headers, buffers, strict=True)
        return [Frame(header, buffer[: HEADER_BYTES + header.length]) for header, buffer in pairs]

    def _finish(self, taken: Sequence[tuple[int, _Batch]], kept: int) -> None:
        """A tier has written batches, and kept so many of their blocks: the first ones, as stores keep chains from the head."""
        done: list[_Batch] = []
        with self._changed:
            for number, batch in taken:
                batch.kept = max(batch.kept, min(kept, len(batch.slots)))
                kept = max(kept - len(batch.slots), 0)
                batch.busy -= 1
                if not batch.busy and not batch.todo:
                    done.append(self._batches.pop(number))
            for batch in done:
                if not batch.promotion:
                    self.saved += batch.kept
                    self.failed += len(batch.slots) - batch.kept
            self._changed.notify_all()
        for batch in done:
            batch.home.give(batch.slots)
