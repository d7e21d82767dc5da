"""KV send and KV receive, for prompts and for migrations.

Send: blocks are held until the receiver has their KV, and one thread per connection sends them. The engine's thread only queues
KV; it never copies and never waits for a peer. The KV of a position never changes once it is written, so a queued range is read
when the link has room for it, while its blocks are held.

Receive: KV from another instance arrives in blocks that a sequence holds already. The engine's thread begins and closes it, the
connection's reader thread writes what comes. Writing may wait for the device, and no other thread waits for it: `close` sets a
flag, after which no part is begun, and a part that has begun is `writing` into its blocks until its copy is done. They are used
for nothing else meanwhile.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from foreword.engine.sequence import SequenceState
from foreword.events import TransferEnded
from foreword.store.background import background_thread
from foreword.transfer.channel import Channel
from foreword.transfer.errors import TransferError
from foreword.transfer.link import Payload
from foreword.transfer.parts import split
from foreword.transfer.transfers import KVDestination, KVSource
from foreword.transfer.wire_format import Buffer, KVPart, Reason

if TYPE_CHECKING:
    from foreword.disaggregation.kv_view import KVView
    from foreword.engine.loop import EngineCore

log = logging.getLogger(__name__)

# Seconds that a part waits for room in the link.
SEND_WAIT: Final = 30.0
_IDLE_SECONDS: Final = 20.0


@dataclass(frozen=True, slots=True)
class KVRange:
    """KV of `tokens` tokens in `blocks`, from block `first` of the sequence on; layers `[low, high)`.

    Attributes:
        mark: the point in the engine's work after which the KV may be read (`kv_view`).
    """

    first: int
    blocks: Sequence[int]
    tokens: int
    keys: Sequence[bytes]
    low: int = 0
    high: int = 0
    mark: Any = None

    def is_followed_by(self, other: KVRange) -> bool:
        """Whether the other range is the next layers of the same blocks."""
        return (other.first, other.tokens, other.low) == (self.first, self.tokens, self.high)


class KVSend:
    """The KV of one sequence on its way to another instance: a prompt computed for it, or a request that migrates.

    The engine's thread reserves and queues; the queue's thread sends; the connection's threads report. The blocks are given
    back when the transfer has ended *and* none of them is being read: a part read from a reused block could otherwise arrive
    before the message that the transfer is over.

    Attributes:
        next_block: the first block that was not reserved yet.
        computed: the prompt is computed to its end; bytes sent before count as hidden behind the computation.
        pause: seconds in which a request that migrates was not decoded.
    """

    def __init__(self, sender: KVSender, source: KVSource, kind: str, sequence: SequenceState) -> None:
        self.source = source
        self.sequence = sequence
        self.next_block = source.have
        self.bytes = self.hidden_bytes = self.parts = 0
        self.computed = self.finishing = False
        self.pause = 0.0
        self.held: list[int] = []
        self._sender = sender
        self._kind = kind
        self._started = time.monotonic()
        self._changed = sender.changed
        self._awaited = False  # a thread is in `wait_sent`; the other ones wait for jobs, and would wake for nothing
        self._in_flight = 0
        self.over = False  # the transfer has ended

    # On the engine's thread

    def reserve(self, tokens: int) -> KVRange | None:
        """Hold those blocks of the first `tokens` tokens that were not reserved yet. None if there are none."""
        table, size = self.sequence.table, self._sender.view.layout.block_size
        first, stop = self.next_block, -(-tokens // size)
        if stop <= first:
            return None
        self.next_block = stop
        blocks = table.blocks[first:stop]
        self._sender.hold(self, blocks)
        full = tokens // size
        return KVRange(first, blocks, tokens - first * size, table.chain.keys_to(full)[first:full])

    def put(self, kv: KVRange, low: int, high: int) -> None:
        """Queue layers `[low, high)` of a reserved range, which the engine has written by now."""
        self._sender.put(self, replace(kv, low=low, high=high, mark=self._sender.view.mark()))

    def finish(self, result: bytes, tokens: int) -> None:
        """Queue the end of the transfer: `tokens` tokens have KV."""
        self.finishing = True
        self._sender.put(self, lambda: self.source.finish(result, tokens))

    def event(self) -> TransferEnded:
        """How it went. After the end."""
        outcome = "taken" if self.source.reason is None else str(self.source.reason)
        seconds = time.monotonic() - self._started
        counts = (self.bytes, self.parts, seconds, self.hidden_bytes, self.pause)
        return TransferEnded(self._kind, "source", outcome, *counts)

    # From any thread

    def end(self) -> None:
        """The transfer has ended. A second call does nothing."""
        with self._changed:
            unused = self._in_flight == 0 and not self.over
            self.over = True
            self._wake()
        if unused:
            self._sender.released(self)

    def start_job(self) -> bool:
        """Count a job as in flight; False if the transfer has ended."""
        with self._changed:
            self._in_flight += not self.over
            return not self.over

    def end_job(self) -> None:
        """A job was done, or was dropped."""
        with self._changed:
            self._in_flight -= 1
            self._wake()
            unused = self.over and self._in_flight == 0
        if unused:
            self._sender.released(self)

    def _wake(self) -> None:
        """Under the lock."""
        if self._awaited:
            self._changed.notify_all()

    # On the queue's thread

    def wait_sent(self) -> None:
        """In a job: wait until everything queued before it has been sent. Cancels the transfer if that takes too long."""
        with self._changed:
            self._awaited = True
            sent = self._changed.wait_for(lambda: self._in_flight <= 1 or self.over, SEND_WAIT)
            self._awaited = False
        if not sent:
            self._cancel_late()

    def send(self, kv: KVRange) -> None:
        """Send a range. If the transfer ends meanwhile, `ended` reports it to the service."""
        view = self._sender.view
        largest = min(self.source.channel.largest, 1 << 20)
        layers = range(kv.low, kv.high)
        for part in split(view.layout, kv.tokens, kv.keys, first_block=kv.first, layers=layers, target=largest):
            if self.over:
                return
            start = part.first_block - kv.first
            self._send_part(part, view.read(part, kv.blocks[start : start + part.blocks], kv.mark))

    def _send_part(self, part: KVPart, buffers: list[Buffer]) -> None:
        size = sum(map(len, buffers))

        def sent() -> None:
            if not self.over:
                self.bytes += size
                self.parts += 1
                self.hidden_bytes += 0 if self.computed else size
            self.end_job()

        if not self.start_job():
            return
        try:
            if not self.source.send(part, buffers, sent=sent, wait=SEND_WAIT):
                self._cancel_late()
        except TransferError:
            return  # it has ended; `ended` says why

    def _cancel_late(self) -> None:
        self.source.cancel(Reason.DEADLINE, f"the peer took nothing for {SEND_WAIT:g} s")


Job = KVRange | Callable[[], None]


class KVSender:
    """All KV sends of one engine, with a send queue per connection: a slow peer delays its own transfers only.

    Args:
        post: runs work on the engine's thread.

    Attributes:
        changed: of the queues, and of the state of their sends. Held for assignments only.
    """

    def __init__(self, core: EngineCore, view: KVView, post: Callable[[Callable[[], None]], bool]) -> None:
        self.view = view
        self._core = core
        self._post = post
        self._num_holding = 0
        self._queues: dict[Channel, deque[tuple[KVSend, Job]]] = {}
        self.changed = threading.Condition()

    @property
    def holds_blocks(self) -> bool:
        """Blocks are held for receivers."""
        return self._num_holding > 0

    def hold(self, send: KVSend, blocks: Sequence[int]) -> None:
        """Refer to blocks until the end of a send. On the engine's thread."""
        self._num_holding += not send.held
        self._core.cache.pool.share(blocks)
        send.held += blocks

    def released(self, send: KVSend) -> None:
        """A send is over, and none of its blocks is being read. From any thread."""
        self._post(lambda: self._give_back(send))

    def _give_back(self, send: KVSend) -> None:
        if send.held:
            self._num_holding -= 1
            self._core.cache.unpin(send.held)
            send.held = []
        self._core.notify(send.event())

    def put(self, send: KVSend, job: Job) -> None:
        """Queue KV, or a call that follows everything queued before. Does nothing if the transfer is over."""
        if not send.start_job():
            return
        channel = send.source.channel
        with self.changed:
            jobs = self._queues.get(channel)
            if jobs is None:
                jobs = self._queues[channel] = deque()
                background_thread(partial(self._run, channel, jobs), "send-kv")
            jobs.append((send, job))
            self.changed.notify_all()

    def _run(self, channel: Channel, jobs: deque[tuple[KVSend, Job]]) -> None:
        """The thread of one connection; it ends when there was nothing to send for a while."""
        while True:
            with self.changed:
                if not self.changed.wait_for(lambda: jobs, _IDLE_SECONDS):
                    del self._queues[channel]
                    return
                send, job, count = _next(jobs)
            try:
                if isinstance(job, KVRange):
                    send.send(job)
                elif not send.over:
                    job()
            except TransferError:
                pass  # it ended a moment ago
            except Exception:  # the edge of a thread that serves many transfers
                log.exception("sending KV failed")
                send.source.cancel(Reason.FAILED, "sending KV failed")
            finally:
                for _ in range(count):
                    send.end_job()


def _next(jobs: deque[tuple[KVSend, Job]]) -> tuple[KVSend, Job, int]:
    """The next job, and how many queued jobs it stands for: consecutive layers of the same blocks are sent together."""
    send, job = jobs.popleft()
    count = 1
    while jobs and isinstance(job, KVRange):
        other, following = jobs[0]
        if other is not send or not isinstance(following, KVRange) or not job.is_followed_by(following):
            break
        job = replace(job, high=following.high, mark=following.mark)
        jobs.popleft()
        count += 1
    return send, job, count


class KVReceive:
    """The common part of a remote prefill and an incoming migration. With `close`, subclasses are an
    `engine.external_kv.ExternalKV`.

    Args:
        wake: called when a part that nothing waits for any more was written.

    Attributes:
        closed: `close` was called.
        over: nothing more will come.
        writing: a part is being written into the blocks.
        blocks: those that it fills.
    """

    from_store = False

    def __init__(self, view: KVView, wake: Callable[[], object] = lambda: None) -> None:
        self.closed = self.over = self.writing = False
        self._view = view
        self._wake = wake
        # Held for assignments only. No part begins once `closed` or `over` is set, so what was seen as not writing then is not.
        self._lock = threading.Lock()
        self._started = time.monotonic()
        self._bytes = self._parts = 0
        self._held = 0
        self.blocks: Sequence[int] = []
        self._layers: list[int] = []  # per block, a bit for each layer that has come
        self._mark: Any = None

    @property
    def begun(self) -> bool:
        """Whether the request has blocks."""
        return bool(self.blocks)

    @property
    def done(self) -> bool:
        """Nothing more will come, and nothing is written any more."""
        return self.over and not self.writing

    def end(self) -> None:
        """Nothing more will come."""
        with self._lock:
            self.over = True

    def stop(self) -> None:
        """Begin no part from now on. It waits for none that was begun."""
        with self._lock:
            self.closed = True

    def begin(self, keys: Sequence[bytes], held: int, blocks: Sequence[int]) -> None:
        """Write what comes into `blocks`, which follow the first `held` blocks. On the engine's thread."""
        self._started = time.monotonic()
        self._held, self.blocks, self._layers = held, list(blocks), [0] * len(blocks)
        # The engine may still compute with the former content of these blocks.
        self._mark = self._view.mark()

    def part(self, part: KVPart, payload: Payload) -> None:
        """Write a part, unless it is closed. On the connection's thread, which holds no lock."""
        first = part.first_block - self._held
        with payload as kv:
            if not self._begin_part():
                return
            try:
                self._write(part, first, kv)
            finally:
                self._end_part()

    def _wanted(self) -> bool:
        return not (self.closed or self.over)

    def _begin_part(self) -> bool:
        with self._lock:
            self.writing = self._wanted()
            return self.writing

    def _end_part(self) -> None:
        with self._lock:
            self.writing = False
            wanted = self._wanted()
        if not wanted:
            self._wake()

    def _write(self, part: KVPart, first: int, kv: memoryview) -> None:
        if first < 0 or first + part.blocks > len(self.blocks):
            raise TransferError("a part for blocks that were not asked for", reason=str(Reason.CONTENT))
        self._view.write(part, self.blocks[first : first + part.blocks], kv, self._mark)
        self._bytes += len(kv)
        self._parts += 1
        layers = (1 << part.layers) - 1 << part.first_layer
        with self._lock:
            if self.closed:
                return  # what has come was said
            for block in range(first, first + part.tokens // self._view.layout.block_size):
                self._layers[block] |= layers

    def finished(self, destination: KVDestination, result: bytes, tokens: int) -> None:
        """Everything has come. On the connection's thread; the KV may be taken now or later."""
        raise NotImplementedError

    def ended(self, destination: KVDestination) -> None:
        """The transfer is over. From any thread."""
        raise NotImplementedError

    def event(self, kind: str, outcome: str) -> TransferEnded:
        """How it went. After the end."""
        return TransferEnded(kind, "destination", outcome, self._bytes, self._parts, time.monotonic() - self._started)

    def _whole_blocks(self) -> int:
        """Blocks with KV in all layers, from the sequence's first one on."""
        whole = (1 << self._view.last_layer + 1) - 1
        came = next((number for number, layers in enumerate(self._layers) if layers != whole), len(self._layers))
        return self._held + came
