"""The connector on a device that a test makes of the host's memory: the copies, checksums and streams of `store.direct` under a
vLLM whose model computes on a processor. Triton's interpreter runs the kernels; nothing else is replaced.

vLLM's CPU build computes on its own thread, which is the stream that computes here: work in it is done when it is queued, and a
wait holds the thread up. Every other stream is a thread, which runs its work later.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Hashable
from functools import partial

from vllm_patient import PatientConnector
from vllm_waits import WITHIN

from foreword.integrations.vllm import worker_side
from foreword.offload.device import Event, Stream
from foreword.offload.staging import StagingArena


class HostEvent:
    """A point in a stream."""

    def __init__(self) -> None:
        self._reached = threading.Event()

    def reach(self) -> None:
        self._reached.set()

    def synchronize(self) -> None:
        assert self._reached.wait(WITHIN), "a stream does not get there"


class HostDevice:
    """The `Queues` of the host as a device. One thing runs at a time, as the interpreter demands, in any order of the streams.

    Attributes:
        work: how much has been queued in each kind of stream.
        open: while it is not set, streams that copy stop before their next work.
    """

    def __init__(self) -> None:
        self.work = dict.fromkeys(Stream, 0)
        self.open = threading.Event()
        self.open.set()
        self._busy = threading.Lock()
        self._starting = threading.Lock()
        self._streams: dict[Hashable, queue.SimpleQueue[Callable[[], object]]] = {}

    def submit(self, stream: Stream, work: Callable[[], object]) -> None:
        self.work[stream] += 1
        if stream is Stream.COMPUTE:
            with self._busy:
                work()
        else:
            self._queue(stream).put(partial(self._do, work))

    def record(self, stream: Stream) -> Event:
        event = HostEvent()
        if stream is Stream.COMPUTE:
            event.reach()
        else:
            self._queue(stream).put(event.reach)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        if stream is Stream.COMPUTE:
            event.synchronize()
        else:
            self._queue(stream).put(event.synchronize)

    def _do(self, work: Callable[[], object]) -> None:
        assert self.open.wait(WITHIN), "the streams stay stopped"
        with self._busy:
            work()

    def _queue(self, stream: Stream) -> queue.SimpleQueue[Callable[[], object]]:
        key = (stream, threading.get_ident()) if stream is Stream.LOAD else stream
        with self._starting:
            if key not in self._streams:
                self._streams[key] = queue.SimpleQueue()
                threading.Thread(target=self._run, args=(self._streams[key],), daemon=True).start()
            return self._streams[key]

    @staticmethod
    def _run(works: queue.SimpleQueue[Callable[[], object]]) -> None:
        while True:
            works.get()()


device = HostDevice()
worker_side.StagingArena = partial(StagingArena, queues=device)  # type: ignore[attr-defined, assignment]


class DirectConnector(PatientConnector):
    """The connector on that device."""


ForewordConnector = DirectConnector
