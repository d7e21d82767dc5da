"""KV that leaves: blocks are held until the other side has them, and a thread per connection sends them.

The engine's thread only says what is ready (`Lanes.put`); it never copies and never waits for a peer. KV of a position never
changes once it is written, so what was queued is read when the link has room for it, while the blocks are held.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from foreword.blocks import PrefixCache
from foreword.blocks.layout import Layout
from foreword.errors import TransferError
from foreword.transfer.channel import Channel
from foreword.transfer.messages import Buffer, KVPart, Reason
from foreword.transfer.parts import split
from foreword.transfer.transfers import KVSource

log = logging.getLogger(__name__)

_WAIT: Final = 30.0
_IDLE: Final = 20.0


class Port(Protocol):
    """The paged tensors (`engine.kv_port.KVPort`)."""

    layout: Layout
    position: dict[int, int]

    @property
    def last_layer(self) -> int: ...
    def mark(self) -> Any: ...
    def read(self, part: KVPart, blocks: Sequence[int], mark: Any = None) -> list[Buffer]: ...
    def write(self, part: KVPart, blocks: Sequence[int], payload: memoryview, mark: Any = None) -> None: ...


@dataclass(frozen=True, slots=True)
class Ready:
    """KV that may be sent: `tokens` tokens in `blocks`, the sequence's from number `first` on; layers `[low, high)`."""

    first: int
    blocks: Sequence[int]
    tokens: int
    keys: Sequence[bytes]
    low: int
    high: int
    mark: Any = None

    def followed_by(self, other: Ready) -> bool:
        """Whether the other one is the next layers of the same blocks."""
        same = other.first == self.first and other.tokens == self.tokens
        return same and other.low == self.high


class Outgoing:
    """One transfer's sending side.

    The engine's thread holds blocks and queues; the lane's thread sends; the connection's threads report. The blocks are given
    back when the transfer has ended *and* nothing of them is being read any more: a part that is torn because its block was
    used again could otherwise still arrive, before the word that the transfer is over.

    Args:
        release: called once, from any thread, when the blocks may go back.
    """

    def __init__(self, source: KVSource, port: Port, release: Callable[[Outgoing], None]) -> None:
        self.source = source
        self.port = port
        self.held: list[int] = []
        self.bytes = self.hidden_bytes = self.parts = 0
        self.started = time.monotonic()
        self.computed_at: float | None = None
        self._release = release
        self._lock = threading.Condition()
        self._flying = 0
        self._over = False

    def hold(self, cache: PrefixCache, blocks: Sequence[int]) -> None:
        """Refer to blocks until the end. On the engine's thread."""
        cache.pool.share(blocks)
        self.held += blocks

    @property
    def over(self) -> bool:
        return self._over

    def end(self) -> None:
        """The transfer has ended. More calls do nothing."""
        with self._lock:
            settled = self._flying == 0 and not self._over
            self._over = True
            self._lock.notify_all()
        if settled:
            self._release(self)

    def take_off(self) -> bool:
        """Something of it is queued; False if it is too late."""
        with self._lock:
            self._flying += not self._over
            return not self._over

    def land(self) -> None:
        """It was sent, or will not be."""
        with self._lock:
            self._flying -= 1
            self._lock.notify_all()
            settled = self._over and self._flying == 0
        if settled:
            self._release(self)

    def wait_sent(self, timeout: float) -> bool:
        """On the lane's thread, in a job: wait until everything before it has been sent."""
        with self._lock:
            return self._lock.wait_for(lambda: self._flying <= 1 or self._over, timeout)

    def send(self, ready: Ready) -> None:
        """On the lane's thread. A transfer that ends meanwhile says so to the service."""
        layout, size = self.port.layout, self.port.layout.block_size
        largest = min(self.source.channel.largest, 1 << 20)
        layers = range(ready.low, ready.high)
        for part in split(layout, ready.tokens, ready.keys, first_block=ready.first, layers=layers, target=largest):
            if self._over:
                return
            start = part.first_block - ready.first
            blocks = ready.blocks[start : start + part.blocks]
            assert part.tokens <= len(blocks) * size
            self._send_part(part, self.port.read(part, blocks, ready.mark))

    def _send_part(self, part: KVPart, buffers: list[Buffer]) -> None:
        size = sum(map(len, buffers))

        def sent() -> None:
            if not self._over:
                self.bytes += size
                self.parts += 1
                self.hidden_bytes += size if self.computed_at is None else 0
            self.land()

        if not self.take_off():
            return
        try:
            if not self.source.send(part, buffers, sent=sent, wait=_WAIT):
                self.source.cancel(Reason.DEADLINE, f"the peer took nothing for {_WAIT:g} s")
        except TransferError:
            return  # it has ended; `ended` says why


class Lane:
    """What is to be sent over one connection, in order, on a thread of its own that ends when there is nothing to do."""

    def __init__(self, done: Callable[[Lane], bool]) -> None:
        self._jobs: deque[tuple[Outgoing, Ready | Callable[[], None]]] = deque()
        self._changed = threading.Condition()
        self._done = done
        threading.Thread(target=self._run, name="foreword-send-kv", daemon=True).start()

    @property
    def empty(self) -> bool:
        return not self._jobs

    def put(self, outgoing: Outgoing, job: Ready | Callable[[], None]) -> None:
        with self._changed:
            self._jobs.append((outgoing, job))
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: self._jobs, _IDLE) and self._done(self):
                    return
                if not self._jobs:
                    continue
                outgoing, job, count = self._next()
            try:
                if isinstance(job, Ready):
                    outgoing.send(job)
                elif not outgoing.over:
                    job()
            except TransferError:
                pass  # it ended a moment ago
            except Exception:  # the edge of a thread that serves many transfers
                log.exception("sending KV failed")
                outgoing.source.cancel(Reason.FAILED, "sending KV failed")
            finally:
                for _ in range(count):
                    outgoing.land()

    def _next(self) -> tuple[Outgoing, Ready | Callable[[], None], int]:
        """The next job; layers of the same blocks that waited together go together."""
        outgoing, job = self._jobs.popleft()
        count = 1
        while self._jobs and isinstance(job, Ready):
            other, following = self._jobs[0]
            if other is not outgoing or not isinstance(following, Ready) or not job.followed_by(following):
                break
            job = Ready(job.first, job.blocks, job.tokens, job.keys, job.low, following.high, following.mark)
            self._jobs.popleft()
            count += 1
        return outgoing, job, count


class Lanes:
    """A lane per connection, so that a slow peer holds up nobody else's transfers."""

    def __init__(self) -> None:
        self._lanes: dict[Channel, Lane] = {}
        self._lock = threading.Lock()

    def put(self, outgoing: Outgoing, job: Ready | Callable[[], None]) -> None:
        """Queue KV, or a call that comes after everything before it. Nothing if the transfer is over."""
        if not outgoing.take_off():
            return
        connection = outgoing.source.channel
        with self._lock:
            lane = self._lanes.get(connection)
            if lane is None:
                lane = self._lanes[connection] = Lane(lambda lane: self._retire(connection, lane))
            lane.put(outgoing, job)

    def _retire(self, connection: Channel, lane: Lane) -> bool:
        # Not while somebody is about to put: they hold the lock, then the lane's.
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if not lane.empty:
                return False
            self._lanes.pop(connection, None)
            return True
        finally:
            self._lock.release()
