"""The endpoint picker's gRPC server, by gRPC's own client and by frames of HTTP/2."""

from __future__ import annotations

import asyncio
import itertools
import select
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

import pytest
from router_parts import Loop
from shared_server import until
from stranger_messages import call_head, h2_frame

from foreword.router_extras.gateway import grpc_server
from foreword.router_extras.gateway.grpc_server import GrpcCall, GrpcServer

grpc = pytest.importorskip("grpc")

ECHO, MANY, HOLD = b"/test/Echo", b"/test/Many", b"/test/Hold"
DATA, HEADERS, PRIORITY, RESET, SETTINGS, PING, AWAY, WINDOW, MORE = 0, 1, 2, 3, 4, 6, 7, 8, 9
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + h2_frame(SETTINGS, 0, 0, b"")
HEAD = call_head(ECHO)


class Served:
    """A server of three methods: Echo answers each message with itself, Many never ends to answer, Hold reads nothing and ends
    when `gate` is open."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.cancelled = self.answers = self.holding = 0
        self.gate = asyncio.Event()
        methods = {ECHO: self._echo, MANY: self._many, HOLD: self._hold}
        self.server = GrpcServer({path.decode(): (bytes, method) for path, method in methods.items()})
        listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = listener.getsockname()[1]
        self.loop.call(lambda: self.server.start(listener, None))

    async def _echo(self, call: GrpcCall) -> None:
        try:
            async for message in call:
                await call.write(message)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def _many(self, call: GrpcCall) -> None:
        while True:
            await call.write(bytes(100_000))
            self.answers += 1

    async def _hold(self, call: GrpcCall) -> None:
        self.holding += 1
        with suppress(asyncio.CancelledError):
            await self.gate.wait()
        await self.gate.wait()

    def echo(self, *messages: bytes) -> list[bytes]:
        """The answers that gRPC's client gets for these."""
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        with grpc.insecure_channel(f"127.0.0.1:{self.port}", options=options) as channel:
            return list(channel.stream_stream(ECHO.decode())(iter(messages), timeout=60, wait_for_ready=True))

    def close(self) -> None:
        self.loop.loop.call_soon_threadsafe(self.gate.set)
        self.loop.call(lambda: self.server.stop(0))
        self.loop.close()


@pytest.fixture
def served() -> Iterator[Served]:
    one = Served()
    yield one
    one.close()


class Raw:
    """A client that sends frames. `data`: what it has read."""

    def __init__(self, port: int, *frames: bytes) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), 60)
        self._data = self._unsent = b""
        self.send(PREFACE, *frames)

    def send(self, *frames: bytes) -> None:
        self._socket.sendall(b"".join(frames))

    def try_to_send(self, *frames: bytes) -> None:
        """Send as much of these as the system takes; first what it did not take in an earlier call, so that no frame is cut."""
        self._unsent = self._unsent or b"".join(frames)
        with suppress(BlockingIOError):
            self._unsent = self._unsent[self._socket.send(self._unsent, socket.MSG_DONTWAIT) :]

    def is_reset(self) -> bool:
        """Whether the connection is gone, also if what was sent before was not read."""
        looked = select.poll()
        looked.register(self._socket, 0)
        return bool(looked.poll(0))

    def frames(self) -> Iterator[tuple[int, int, int, bytes]]:
        """Kind, flags, stream and data of the next frames, until the connection ends."""
        while True:
            while len(self._data) < 9 or len(self._data) < 9 + int.from_bytes(self._data[:3]):
                try:
                    more = self._socket.recv(1 << 16)
                except ConnectionResetError:
                    return
                if not more:
                    return
                self._data += more
            end = 9 + int.from_bytes(self._data[:3])
            kind, flags, stream = struct.unpack_from(">BBI", self._data, 3)
            data, self._data = self._data[9:end], self._data[end:]
            yield kind, flags, stream, data

    def next(self, wanted: int) -> tuple[int, int, bytes]:
        """Flags, stream and data of the next frame of this kind."""
        return next((flags, stream, data) for kind, flags, stream, data in self.frames() if kind == wanted)

    def close(self) -> None:
        self._socket.close()


def message(data: bytes) -> bytes:
    return struct.pack(">BI", 0, len(data)) + data


# Calls


def test_messages_of_all_sizes_are_echoed(served: Served) -> None:
    """Messages that are empty, fill frames and windows, or are far larger, go both ways as they are, in order."""
    sizes = (0, 1, 16_379, 16_384, 65_535, (1 << 20) - 5, 1 << 20, 9_000_000, 3)
    messages = [bytes([number]) * size for number, size in enumerate(sizes)]
    assert served.echo(*messages) == messages
    until(lambda: served.server.open == 0)
    assert served.server.held == 0


def test_a_message_in_frames_of_one_byte(served: Served) -> None:
    """However a message and the head of its call are cut into frames, also with padding and priorities, it is answered once."""
    raw = Raw(served.port, h2_frame(PRIORITY, 0, 1, bytes(5)))
    raw.send(h2_frame(HEADERS, 40, 1, b"\x03" + bytes(5) + HEAD[:20] + bytes(3)), h2_frame(MORE, 4, 1, HEAD[20:]))
    for byte in message(b"in pieces"):
        raw.send(h2_frame(DATA, 8, 1, bytes([2, byte, 0, 0])))
    assert raw.next(DATA)[2] == message(b"in pieces")
    raw.send(h2_frame(DATA, 1, 1, b""))
    flags, stream, data = raw.next(HEADERS)
    assert (flags, stream) == (5, 1) and data.endswith(b"grpc-status\x010")
    raw.close()


def test_an_answer_keeps_to_the_windows(served: Served) -> None:
    """No byte is sent beyond the window of the stream, the one of the connection, and one that settings make smaller; what a
    window leaves out follows when it grows."""
    raw = Raw(served.port, h2_frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 10)))
    raw.send(h2_frame(HEADERS, 4, 1, HEAD), h2_frame(DATA, 0, 1, message(bytes(100))))
    assert len(raw.next(DATA)[2]) == 10
    raw.send(h2_frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 4)), h2_frame(WINDOW, 0, 1, (16).to_bytes(4)))
    assert len(raw.next(DATA)[2]) == 10
    raw.send(h2_frame(WINDOW, 0, 1, (1 << 20).to_bytes(4)))
    assert len(raw.next(DATA)[2]) == 85
    more = message(bytes(70_000))
    raw.send(*(h2_frame(DATA, 0, 1, more[at : at + 10_000]) for at in range(0, len(more), 10_000)))
    got = 105
    while got < 65_535:
        got += len(raw.next(DATA)[2])
    assert got == 65_535
    raw.send(h2_frame(PING, 0, 0, b"12345678"))
    assert next(kind for kind, *_ in raw.frames()) == PING
    raw.send(h2_frame(WINDOW, 0, 0, (1 << 20).to_bytes(4)))
    while got < 70_110:
        got += len(raw.next(DATA)[2])
    assert got == 70_110
    raw.close()


def test_a_client_that_does_not_read(served: Served) -> None:
    """Answers stop when the system takes no more, whatever windows a client has given, and go on when it reads."""
    grows = [h2_frame(WINDOW, 0, stream, ((1 << 31) - 1 - 65_535).to_bytes(4)) for stream in (0, 1)]
    raw = Raw(served.port, h2_frame(HEADERS, 4, 1, call_head(MANY)), *grows)
    until(lambda: any(one.is_full for one in list(served.server.connections)))
    at_most = served.answers + 1
    assert served.echo(b"another") == [b"another"] and served.answers <= at_most
    for _ in itertools.takewhile(lambda _: served.answers <= at_most, raw.frames()):
        pass
    raw.close()
    until(lambda: not served.server.open)


@pytest.mark.parametrize("how", ["cancels", "leaves"])
def test_a_call_ends_with_its_client(served: Served, how: str) -> None:
    """The handler is cancelled when its client cancels the call, and when the connection ends; nothing of it is held."""
    raw = Raw(served.port, h2_frame(HEADERS, 4, 1, HEAD), h2_frame(DATA, 0, 1, message(bytes(100))[:50]))
    until(lambda: served.server.held == 50)
    if how == "cancels":
        raw.send(h2_frame(RESET, 0, 1, bytes(4)))
    else:
        raw.close()
    until(lambda: served.cancelled == 1 and not served.server.open)
    assert served.server.held == 0


def test_a_message_that_is_not_read_is_bounded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call ends with RESOURCE_EXHAUSTED where more bytes of messages are held than may be, and others are answered."""
    monkeypatch.setattr(grpc_server, "_HELD_BYTES", 50_000)
    raw = Raw(served.port, h2_frame(HEADERS, 4, 1, HEAD))
    raw.send(*(h2_frame(DATA, 0, 1, message(bytes(1 << 20))[at : at + 10_000]) for at in range(0, 60_000, 10_000)))
    assert b"grpc-status\x018" in raw.next(HEADERS)[2]
    until(lambda: served.server.held == 0)
    assert served.echo(b"another") == [b"another"]
    raw.close()


def test_messages_without_bytes_are_bounded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that are not read count more than their bytes: a client cannot leave any number of empty ones."""
    monkeypatch.setattr(grpc_server, "_HELD_BYTES", 50_000)
    raw = Raw(served.port, h2_frame(HEADERS, 4, 1, call_head(HOLD)))
    raw.send(h2_frame(DATA, 0, 1, message(b"") * 1000))
    assert b"grpc-status\x018" in raw.next(HEADERS)[2]
    until(lambda: served.server.held == 0)
    raw.close()


@pytest.mark.parametrize("how", ["says nothing", "takes no answers"])
def test_a_call_that_gets_nowhere(served: Served, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """A call without a message, and one whose client never lets an answer come, end after some time with DEADLINE_EXCEEDED."""
    monkeypatch.setattr(grpc_server, "_QUIET_SECONDS", 0.3)
    monkeypatch.setattr(grpc_server, "_SILENT_BEATS", 0 if how == "says nothing" else 1000)
    monkeypatch.setattr(grpc_server, "_BLOCKED_BEATS", 0 if how == "takes no answers" else 1000)
    raw = Raw(served.port, h2_frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 0)), OPENED)
    if how == "takes no answers":
        raw.send(h2_frame(DATA, 0, 1, message(b"a question")))
    while b"grpc-status\x014" not in raw.next(HEADERS)[2]:  # an answer that waits has begun
        pass
    until(lambda: served.cancelled == 1 and not served.server.open)
    raw.close()


WRONG_CALLS = {
    "a method that there is not": ([h2_frame(HEADERS, 4, 1, call_head(b"/x\xb6/y"))], b"12"),
    "compressed": ([h2_frame(DATA, 0, 1, b"\x01" + bytes(4))], b"12"),
    "too large": ([h2_frame(DATA, 0, 1, b"\0\xff\xff\xff\xff")], b"8"),
    "without an end": ([h2_frame(DATA, 1, 1, b"\0\0\0\0\x05abc")], b"13"),
}


@pytest.mark.parametrize(("frames", "status"), WRONG_CALLS.values(), ids=WRONG_CALLS.keys())
def test_a_call_that_is_wrong_ends_alone(served: Served, frames: list[bytes], status: bytes) -> None:
    """Its client gets the status, and another call on its connection is answered."""
    begin = [] if frames[0][3] == HEADERS else [h2_frame(HEADERS, 4, 1, HEAD)]
    raw = Raw(served.port, *begin, *frames)
    assert b"grpc-status" + bytes([len(status)]) + status in raw.next(HEADERS)[2]
    raw.send(h2_frame(HEADERS, 4, 3, HEAD), h2_frame(DATA, 1, 3, message(b"fine")))
    assert raw.next(DATA)[1:] == (3, message(b"fine"))
    raw.close()


def test_more_calls_than_a_connection_may_have(served: Served) -> None:
    """Calls above the limit are refused, which says that nothing of them was done; when one has ended, the next is taken."""
    raw = Raw(served.port, *(h2_frame(HEADERS, 4, 2 * number + 1, HEAD) for number in range(101)))
    assert raw.next(RESET)[1:] == (201, (7).to_bytes(4))
    raw.send(h2_frame(DATA, 1, 1, b""))
    assert raw.next(HEADERS)[:2] == (5, 1)
    raw.send(h2_frame(HEADERS, 4, 203, HEAD), h2_frame(DATA, 1, 203, message(b"fine")))
    assert raw.next(DATA)[1:] == (203, message(b"fine"))
    raw.close()


def test_calls_of_all_connections_are_bounded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call above the limit for all connections is refused, and taken when another one has ended."""
    monkeypatch.setattr(grpc_server, "_ALL_CALLS", 1)
    one, other = Raw(served.port, OPENED), Raw(served.port)
    until(lambda: served.server.open == 1)
    other.send(OPENED)
    assert other.next(RESET)[1:] == (1, (7).to_bytes(4))
    one.close()
    until(lambda: not served.server.open)
    other.send(h2_frame(HEADERS, 4, 3, HEAD), h2_frame(DATA, 1, 3, message(b"fine")))
    assert other.next(DATA)[2] == message(b"fine")
    other.close()


def test_connections_are_bounded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the limit the oldest connection without a call ends for a new one, and its client is told that nothing of what it may
    have sent was done. Where all have calls, the new one is refused, and taken when a call has ended."""
    monkeypatch.setattr(grpc_server, "_CONNECTIONS", 2)
    busy = Raw(served.port, OPENED)
    until(lambda: served.server.open == 1)
    idle = Raw(served.port)
    until(lambda: len(served.server.connections) == 2)
    other = Raw(served.port, OPENED)
    assert idle.next(AWAY)[2] == bytes(8) and not list(idle.frames())
    until(lambda: served.server.open == 2)
    refused = Raw(served.port)
    assert refused.next(AWAY)[2] == bytes(7) + b"\x0b" and not list(refused.frames())
    assert len(served.server.connections) == 2
    other.send(h2_frame(DATA, 1, 1, b""))
    assert other.next(HEADERS)[:2] == (5, 1)
    last = Raw(served.port, OPENED, h2_frame(DATA, 0, 1, message(b"fine")))
    assert last.next(DATA)[2] == message(b"fine")
    busy.send(h2_frame(DATA, 1, 1, message(b"still here")))
    assert busy.next(DATA)[2] == message(b"still here")
    for one in (busy, idle, other, refused, last):
        one.close()


def test_an_idle_connection_whose_client_reads_nothing_gives_way(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that ends for another one is gone at once, although its client reads nothing of what waits for it."""
    monkeypatch.setattr(grpc_server, "_CONNECTIONS", 1)
    deaf = Raw(served.port)
    until(lambda: len(served.server.connections) == 1)
    [connection] = served.server.connections
    ping = h2_frame(PING, 0, 0, bytes(8))

    def is_full() -> bool:
        deaf.try_to_send(*[ping] * 1000)
        return connection.is_full

    until(is_full)
    other = Raw(served.port, OPENED, h2_frame(DATA, 0, 1, message(b"fine")))
    assert other.next(DATA)[2] == message(b"fine")
    until(deaf.is_reset)
    deaf.close()
    other.close()


def test_calls_that_are_cancelled_at_once(served: Served) -> None:
    """Calls that a client opens and cancels count until their handlers have ended, and no longer: also if none has begun."""
    opened = [h2_frame(HEADERS, 4, 2 * number + 1, call_head(HOLD)) for number in range(101)]
    resets = [h2_frame(RESET, 0, 2 * number + 1, bytes(4)) for number in range(101)]
    raw = Raw(served.port, *opened[:100])
    until(lambda: served.holding == 100)
    raw.send(*resets[:100], opened[100])
    assert raw.next(RESET)[1:] == (201, (7).to_bytes(4))
    served.loop.loop.call_soon_threadsafe(served.gate.set)
    until(lambda: not served.server.open)
    for number in range(101, 1101):
        stream = 2 * number + 1
        raw.send(h2_frame(HEADERS, 4, stream, HEAD), h2_frame(RESET, 0, stream, bytes(4)))
    raw.send(h2_frame(PING, 0, 0, bytes(8)))
    raw.next(PING)
    until(lambda: not served.server.open)
    raw.send(h2_frame(HEADERS, 4, 9001, HEAD), h2_frame(DATA, 1, 9001, message(b"fine")))
    assert raw.next(DATA)[1:] == (9001, message(b"fine"))
    raw.close()


@pytest.mark.parametrize("kind", [PING, SETTINGS])
def test_a_flood_whose_answers_are_not_read(served: Served, kind: int) -> None:
    """A client that asks without an end and reads no answers is not read any more; few answers are kept for it."""
    frames = h2_frame(kind, 0, 0, bytes(8 if kind == PING else 0)) * 1000
    raw = Raw(served.port)

    def full() -> bool:
        raw.try_to_send(frames)
        return any(one.is_full for one in list(served.server.connections))

    until(full)
    assert max(one.transport.get_write_buffer_size() for one in list(served.server.connections)) < 2 << 20
    assert served.echo(b"another") == [b"another"]
    raw.close()


PROTOCOL, FLOW, SIZE, TABLE, TOO_MUCH = 1, 3, 6, 9, 11
OPENED = h2_frame(HEADERS, 4, 1, HEAD)
# The standard's rules for header blocks, and its limits.
BLOCKS = {
    "number 0": b"\x80",
    "unknown number": b"\xff\x10",
    "endless number": b"\xff" + b"\xff" * 20,
    "number without an end": b"\xff",
    "text without an end": b"\0\x05ab",
    "no value": b"\0\x01a",
    "large table": b"\x3f\xe2\x1f",
    "late size": b"\x82\x20",
    "end of text within text": b"\0\x84" + b"\xff" * 4 + b"\x01a",
    "long padding": b"\0\x82\x1f\xff\x01a",
    "padding of zeros": b"\0\x81\x00\x01a",
    "large by numbers": b"\x40\x01x\x7f\xd1\x1e" + bytes(4048) + b"\xbe" * 20,
    "no text": b"\0\x01a\x81\xff\x40",
}
FAULTS = {
    **{name: ([h2_frame(HEADERS, 4, 1, data)], TABLE) for name, data in BLOCKS.items()},
    "a frame that is too large": ([h2_frame(DATA, 0, 1, b"", length=1 << 20)], SIZE),
    "headers of an even stream": ([h2_frame(HEADERS, 4, 2, HEAD)], PROTOCOL),
    "data of no stream": ([h2_frame(DATA, 0, 5, b"x")], PROTOCOL),
    "a reset of no stream": ([h2_frame(RESET, 0, 5, bytes(4))], PROTOCOL),
    "a block that is interrupted": ([h2_frame(HEADERS, 0, 1, HEAD), h2_frame(PING, 0, 0, bytes(8))], PROTOCOL),
    "a block that has not begun": ([h2_frame(MORE, 4, 1, HEAD)], PROTOCOL),
    "a block without an end": ([h2_frame(HEADERS, 0, 1, b""), *[h2_frame(MORE, 0, 1, b"")] * 40], TOO_MUCH),
    "large headers": ([h2_frame(HEADERS, 0, 1, HEAD), *[h2_frame(MORE, 0, 1, bytes(16_000))] * 5], TOO_MUCH),
    "more padding than bytes": ([OPENED, h2_frame(DATA, 8, 1, b"\x05abc")], PROTOCOL),
    "a window that does not grow": ([h2_frame(WINDOW, 0, 0, bytes(4))], PROTOCOL),
    "a window that is too large": ([h2_frame(WINDOW, 0, 0, b"\x7f\xff\xff\xff")], FLOW),
    "a window of a stream that is too large": ([OPENED, h2_frame(WINDOW, 0, 1, b"\x7f\xff\xff\xff")], FLOW),
    "settings that make a window too large": (
        [
            OPENED,
            h2_frame(WINDOW, 0, 1, ((1 << 31) - 1 - 65_535).to_bytes(4)),
            h2_frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 65_536)),
        ],
        FLOW,
    ),
    "settings of a wrong length": ([h2_frame(SETTINGS, 0, 0, bytes(5))], SIZE),
    "a window of settings that is too large": ([h2_frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 1 << 31))], FLOW),
    "a ping of a wrong length": ([h2_frame(PING, 0, 0, bytes(7))], SIZE),
    "more than the window": ([OPENED, *[h2_frame(DATA, 0, 1, b"\0\0\xff\xff\xff" + bytes(16_000))] * 1200], FLOW),
    "a push": ([h2_frame(5, 4, 1, HEAD)], PROTOCOL),
}


@pytest.mark.parametrize(("frames", "code"), FAULTS.values(), ids=FAULTS.keys())
def test_a_connection_that_is_wrong_ends_alone(served: Served, frames: list[bytes], code: int) -> None:
    """A connection that breaks the rules of HTTP/2 ends with the error that these name; other clients are answered."""
    raw = Raw(served.port)
    with suppress(OSError):  # the connection may end before all was sent
        raw.send(*frames)
    codes = [int.from_bytes(data[4:8]) for kind, *_, data in raw.frames() if kind == AWAY]
    # Bytes that were sent and not read take the reason with them.
    assert codes == [code] or (not codes and len(frames) > 100)
    raw.close()
    assert served.echo(b"another") == [b"another"]
    until(lambda: not served.server.open)


def test_what_is_no_http2(served: Served) -> None:
    """A client of another protocol is told so and its connection ends."""
    with socket.create_connection(("127.0.0.1", served.port), 60) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        data = b""
        while more := stranger.recv(1 << 16):
            data += more
    assert h2_frame(AWAY, 0, 0, bytes(7) + b"\x01") in data


def test_a_client_that_sends_byte_by_byte(served: Served) -> None:
    """The beginning of a connection may come in pieces, and so may all frames."""
    with socket.create_connection(("127.0.0.1", served.port), 60) as slow:
        slow.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in PREFACE + OPENED + h2_frame(DATA, 1, 1, message(b"slow")):
            slow.sendall(bytes([byte]))
        data = b""
        while message(b"slow") not in data:
            data += slow.recv(1 << 16)


def test_a_client_that_opens_no_more_calls(served: Served) -> None:
    """A client that says so (GOAWAY) has its calls that are open answered to their end; what comes behind an end is refused."""
    raw = Raw(served.port, OPENED, h2_frame(AWAY, 0, 0, bytes(8)), h2_frame(DATA, 0, 1, message(b"the last")))
    assert raw.next(DATA)[2] == message(b"the last")
    raw.send(h2_frame(DATA, 1, 1, b""))
    assert raw.next(HEADERS)[:2] == (5, 1)
    raw.send(h2_frame(HEADERS, 5, 3, call_head(HOLD)), h2_frame(DATA, 0, 3, message(b"too late")))
    assert raw.next(RESET)[1:] == (3, (5).to_bytes(4))
    raw.close()


def test_a_client_that_is_gone(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of which nothing is heard is asked, and if it does not answer its calls end."""
    monkeypatch.setattr(grpc_server, "_QUIET_SECONDS", 0.02)
    monkeypatch.setattr(grpc_server, "_ANSWER_SECONDS", 0.02)
    gone = Raw(served.port, OPENED)
    assert [kind for kind, *_ in gone.frames()][-1] == PING
    until(lambda: served.cancelled == 1)
    gone.close()


def test_a_client_that_waits(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that answers when it is asked keeps its calls, however long it says nothing else."""
    monkeypatch.setattr(grpc_server, "_QUIET_SECONDS", 0.02)
    monkeypatch.setattr(grpc_server, "_ANSWER_SECONDS", 60.0)
    living = Raw(served.port, OPENED)
    living.next(PING)
    living.send(h2_frame(PING, 1, 0, bytes(8)))
    living.send(h2_frame(DATA, 1, 1, message(b"still here")))
    assert living.next(DATA)[2] == message(b"still here")
    living.close()


def test_a_server_that_stops(served: Served) -> None:
    """Its clients are told to open no more calls; one that runs goes to its end, and then the connection ends. No connection
    is taken meanwhile."""
    raw = Raw(served.port, OPENED)
    until(lambda: served.server.open == 1)
    stopping = asyncio.run_coroutine_threadsafe(served.server.stop(60), served.loop.loop)
    assert raw.next(AWAY)[2] == b"\x7f\xff\xff\xff" + bytes(4)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", served.port), 60)
    raw.send(h2_frame(DATA, 1, 1, message(b"the last")))
    assert raw.next(DATA)[2] == message(b"the last")
    raw.next(PING)
    raw.send(h2_frame(PING, 1, 0, bytes(8)))
    assert raw.next(AWAY)[2] == (1).to_bytes(4) + bytes(4)
    stopping.result(60)
    raw.close()
