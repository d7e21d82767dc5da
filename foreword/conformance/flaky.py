"""A store that misbehaves on purpose: fails, waits, and alters what is read."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

from foreword.errors import StoreError, StoreTimeout, StoreUnavailable
from foreword.store.base import Entry, Name, Store, StoreStatus, time_left
from foreword.store.frame import Frame

Fault = Literal["fail", "corrupt", "truncate", "swap", "lose"]


class FlakyStore:
    """A store that misbehaves when it is told to, or by a seeded plan. Otherwise it is the store it wraps.

    Args:
        plan: how often, 0.0 to 1.0, a call fails (`fail`) or a put is lost (`lose`), and how often a frame that is read is
            altered: one bit (`corrupt`), cut short (`truncate`), or another block's bytes under this name (`swap`).
        seed: of the plan's dice.

    `injected` counts what was done, by name of the fault.
    """

    def __init__(self, store: Store, *, seed: int = 0, plan: Mapping[Fault, float] | None = None) -> None:
        self.inner = store
        self.label = store.label
        self.readers = store.readers
        self.injected: Counter[str] = Counter()
        self._draw = random.Random(seed)
        self._rates: dict[Fault, float] = dict(plan or {})
        self._failures = 0
        self._error: Callable[[], StoreError] = lambda: StoreUnavailable("fails on purpose")
        self._seconds = 0.0
        self._hangs = False
        self._other: bytes = b""
        self._lock = threading.Lock()

    def fail_next(self, count: int = 1, error: Callable[[], StoreError] | None = None) -> None:
        """The next `count` calls raise StoreUnavailable, or what `error` makes."""
        with self._lock:
            self._failures = count
            if error is not None:
                self._error = error

    def fail(self, on: bool = True) -> None:
        """Every call fails."""
        self._rates["fail"] = float(on)

    def corrupt_reads(self, on: bool = True) -> None:
        """Every frame that is read has one bit flipped."""
        self._rates["corrupt"] = float(on)

    def truncate_reads(self, on: bool = True) -> None:
        """Every frame that is read is cut short, somewhere."""
        self._rates["truncate"] = float(on)

    def swap_reads(self, on: bool = True) -> None:
        """Every frame that is read is another block's, in itself sound: the one put or read before."""
        self._rates["swap"] = float(on)

    def lose_puts(self, on: bool = True) -> None:
        """Puts say that all went well and keep nothing."""
        self._rates["lose"] = float(on)

    def delay(self, seconds: float) -> None:
        """Every call takes this long first, or until its deadline, where it raises StoreTimeout."""
        self._seconds = seconds

    def hang(self, on: bool = True) -> None:
        """Every call waits for its deadline and raises StoreTimeout."""
        self._hangs = on

    def lookup(self, names: Sequence[Name], *, deadline: float) -> int:
        self._before(deadline)
        return self.inner.lookup(names, deadline=deadline)

    def get(self, names: Sequence[Name], buffers: Sequence[memoryview], *, deadline: float) -> list[int]:
        self._before(deadline)
        lengths = self.inner.get(names, buffers, deadline=deadline)
        return [self._alter(buffer, length) for buffer, length in zip(buffers, lengths, strict=True)]

    def put(self, frames: Sequence[Frame], *, deadline: float) -> int:
        self._before(deadline)
        if self._now("lose"):
            return len(frames)
        if frames:
            self._other = bytes(frames[-1].data)
        return self.inner.put(frames, deadline=deadline)

    def delete(self, names: Sequence[Name], *, deadline: float) -> int:
        self._before(deadline)
        return self.inner.delete(names, deadline=deadline)

    def pin(self, names: Sequence[Name], *, pinned: bool = True, deadline: float) -> int:
        self._before(deadline)
        return self.inner.pin(names, pinned=pinned, deadline=deadline)

    def scan(self, *, deadline: float) -> Iterator[Entry]:
        self._before(deadline)
        return self.inner.scan(deadline=deadline)

    def put_record(self, word: str, data: bytes, *, deadline: float) -> None:
        self._before(deadline)
        self.inner.put_record(word, data, deadline=deadline)

    def get_record(self, word: str, *, deadline: float) -> bytes | None:
        self._before(deadline)
        return self.inner.get_record(word, deadline=deadline)

    def delete_record(self, word: str, *, deadline: float) -> bool:
        self._before(deadline)
        return self.inner.delete_record(word, deadline=deadline)

    def records(self, start: str, *, deadline: float) -> list[str]:
        self._before(deadline)
        return self.inner.records(start, deadline=deadline)

    def status(self) -> StoreStatus:
        return self.inner.status()

    def close(self) -> None:
        self.inner.close()

    def _before(self, deadline: float) -> None:
        left = time_left(deadline)
        if self._hangs or self._seconds:
            late = self._hangs or self._seconds >= left
            self.injected["hang" if self._hangs else "delay"] += 1
            time.sleep(left if late else self._seconds)
            if late:
                raise StoreTimeout("waited on purpose until the deadline")
        with self._lock:
            told = self._failures > 0
            self._failures -= told
        if told or self._now("fail"):
            if told:
                self.injected["fail"] += 1
            raise self._error()

    def _now(self, fault: Fault) -> bool:
        """Whether the plan says so at this moment; counts it."""
        rate = self._rates.get(fault, 0.0)
        with self._lock:
            hit = rate > 0.0 and self._draw.random() < rate
        if hit:
            self.injected[fault] += 1
        return hit

    def _alter(self, buffer: memoryview, length: int) -> int:
        """What the caller gets to see of a frame of `length` bytes in `buffer`."""
        if not length:
            return 0
        mine = bytes(buffer[:length])
        other = self._other
        self._other = mine
        if other and other != mine and len(other) <= len(buffer) and self._now("swap"):
            buffer[: len(other)] = other
            length = len(other)
        if self._now("corrupt"):
            bit = self._draw.randrange(length * 8)
            buffer[bit // 8] ^= 1 << bit % 8
        if self._now("truncate"):
            length = self._draw.randrange(length)
        return length
