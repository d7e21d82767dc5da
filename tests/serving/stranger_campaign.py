"""A seeded campaign of strangers at every port: HTTP of a server and a router, KV events, their replays, KV transfer, the same
under TLS, and the endpoint picker. All are real processes with keys, which strangers do not have.

    make strangers [MESSAGES=100000] [SEED=1]

Each message is one exchange on a connection of its own: the port's protocol with a wrong key, lengths that nothing has, what a
real peer has sent before, the protocols of other ports, garbage; whole, cut off, changed, piece by piece, or held open byte by
byte. Meanwhile a client with the key uses the same port. Before that a twentieth as many warm everything up. The levels of the
port's process are read between the two, and at the end. The table counts:

- memory, files, threads: what the process has more at the end, memory in MiB; and MiB of the most that it had in between,
- learned: answers with a key, a secret, a tenant's name or salt, its text, its tokens, keys of its blocks, or a path,
- failed, slowest: calls of the client with the key that failed, and the longest one in seconds,
- crash: tracebacks in the log, and processes that ended,
- log: bytes that it logged per message.
"""

from __future__ import annotations

import contextlib
import errno
import re
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

if __name__ == "__main__":
    for folder in ("store", "transfer"):
        sys.path.append(str(Path(__file__).parents[1] / folder))

import http_client
import msgspec
import psutil
import zmq
from fault_campaign import print_campaign, scratch_folder
from ports import free_port
from router_parts import RouterProcess
from server_process import ServerProcess
from shared_server import until
from stranger_messages import (
    Maker,
    Pieces,
    Recorder,
    grpc,
    grpc_huge,
    http,
    http_huge,
    tls_huge,
    transfer,
    transfer_huge,
    zmtp,
    zmtp_huge,
)

from foreword.api.event_curve import secure_subscriber
from foreword.api.rights import Tenants
from foreword.kv_event_wire import REPLAY_END, encode_number
from foreword.process_config import ServerConfig
from foreword.transfer.errors import TransferError
from foreword.transfer.transfer_endpoint import TransferEndpoint
from foreword.transfer.transfers import TransferService
from foreword.transfer_config import TransferConfig

LIVE, HELD = 32, 64  # connections of strangers at a time, and those that they hold open besides
PATIENCE = 0.15  # seconds that a stranger waits for an answer
QUIET = 0.01  # and after one
SOURCES = 4  # addresses of strangers; the client with the key has the first of them
CALL = 30.0
SETTLE = 30.0
READ = 1 << 20
GROWTH = 16  # MiB

NAME, OTHER = "tenant-annabelle", "tenant-bartholomew"
TEXT = "the marker of annabelle is a heliotrope zeppelin over a quiet harbour in november; " * 3
KEYS = {
    name: f"the-{name}-key-of-these-processes"
    for name in ("annabelle", "bartholomew", "admin", "router", "tenant", "transfer")
}


@dataclass
class Row:
    """The counts of one port."""

    label: str
    messages: int = 0
    memory: float = 0.0
    most: float = 0.0
    files: int = 0
    threads: int = 0
    learned: int = 0
    calls: int = 0
    failed: int = 0
    slowest: float = 0.0
    crash: int = 0
    log: float = 0.0
    seconds: float = 0.0
    kinds: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)

    @property
    def good(self) -> bool:
        # Idle threads and connections of pools come and go.
        leaks = self.memory > GROWTH or self.files > 8 or self.threads > 8
        return not (leaks or self.learned or self.failed or self.crash) and self.calls > 0


class _Connection:
    """A connection of a stranger. `ends`: what it does when all is sent: `close`, `half` (it sends no more) or `wait`."""

    def __init__(self, sock: socket.socket, pieces: Pieces, ends: str) -> None:
        self.sock = sock
        self.left = deque(one for one in pieces if one)
        self.ends = ends
        self.received = bytearray()
        self.until = time.monotonic() + PATIENCE

    def send(self) -> bool:
        """Send what fits; true if it is the end of the exchange. Raises OSError."""
        while self.left:
            sent = self.sock.send(self.left[0][: 1 << 16])
            if sent < len(self.left[0]):
                self.left[0] = self.left[0][sent:]
                return False
            self.left.popleft()
            self.until = time.monotonic() + PATIENCE
            return False
        if self.ends == "half":
            self.sock.shutdown(socket.SHUT_WR)
            self.ends = "wait"
        return self.ends == "close"

    def receive(self) -> bool:
        """True if it is the end of the exchange. Raises OSError."""
        data = self.sock.recv(1 << 16)
        self.received += data
        if not self.left:
            self.until = min(self.until, time.monotonic() + QUIET)
        return not data or len(self.received) > READ


class Storm:
    """Connections of strangers to one port, `LIVE` at a time, and up to `HELD` that are kept open."""

    def __init__(self, port: int, secrets: re.Pattern[bytes], row: Row) -> None:
        self._port = port
        self._secrets = secrets
        self._row = row
        self._selector = selectors.DefaultSelector()
        self._live: dict[_Connection, None] = {}
        self._held: deque[_Connection] = deque()

    def send(self, pieces: Pieces, ends: str, source: int) -> None:
        """Begin an exchange as soon as there is room."""
        while len(self._live) >= LIVE:
            self._turn()
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_IP, 24, 1)  # IP_BIND_ADDRESS_NO_PORT
        sock.bind((f"127.0.0.{source}", 0))
        if sock.connect_ex(("127.0.0.1", self._port)) not in (0, errno.EINPROGRESS):
            self._row.notes["no connection"] += 1
            sock.close()
            return
        connection = _Connection(sock, pieces, ends)
        self._selector.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE, connection)
        if ends == "hold":
            self._held.append(connection)
            if len(self._held) > HELD:
                self._end(self._held.popleft())
        else:
            self._live[connection] = None

    def _turn(self) -> None:
        for key, events in self._selector.select(0.01):
            connection: _Connection = key.data
            try:
                over = bool(events & selectors.EVENT_READ) and connection.receive()
                if not over and events & selectors.EVENT_WRITE:
                    over = connection.send()
                    if connection.ends == "hold" or (not connection.left and connection.ends == "wait"):
                        self._selector.modify(connection.sock, selectors.EVENT_READ, connection)
            except BlockingIOError:
                over = False
            except OSError:
                over = True
            if over:
                self._end(connection)
        now = time.monotonic()
        for connection in [one for one in self._live if one.until < now]:
            self._end(connection)
        if self._held:  # one byte more
            self._held.rotate()
            with contextlib.suppress(OSError):
                self._held[0].send()

    def _end(self, connection: _Connection) -> None:
        if self._live.pop(connection, connection) is connection and connection in self._held:
            self._held.remove(connection)
        with contextlib.suppress(KeyError):
            self._selector.unregister(connection.sock)
        connection.sock.close()
        found = self._secrets.search(connection.received)
        if found:
            self._row.learned += 1
            self._row.notes[f"learned {found[0][:40]!r} from {bytes(connection.received[:80])!r}"] += 1

    def close(self) -> None:
        """Wait for the last answers."""
        while self._live:
            self._turn()
        while self._held:
            self._end(self._held.popleft())
        self._selector.close()


class Port:
    """A port under test.

    Args:
        process: that listens on it.
        valid, huge: make what strangers send; `recorded`: what real peers have sent.
        use: a call of a client with the key; raises or asserts if it is not served.
    """

    def __init__(
        self, label: str, process: Process, port: int, valid: Maker, huge: Maker, use: Callable[[], object]
    ) -> None:
        self.label, self.process, self.number = label, process, port
        self.valid, self.huge, self.use = valid, huge, use
        self.recorded: list[Pieces] = []

    def message(self, draw: Random, others: Sequence[Port]) -> tuple[str, Pieces, str]:
        """The kind of a message, what is sent, and how it ends."""
        kinds = {"own": 30, "huge": 8, "recorded": 12 if self.recorded else 0, "other": 5, "garbage": 10, "nothing": 3}
        kind = draw.choices(list(kinds), list(kinds.values()))[0]
        pieces: Pieces = []
        if kind in ("own", "other"):
            pieces = (self if kind == "own" else draw.choice(others)).valid(draw)
        elif kind == "huge":
            pieces = self.huge(draw)
        elif kind == "recorded":
            pieces = draw.choice(self.recorded)
        elif kind == "garbage":
            pieces = [draw.randbytes(draw.choice((1, 10, 100, 3000, 70_000)))]
        ways = {"whole": 50, "cut": 20, "changed": 15, "slow": 10, "again": 5}
        way = draw.choices(list(ways), list(ways.values()))[0] if kind not in ("nothing", "huge") else "whole"
        ends = draw.choices(("wait", "half", "close"), (60, 20, 20))[0]
        return f"{kind}, {way}", *_changed(draw, pieces, way, ends)


def _changed(draw: Random, pieces: Pieces, way: str, ends: str) -> tuple[Pieces, str]:
    data = b"".join(pieces)
    if way == "cut":
        return [data[: draw.randrange(len(data))]], ends
    if way == "changed":
        changed = bytearray(data)
        for _ in range(draw.choice((1, 1, 8))):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        return [bytes(changed)], ends
    if way == "slow":
        at = draw.randrange(len(data))
        return [data[:at], *(data[one : one + 1] for one in range(at, min(at + 200, len(data))))], "hold"
    return pieces * (draw.randrange(2, 6) if way == "again" else 1), ends


class Process:
    """A process with the text of its log."""

    def __init__(self, name: str, command: ServerProcess | RouterProcess) -> None:
        self.name, self.command = name, command
        self._process: psutil.Process | None = None

    def levels(self) -> tuple[float, int, int]:
        """MiB of memory, open files, threads."""
        self._process = self._process or psutil.Process(self.command.popen.pid)
        with self._process.oneshot():
            memory = self._process.memory_info().rss / (1 << 20)
            return memory, self._process.num_fds(), self._process.num_threads()

    def settled(self, files: int) -> tuple[float, int, int]:
        """Its levels when it has closed all but this many files, or after a time."""
        deadline = time.monotonic() + SETTLE
        while self.levels()[1] > files and time.monotonic() < deadline:
            time.sleep(0.2)
        time.sleep(6.0)  # the picker returns memory every five seconds
        return self.levels()


class Fleet:
    """The processes, which end with `stack`, their ports, and what no stranger may learn."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        files = {name: folder / f"{name}.secret" for name in ("admin", "router", "tenant", "transfer")}
        for name, path in files.items():
            path.write_text(KEYS[name])
        given = [part for one in _api_keys() for part in ("--api-keys", one)]
        given += ["--admin-key", f"file:{files['admin']}", "--tenant-secret", f"file:{files['tenant']}"]
        secret = ["--transfer-secret", f"file:{files['transfer']}"]
        _certificate(folder)
        tls = ["--transfer-tls", "--transfer-tls-certificate-file", str(folder / "tls.pem")]
        stores = ["--store", "memory://?size=4MiB", "--store", f"disk://{folder}/kv?size=16MiB"]
        transfers, encrypted, picker = (free_port() for _ in range(3))
        self.server = self._start(
            "server",
            ServerProcess(
                *("--dtype", "float32", "--no-self-check", "--role", "both", *given, *stores, *secret),
                *("--router-key", f"file:{files['router']}", "--transfer-bind", f"127.0.0.1:{transfers}"),
                *("--kv-events", "tcp://127.0.0.1:0"),
            ),
        )
        self.peer = self._start(
            "peer",
            ServerProcess(
                *("--dtype", "float32", "--no-self-check", "--role", "prefill", *given, *secret, *tls),
                *("--transfer-bind", f"127.0.0.1:{encrypted}"),
            ),
        )
        self.url = self.server.command.wait_ready()
        self.peer.command.wait_ready()
        self.router = self._start(
            "router",
            RouterProcess(
                *("--replica", self.url, "--replica-key", f"file:{files['router']}", *given),
                *("--picker", f"127.0.0.1:{picker}", "--health-interval", "2"),
            ),
        )
        self.router.command.wait_for(1)
        self.answer = self._ask(self.url)
        headers = {"authorization": f"Bearer {KEYS['router']}"}
        source = http_client.get(f"{self.url}/kv_event_sources", headers=headers).json()["0"]
        events, replays = (int(source[name].rpartition(":")[2]) for name in ("endpoint", "replay_endpoint"))
        self._subscriber = self._stack.enter_context(_subscriber(events, zmq.SUB))
        self._subscriber.subscribe(b"")
        self._asked = 0
        plain, under_tls = ({"secret": KEYS["transfer"], "tls": one} for one in (False, True))
        routed = self.router.command.url
        paths, routes = _paths(self.url), _paths(routed)
        zmq_ports = (zmtp, zmtp_huge)
        self.ports = [
            Port("server", self.server, _port(self.url), http(paths), http_huge, lambda: self._same(self.url)),
            Port("KV events", self.server, events, *zmq_ports, self._event),
            Port("replays", self.server, replays, *zmq_ports, lambda: _replay(replays)),
            Port("transfer", self.server, transfers, transfer, transfer_huge, lambda: _connect(transfers, plain)),
            Port("transfer, TLS", self.peer, encrypted, transfer, tls_huge, lambda: _connect(encrypted, under_tls)),
            Port("router", self.router, _port(routed), http(routes), http_huge, lambda: self._same(routed)),
            Port("picker", self.router, picker, grpc(routes), grpc_huge, lambda: _pick(picker, self.url)),
        ]
        self._record()
        self.secrets = re.compile(b"|".join(map(re.escape, sorted(set(self._known(folder))))))

    def _start(self, name: str, command: Any) -> Process:
        self._stack.callback(command.kill)
        return Process(name, command)

    # Clients with a key

    def _ask(self, url: str, text: str = TEXT) -> str:
        body = {"prompt": text, "max_tokens": 4, "temperature": 0}
        headers = {"authorization": f"Bearer {KEYS['annabelle']}"}
        answer = http_client.post(f"{url}/v1/completions", json=body, headers=headers, timeout=CALL)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def _same(self, url: str) -> None:
        assert self._ask(url) == self.answer

    def _event(self) -> None:
        """A new prompt's event arrives."""
        while self._subscriber.poll(0):
            self._subscriber.recv_multipart()
        self._asked += 1
        self._ask(self.url, f"{self._asked} {TEXT}")
        assert self._subscriber.poll(int(CALL * 1000)), "no event"

    # Requests that strangers may send, and facts that they may not learn

    def _record(self) -> None:
        """Let real clients talk to each port, with and without the key, and keep what they send."""
        uses: dict[str, Callable[[int], object]] = {
            "KV events": lambda port: _talk(port, zmq.SUB),
            "replays": lambda port: _replay(port),
            "transfer": lambda port: _connect(port, {"secret": KEYS["transfer"]}),
            "transfer, TLS": lambda port: _connect(port, {"secret": KEYS["transfer"], "tls": True}),
            "picker": lambda port: _pick(port, self.url, "another key than that"),
        }
        strangers: dict[str, Callable[[int], object]] = {
            "KV events": lambda port: _talk(port, zmq.XSUB, "another key than that"),
            "replays": lambda port: _talk(port, zmq.DEALER, None),
            "transfer": lambda port: _connect(port, {"secret": "another secret than that"}),
        }
        for port in self.ports:
            for use in (uses.get(port.label), strangers.get(port.label)):
                if use is not None:
                    recorder = Recorder(port.number)
                    with contextlib.suppress(TransferError, AssertionError):
                        use(recorder.port)
                    port.recorded += recorder.close()

    def _known(self, folder: Path) -> Iterator[bytes]:
        yield from (one.encode() for one in (*KEYS.values(), NAME, OTHER, str(folder)))
        yield from (TEXT[at : at + 24].encode() for at in range(0, 80, 8))
        tenants = Tenants.from_config(ServerConfig(api_keys=_api_keys(), tenant_secret=KEYS["tenant"]))
        for tenant in map(tenants.named, (NAME, OTHER)):
            assert tenant is not None
            yield from (tenant.salt, tenant.salt.hex().encode())
        headers = {"authorization": f"Bearer {KEYS['annabelle']}"}
        body = {"prompt": TEXT}
        tokens = http_client.post(f"{self.url}/v1/tokenize", json=body, headers=headers).json()["tokens"]
        for at in range(0, len(tokens) - 4, 2):
            some = tokens[at : at + 4]
            yield from (sign.join(map(str, some)).encode() for sign in (", ", ","))
            yield b"".join(map(msgspec.msgpack.encode, some))
            yield b"".join(one.to_bytes(4, "little") for one in some)
        until(lambda: bool(_block_files(folder)), CALL)
        for path in _block_files(folder):
            yield path.name.encode()
            yield bytes.fromhex(path.name)


def _api_keys() -> tuple[str, ...]:
    return f"{NAME}={KEYS['annabelle']}", f"{OTHER}={KEYS['bartholomew']}"


def _block_files(folder: Path) -> list[Path]:
    return [one for one in (folder / "kv").rglob("*") if re.fullmatch("[0-9a-f]{64}", one.name)]


def _port(url: str) -> int:
    return int(url.rpartition(":")[2])


def _paths(url: str) -> list[str]:
    return list(http_client.get(f"{url}/openapi.json").json()["paths"])


def _certificate(folder: Path) -> None:
    path = str(folder / "tls.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=peer", "-days", "2"]
    subprocess.run([*command, "-keyout", path, "-out", f"{path}.crt"], check=True, capture_output=True)
    with open(path, "a") as file:
        file.write(Path(f"{path}.crt").read_text())


@contextlib.contextmanager
def _subscriber(port: int, kind: int, key: str | None = KEYS["router"]) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(kind) as made:
        made.linger = 0
        if key is not None:
            secure_subscriber(made, key)
        made.connect(f"tcp://127.0.0.1:{port}")
        yield made


def _talk(port: int, kind: int, key: str | None = KEYS["router"]) -> None:
    """Subscribe, or ask, and leave."""
    with _subscriber(port, kind, key) as made:
        if kind == zmq.SUB:
            made.subscribe(b"")
        else:
            with contextlib.suppress(zmq.Again):
                made.send(b"\x01", zmq.DONTWAIT)
        time.sleep(0.5)


def _replay(port: int) -> None:
    """The whole replay arrives."""
    with _subscriber(port, zmq.DEALER) as made:
        made.send_multipart([b"", encode_number(0)])
        while made.poll(int(CALL * 1000)):
            if made.recv_multipart()[-2] == REPLAY_END:
                return
    raise AssertionError("no replay")


def _connect(port: int, settings: dict[str, Any]) -> None:
    """A peer with the secret connects, at the first try."""
    endpoint = TransferEndpoint(TransferConfig(**settings), TransferService())
    try:
        assert endpoint.connect(f"127.0.0.1:{port}").alive
    finally:
        endpoint.close()


def _pick(port: int, url: str, key: str = KEYS["annabelle"]) -> None:
    """A gateway's request with the key gets the only replica."""
    import grpc as library

    from foreword.router_extras.gateway import envoy_messages as envoy

    first, last = envoy.ProcessingRequest(), envoy.ProcessingRequest()
    first.protocol_config.request_body_mode = first.protocol_config.response_body_mode = envoy.BUFFERED
    heads = {
        ":method": "POST",
        ":path": "/v1/completions",
        "authorization": f"Bearer {key}",
        "content-type": "application/json",
    }
    for name, value in heads.items():
        first.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    last.request_body.body, last.request_body.end_of_stream = b'{"prompt": "once"}', True
    # Without its own pool, whose connection would be used again.
    with library.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        process = channel.stream_stream(
            "/envoy.service.ext_proc.v3.ExternalProcessor/Process",
            request_serializer=envoy.ProcessingRequest.SerializeToString,
            response_deserializer=envoy.ProcessingResponse.FromString,
        )
        answers = list(process(iter((first, last)), timeout=CALL))
    assert url.removeprefix("http://") in str(answers), answers


class Client:
    """Uses a port as one with the key, all the time."""

    def __init__(self, port: Port, row: Row) -> None:
        self._port, self._row = port, row
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.is_set():
            self.call()
            self._row.most = max(self._row.most, self._port.process.levels()[0])
            self._ended.wait(0.2)

    def call(self) -> None:
        began = time.monotonic()
        try:
            self._port.use()
        except Exception as error:  # noqa: BLE001 - every error is a result
            self._row.failed += 1
            self._row.notes[f"{type(error).__name__}: {error}"[:500]] += 1
        self._row.calls += 1
        self._row.slowest = max(self._row.slowest, time.monotonic() - began)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()


def at_port(fleet: Fleet, port: Port, messages: int, seed: int) -> Row:
    """Send messages to one port: some to warm it up, then as many as are counted."""
    row, draw = Row(port.label), Random(f"{seed}/{port.label}")
    files = port.process.levels()[1]
    before = _storm(fleet, port, max(messages // 20, 200), draw, Row("warm up"), files)
    logged, tracebacks = len(port.process.command.text), port.process.command.text.count("Traceback")
    began = time.monotonic()
    row.most = before[0]
    after = _storm(fleet, port, messages, draw, row, files)
    row.seconds = time.monotonic() - began
    row.messages = messages
    row.memory, row.files, row.threads = (now - then for now, then in zip(after, before, strict=True))
    row.most -= before[0]
    text = port.process.command.text
    row.log = (len(text) - logged) / messages
    found = [
        one.strip()[-600:] for one in re.findall(r"Traceback (?:.*\n)+?(?=\d{4}-|\S*Error|\S*Exc).*", text[logged:])
    ]
    # gRPC prints one, past the log, if a client leaves in the middle of a refusal.
    printed = sum("_send_error_status_from_server" in one for one in found)
    row.crash = text.count("Traceback") - tracebacks - printed + port.process.command.ended()
    row.notes.update(found)
    return row


def _storm(fleet: Fleet, port: Port, messages: int, draw: Random, row: Row, files: int) -> tuple[float, int, int]:
    storm, client = Storm(port.number, fleet.secrets, row), Client(port, row)
    others = [one for one in fleet.ports if one is not port]
    for _ in range(messages):
        kind, pieces, ends = port.message(draw, others)
        row.kinds[kind] += 1
        storm.send(pieces, ends, draw.randrange(SOURCES) + 1)
    storm.close()
    client.close()
    client.call()
    return port.process.settled(files + 4)


def run(
    messages: int, seed: int, only: Sequence[str] = (), report: Callable[[Row], None] = lambda _: None
) -> list[Row]:
    """The campaign: this number of messages, divided among the ports."""
    rows = []
    with scratch_folder() as folder, contextlib.ExitStack() as stack:
        fleet = Fleet(folder, stack)
        for port in fleet.ports:
            if not only or port.label in only:
                rows.append(at_port(fleet, port, max(messages // len(fleet.ports), 50), seed))
                report(rows[-1])
    return rows


HEAD = (
    *("port", "messages", "memory", "most", "files", "threads", "learned"),
    *("calls with a key", "failed", "slowest, s", "crash", "log", "seconds"),
)


def cells(row: Row) -> list[str]:
    counts = (row.files, row.threads, row.learned, row.calls, row.failed)
    memory = (f"{row.memory:+.1f}", f"{row.most:+.1f}")
    rest = (f"{row.slowest:.2f}", f"{row.crash}", f"{row.log:.0f}", f"{row.seconds:.0f}")
    return [row.label, f"{row.messages:,}", *memory, *(f"{one:,}" for one in counts), *rest]


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # end the processes
    rows, notes = print_campaign(__doc__, "messages", 100_000, HEAD, run, cells)
    for row in rows if notes else ():
        print(f"\n{row.label}: {dict(row.kinds)}; {dict(row.notes.most_common(20))}")
    return int(not all(row.good for row in rows))


if __name__ == "__main__":
    sys.exit(main())
