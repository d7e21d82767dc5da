"""Reading another instance like a store: the client's requests that wait for an answer, and the server that answers them."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Final

from foreword.blocks.layout import NAME_BYTES
from foreword.store.background_jobs import BackgroundJobs
from foreword.transfer.channel import Channel
from foreword.transfer.errors import ProtocolViolation, TransferError, TransferRefused, TransferTimeout
from foreword.transfer.link import Received
from foreword.transfer.transfers import TransferService
from foreword.transfer.wire_format import (
    ID_BYTES,
    Buffer,
    Frames,
    Get,
    Locate,
    Located,
    Reason,
    Refuse,
    join_keys,
    split_keys,
)

log = logging.getLogger("foreword.transfer")
_GROUP: Final = 64
_MAX_REQUESTS: Final = 64
_THREADS_PER_PEER: Final = 2
# Frames must leave within these seconds, plus what all that is queued takes at this rate in bytes per second.
_PATIENCE: Final = 2.0
_SLOWEST: Final = 8 << 20


class _Fetch:
    """A request. Buffers are written under `lock`, and only before the request is done."""

    def __init__(self, buffers: Sequence[memoryview] = ()) -> None:
        self.buffers = buffers
        self.lengths = [0] * len(buffers)
        self.answered = 0
        self.count = 0
        self.error: TransferError | None = None
        self.done = threading.Event()
        self.lock = threading.Lock()

    def finish(self, error: TransferError | None = None) -> None:
        with self.lock:
            if not self.done.is_set():
                self.error = error
                self.done.set()

    def copy(self, message: Frames, view: memoryview) -> None:
        """Copy received frames into the buffers of their names. Raises ProtocolViolation."""
        with self.lock:
            if self.done.is_set():
                return
            if message.first != self.answered or message.first + len(message.lengths) > len(self.buffers):
                raise ProtocolViolation("frames for other names than were requested")
            if sum(message.lengths) != len(view):
                raise ProtocolViolation("frames of other lengths than were announced")
            start = 0
            for number, length in enumerate(message.lengths, start=message.first):
                if 0 < length <= len(self.buffers[number]):
                    self.buffers[number][:length] = view[start : start + length]
                    self.lengths[number] = length
                start += length
            self.answered += len(message.lengths)
            if self.answered == len(self.buffers):
                self.done.set()


class FetchClient:
    """Sends requests on one connection and waits for their answers. Thread-safe.

    Each step on `_waiting` is one call of the dictionary, whose keys are bytes: no lock is needed. A request is entered before
    it looks whether the connection has ended, and `fail` says so before it looks for requests: one of the two sees the other.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._waiting: dict[bytes, _Fetch] = {}
        self._error: TransferError | None = None

    def locate(self, names: Sequence[bytes], deadline: float) -> int:
        if not names:
            return 0
        fetch = _Fetch()
        self._request(Locate(join_keys(names)), fetch, deadline)
        return min(fetch.count, len(names))

    def get(self, names: Sequence[bytes], buffers: Sequence[memoryview], deadline: float) -> list[int]:
        if not names:
            return []
        fetch = _Fetch(buffers)
        seconds = max(deadline - time.monotonic(), 0)
        self._request(Get(join_keys(names), max(map(len, buffers)), seconds), fetch, deadline)
        return fetch.lengths

    def _request(self, message: Locate | Get, fetch: _Fetch, deadline: float) -> None:
        number = secrets.token_bytes(ID_BYTES)
        self._waiting[number] = fetch
        try:
            if self._error is not None:
                raise self._error
            self._channel.post(message, number)
            fetch.done.wait(max(deadline - time.monotonic(), 0))
            fetch.finish(TransferTimeout("the peer did not answer in time"))
            if fetch.error is not None:
                raise fetch.error
        finally:
            self._waiting.pop(number, None)

    def got(self, received: Received) -> bool:
        """Handle an answer; False if it belongs to none of these requests. Raises ProtocolViolation."""
        fetch = self._waiting.get(received.head.transfer)
        message = received.message
        if fetch is None:
            if isinstance(message, Located | Frames):
                received.payload.release()  # the client stopped waiting
            return False
        with received.payload as view:
            if isinstance(message, Frames):
                fetch.copy(message, view)
            elif isinstance(message, Located):
                fetch.count = message.count
                fetch.finish()
            elif isinstance(message, Refuse):
                fetch.finish(TransferRefused(message.message or "the peer refused", reason=message.reason))
            else:
                raise ProtocolViolation(f"a {type(message).__name__} in answer to a fetch")
        return True

    def fail(self, error: TransferError) -> None:
        """The connection ended: every request fails."""
        self._error = error
        for fetch in self._waiting.copy().values():
            fetch.finish(error)


class FetchServer:
    """Answers the requests of all peers, on threads that may wait.

    Args:
        patience: seconds that one request may take.
        lock: the endpoint's; held for assignments only.
    """

    def __init__(
        self, service: TransferService, workers: BackgroundJobs, patience: float, lock: threading.Condition
    ) -> None:
        self._service = service
        self._workers = workers
        self._patience = patience
        # Requests of each channel that wait, and how many are being answered.
        self._waiting: dict[Channel, deque[tuple[bytes, Locate | Get]]] = {}
        self._busy: Counter[Channel] = Counter()
        self._open = 0  # requests that wait or are being answered
        self._lock = lock

    def serve(self, channel: Channel, transfer: bytes, message: Locate | Get) -> None:
        """Answer a request on another thread, or refuse it at once if there are too many."""
        with self._lock:
            full = self._open >= _MAX_REQUESTS
            if not full:
                self._open += 1
                if self._busy[channel] >= _THREADS_PER_PEER:
                    self._waiting.setdefault(channel, deque()).append((transfer, message))
                    return
                self._busy[channel] += 1
        if full:
            channel.post(Refuse(Reason.FULL, "too many requests at once"), transfer)
            return
        try:
            self._workers.submit(self._serve_all, channel, transfer, message)
        except RuntimeError:  # the endpoint is closed
            self._end()
            channel.post(Refuse(Reason.DRAINING, "the instance stops"), transfer)

    def _serve_all(self, channel: Channel, transfer: bytes, message: Locate | Get) -> None:
        """Answer a request, then those of the same peer that have waited for this thread."""
        following: tuple[bytes, Locate | Get] | None = (transfer, message)
        while following is not None:
            self._work(channel, *following)
            following = self._next(channel)

    def _end(self) -> None:
        with self._lock:
            self._open -= 1

    def _next(self, channel: Channel) -> tuple[bytes, Locate | Get] | None:
        with self._lock:
            waiting = self._waiting.get(channel)
            if waiting:
                return waiting.popleft()
            self._waiting.pop(channel, None)
            self._busy[channel] -= 1
            if not self._busy[channel]:
                del self._busy[channel]
            return None

    def _work(self, channel: Channel, transfer: bytes, message: Locate | Get) -> None:
        if not channel.alive:
            self._end()
            return
        try:
            self._answer(channel, transfer, message)
        except TransferError as error:
            channel.post(Refuse(Reason.FAILED, error.message[:2000]), transfer)
        except Exception as error:  # the edge of this package: a service may raise anything
            log.exception("the service failed to answer a peer")
            channel.post(Refuse(Reason.FAILED, f"the service failed: {type(error).__name__}"), transfer)
        finally:
            self._end()

    def _answer(self, channel: Channel, transfer: bytes, message: Locate | Get) -> None:
        names = split_keys(message.names, NAME_BYTES)
        if isinstance(message, Locate):
            channel.post(Located(self._service.locate(names, time.monotonic() + self._patience)), transfer)
            return
        deadline = time.monotonic() + min(message.seconds, self._patience)
        done = 0
        for batch in self._service.get(names, message.longest, deadline):
            for group in _groups(batch, channel.largest):
                _send_group(channel, transfer, done, group, deadline)
                done += len(group)
        if done < len(names):
            _send_group(channel, transfer, done, [None] * (len(names) - done), deadline)


def _groups(batch: Sequence[Buffer | None], largest: int) -> list[list[Buffer | None]]:
    """Split a batch into groups that fit into one message each; a frame that fits into none counts as missing."""
    groups: list[list[Buffer | None]] = [[]]
    size = 0
    for frame in batch:
        length = len(frame) if frame is not None else 0
        if length > largest:
            frame, length = None, 0
        if size + length > largest or len(groups[-1]) >= _GROUP:
            groups.append([])
            size = 0
        groups[-1].append(frame)
        size += length
    return groups


def _send_group(channel: Channel, transfer: bytes, first: int, group: Sequence[Buffer | None], deadline: float) -> None:
    """Send frames and wait until they have left: their memory is reused."""
    message = Frames(first, tuple(0 if frame is None else len(frame) for frame in group))
    buffers = [frame for frame in group if frame is not None]
    if not buffers:
        channel.post(message, transfer)
        return
    sent = threading.Event()
    size = sum(map(len, buffers))
    patience = _PATIENCE + (channel.queued_bytes + size) / _SLOWEST
    left = min(max(deadline - time.monotonic(), 0), patience)
    if not channel.put(message, transfer, buffers, sent.set, left, lambda: time.monotonic() >= deadline):
        raise TransferTimeout("the peer takes no frames")
    if not sent.wait(patience):
        channel.abort(TransferTimeout("the peer takes frames too slowly"))
        sent.wait()  # the link is closed: the writer drops the message
