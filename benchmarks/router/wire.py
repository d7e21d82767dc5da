"""The wire of the router's benchmark: a server that streams at once or slowly, a client that sees when each event comes, and
the proxies between them. Only as much HTTP/1.1 as is spoken there, so that what is measured is the way and not the ends.

Every event carries its number and the time at which it was sent, so the client sees how late it is, and whether one is missing,
doubled or out of order.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import uvloop

EVENTS = 16
PROXY_CORE, REST_CORE = 0, 1
# Streams that begin per second: less than any contender manages.
STARTS = 500
_EVENT = re.compile(rb'"text": ?" (\d+) ([\d.]+)"[^\n]*?"finish_reason": ?(null|"length")')
_END = b"0\r\n\r\n"
_numbers = itertools.count()


def many_files() -> int:
    """As many open files as this process may have."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def settle_memory() -> None:
    """Freeze what is loaded, so that the collector's pauses at the ends are not measured."""
    gc.collect()
    gc.freeze()
    gc.disable()


# The server behind


class Behind(asyncio.Protocol):
    """Answers what a router asks, on connections that are kept."""

    kind = "vllm"
    ending = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.loop = asyncio.get_running_loop()
        self.data = b""

    def data_received(self, data: bytes) -> None:
        self.data += data
        while b"\r\n\r\n" in self.data:
            head, _, rest = self.data.partition(b"\r\n\r\n")
            fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
            if b"transfer-encoding" in fields:
                body, ended, after = chunks(rest)
                if not ended:
                    return
                self.data = after
            else:
                length = int(fields.get(b"content-length", 0))
                if len(rest) < length:
                    return
                body, self.data = rest[:length], rest[length:]
            self.answer(head.split(b" ", 2)[1].decode(), body)

    def answer(self, path: str, body: bytes) -> None:
        if path.startswith("/v1/completions"):
            self.stream(json.loads(body))
        elif path == "/v1/models":
            card = {"id": "m", "object": "model", "owned_by": self.kind, "max_model_len": 100_000}
            self.whole({"object": "list", "data": [card]})
        elif path == "/tokenize":
            self.whole({"tokens": list(json.loads(body)["prompt"].encode()[::4]), "count": 0})
        elif path == "/end":
            Behind.ending = True
            self.whole({})
        elif path == "/health":
            self.whole({})
        else:
            self.whole({}, b"404 Not Found")

    def whole(self, found: dict[str, Any], status: bytes = b"200 OK") -> None:
        data = json.dumps(found).encode()
        head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(data))
        self.transport.write(head + data)

    def stream(self, asked: dict[str, Any]) -> None:
        """All events at once; or one every `pause` seconds, until `/end` is asked for, or there are as many if it `ends`."""
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        self.number = 0
        if "pause" in asked:
            self.pause, Behind.ending = float(asked["pause"]), False
            self.last = asked["max_tokens"] - 1 if asked.get("ends") else -1
            self.due = self.loop.time() + random.random() * self.pause
            self.loop.call_at(self.due, self.tick)
            return
        count = asked["max_tokens"]
        for number in range(count):
            self.event(number == count - 1)
        self.transport.write(_chunk(b"data: [DONE]\n\n") + _END)

    def tick(self) -> None:
        if self.transport.is_closing():
            return
        last = Behind.ending or self.number == self.last
        self.event(last)
        if last:
            self.transport.write(_chunk(b"data: [DONE]\n\n") + _END)
        else:
            self.due += self.pause
            self.loop.call_at(self.due, self.tick)

    def event(self, last: bool) -> None:
        """One event as vLLM writes it, without spaces."""
        said = b' %d %.6f","logprobs":null,"finish_reason":' % (self.number, time.monotonic())
        said += b'"length"' if last else b"null"
        if self.kind == "vllm":
            said += b',"token_ids":[%d]' % (self.number % 30_000)
            if not self.number:
                said += _PROMPT_IDS
        self.transport.write(_chunk(_HEAD + said + b"}]}\n\n"))
        self.number += 1


_HEAD = b'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"'
_PROMPT_IDS = b',"prompt_token_ids":' + json.dumps(list(range(250)), separators=(",", ":")).encode()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def chunks(data: bytes) -> tuple[bytes, bool, bytes]:
    """The text of the chunks that are whole, whether the last one was among them, and the bytes that follow."""
    at, parts, ended = 0, list[bytes](), False
    while not ended and (line := data.find(b"\r\n", at)) >= 0:
        size = int(data[at:line], 16)
        if line + size + 4 > len(data):
            break
        parts.append(data[line + 2 : line + 2 + size])
        at, ended = line + size + 4, not size
    return b"".join(parts), ended, data[at:]


def serve(kind: str, port: Connection) -> None:
    """The server's process."""
    os.sched_setaffinity(0, {REST_CORE})
    many_files()

    async def run() -> None:
        Behind.kind = kind
        server = await asyncio.get_running_loop().create_server(Behind, "127.0.0.1", 0, backlog=4096)
        port.send(server.sockets[0].getsockname()[1])
        settle_memory()
        await server.serve_forever()

    uvloop.run(run())


# The clients


class Broken(RuntimeError):
    """A stream that did not come as it was sent."""


@dataclass(slots=True)
class Seen:
    """One request: seconds to its first event and to its end, and `(arrival, seconds on the way)` of events, if wanted."""

    first: float
    end: float
    late: list[tuple[float, float]] = field(default_factory=list)


class Client(asyncio.Protocol):
    """One connection that is kept, one request at a time."""

    def __init__(self) -> None:
        self.seen: asyncio.Future[Seen] | None = None
        self.number = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def ask(self, port: int, **more: float) -> asyncio.Future[Seen]:
        """`more`: the `pause` of a slow stream, and whether it `ends`. Its result raises Broken."""
        prompt = f"{next(_numbers)} " + "Tell me about reverse proxies and prefix caches. " * 20
        body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": EVENTS, "stream": True, **more}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
        self.rest, self.text, self.inside = b"", b"", False
        self.first, self.number, self.finished, self.late = 0.0, 0, False, list[tuple[float, float]]()
        self.seen = asyncio.get_running_loop().create_future()
        self.began = time.monotonic()
        self.transport.write(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
        return self.seen

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        text, ended = self.unwrap(data)
        if text:
            self.text += text
            self.take(now)
        if not ended or self.seen is None or self.seen.done():
            return
        if self.text == b"data: [DONE]\n\n" and self.finished:
            self.seen.set_result(Seen(self.first - self.began, now - self.began, self.late))
        else:
            self.fail(f"ended after {self.number} events with {self.text[-400:].decode()}")

    def unwrap(self, data: bytes) -> tuple[bytes, bool]:
        """The text of the chunks that are whole by now, and whether it was the last one. A proxy may cut them anywhere."""
        data = self.rest + data
        if not self.inside:
            head, found, data = data.partition(b"\r\n\r\n")
            if not found:
                self.rest = head
                return b"", False
            if b" 200 " not in head[:16]:
                self.fail((head[:80] + data).decode())
            self.inside = True
        text, ended, self.rest = chunks(data)
        return text, ended

    def take(self, now: float) -> None:
        """Events that are whole. What follows the last of them stays in `text`, the end of the stream too."""
        end = self.text.rfind(b"}]}\n\n") + 5
        if end < 5:
            return
        for number, sent, finish in _EVENT.findall(self.text, 0, end):
            if int(number) != self.number:
                self.fail(f"event {int(number)} came in place of {self.number}")
            self.number += 1
            self.first = self.first or now
            self.late.append((now, now - float(sent)))
            self.finished = finish != b"null"
        self.text = self.text[end:]

    def fail(self, why: str) -> None:
        if self.seen is not None and not self.seen.done():
            self.seen.set_exception(Broken(why))

    def connection_lost(self, error: Exception | None) -> None:
        self.fail(f"closed after {self.number} events: {error or 'without a reason'}")


async def connected(port: int, count: int) -> list[Client]:
    loop = asyncio.get_running_loop()
    return [(await loop.create_connection(Client, "127.0.0.1", port))[1] for _ in range(count)]


# Contenders

_TOKENIZER = str(Path(__file__).parents[2] / "foreword" / "models" / "stdlib-nano")
# Routers: name, the kind of servers, and settings.
ROUTERS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("router, plain servers", "plain", ()),
    ("router, vLLM, own tokenizer", "vllm", ("--tokenizer", _TOKENIZER)),
    ("router, vLLM, /tokenize", "vllm", ()),
)


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to the servers: its port, and the process whose time counts (None for the straight way)."""

    name: str
    port: int
    pid: int | None

    def cpu_seconds(self) -> float:
        return process_seconds(self.pid) if self.pid else 0.0

    def memory(self) -> int:
        """Resident bytes."""
        if self.pid is None:
            return 0
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def process_seconds(pid: int) -> float:
    """Of CPU so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def all_seconds(pid: int) -> float:
    """The processor time of a process and its children so far, of the threads that they have now: to the nanosecond."""
    tasks = (task for process in _tree(pid) for task in Path(f"/proc/{process}/task").iterdir())
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def _tree(pid: int) -> Iterator[int]:
    yield pid
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        yield from _tree(int(child))


class Servers:
    """The servers' processes: two of each kind."""

    def __init__(self) -> None:
        self.ports: dict[str, list[int]] = {}
        self._pids: list[int] = []
        for kind in ("vllm", "plain") * 2:
            ours, theirs = multiprocessing.Pipe()
            process = multiprocessing.Process(target=serve, args=(kind, theirs), daemon=True)
            process.start()
            assert process.pid is not None
            self._pids.append(process.pid)
            self.ports.setdefault(kind, []).append(ours.recv())

    def cpu_seconds(self) -> float:
        return sum(map(process_seconds, self._pids))

    async def end_streams(self) -> None:
        """The slow ones: the next event of each is its last."""
        for port in itertools.chain(*self.ports.values()):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /end HTTP/1.1\r\n\r\n")
            await reader.readline()
            writer.close()


def start(stack: ExitStack, servers: Servers, rival: str | None = None) -> list[Contender]:
    """All of them, the straight way first. `rival`: the command of the package `vllm-router`."""
    behind = servers.ports
    found = [Contender("straight", behind["vllm"][0], None)]
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    if shutil.which("nginx"):
        process, port = _nginx(behind["vllm"], folder)
        stack.callback(end_process, process)
        found.append(Contender("nginx", port, _worker(process)))
    if rival:
        process, port = _vllm_router(rival, behind["vllm"])
        stack.callback(end_process, process)
        found.append(Contender("vllm-router, cache aware", port, process.pid))
    for name, kind, flags in ROUTERS:
        process, port = start_router(behind[kind], *flags)
        stack.callback(end_process, process)
        found.append(Contender(name, port, process.pid))
    return found


def _nginx(ports: list[int], folder: Path) -> tuple[subprocess.Popen[bytes], int]:
    port = free_port()
    servers = " ".join(f"server 127.0.0.1:{one};" for one in ports)
    (folder / "nginx.conf").write_text(
        f"""daemon off; worker_processes 1; worker_rlimit_nofile {many_files()}; pid {folder}/nginx.pid;
        error_log {folder}/error.log; events {{ worker_connections {many_files()}; }}
        http {{ access_log off; client_body_temp_path {folder}; proxy_temp_path {folder}; fastcgi_temp_path {folder};
          uwsgi_temp_path {folder}; scgi_temp_path {folder}; keepalive_requests 1000000;
          upstream behind {{ {servers} keepalive 4096; keepalive_requests 1000000; }}
          server {{ listen 127.0.0.1:{port} backlog=4096; location / {{ proxy_pass http://behind; proxy_http_version 1.1;
            proxy_set_header Connection ""; proxy_buffering off; }} }} }}""",
        encoding="utf-8",
    )
    return _pinned(["nginx", "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]), port


def nginx_version() -> str:
    found = shutil.which("nginx")
    return subprocess.run([found, "-v"], capture_output=True, text=True).stderr.strip() if found else "absent"


def start_router(
    ports: list[int], *flags: str, checkout: Path | None = None, pinned: bool = True
) -> tuple[subprocess.Popen[bytes], int]:
    """A router in front of servers on these ports, and its own port. `checkout`: the folder with its code, if not this one."""
    port = free_port()
    named = [word for one in ports for word in ("--replica", f"http://127.0.0.1:{one}")]
    limits = ["--max-waiting", "100000", "--max-in-flight", "100000", "--log-level", "warning"]
    command = [sys.executable, "-m", "foreword", "route", "--port", str(port), *named, *limits, *flags]
    if checkout is None:
        return (_pinned(command) if pinned else subprocess.Popen(command)), port
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    return _pinned(command, cwd=checkout, env=environment), port


def _vllm_router(rival: str, ports: list[int]) -> tuple[subprocess.Popen[bytes], int]:
    port, metrics = free_port(), str(free_port())
    named = [f"http://127.0.0.1:{one}" for one in ports]
    quiet = ("--prometheus-port", metrics, "--log-level", "error")
    command = [rival, "--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware", *quiet]
    return _pinned([*command, "--worker-urls", *named]), port


def _pinned(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, preexec_fn=lambda: os.sched_setaffinity(0, {PROXY_CORE}), **options)


def end_process(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def _worker(process: subprocess.Popen[bytes]) -> int:
    """nginx works in a child."""
    for _ in range(100):
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        if children:
            return int(children[0])
        time.sleep(0.05)
    raise SystemExit("nginx does not start")


async def wait_for(port: int, seconds: float = 60.0) -> None:
    """Until a request is answered. Raises SystemExit if none is."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            [client] = await connected(port, 1)
            async with asyncio.timeout(5):
                await client.ask(port)
            client.transport.close()
            return
        except (OSError, Broken, TimeoutError):
            await asyncio.sleep(0.1)
    raise SystemExit(f"nothing answers on port {port}")
