"""A store that injects faults: it fails, delays, and alters what is read."""

from __future__ import annotations

import itertools
import random
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from foreword.errors import StoreError, StoreTimeout, StoreUnavailable
from foreword.store.base import BAD, FAILED, UNREADABLE, Name, Store, time_left
from foreword.store.frame import Frame
from foreword.store.wrappers import StoreWrapper

Fault = Literal["fail", "hang", "corrupt", "truncate", "swap", "lose", "bad", "block_fails", "unreadable"]


class FlakyStore(StoreWrapper):
    """Wraps a store and injects faults, on request or at random with a seed. Without faults it behaves like the inner
    store.

        Args:
            plan: probability of each fault, 0.0 to 1.0: a call fails (`fail`), a put is lost (`lose`), a frame that is
                read has one bit flipped (`corrupt`), is cut short (`truncate`), or is another block's frame (`swap`), or
                `get` returns BAD (`bad`), FAILED (`block_fails`) or UNREADABLE (`unreadable`) for a block.
            seed: seed of the random choices.

        Attributes:
            injected: number of injected faults by name.
    """

    def __init__(self, store: Store, *, seed: int = 0, plan: Mapping[Fault, float] | None = None) -> None:
        super().__init__(store)
        self.blocking, self.local = True, False
        self.injected: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._rates: dict[Fault, float] = dict(plan or {})
        self._failures = 0
        self._error: Callable[[], StoreError] = lambda: StoreUnavailable("injected failure")
        self._seconds = 0.0
        self._other: bytes = b""
        self._bad: set[Name] = set()
        self._dead = 0.0
        self._gate = threading.Event()
        self._gate.set()
        self._changed = threading.Condition()

    def fail_next(self, count: int = 1, error: Callable[[], StoreError] | None = None) -> None:
        """Make the next `count` calls raise StoreUnavailable, or the result of `error`."""
        with self._changed:
            self._failures = count
            if error is not None:
                self._error = error

    def inject(self, fault: Fault, rate: float = 1.0) -> None:
        """Set the probability of a fault; 0.0 ends it, also for the calls that hang."""
        with self._changed:
            self._rates[fault] = rate
            self._changed.notify_all()

    def delay(self, seconds: float) -> None:
        """Make every call wait this long first. If its deadline comes first, the call raises StoreTimeout."""
        self._seconds = seconds

    def stick(self) -> None:
        """Make every call wait until `release`, whatever its deadline: a call that does not return."""
        self._gate.clear()

    def release(self) -> None:
        self._gate.set()

    def spoil(self, names: Iterable[Name]) -> None:
        """Make blocks unreadable until they are deleted. `lookup` and `put` take them for present."""
        self._bad.update(names)

    def lose_nodes(self, share: float) -> None:
        """Behave like a cluster with dead nodes: calls fail for this share of all names, always the same ones."""
        self._dead = share

    def lookup(self, names: Sequence[Name], *, deadline: float) -> int:
        alive = list(itertools.takewhile(self._is_alive, names))
        if names and not alive:
            raise StoreUnavailable("injected: a dead node")
        return super().lookup(alive, deadline=deadline)

    def present(self, names: Sequence[Name], *, deadline: float) -> list[bool]:
        known = super().present(names, deadline=deadline)
        return [there and self._is_alive(name) for name, there in zip(names, known, strict=True)]

    def get(self, names: Sequence[Name], buffers: Sequence[memoryview], *, deadline: float) -> list[int]:
        lengths = super().get(names, buffers, deadline=deadline)
        results = [self._result(*item) for item in zip(names, buffers, lengths, strict=True)]
        if results and all(one == FAILED for one in results):
            raise StoreUnavailable("injected: no block could be read")
        return results

    def delete(self, names: Sequence[Name], *, deadline: float) -> int:
        count = super().delete(names, deadline=deadline)
        self._bad.difference_update(names)
        return count

    def _is_alive(self, name: Name) -> bool:
        return zlib.crc32(name) / 2**32 >= self._dead

    def _result(self, name: Name, buffer: memoryview, length: int) -> int:
        if not self._is_alive(name) or self._happens("block_fails"):
            return FAILED
        if length > 0 and self._happens("unreadable"):
            return UNREADABLE
        if length > 0 and (name in self._bad or self._happens("bad")):
            return BAD
        return self._alter(buffer, length)

    def put(self, frames: Sequence[Frame], *, deadline: float) -> int:
        self.before_call(deadline)
        if self._happens("lose"):
            return len(frames)
        if frames:
            self._other = bytes(frames[-1].data)
        return self.inner.put([one for one in frames if self._is_alive(one.name)], deadline=deadline)

    def before_call(self, deadline: float) -> None:
        self._gate.wait()
        left = time_left(deadline)
        if self._happens("hang"):
            with self._changed:
                self._changed.wait_for(lambda: not self._rates["hang"], left)
            raise StoreTimeout("injected hang")
        if self._seconds:
            self.injected["delay"] += 1
            time.sleep(min(left, self._seconds))
            if left <= self._seconds:
                raise StoreTimeout("injected delay until the deadline")
        with self._changed:
            requested = self._failures > 0
            self._failures -= requested
        if requested:
            self.injected["fail"] += 1
        if requested or self._happens("fail"):
            raise self._error()

    def _happens(self, fault: Fault) -> bool:
        """Decide whether to inject a fault now, and count it."""
        rate = self._rates.get(fault, 0.0)
        with self._changed:
            hit = rate > 0.0 and self._random.random() < rate
        if hit:
            self.injected[fault] += 1
        return hit

    def _alter(self, buffer: memoryview, length: int) -> int:
        """Apply faults to a frame of `length` bytes that was read into `buffer`. Returns its new length."""
        if length <= 0:
            return length
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
