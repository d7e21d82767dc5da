"""Another instance as a store: questions that wait for an answer, and the thread that gives one."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from foreword.blocks.layout import NAME_BYTES
from foreword.errors import ProtocolViolation, TransferError, TransferRefused, TransferTimeout
from foreword.transfer.link import Received
from foreword.transfer.messages import (
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
from foreword.transfer.service import Service

if TYPE_CHECKING:
    from foreword.transfer.connection import Connection

log = logging.getLogger("foreword.transfer")
_GROUP: Final = 64


class _Fetch:
    """One question. Buffers are written under `lock`, and only while nobody has given up."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
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
        """Frames that came, into the buffers beside their names. Raises ProtocolViolation."""
        with self.lock:
            if self.done.is_set():
                return
            if message.first != self.answered or message.first + len(message.lengths) > len(self.buffers):
                raise ProtocolViolation("frames for other names than were asked for")
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


class Fetches:
    """The questions of one connection that wait for an answer."""

    def __init__(self) -> None:
        self._open: dict[bytes, _Fetch] = {}
        self._lock = threading.Lock()
        self._error: TransferError | None = None

    def begin(self, number: bytes, fetch: _Fetch) -> None:
        with self._lock:
            if self._error is not None:
                raise self._error
            self._open[number] = fetch

    def end(self, number: bytes) -> None:
        with self._lock:
            self._open.pop(number, None)

    def got(self, received: Received) -> bool:
        """Take an answer; False if it is none of these questions'. Raises ProtocolViolation."""
        with self._lock:
            fetch = self._open.get(received.head.transfer)
        message = received.message
        if fetch is None:
            if isinstance(message, Located | Frames):
                received.payload.release()  # the question was given up
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
                raise ProtocolViolation(f"a {type(message).__name__} in answer to a question")
        return True

    def fail(self, error: TransferError) -> None:
        """The connection ended."""
        with self._lock:
            self._error = error
            fetches = list(self._open.values())
        for fetch in fetches:
            fetch.finish(error)


def _ask(connection: Connection, fetches: Fetches, message: Locate | Get, fetch: _Fetch, deadline: float) -> None:
    number = secrets.token_bytes(ID_BYTES)
    fetches.begin(number, fetch)
    try:
        connection.post(message, number)
        fetch.done.wait(max(deadline - time.monotonic(), 0))
        fetch.finish(TransferTimeout("the peer did not answer in time"))
        if fetch.error is not None:
            raise fetch.error
    finally:
        fetches.end(number)


def locate(connection: Connection, fetches: Fetches, names: Sequence[bytes], deadline: float) -> int:
    if not names:
        return 0
    fetch = _Fetch(())
    _ask(connection, fetches, Locate(join_keys(names)), fetch, deadline)
    return min(fetch.count, len(names))


def read_frames(
    connection: Connection, fetches: Fetches, names: Sequence[bytes], buffers: Sequence[memoryview], deadline: float
) -> list[int]:
    if not names:
        return []
    fetch = _Fetch(buffers)
    message = Get(join_keys(names), max(map(len, buffers)), max(deadline - time.monotonic(), 0))
    _ask(connection, fetches, message, fetch, deadline)
    return fetch.lengths


def answer(connection: Connection, service: Service, transfer: bytes, message: Locate | Get, patience: float) -> None:
    """Answer a question; on a thread that may wait. Whatever the service raises is a refusal."""
    try:
        names = split_keys(message.names, NAME_BYTES)
        if isinstance(message, Locate):
            count = service.locate(names, time.monotonic() + patience)
            connection.post(Located(count), transfer)
        else:
            _send_frames(connection, service, transfer, names, message, min(message.seconds, patience))
    except TransferError as error:
        connection.post(Refuse(Reason.FAILED, error.message[:2000]), transfer)
    except Exception as error:  # the edge of this room: whatever a service raises is a refusal
        log.exception("the service failed to answer a peer")
        connection.post(Refuse(Reason.FAILED, f"the service failed: {type(error).__name__}"), transfer)


def _send_frames(
    connection: Connection, service: Service, transfer: bytes, names: list[bytes], message: Get, patience: float
) -> None:
    deadline = time.monotonic() + patience
    done = 0
    for batch in service.get(names, message.longest, deadline):
        for group in _groups(batch, connection.largest):
            _send_group(connection, transfer, done, group, deadline)
            done += len(group)
    if done < len(names):
        missing: list[Buffer | None] = [None] * (len(names) - done)
        _send_group(connection, transfer, done, missing, deadline)


def _groups(batch: Sequence[Buffer | None], largest: int) -> list[list[Buffer | None]]:
    """The batch in pieces that fit into one message each; a frame that never does counts as missing."""
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


def _send_group(
    connection: Connection, transfer: bytes, first: int, group: Sequence[Buffer | None], deadline: float
) -> None:
    """Send frames and wait until they left: their memory is used again."""
    message = Frames(first, tuple(0 if frame is None else len(frame) for frame in group))
    buffers = [frame for frame in group if frame is not None]
    if not buffers:
        connection.post(message, transfer)
        return
    sent = threading.Event()
    left = max(deadline - time.monotonic(), 0)
    if not connection.put(message, transfer, buffers, sent.set, left, lambda: time.monotonic() >= deadline):
        raise TransferTimeout("the peer takes no frames")
    # It comes: the writer sends it, drops it, or the connection ends; all of them within the link's time limit.
    sent.wait()
