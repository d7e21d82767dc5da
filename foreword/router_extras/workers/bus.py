"""Messages between the workers of a router: a connection from each to each other one, over Unix sockets.

Messages of one worker arrive in their order. They are gathered: those of one turn of the event loop, and others that may wait a
few milliseconds, are one write and one read. Those about requests are handled together, too: code that runs once has left the
processor's caches, and costs as much as for several. They wait for each other a few milliseconds, at most until this worker
places a request that one of them is about to decide.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import struct
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import msgspec
from msgspec import Struct

from foreword.decoders import decode_msgpack
from foreword.router_extras.worker_links import Answers
from foreword.router_extras.workers.supervisor import Seat
from foreword.tasks import background

logger = logging.getLogger(__name__)

_LENGTH: Final = struct.Struct("<I")
# The first bytes of a connection: which worker it is of, and its process.
_HELLO: Final = struct.Struct("<iI")
_RETRY_SECONDS: Final = 0.1
# How long a message that is not urgent may wait for others.
_GATHER_SECONDS: Final = 0.005
# How long messages that may be handled later wait for others, and how many bytes of them.
_HANDLE_SECONDS: Final = 0.005
_MOST_DEFERRED: Final = 1 << 20
# Unread bytes of a worker's messages at another one: with more, the connection ends and begins anew.
_MOST_UNREAD: Final = 64 << 20
_ANSWER_SECONDS: Final = 5.0


class Sent(Struct, frozen=True, array_like=True, tag=0):
    """A request that a worker has placed. `name` is short, and its own."""

    name: int
    model: str
    replica: str
    prefill: str | None
    tokens: int
    reused: int
    computed: int
    session: str | None
    max_output: int | None
    weights: str
    block_size: int
    keys: list[bytes]
    other_keys: list[tuple[tuple[str, int], list[bytes]]]
    public_keys: list[tuple[tuple[str, int], list[bytes]]]
    now: float


class First(Struct, frozen=True, array_like=True, tag=1):
    """The first token of a request has come."""

    name: int
    now: float


class SharedEnd(Struct, frozen=True, array_like=True, tag=2):
    """A request was served."""

    name: int
    now: float
    cached: int | None
    output: int | None
    guessed: bool


class SharedFailure(Struct, frozen=True, array_like=True, tag=3):
    """A request failed, or its client has gone."""

    name: int
    now: float


class Known(Struct, frozen=True, array_like=True, tag=4):
    """A prompt that was sent to a replica, by its bytes."""

    model: str
    owner: bytes
    links: tuple[bytes, ...]
    sizes: tuple[int, ...]
    tokens: int
    replica: str
    now: float
    by_keys: bool


class Told(Struct, frozen=True, array_like=True, tag=5):
    """Something that happens seldom."""

    kind: str
    content: Any


class WorkerQuestion(Struct, frozen=True, array_like=True, tag=6):
    """A question, or something to do before the answer."""

    number: int
    kind: str
    content: Any


class WorkerAnswer(Struct, frozen=True, array_like=True, tag=7):
    """The answer to a question. `failed`: its handler raised."""

    number: int
    content: Any
    failed: bool = False


class _Frame(Struct, frozen=True, array_like=True):
    """Messages that are read together. `later`: all of them may wait. `names`: what a request has that they decide: the end of
    its prompt, its session, or what it asks."""

    later: bool
    names: list[Any]
    messages: msgspec.Raw


Message = Sent | First | SharedEnd | SharedFailure | Known | Told | WorkerQuestion | WorkerAnswer
_encode: Final = msgspec.msgpack.Encoder().encode


class WorkerBus:
    """Runs on the event loop of one worker.

    Args:
        told: gets each message of another worker, with its number.
        asked: answers a question of another worker.
        joined: the first messages to a worker that has just begun to listen.
        gone: a worker has ended, or its connection.
        missed: a worker that still runs has begun its connection anew, so messages of it are lost.
        answer_seconds: how long an answer may take.
        defers: whether messages may be handled later now, because no request waits for what they say.

    Attributes:
        failures: messages and questions that were not handled, because their handler raised.
        known: workers that have said all that they know.
        deferred: messages that wait to be handled, as they came. handled: how often some were handled together.
    """

    def __init__(
        self,
        seat: Seat,
        told: Callable[[int, Message], None],
        asked: Callable[[str, Any], Awaitable[Any]],
        joined: Callable[[], list[Message]],
        gone: Callable[[int], None],
        missed: Callable[[int], None],
        answer_seconds: float = _ANSWER_SECONDS,
        defers: Callable[[], bool] = lambda: False,
    ) -> None:
        self.failures, self.handled, self._answer_seconds, self._defers = 0, 0, answer_seconds, defers
        self._seat, self._told, self._asked, self._joined, self._gone = seat, told, asked, joined, gone
        self._missed = missed
        self._processes: dict[int, int] = {}
        self.known: set[int] = set()
        self._links: dict[int, asyncio.Transport] = {}
        self._waiting: dict[int, tuple[int, asyncio.Future[Any]]] = {}
        self._numbers = itertools.count()
        self._gathered: list[Message] = []
        self._names: list[bytes | str] = []
        self._later = True
        self._timer: asyncio.TimerHandle | None = None
        self.deferred: list[tuple[_Link, msgspec.Raw]] = []
        # The names of `_Frame` of those messages, and the bytes of both.
        self._deciding = set[bytes | str]()
        self._deferred_bytes = 0
        self._handler: asyncio.TimerHandle | None = None
        self._soon = False
        self._tasks: list[asyncio.Task[None]] = []
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        loop, seat = asyncio.get_running_loop(), self._seat
        own = self._path(seat.number)
        own.unlink(missing_ok=True)
        self._server = await loop.create_unix_server(lambda: _Link(self._heard, self._left, self._begun), str(own))
        others = (number for number in range(seat.count) if number != seat.number)
        self._tasks = [background(self._keep(number), f"messages to worker {number}") for number in others]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._handler is not None:
            self._handler.cancel()
        if self._server is not None:
            self._server.close()
        for link in self._links.values():
            link.abort()

    def tell(
        self, message: Message, *, urgent: bool = True, later: bool = False, names: Sequence[bytes | str] = ()
    ) -> None:
        """A message to all others that listen; one that is not urgent may go a few milliseconds later.

        Args:
            later: it may be handled a few milliseconds later, but before a request is placed that has one of the `names`.
        """
        if not self._links:
            return
        self._gathered.append(message)
        self._names += names
        self._later &= later
        if self._soon:
            return
        loop = asyncio.get_running_loop()
        if urgent:
            self._soon = True
            loop.call_soon(self._flush)
        elif self._timer is None:
            self._timer = loop.call_later(_GATHER_SECONDS, self._flush)

    async def ask(self, kind: str, content: Any = None) -> Answers:
        """The answers of all others. Messages to them have arrived by then, and what they told before they answered."""
        self._flush()
        others: dict[int, asyncio.Future[Any]] = {}
        numbers: list[int] = []
        for other, link in list(self._links.items()):
            number, future = next(self._numbers), asyncio.get_running_loop().create_future()
            self._waiting[number] = other, future
            numbers.append(number)
            others[other] = future
            self._write(link, [WorkerQuestion(number, kind, content)])
        try:
            if others:
                await asyncio.wait(others.values(), timeout=self._answer_seconds)
        finally:
            for number in numbers:
                self._waiting.pop(number, None)
        given = {other: one.result() for other, one in others.items() if one.done() and not one.cancelled()}
        answered = {other: one.content for other, one in given.items() if not one.failed}
        everyone = set(range(self._seat.count)) - {self._seat.number}
        return Answers(answered.values(), everyone - answered.keys())

    @property
    def connected(self) -> set[int]:
        """Workers that get messages now; another one gets what is known when it connects."""
        return set(self._links)

    def _path(self, number: int) -> Path:
        return self._seat.folder / f"{number}.sock"

    def _flush(self) -> None:
        """Write what was gathered."""
        self._soon = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._gathered:
            data = _frame(self._gathered, self._names, later=self._later)
            self._gathered, self._names, self._later = [], [], True
            self._write_data(list(self._links.values()), data)

    def _write(self, link: asyncio.Transport, messages: list[Message]) -> None:
        self._write_data([link], _frame(messages))

    @staticmethod
    def _write_data(links: list[asyncio.Transport], data: bytes) -> None:
        for link in links:
            if link.get_write_buffer_size() > _MOST_UNREAD:
                link.abort()
            else:
                link.write(data)

    async def _keep(self, number: int) -> None:
        """Keep a connection to another worker."""
        loop = asyncio.get_running_loop()
        while True:
            ended: asyncio.Future[None] = loop.create_future()
            link = _Link(self._heard, partial(_end, ended), number=number)
            try:
                transport, _ = await loop.create_unix_connection(partial(_same, link), str(self._path(number)))
            except OSError:
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            self._flush()
            transport.write(_HELLO.pack(self._seat.number, os.getpid()) + _frame(self._joined()))
            self._links[number] = transport
            try:
                await ended
            finally:
                del self._links[number]
                transport.abort()
                for asked, (other, future) in list(self._waiting.items()):
                    if other == number:
                        del self._waiting[asked]
                        future.cancel()  # the others' answers count

    def _begun(self, number: int, process: int) -> None:
        if self._processes.get(number) == process:
            self._missed(number)
        self._processes[number] = process

    def hear(self, names: Iterable[bytes | str] | None) -> None:
        """Handle what has arrived now, if some of it decides where a request with one of these names goes; None for any."""
        if names is None or (self._deciding and not self._deciding.isdisjoint(names)):
            self._handle_all()

    def _handle_all(self) -> None:
        deferred, self.deferred, self._deferred_bytes = self.deferred, [], 0
        self._deciding.clear()
        if self._handler is not None:
            self._handler.cancel()
            self._handler = None
        if deferred:
            self.handled += 1
        for link, messages in deferred:
            try:
                found = decode_msgpack(memoryview(messages), list[Message])
            except msgspec.DecodeError:  # what others have told, and the request that hears it, are not at fault
                self.failures += 1
                logger.exception("messages of worker %d cannot be read: their connection ends", link.number)
                link.transport.abort()
                continue
            for one in found:
                self._handle(link, one)

    def _heard(self, link: _Link, frame: _Frame, size: int) -> None:
        if not link.calls:
            self.known.add(link.number)  # the first messages of its connection are all that it knows
        self.deferred.append((link, frame.messages))
        self._deferred_bytes += size
        if not (frame.later and self._defers()) or self._deferred_bytes > _MOST_DEFERRED:
            self._handle_all()
            return
        self._deciding.update(frame.names)
        if self._handler is None:
            self._handler = asyncio.get_running_loop().call_later(_HANDLE_SECONDS, self._handle_all)

    def _handle(self, link: _Link, one: Message) -> None:
        if isinstance(one, WorkerQuestion):
            background(self._answer(link, one), "an answer to another worker")
        elif isinstance(one, WorkerAnswer):
            found = self._waiting.pop(one.number, None)
            if found is not None and not found[1].done():
                found[1].set_result(one)
        else:
            try:
                self._told(link.number, one)
            except Exception:  # one message of many: the connection, and what comes over it, stays
                self.failures += 1
                logger.exception("a message of worker %d was not handled", link.number)

    def _left(self, number: int) -> None:
        self._handle_all()  # what it told before it ended
        self._gone(number)

    async def _answer(self, link: _Link, one: WorkerQuestion) -> None:
        try:
            answer = WorkerAnswer(one.number, await self._asked(one.kind, one.content))
        except Exception:  # the other one waits for an answer
            self.failures += 1
            logger.exception("a question of worker %d was not handled", link.number)
            answer = WorkerAnswer(one.number, None, failed=True)
        # Behind what this worker has told that one: all of it has arrived then.
        self._flush()
        own = self._links.get(link.number, link.transport)
        if not own.is_closing():
            self._write(own, [answer])


class _Link(asyncio.Protocol):
    """An end of a connection. `heard` gets what is read together, and how many bytes it was; `begun`, at the end that is
    called, the number of the calling worker, and its process.

    Attributes:
        calls: whether this end has begun the connection.
    """

    transport: asyncio.Transport

    def __init__(
        self,
        heard: Callable[[_Link, _Frame, int], None],
        ended: Callable[[int], None],
        begun: Callable[[int, int], None] | None = None,
        number: int = -1,
    ) -> None:
        self._read, self._ended, self._begun, self.number = heard, ended, begun, number
        self.calls = number >= 0
        self._data = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are of no class of asyncio's

    def data_received(self, data: bytes) -> None:
        kept = self._data
        kept += data
        at = 0
        if self._begun is not None:
            if len(kept) < _HELLO.size:
                return
            self.number, process = _HELLO.unpack_from(kept)
            at = _HELLO.size
            self._begun(self.number, process)
            self._begun = None
        while len(kept) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(kept, at)
            end = at + _LENGTH.size + length
            if len(kept) < end:
                break
            frame = decode_msgpack(bytes(kept[at + _LENGTH.size : end]), _Frame)
            at = end
            self._read(self, frame, length)
        del kept[:at]

    def connection_lost(self, error: Exception | None) -> None:
        self._ended(self.number)


def _end(ended: asyncio.Future[None], number: int) -> None:
    if not ended.done():
        ended.set_result(None)


def _same(link: _Link) -> _Link:
    return link


def _frame(messages: list[Message], names: list[bytes | str] | None = None, *, later: bool = False) -> bytes:
    data = _encode((later, names or (), messages))
    return _LENGTH.pack(len(data)) + data
