"""Messages between the workers of a router: a connection from each to each other one, over Unix sockets.

Messages of one worker arrive in their order. A worker that was started again knows nothing of what came before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from foreword.router_extras.workers.supervisor import Seat
from foreword.tasks import background

logger = logging.getLogger(__name__)

_LENGTH: Final = struct.Struct("<I")
_RETRY_SECONDS: Final = 0.1
# What a worker has not read of another one's messages: more, and the connection is given up and begun anew.
_MOST_UNREAD: Final = 64 << 20
_ANSWER_SECONDS: Final = 5.0
_TELL, _ASK, _SAY = range(3)
_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(tuple[int, int, str, msgspec.Raw]).decode


class WorkerBus:
    """Runs on the event loop of one worker.

    Args:
        told: gets each message of another worker: its number, the kind and the content.
        asked: answers a question of another worker.
        gone: a worker's connection has ended.
    """

    def __init__(
        self,
        seat: Seat,
        told: Callable[[int, str, msgspec.Raw], None],
        asked: Callable[[str, msgspec.Raw], Awaitable[Any]],
        gone: Callable[[int], None],
    ) -> None:
        self._seat, self._told, self._asked, self._gone = seat, told, asked, gone
        self._others = [number for number in range(seat.count) if number != seat.number]
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._waiting: dict[int, tuple[int, asyncio.Future[bytes]]] = {}
        self._numbers = itertools.count()
        self._tasks: list[asyncio.Task[None]] = []
        self._server: asyncio.Server | None = None

    def _path(self, number: int) -> Path:
        return self._seat.folder / f"{number}.sock"

    async def start(self) -> None:
        own = self._path(self._seat.number)
        own.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._receive, own)
        self._tasks = [background(self._keep(number), f"messages to worker {number}") for number in self._others]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._server is not None:
            self._server.close()
        for writer in self._writers.values():
            writer.transport.abort()

    @property
    def connected(self) -> int:
        """The number of other workers that hear this one."""
        return len(self._writers)

    def tell(self, kind: str, content: Any) -> None:
        """A message to all others. Never waits; one that does not listen misses it."""
        if self._writers:
            data = _frame(_TELL, 0, kind, content)
            for writer in list(self._writers.values()):
                if writer.transport.get_write_buffer_size() > _MOST_UNREAD:
                    writer.transport.abort()
                else:
                    writer.write(data)

    async def ask(self, kind: str, content: Any = None) -> list[bytes]:
        """The answers of all others that are connected, as msgpack. All that was told to them before has arrived by then."""
        futures: list[asyncio.Future[bytes]] = []
        for other, writer in list(self._writers.items()):
            number, future = next(self._numbers), asyncio.get_running_loop().create_future()
            self._waiting[number] = other, future
            futures.append(future)
            writer.write(_frame(_ASK, number, kind, content))
        if not futures:
            return []
        done, late = await asyncio.wait(futures, timeout=_ANSWER_SECONDS)
        for future in late:
            future.cancel()
        return [one.result() for one in done if not one.cancelled()]

    async def _keep(self, number: int) -> None:
        """Keep a connection to another worker."""
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(self._path(number))
            except OSError:
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            writer.write(_LENGTH.pack(self._seat.number))
            self._writers[number] = writer
            try:
                while True:
                    _, asked, _, content = await _read(reader)
                    found = self._waiting.pop(asked, None)
                    if found is not None and not found[1].done():
                        found[1].set_result(bytes(content))
            except (OSError, asyncio.IncompleteReadError):
                pass
            finally:
                del self._writers[number]
                writer.transport.abort()
                for asked, (other, future) in list(self._waiting.items()):
                    if other == number:
                        del self._waiting[asked]
                        future.cancel()

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other = -1
        try:
            (other,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
            while True:
                what, number, kind, content = await _read(reader)
                if what == _TELL:
                    self._told(other, kind, content)
                else:
                    background(self._answer(writer, number, kind, content), "an answer to another worker")
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.transport.abort()
            self._gone(other)

    async def _answer(self, writer: asyncio.StreamWriter, number: int, kind: str, content: msgspec.Raw) -> None:
        writer.write(_frame(_SAY, number, kind, await self._asked(kind, content)))
        with contextlib.suppress(OSError):
            await writer.drain()


def _frame(what: int, number: int, kind: str, content: Any) -> bytes:
    data = _encode((what, number, kind, content))
    return _LENGTH.pack(len(data)) + data


async def _read(reader: asyncio.StreamReader) -> tuple[int, int, str, msgspec.Raw]:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return _decode(await reader.readexactly(length))
