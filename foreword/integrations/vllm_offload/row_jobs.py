"""Moves blocks between rows of memory and stores, in jobs that always end.

vLLM's offloading keeps blocks in rows of host memory. It pins a row until the job that reads or writes it has ended, so a job
needs no copy of its own before its turn, and the rows that wait are what the queue holds. The thread that asks for a job only
appends to a list. A row gets a block only after the whole frame was verified.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from foreword.offload.writer import WRITE_TIMEOUT
from foreword.store.background import background_thread
from foreword.store.base import Name
from foreword.store.frame import HEADER_BYTES, RAW, Frame, Header, seal
from foreword.store.tier import used_once
from foreword.store.tiered import TieredStore, TierSearch

logger = logging.getLogger("vllm.foreword")

Rows = np.ndarray[Any, np.dtype[np.uint8]]
_LOADERS: Final = 4  # so that a load from a tier that hangs does not delay those of others
_BATCH_BYTES: Final = 8 << 20  # of frames in memory per thread, but at least one frame
_NICE: Final = 5


@dataclass(frozen=True, slots=True)
class EndedJob:
    """A job that has ended. `kept`: for each block whether it was saved, or loaded. `seconds`: since it was asked for."""

    number: int
    kept: Sequence[bool]
    seconds: float


@dataclass(slots=True, eq=False)
class _Job:
    number: int
    rows: Sequence[int]
    names: Sequence[Name]
    headers: Sequence[Header]  # of a save
    epoch: int  # of `RowJobs.drain`
    kept: list[bool]
    began: float = field(default_factory=time.monotonic)


class RowJobs:
    """See the module. Thread-safe.

    Args:
        rows: `[count, bytes]`, uint8; a row has one block.
        queue_bytes: of rows that may wait to be saved, but at least one row. Of a job without room for all of it the start is
            saved.
        load_timeout: seconds after which a load ends with what it has.

    Attributes:
        dropped: blocks that were not saved because the queue was full, or was ended.
    """

    def __init__(
        self,
        store: TieredStore,
        rows: Rows,
        queue_bytes: int,
        load_timeout: float,
        unwritten: Mapping[int, Sequence[slice]] = MappingProxyType({}),
    ) -> None:
        self._store = store
        self._unwritten = unwritten
        self._rows: Rows | None = rows
        self._row_bytes = int(rows.shape[1])
        self._most = max(queue_bytes // self._row_bytes, 1)
        self._batch = max(_BATCH_BYTES // (self._row_bytes + HEADER_BYTES), 1)
        self._load_timeout = load_timeout
        self._changed = threading.Condition()
        self._loads: deque[_Job] = deque()
        self._saves: deque[_Job] = deque()
        self._running: set[_Job] = set()
        self._waiting = 0  # rows of saves that have not ended
        self._copying = 0
        self._epoch = 0
        self._closing = False
        self._ended: list[EndedJob] = []
        self.dropped = 0
        loads = [background_thread(partial(self._run, self._loads, self._load), "load") for _ in range(_LOADERS)]
        save = background_thread(partial(self._run, self._saves, self._save), "save", nice=_NICE)
        self._threads = [save, *loads]

    @property
    def queued_bytes(self) -> int:
        """Bytes of the rows that are pinned for saves."""
        with self._changed:
            return self._waiting * self._row_bytes

    def save(self, number: int, headers: Sequence[Header], rows: Sequence[int]) -> None:
        """Save the blocks in these rows, in chain order."""
        with self._changed:
            room = 0 if self._closing else self._most - self._waiting
            taken = min(len(rows), max(room, 0))
            self.dropped += len(rows) - taken
            job = self._job(number, rows, [one.name for one in headers[:taken]], headers[:taken])
            self._waiting += taken
            self._queue(self._saves, job)

    def load(self, number: int, names: Sequence[Name], rows: Sequence[int]) -> None:
        """Load blocks into these rows."""
        with self._changed:
            self._queue(self._loads, self._job(number, rows, () if self._closing else names))

    def _job(self, number: int, rows: Sequence[int], names: Sequence[Name], headers: Sequence[Header] = ()) -> _Job:
        return _Job(number, rows, names, headers, self._epoch, [False] * len(rows))

    def _queue(self, queue: deque[_Job], job: _Job) -> None:
        if not job.names:
            self._ended.append(EndedJob(job.number, job.kept, 0.0))
            return
        queue.append(job)
        self._changed.notify_all()

    def take_ended(self) -> list[EndedJob]:
        """The jobs that have ended since the last call."""
        with self._changed:
            ended, self._ended = self._ended, []
            return ended

    def drain(self) -> None:
        """End all jobs: those that wait without a copy, and running ones after what they copy now. When this returns, no thread
        reads or writes a row, and `take_ended` has them all."""
        with self._changed:
            self._cancel()
            self._changed.wait_for(lambda: not self._running)

    def close(self, timeout: float) -> bool:
        """Write what waits, for at most `timeout` seconds, and drop the rest. When this returns, no row is in use. False if
        blocks were dropped."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            written = self._changed.wait_for(lambda: not self._waiting, timeout)
            self._cancel()
            # A call of a store that hangs has buffers of its own; what it brings is not copied any more.
            self._changed.wait_for(lambda: not self._copying)
            self._rows = None
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(0.5)
        return written

    def _cancel(self) -> None:
        self._epoch += 1
        for queue in (self._loads, self._saves):
            while queue:
                job = queue.popleft()
                self._waiting -= len(job.headers)
                self.dropped += len(job.headers)
                self._ended.append(EndedJob(job.number, job.kept, time.monotonic() - job.began))
        self._changed.notify_all()

    # Threads

    def _run(self, queue: deque[_Job], work: Callable[[_Job], None]) -> None:
        while (job := self._take(queue)) is not None:
            try:
                work(job)
            except Exception:  # stores fail with a StoreError, which the tier counts; this thread outlives all else
                logger.exception("Foreword: blocks of an offloading job were not moved")
            finally:
                self._end(job)

    def _take(self, queue: deque[_Job]) -> _Job | None:
        with self._changed:
            self._changed.wait_for(lambda: queue or self._rows is None)
            if not queue:
                return None
            job = queue.popleft()
            self._running.add(job)
            return job

    def _end(self, job: _Job) -> None:
        with self._changed:
            self._running.discard(job)
            self._waiting -= len(job.headers)
            self._ended.append(EndedJob(job.number, job.kept, time.monotonic() - job.began))
            self._changed.notify_all()

    def _load(self, job: _Job) -> None:
        deadline = job.began + self._load_timeout
        for low in range(0, len(job.names), self._batch):
            if job.epoch != self._epoch or time.monotonic() >= deadline:
                return
            names = job.names[low : low + self._batch]
            buffers = [self._buffer() for _ in names]
            found = self._store.fetch(names, buffers, deadline=deadline, on_late=used_once)
            for number, one in enumerate(found, low):
                if one is not None and self._fits(one.frame):
                    payload = np.frombuffer(one.frame.payload, np.uint8)
                    job.kept[number] = self._copy(job.rows[number], payload, into_row=True)

    def _fits(self, frame: Frame) -> bool:
        return frame.header.codec == RAW and len(frame.payload) == self._row_bytes

    def _save(self, job: _Job) -> None:
        for low in range(0, len(job.headers), self._batch):
            chosen = self._absent(job, range(low, min(low + self._batch, len(job.headers))))
            frames = []
            for number in chosen:
                buffer = self._buffer()
                row = np.frombuffer(buffer, np.uint8)
                if job.epoch != self._epoch or not self._copy(job.rows[number], row):
                    with self._changed:
                        self.dropped += len(job.headers) - low
                    return
                for part in self._unwritten.get(job.headers[number].group, ()):
                    row[part] = 0
                frames.append(seal(job.headers[number], buffer))
            kept = self._store.put(frames, deadline=time.monotonic() + WRITE_TIMEOUT) if frames else 0
            for number in chosen[:kept]:  # stores keep prefixes
                job.kept[number] = True

    def _absent(self, job: _Job, batch: range) -> list[int]:
        """The blocks of a batch that are to be written. Only a single tier says by what it knows itself that it has a block:
        what a fast tier has, a slower one may have evicted."""
        if len(self._store.tiers) > 1:
            return list(batch)
        search = TierSearch(time.monotonic() + WRITE_TIMEOUT)
        places = self._store.find(job.names[batch.start : batch.stop], search=search, inline=True)
        for number, place in zip(batch, places, strict=True):
            job.kept[number] = place >= 0
        return [number for number in batch if not job.kept[number]]

    def _buffer(self) -> memoryview:
        return memoryview(bytearray(self._row_bytes + HEADER_BYTES))

    def _copy(self, row: int, other: Rows, *, into_row: bool = False) -> bool:
        """Copy a row to the start of a buffer, or a payload into a row. False once the rows are not to be used any more."""
        with self._changed:
            if self._rows is None:
                return False
            self._copying += 1
            rows = self._rows
        try:
            if into_row:
                np.copyto(rows[row], other)
            else:
                np.copyto(other[: self._row_bytes], rows[row])
        finally:
            del rows
            with self._changed:
                self._copying -= 1
                self._changed.notify_all()
        return True
