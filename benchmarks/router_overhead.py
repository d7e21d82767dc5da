"""What the router costs: the same streaming load sent straight to a server, through nginx, and through the router.

    python benchmarks/router_overhead.py [--rounds 5] [--streams 1000]

The server behind is a small one that answers at once with fixed events, so that all that is seen is the way. The proxy has one
core, server and clients another. All contenders take turns within one run. nginx (if it is installed) is a plain reverse proxy:
it neither reads the prompt nor remembers the answer. The router is measured three times: in front of plain OpenAI servers
(prompts compared as text), of vLLM servers with the tokenizer in the router, and with the servers' own /tokenize. Every prompt
is new, of about 1 kB.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from timing import machine, median, set_up, table, version_of

EVENTS = 16
PROXY_CORE, REST_CORE = 0, 1
numbers = itertools.count()


# The server behind


class Behind(asyncio.Protocol):
    """Just enough HTTP/1.1 to answer what a router asks, on connections that are kept."""

    kind = "vllm"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.data = b""

    def data_received(self, data: bytes) -> None:
        self.data += data
        while b"\r\n\r\n" in self.data:
            head, _, rest = self.data.partition(b"\r\n\r\n")
            length = next(
                (int(line[15:]) for line in head.split(b"\r\n") if line[:15].lower() == b"content-length:"), 0
            )
            if len(rest) < length:
                return
            body, self.data = rest[:length], rest[length:]
            self.answer(head.split(b" ", 2)[1].decode(), body)

    def answer(self, path: str, body: bytes) -> None:
        if path.startswith("/v1/completions"):
            asked = json.loads(body)
            answer = self.stream(asked.get("max_tokens", EVENTS), asked.get("pause", 0.0))
            self.answering = asyncio.ensure_future(answer)
        elif path == "/v1/models":
            card = {"id": "m", "object": "model", "owned_by": self.kind, "max_model_len": 100_000}
            self.whole({"object": "list", "data": [card]})
        elif path == "/tokenize":
            self.whole({"tokens": list(json.loads(body)["prompt"].encode()[::4]), "count": 0})
        elif path == "/health":
            self.whole({})
        else:
            self.whole({}, b"404 Not Found")

    def whole(self, found: dict[str, Any], status: bytes = b"200 OK") -> None:
        data = json.dumps(found).encode()
        head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(data))
        self.transport.write(head + data)

    async def stream(self, count: int, pause: float) -> None:
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        for number in range(count):
            if pause:
                await asyncio.sleep(pause)
            self.transport.write(piece(number, number == count - 1, self.kind))
        self.transport.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


def piece(number: int, last: bool, kind: str) -> bytes:
    """One event as vLLM writes it, with the time it was sent."""
    choice: dict[str, Any] = {"index": 0, "text": f" {time.monotonic():.6f}", "logprobs": None}
    choice["finish_reason"] = "length" if last else None
    if kind == "vllm":
        choice["token_ids"] = [number]
        if not number:
            choice["prompt_token_ids"] = list(range(250))
    head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}
    return chunk(b"data: " + json.dumps(head).encode() + b"\n\n")


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def serve(kind: str, port: Connection) -> None:
    """The server's process."""
    os.sched_setaffinity(0, {REST_CORE})

    async def run() -> None:
        Behind.kind = kind
        server = await asyncio.get_running_loop().create_server(Behind, "127.0.0.1", 0, backlog=4096)
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


# The clients


@dataclass
class Seen:
    """Seconds of one request: to its first event, to its end, and from sending to arrival of its events."""

    first: float
    end: float
    late: list[float] = field(default_factory=list)


class Client(asyncio.Protocol):
    """One connection that is kept, one request at a time."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.seen: asyncio.Future[Seen] | None = None

    def ask(self, port: int, pause: float) -> asyncio.Future[Seen]:
        prompt = f"{next(numbers)} " + "Tell me about reverse proxies and prefix caches. " * 20
        asked = {"model": "m", "prompt": prompt, "max_tokens": EVENTS, "stream": True}
        if pause:
            asked["pause"] = pause
        body = json.dumps(asked).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
        self.got, self.first, self.late = b"", 0.0, list[float]()
        self.seen = asyncio.get_running_loop().create_future()
        self.began = time.monotonic()
        self.transport.write(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
        return self.seen

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        self.got += data
        if not self.first and b"data: " in self.got:
            self.first = now
        for part in data.split(b'"text":')[1:]:
            text = part.lstrip(b' "').split(b'"', 1)[0]
            if len(text) > 10:
                self.late.append(now - float(text))
        if self.got.endswith(b"0\r\n\r\n") and self.seen is not None and not self.seen.done():
            if b"[DONE]" not in self.got or b"error" in self.got:
                self.seen.set_exception(RuntimeError(self.got[-400:].decode()))
            else:
                self.seen.set_result(Seen(self.first - self.began, now - self.began, self.late))

    def connection_lost(self, error: Exception | None) -> None:
        if self.seen is not None and not self.seen.done():
            self.seen.set_exception(ConnectionError(f"closed after {self.got[-200:]!r}"))


async def connected(port: int, count: int) -> list[Client]:
    loop = asyncio.get_running_loop()
    made = []
    for _ in range(count):
        _, client = await loop.create_connection(Client, "127.0.0.1", port)
        made.append(client)
    return made


async def one_by_one(port: int, count: int) -> list[Seen]:
    """Requests one after the other: what the way takes when nothing else goes on."""
    (client,) = await connected(port, 1)
    seen = [await client.ask(port, 0.0) for _ in range(count)]
    client.transport.close()
    return seen


async def at_full_load(port: int, seconds: float, clients: int) -> float:
    """Requests per second when each client sends the next as soon as the last has ended."""
    made, ended = await connected(port, clients), 0
    until = time.monotonic() + seconds

    async def go_on(client: Client) -> None:
        nonlocal ended
        while time.monotonic() < until:
            await client.ask(port, 0.0)
            ended += 1

    began = time.monotonic()
    await asyncio.gather(*map(go_on, made))
    took = time.monotonic() - began
    for client in made:
        client.transport.close()
    return ended / took


async def side_by_side(port: int, streams: int, pause: float) -> list[float]:
    """So many streams at once, each with an event every `pause` seconds: from sending an event to its arrival."""
    made = await connected(port, streams)
    waiting = []
    for client in made:
        waiting.append(client.ask(port, pause))
        await asyncio.sleep(pause * EVENTS / streams / 2)
    seen = await asyncio.gather(*waiting)
    for client in made:
        client.transport.close()
    return [late for one in seen for late in one.late]


# Contenders


def nginx(ports: list[int], folder: Path) -> tuple[subprocess.Popen[bytes], int]:
    port = free_port()
    servers = " ".join(f"server 127.0.0.1:{one};" for one in ports)
    (folder / "nginx.conf").write_text(
        f"""daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/error.log;
        events {{ worker_connections 8192; }}
        http {{ access_log off; client_body_temp_path {folder}; proxy_temp_path {folder}; fastcgi_temp_path {folder};
          uwsgi_temp_path {folder}; scgi_temp_path {folder}; keepalive_requests 1000000;
          upstream behind {{ {servers} keepalive 4096; keepalive_requests 1000000; }}
          server {{ listen 127.0.0.1:{port} backlog=4096; location / {{ proxy_pass http://behind; proxy_http_version 1.1;
            proxy_set_header Connection ""; proxy_buffering off; }} }} }}""",
        encoding="utf-8",
    )
    return pinned(["nginx", "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]), port


def router(ports: list[int], *flags: str) -> tuple[subprocess.Popen[bytes], int]:
    port = free_port()
    named = [word for one in ports for word in ("--replica", f"http://127.0.0.1:{one}")]
    limits = ["--max-waiting", "100000", "--max-in-flight", "100000", "--log-level", "warning"]
    command = [sys.executable, "-m", "foreword", "route", "--port", str(port), *named, *limits, *flags]
    return pinned(command), port


def pinned(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, preexec_fn=lambda: os.sched_setaffinity(0, {PROXY_CORE}))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def worker(process: subprocess.Popen[bytes]) -> int:
    """nginx works in a child."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(children[0]) if children else process.pid


async def wait_for(port: int) -> None:
    for _ in range(200):
        try:
            await one_by_one(port, 1)
            return
        except (OSError, RuntimeError):
            await asyncio.sleep(0.1)
    raise SystemExit(f"nothing answers on port {port}")


def start(stack: ExitStack) -> dict[str, tuple[int, int | None]]:
    """All contenders: port, and the process whose time counts."""
    found: dict[str, tuple[int, int | None]] = {}
    behind: dict[str, list[int]] = {}
    for kind in ("vllm", "somebody"):
        for _ in range(2):
            ours, theirs = multiprocessing.Pipe()
            process = multiprocessing.Process(target=serve, args=(kind, theirs), daemon=True)
            process.start()
            behind.setdefault(kind, []).append(ours.recv())
    found["straight"] = behind["vllm"][0], None
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    if shutil.which("nginx"):
        process_, port = nginx(behind["vllm"], folder)
        stack.callback(process_.terminate)
        time.sleep(1)
        found["nginx"] = port, worker(process_)
    tokenizer = str(Path(__file__).parents[1] / "foreword" / "models" / "stdlib-nano")
    for name, kind, flags in (
        ("router, plain servers", "somebody", []),
        ("router, vLLM, own tokenizer", "vllm", ["--tokenizer", tokenizer]),
        ("router, vLLM, /tokenize", "vllm", []),
    ):
        routed, port = router(behind[kind], *flags)
        stack.callback(routed.terminate)
        found[name] = port, routed.pid
    return found


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=200, help="one by one, per round")
    parser.add_argument("--seconds", type=float, default=3.0, help="of full load, per round")
    parser.add_argument("--clients", type=int, default=64, help="at full load")
    parser.add_argument("--streams", type=int, default=1000, help="side by side")
    parser.add_argument("--pause", type=float, default=0.2, help="seconds between a stream's events")
    given = parser.parse_args()
    os.sched_setaffinity(0, {REST_CORE})
    print(
        set_up(machine() | {"aiohttp": version_of("aiohttp"), "uvloop": version_of("uvloop"), "nginx": nginx_version()})
    )
    with ExitStack() as stack:
        contenders = start(stack)
        asyncio.run(measure(contenders, given))


def nginx_version() -> str:
    found = shutil.which("nginx")
    return subprocess.run([found, "-v"], capture_output=True, text=True).stderr.strip() if found else "absent"


async def measure(contenders: dict[str, tuple[int, int | None]], given: argparse.Namespace) -> None:
    for port, _ in contenders.values():
        await wait_for(port)
        await one_by_one(port, 50)
    firsts: dict[str, list[float]] = {name: [] for name in contenders}
    ends: dict[str, list[float]] = {name: [] for name in contenders}
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    lates: dict[str, list[float]] = {name: [] for name in contenders}
    busy: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(given.rounds):
        for name, (port, _) in contenders.items():
            seen = await one_by_one(port, given.requests)
            firsts[name] += [one.first for one in seen]
            ends[name] += [one.end for one in seen]
    for _ in range(given.rounds):
        for name, (port, _) in contenders.items():
            rates[name].append(await at_full_load(port, given.seconds, given.clients))
    for _ in range(max(given.rounds // 2, 1)):
        for name, (port, pid) in contenders.items():
            before, began = cpu_seconds(pid) if pid else 0.0, time.monotonic()
            lates[name] += await side_by_side(port, given.streams, given.pause)
            if pid:
                busy[name].append((cpu_seconds(pid) - before) / (time.monotonic() - began))
    report(contenders, firsts, ends, rates, lates, busy, given)


def report(
    contenders: dict[str, tuple[int, int | None]],
    firsts: dict[str, list[float]],
    ends: dict[str, list[float]],
    rates: dict[str, list[float]],
    lates: dict[str, list[float]],
    busy: dict[str, list[float]],
    given: argparse.Namespace,
) -> None:
    count = given.requests * given.rounds
    print(f"\nOne by one, {count} requests each, {EVENTS} events: milliseconds, and what the way adds")
    rows = []
    for name in contenders:
        added = [1e3 * (quantile(firsts[name], q) - quantile(firsts["straight"], q)) for q in (0.5, 0.99)]
        cells = [1e3 * quantile(values[name], share) for values in (firsts, ends) for share in (0.5, 0.99)]
        rows.append([name, *(f"{cell:.2f}" for cell in cells), *(f"{cell:.2f}" for cell in added)])
    print(table(["", "first p50", "first p99", "end p50", "end p99", "added p50", "added p99"], rows))
    print(
        f"\nFull load, {given.clients} clients, {given.seconds:g} s a round: requests per second (the proxy has one core)"
    )
    print(
        table(
            ["", "median", "all rounds"],
            [[n, f"{median(v):.0f}", " ".join(f"{x:.0f}" for x in v)] for n, v in rates.items()],
        )
    )
    events = given.streams / given.pause
    print(
        f"\n{given.streams} streams side by side, {events:.0f} events/s in all: "
        "milliseconds from sending an event to its arrival"
    )
    rows = []
    for name in contenders:
        share = f"{100 * median(busy[name]):.0f} %" if busy[name] else ""
        rows.append([name, *(f"{1e3 * quantile(lates[name], q):.2f}" for q in (0.5, 0.99)), share])
    print(table(["", "p50", "p99", "of a core"], rows))


if __name__ == "__main__":
    main()
