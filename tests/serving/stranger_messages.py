"""Messages of strangers without a key to each kind of port: its own protocol with a wrong key, lengths that nothing has, and
what real peers have sent before."""

from __future__ import annotations

import gzip
import json
import random
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from foreword.transfer.wire_format import NO_TRANSFER, Get, Hello, encode

# Messages that are sent in a row on one connection.
Pieces = list[bytes]
Maker = Callable[[random.Random], Pieces]

_METHODS = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "CONNECT", "FOO")
_PATHS = (
    *(
        "/",
        "/health",
        "/ready",
        "/metrics",
        "/version",
        "/openapi.json",
        "/ui",
        "/ui/",
        "/ui/data/state",
        "/v1/instance",
    ),
    *("/kv_event_sources", "/v1/drain", "/v1/migrate", "/v1/requests", "/v1/cache", "/v1/prefixes", "/v1/models"),
    *("/v1/router/state", "/v1/router/decisions", "/v1/router/replicas", "/v1/completions", "/v1/chat/completions"),
    *("/v1/messages", "/v1/responses", "/v1/embeddings", "/v1/tokenize", "/v1/detokenize", "/v1/cache/retain"),
    *("/../../../../etc/passwd", "/ui/../../../../etc/passwd", "/ui/%2e%2e/%2e%2e/config.py", "//v1/completions", "*"),
    *("http://127.0.0.1/v1/models", "/v1/completions/../drain", "/v1/prefixes/" + "x" * 3000, "/v1/responses/resp_0"),
)
_BODIES: tuple[object, ...] = (
    {"prompt": "once", "max_tokens": 2},
    {"prompt": list(range(400)), "max_tokens": 1},
    {"messages": [{"role": "user", "content": "yes"}]},
    {"messages": [{"role": "user", "content": "yes"}], "kv_transfer_params": {"prefill": "127.0.0.1:1"}},
    {"input": "Say yes."},
    {"name": "rules", "content": "Be brief."},
    {"to": "127.0.0.1:1"},
    {"prompt": "once", "stream": True, "n": 8},
    [[[]]] * 50,
    None,
)


_ZEROS = gzip.compress(bytes(8 << 20), 9)


def request(draw: random.Random, paths: Sequence[str]) -> bytes:
    """A request for any path, without a key or with a wrong one."""
    body = json.dumps(draw.choice(_BODIES)).encode() if draw.random() < 0.6 else b""
    method, path = draw.choice(_METHODS if draw.random() < 0.3 else ("GET", "POST", "DELETE")), draw.choice(paths)
    secret = draw.randbytes(16).hex()
    heads = ["host: " + draw.choice(("127.0.0.1", "localhost", "evil.example", "x" * 300))]
    heads += draw.choice(
        ([], [f"authorization: Bearer {secret}"], [f"x-api-key: {secret}"], ["authorization: Basic =="])
    )
    heads += draw.choice(([], [f"x-foreword-salt: {secret}"], ["x-forwarded-for: 127.0.0.1"], ["origin: http://evil"]))
    heads += draw.choice(
        ([], ["connection: close"], ["upgrade: websocket", "connection: upgrade"], ["expect: 100-continue"])
    )
    heads += [f"content-length: {len(body)}", f"content-type: {draw.choice(('application/json', 'text/plain', 'a'))}"]
    return f"{method} {path} HTTP/1.1\r\n".encode() + "\r\n".join(heads).encode() + b"\r\n\r\n" + body


def http(paths: Sequence[str]) -> Maker:
    """Makes messages of one to four requests on a connection."""
    every = sorted({*paths, *_PATHS})
    return lambda draw: [request(draw, every) for _ in range(draw.choice((1, 1, 1, 4)))]


def http_huge(draw: random.Random) -> Pieces:
    """Bodies, heads and lengths that no request needs, and two lengths for one body."""
    post = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    kind = draw.randrange(10)
    if kind == 0:
        return [post + b"content-length: %d\r\n\r\n" % 10 ** draw.choice((9, 12, 18, 30)), b"x" * 5000]
    if kind == 1:
        return [post + b"transfer-encoding: chunked\r\n\r\n" + b"F" * draw.choice((8, 16, 4000)) + b"\r\n", b"x" * 5000]
    if kind == 2:
        return [post + b"x-large: " + b"x" * draw.choice((9_000, 300_000)) + b"\r\n\r\n"]
    if kind == 3:
        return [post + b"".join(b"x-%d: y\r\n" % number for number in range(20_000)) + b"\r\n"]
    if kind == 4:
        size = draw.choice((200_000, 2 << 20))
        return [post + b"authorization: Bearer x\r\ncontent-length: %d\r\n\r\n" % size + b"[" * size]
    if kind == 5:
        return [b"GET /" + b"x" * draw.choice((9_000, 200_000)) + b" HTTP/1.1\r\nhost: x\r\n\r\n"]
    if kind == 6:
        return [post + b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(_ZEROS) + _ZEROS]
    if kind == 7:
        both = b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
        return [post + both + b"GET /v1/cache HTTP/1.1\r\nhost: x\r\n\r\n"]
    if kind == 8:
        return [b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 200]
    return [post + b"content-length: -1\r\n\r\n", b"x", b"\r\n" * 3000]


def _zmtp_greeting(mechanism: bytes, *, server: bool = False) -> bytes:
    return b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0") + bytes([server]) + bytes(31)


def _command(name: bytes, data: bytes) -> bytes:
    body = bytes([len(name)]) + name + data
    return b"\x04" + bytes([len(body)]) + body if len(body) < 256 else b"\x06" + struct.pack(">Q", len(body)) + body


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + struct.pack(">I", len(value)) + value


def zmtp(draw: random.Random) -> Pieces:
    """A handshake without CURVE, or one with a key that is not the server's, and a subscription or a request for a replay."""
    curve = draw.random() < 0.5
    kind = draw.choice((b"SUB", b"XSUB", b"DEALER", b"REQ", b"PUB"))
    greeting = _zmtp_greeting(draw.choice((b"CURVE", b"CURVE", b"PLAIN", b"X")) if curve else b"NULL")
    if curve:
        hello = b"\x01\x00" + bytes(72) + draw.randbytes(32) + draw.randbytes(8) + draw.randbytes(80)
        initiate = draw.randbytes(draw.choice((8, 200, 900)))
        return [greeting, _command(b"HELLO", hello), _command(b"INITIATE", initiate), _command(b"MESSAGE", initiate)]
    ready = _command(b"READY", _property(b"Socket-Type", kind) + _property(b"Identity", draw.randbytes(8)))
    sent = b"\x00\x01\x01" if kind.endswith(b"SUB") else b"\x01\x00\x00\x08" + bytes(8)
    return [greeting, ready, sent * draw.choice((1, 3, 200))]


def zmtp_huge(draw: random.Random) -> Pieces:
    """Frames and commands of lengths that are announced, or sent."""
    greeting = _zmtp_greeting(draw.choice((b"NULL", b"CURVE")))
    kind = draw.randrange(5)
    if kind == 0:
        return [greeting, b"\x06" + struct.pack(">Q", 1 << draw.randrange(16, 64)), bytes(5000)]
    if kind == 1:
        return [greeting, b"\x02" + struct.pack(">Q", 1 << draw.randrange(16, 64)), bytes(5000)]
    if kind == 2:
        return [
            greeting,
            _command(b"READY", _property(b"Socket-Type", b"DEALER")),
            b"\x03" + struct.pack(">Q", 1 << 20),
            bytes(1 << 20),
        ]
    if kind == 3:
        return [greeting, _command(b"READY", b"".join(_property(b"X%d" % one, bytes(100)) for one in range(500)))]
    return [
        greeting,
        _command(b"READY", _property(b"Socket-Type", b"XSUB")),
        b"".join(b"\x01\x3f\x01" + draw.randbytes(62) for _ in range(200)),
    ]


def _opening(draw: random.Random) -> bytes:
    version, flags = draw.choice((1, 1, 1, 1, 2, 65535)), draw.choice((1, 1, 1, 0, 255))
    return struct.pack("<4sHBB4x32s", b"FWTH", version, draw.choice((1, 3, 255)), flags, draw.randbytes(32))


def transfer(draw: random.Random) -> Pieces:
    """A handshake whose proof comes from another secret, and messages that want blocks."""
    hello = encode(Hello(draw.randbytes(16), "", "127.0.0.1:1", 1.0, 1 << 20), NO_TRANSFER)
    get = encode(Get(draw.randbytes(64) * draw.choice((1, 50)), 1 << 20, 1e6), draw.randbytes(16))
    return [_opening(draw), draw.randbytes(32), hello, *[get] * draw.choice((0, 1, 20))]


def transfer_huge(draw: random.Random) -> Pieces:
    """Messages of which the head announces up to 4 GiB of metadata and any payload."""
    head = bytearray(encode(Hello(draw.randbytes(16), "", "", 1.0, 1 << 20), NO_TRANSFER))
    head[24:28] = struct.pack("<I", 1 << draw.randrange(16, 32))
    head[32:40] = struct.pack("<Q", 1 << draw.randrange(16, 64))
    begin = draw.choice(([], [_opening(draw)], [_opening(draw), draw.randbytes(32)]))
    return [*begin, bytes(head), draw.randbytes(draw.choice((100, 300_000)))]


def tls_huge(draw: random.Random) -> Pieces:
    """Records of TLS: of greatest length, of every type, without end."""
    record = struct.pack(
        ">BHH", draw.choice((20, 21, 22, 23, 24, 255)), draw.choice((0x301, 0x303, 0)), draw.choice((1, 16384, 65535))
    )
    return [(record + draw.randbytes(draw.choice((1, 200, 16384)))) * draw.choice((1, 20))]


_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def h2_frame(kind: int, flags: int, stream: int, data: bytes, length: int | None = None) -> bytes:
    return (
        struct.pack(">I", len(data) if length is None else length)[1:] + struct.pack(">BBI", kind, flags, stream) + data
    )


def _literal(name: bytes, value: bytes) -> bytes:
    """A header without compression; lengths below 16,000."""

    def number(length: int) -> bytes:
        rest = length - 127
        return bytes([length]) if rest < 0 else bytes([127, rest & 127 | 128, rest >> 7])

    return b"\x00" + number(len(name)) + name + number(len(value)) + value


def call_head(method: bytes, *more: tuple[bytes, bytes]) -> bytes:
    heads = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", method), (b":authority", b"x")]
    heads += [(b"content-type", b"application/grpc"), (b"te", b"trailers"), *more]
    return b"".join(_literal(*one) for one in heads)


def _length_delimited(number: int, data: bytes) -> bytes:
    size, left = b"", len(data)
    while left > 127:
        size, left = size + bytes([left & 127 | 128]), left >> 7
    return bytes([number << 3 | 2]) + size + bytes([left]) + data


def _processing(draw: random.Random, paths: Sequence[str]) -> bytes:
    """A gateway's message about the headers of a request without a key, or with a wrong one."""
    wrong = draw.randbytes(16).hex()
    heads = {":method": draw.choice(("POST", "GET", "X")), ":path": draw.choice(paths), "x-request-id": wrong}
    heads |= draw.choice(({}, {"authorization": f"Bearer {wrong}"}, {"x-api-key": wrong}, {"x-foreword-salt": wrong}))
    listed = (
        _length_delimited(1, _length_delimited(1, name.encode()) + _length_delimited(3, value.encode()))
        for name, value in heads.items()
    )
    return _length_delimited(2, _length_delimited(1, b"".join(listed)))


_METHODS_OF_GRPC = (
    *(b"/envoy.service.ext_proc.v3.ExternalProcessor/Process",) * 6,
    *(b"/grpc.health.v1.Health/Check", b"/grpc.health.v1.Health/Watch"),
    *(b"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", b"/x/y", b"/x\xb6/y"),
)


def grpc_call(method: bytes) -> Pieces:
    """A connection and the head of one call."""
    return [_PREFACE + h2_frame(4, 0, 0, b""), h2_frame(1, 4, 1, call_head(method))]


def grpc(paths: Sequence[str]) -> Maker:
    """Calls of the picker about requests without a key or with a wrong one, and bodies."""
    every = sorted({*paths, *_PATHS})

    def make(draw: random.Random) -> Pieces:
        pieces = [_PREFACE + h2_frame(4, 0, 0, b"")]
        for number in range(draw.choice((1, 1, 5))):
            stream = 2 * number + 1
            pieces.append(h2_frame(1, 4, stream, call_head(draw.choice(_METHODS_OF_GRPC))))
            first = _processing(draw, every)
            body = _length_delimited(4, _length_delimited(1, json.dumps(draw.choice(_BODIES)).encode()))
            for data in (first, body) if draw.random() < 0.5 else (first,):
                pieces.append(h2_frame(0, 0, stream, struct.pack(">BI", 0, len(data)) + data))
        return pieces

    return make


def _block(stream: int, block: bytes, flags: int = 0, part: int = 16_000) -> Pieces:
    """Headers of a stream, in as many frames as they need."""
    parts = [block[at : at + part] for at in range(0, len(block), part)] or [b""]
    kinds = [1] + [9] * (len(parts) - 1)
    ends = [0] * (len(parts) - 1) + [4]
    return [
        h2_frame(kind, flags * (kind == 1) | end, stream, one)
        for kind, end, one in zip(kinds, ends, parts, strict=True)
    ]


def _tables(draw: random.Random, process: bytes) -> Pieces:
    """Headers for a decoder: an entry that is named all over, sizes of its table, endless numbers, texts that are none, and
    entries that push each other out."""
    entry = b"\x40\x01x\x7f" + bytes([3900 - 127 & 127 | 128, 3900 - 127 >> 7]) + bytes(3900)
    size = b"\x3f" + b"\xff" * draw.choice((1, 4, 20)) + b"\x01"
    block = draw.choice(
        (
            process + entry + b"\xbe" * draw.choice((20, 10_000, 60_000)),
            size + process,
            b"\x20\x3f\xe1\x1f" * draw.choice((1, 3000)) + process,
            process + b"\xff" * draw.choice((2, 30, 10_000)),
            process + b"\0" + bytes([0x80 | 100]) + draw.randbytes(100) + b"\x01a",
            process + b"".join(b"\x40\x20" + draw.randbytes(32) + b"\x01a" for _ in range(500)),
        )
    )
    return [piece for one in range(draw.choice((1, 50))) for piece in _block(2 * one + 1, block)]


def _trailers(draw: random.Random, process: bytes) -> Pieces:
    """Headers behind a message that are as large as may be, larger, or come again and again."""
    size = draw.choice((100, 60_000, 70_000, 300_000))
    trailers = b"".join(_literal(b"x-%d" % one, bytes(1000)) for one in range(size // 1000))
    opened = [h2_frame(1, 4, 1, process), h2_frame(0, 0, 1, struct.pack(">BI", 0, 5) + b"12345")]
    return [*opened, *_block(1, trailers, draw.choice((0, 1))) * draw.choice((1, 30))]


def _half_open(draw: random.Random, process: bytes) -> Pieces:
    """Calls without an end: some bytes of a message each, or none."""
    part = draw.choice((b"", b"\0", struct.pack(">BI", 0, 1 << 20) + bytes(draw.choice((0, 1, 5000)))))
    streams = [2 * one + 1 for one in range(draw.choice((1, 90, 300)))]
    return [h2_frame(1, 4, one, process) + (h2_frame(0, 0, one, part) if part else b"") for one in streams]


def _windows(draw: random.Random, process: bytes) -> Pieces:
    """Windows that grow beyond all bounds, or by nothing, shrink below nothing, and data beyond them."""
    most, opened = struct.pack(">I", 0x7FFFFFFF), h2_frame(1, 4, 1, process)
    sizes = [struct.pack(">HI", 4, draw.choice((0, 1, 65_535, 0x7FFFFFFF, 1 << 31))) for _ in range(200)]
    return [
        opened,
        *draw.choice(
            (
                [h2_frame(8, 0, 1, most)],
                [h2_frame(4, 0, 0, struct.pack(">HI", 4, 0x7FFFFFFF)), h2_frame(8, 0, 1, struct.pack(">I", 1))],
                [h2_frame(8, 0, draw.choice((0, 1, 7)), bytes(4))],
                [h2_frame(8, 0, 1, struct.pack(">I", 1))] * 3000,
                [h2_frame(4, 0, 0, one) for one in sizes],
                [h2_frame(4, 0, 0, struct.pack(">HI", 5, draw.choice((0, 16_383, 1 << 24)))) for _ in range(3)],
                [h2_frame(0, 0, 1, struct.pack(">BI", 0, 64 << 20) + bytes(16_000))] * 80,
            )
        ),
    ]


def _nothings(draw: random.Random, process: bytes) -> Pieces:
    """Thousands of frames that say nothing: without bytes, of padding only, with a byte of a body each, with priorities."""
    opened = h2_frame(1, 4, 1, process)
    return draw.choice(
        (
            [h2_frame(1, 0, 1, process), h2_frame(9, 0, 1, b"") * 3000],
            [opened, h2_frame(0, 0, 1, b"") * 3000],
            [opened, h2_frame(0, 8, 1, b"\xc8" + bytes(200)) * 1000],
            [opened, h2_frame(0, 0, 1, struct.pack(">BI", 0, 9000)), h2_frame(0, 0, 1, b"x") * 3000],
            [opened, h2_frame(0, 0, 1, struct.pack(">BI", 0, 0)) * 3000],
            [opened, h2_frame(2, 0, 1, bytes(5)) * 3000],
            [opened, h2_frame(10, 0, 1, bytes(100)) * 500],
        )
    )


_ABUSES = (_tables, _trailers, _half_open, _windows, _nothings)


def grpc_huge(draw: random.Random) -> Pieces:
    """Frames of HTTP/2 of greatest length, in floods, messages of up to 4 GiB, and abuses of tables, trailers and windows."""
    begin = _PREFACE + h2_frame(4, 0, 0, b"")
    process = call_head(_METHODS_OF_GRPC[0])
    if draw.random() < 0.5:
        return [begin, *draw.choice(_ABUSES)(draw, process)]
    kind = draw.randrange(9)
    if kind == 0:
        return [
            begin,
            h2_frame(1, 4, 1, process),
            h2_frame(0, 0, 1, b"\0" + struct.pack(">I", 1 << draw.randrange(16, 32)) + bytes(5000)),
        ]
    if kind == 1:
        return [begin, h2_frame(1, 0, 1, process), h2_frame(9, 0, 1, _literal(b"x", b"y" * 9_000)) * 60]
    if kind == 2:
        return [
            begin,
            b"".join(
                h2_frame(1, 4, 2 * one + 1, process) + h2_frame(3, 0, 2 * one + 1, bytes(4)) for one in range(300)
            ),
        ]
    if kind == 3:
        return [begin, h2_frame(6, 0, 0, bytes(8)) * 2000]
    if kind == 4:
        return [begin, h2_frame(4, 0, 0, struct.pack(">HI", 4, 1 << 30) * 50) * 100]
    if kind == 5:
        return [
            begin,
            h2_frame(
                draw.randrange(12), draw.randrange(256), 1, draw.randbytes(100), draw.choice((1 << 14, (1 << 24) - 1))
            ),
        ]
    if kind == 6:
        return [begin, h2_frame(8, 0, 0, struct.pack(">I", 0x7FFFFFFF)) * 3]
    if kind == 7:
        return [
            begin,
            h2_frame(1, 4, 1, process),
            h2_frame(0, 0, 1, b"\1" + struct.pack(">I", 9000) + draw.randbytes(9000)),
        ]
    heads = [(b"x-%d" % one, draw.randbytes(40).hex().encode()) for one in range(100)]
    return [begin, h2_frame(1, 4, 1, call_head(_METHODS_OF_GRPC[0], *heads))]


class Recorder:
    """A port before another one: keeps what its clients send."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.sent: list[Pieces] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                pieces: Pieces = []
                self.sent.append(pieces)
                server = socket.create_connection(("127.0.0.1", self._target))
                for one, other, kept in ((client, server, pieces), (server, client, [])):
                    threading.Thread(target=self._pass_on, args=(one, other, kept), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, kept: Pieces) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                kept.append(data)
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def close(self) -> list[Pieces]:
        """Listen no more. Returns what each client has sent."""
        self._listener.close()
        return [one for one in self.sent if one]
