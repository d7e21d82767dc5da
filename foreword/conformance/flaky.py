"""A store that injects faults: it fails, delays, and alters what is read."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from foreword.errors import StoreError, StoreTimeout, StoreUnavailable
from foreword.store.base import Name, Store, time_left
from foreword.store.frame import Frame
from foreword.store.wrappers import StoreWrapper

Fault = Literal["fail", "hang", "corrupt", "truncate", "swap", "lose"]


class FlakyStore(StoreWrapper):
    """Wraps a store and injects faults, on request or at random with a seed. Without faults it behaves like the inner
    store.

        Args:
            plan: probability of each fault, 0.0 to 1.0: a call fails (`fail`), a put is lost (`lose`), or a frame that is
                read has one bit flipped (`corrupt`), is cut short (`truncate`), or is another block's frame (`swap`).
            seed: seed of the random choices.

        Attributes:
            injected: number of injected faults by name.
    """

    def __init__(self, store: Store, *, seed: int = 0, plan: Mapping[Fault, float] | None = None) -> None:
        super().__init__(store)
        self.injected: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._rates: dict[Fault, float] = dict(plan or {})
        self._failures = 0
        self._error: Callable[[], StoreError] = lambda: StoreUnavailable("injected failure")
        self._seconds = 0.0
        self._other: bytes = b""
        self._lock = threading.Lock()

    def fail_next(self, count: int = 1, error: Callable[[], StoreError] | None = None) -> None:
        """Make the next `count` calls raise StoreUnavailable, or the result of `error`."""
        with self._lock:
            self._failures = count
            if error is not None:
                self._error = error

    def inject(self, fault: Fault, rate: float = 1.0) -> None:
        """Set the probability of a fault; 0.0 ends it."""
        self._rates[fault] = rate

    def delay(self, seconds: float) -> None:
        """Make every call wait this long first. If its deadline comes first, the call raises StoreTimeout."""
        self._seconds = seconds

    def get(self, names: Sequence[Name], buffers: Sequence[memoryview], *, deadline: float) -> list[int]:
        lengths = super().get(names, buffers, deadline=deadline)
        return [self._alter(buffer, length) for buffer, length in zip(buffers, lengths, strict=True)]

    def put(self, frames: Sequence[Frame], *, deadline: float) -> int:
        self.before_call(deadline)
        if self._happens("lose"):
            return len(frames)
        if frames:
            self._other = bytes(frames[-1].data)
        return self.inner.put(frames, deadline=deadline)

    def before_call(self, deadline: float) -> None:
        left = time_left(deadline)
        if self._happens("hang"):
            time.sleep(left)
            raise StoreTimeout("injected hang until the deadline")
        if self._seconds:
            self.injected["delay"] += 1
            time.sleep(min(left, self._seconds))
            if left <= self._seconds:
                raise StoreTimeout("injected delay until the deadline")
        with self._lock:
            requested = self._failures > 0
            self._failures -= requested
        if requested:
            self.injected["fail"] += 1
        if requested or self._happens("fail"):
            raise self._error()

    def _happens(self, fault: Fault) -> bool:
        """Decide whether to inject a fault now, and count it."""
        rate = self._rates.get(fault, 0.0)
        with self._lock:
            hit = rate > 0.0 and self._random.random() < rate
        if hit:
            self.injected[fault] += 1
        return hit

    def _alter(self, buffer: memoryview, length: int) -> int:
        """Apply faults to a frame of `length` bytes that was read into `buffer`. Returns its new length."""
        if not length:
            return 0
        mine = bytes(buffer[:length])
        other = self._other
        self._other = mine
        if other and other != mine and len(other) <= len(buffer) and self._happens("swap"):
            buffer[: len(other)] = other
            length = len(other)
        if self._happens("corrupt"):
            bit = self._random.randrange(length * 8)
            buffer[bit // 8] ^= 1 << bit % 8
        if self._happens("truncate"):
            length = self._random.randrange(length)
        return length
