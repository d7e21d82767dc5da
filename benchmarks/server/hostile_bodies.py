"""Measures what a hostile request costs the others: the slowest `/health`, and the longest gap in another client's stream.

    python -m benchmarks.server.hostile_bodies [--max-body 32MiB] [--router] [--url URL]

Starts `foreword serve` with the embedded model, in which one client streams a long completion and another asks for `/health`
every 10 ms. Meanwhile one request of each kind is sent; then 500 slow bodies with 500 half heads, and 100 clients that do not
read their streams. By default a body may be much larger than this model needs, so that
parsing and tokenizing are seen, not only the limit of bytes. With --router the three clients go through `foreword route` in
front of three servers, and the circuits that opened are counted. About a minute.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from benchmarks.harness import machine, set_up, table

MIB = 1 << 20
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LIMIT = 0.25


def bodies(size: int) -> dict[str, tuple[str, bytes]]:
    """Per kind of body its path and about `size` bytes."""
    message = b'{"role":"user","content":"a"},'
    deep = size // 2
    return {
        "many messages": (CHAT, b'{"messages":[' + message * (size // len(message)) + message[:-1] + b"]}"),
        "deep nesting": (COMPLETIONS, b'{"prompt":"a","x":' + b"[" * deep + b"]" * deep + b"}"),
        "deep schema": (CHAT, _deep_schema()),
        "unknown objects": (COMPLETIONS, b'{"prompt":"a","x":[' + b'{"a":1},' * (size // 8) + b"1]}"),
        "one huge string": (COMPLETIONS, b'{"prompt":"' + b"ab cd " * (size // 6) + b'"}'),
        "escaped string": (COMPLETIONS, b'{"prompt":"' + rb"\u00e9" * (size // 6) + b'"}'),
        "huge message": (CHAT, b'{"messages":[{"role":"user","content":"' + b"a" * size + b'"}]}'),
        "token ids": (COMPLETIONS, b'{"prompt":[' + b"1," * (size // 2) + b"1]}"),
        "many prompts": (COMPLETIONS, b'{"prompt":[' + b'"a",' * (size // 4) + b'"a"]}'),
        "not UTF-8": (COMPLETIONS, b'{"prompt":"' + b"\xff" * size + b'"}'),
        "not JSON": (COMPLETIONS, b"{" * size),
        "many keys": (
            COMPLETIONS,
            b'{"prompt":"a","x":{' + b",".join(b'"%d":1' % i for i in range(size // 12)) + b"}}",
        ),
        "many stop strings": (COMPLETIONS, b'{"prompt":"a","stop":[' + b'"a",' * (size // 4) + b'"a"]}'),
        "many tools": (CHAT, _many_tools(size)),
    }


def _deep_schema() -> bytes:
    schema = b'{"type":"object","properties":{"a":' * 2000 + b'{"type":"string"}' + b"}}" * 2000
    form = b'{"type":"json_schema","json_schema":{"name":"x","schema":' + schema + b"}}"
    return b'{"messages":[{"role":"user","content":"a"}],"response_format":' + form + b"}"


def _many_tools(size: int) -> bytes:
    tool = b'{"type":"function","function":{"name":"f","parameters":{"type":"object"}}},'
    return b'{"messages":[{"role":"user","content":"a"}],"tools":[' + tool * (size // len(tool)) + tool[:-1] + b"]}"


@dataclass
class Others:
    """Two clients that a hostile request should not disturb: one polls `/health`, one reads a stream."""

    url: str
    health: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def poll(self) -> None:
        while not self._stop.is_set():
            began = time.perf_counter()
            with closing(connection(self.url)) as client:
                client.request("GET", "/health")
                client.getresponse().read()
            self.health.append(time.perf_counter() - began)
            time.sleep(0.01)

    def read(self) -> None:
        while not self._stop.is_set():
            with closing(connection(self.url)) as client:
                body = {"prompt": "import os\n", "max_tokens": 4000, "ignore_eos": True, "stream": True}
                client.request("POST", COMPLETIONS, json.dumps(body), {"content-type": "application/json"})
                self._gaps_of(client.getresponse())

    def _gaps_of(self, response: http.client.HTTPResponse) -> None:
        last = 0.0
        while not self._stop.is_set() and (line := response.readline()):
            if line.startswith(b"data: {"):
                now = time.perf_counter()
                if last:
                    self.gaps.append(now - last)
                last = now

    @contextmanager
    def running(self) -> Iterator[None]:
        threads = [threading.Thread(target=work, daemon=True) for work in (self.poll, self.read)]
        for thread in threads:
            thread.start()
        while len(self.gaps) < 20:
            time.sleep(0.05)
        yield
        self._stop.set()
        for thread in threads:
            thread.join()


@dataclass(frozen=True)
class Outcome:
    """The outcome of one hostile request, and the longest delays of the others while it ran."""

    kind: str
    size: int
    status: int
    seconds: float
    health: float
    gap: float


def connection(url: str) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    return http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=120)


def attack(url: str, others: Others, kind: str, path: str, body: bytes) -> Outcome:
    """Send one request and wait a little longer than until its end."""
    others.health.clear()
    others.gaps.clear()
    began = time.perf_counter()
    status = post(url, path, body)
    seconds = time.perf_counter() - began
    time.sleep(0.3)
    while not others.health:  # the request was over before an answer came
        time.sleep(0.01)
    return Outcome(kind, len(body), status, seconds, max(others.health), max(others.gaps, default=0.0))


def post(url: str, path: str, body: bytes) -> int:
    """The status of the answer; 0 if the connection was closed before it."""
    with closing(connection(url)) as client:
        with suppress(ConnectionError):  # refused before the whole body was sent; the answer is there
            client.request("POST", path, body, {"content-type": "application/json"})
        try:
            return client.getresponse().status
        except (ConnectionError, http.client.HTTPException):
            return 0


def slow_bodies(url: str, others: Others, count: int = 500, seconds: float = 4.0) -> Outcome:
    """Connections that send single bytes, and as many that send half a head."""
    parts = urlsplit(url)
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100000\r\n\r\n"
    )
    others.health.clear()
    others.gaps.clear()
    with ExitStack() as stack:
        clients = []
        for _ in range(count):
            client = stack.enter_context(socket.create_connection((str(parts.hostname), parts.port or 80), 60))
            client.sendall(head)
            clients.append(client)
            half = stack.enter_context(socket.create_connection((str(parts.hostname), parts.port or 80), 60))
            half.sendall(head[:40])
            time.sleep(0.001)
        deadline = time.perf_counter() + seconds
        while time.perf_counter() < deadline:
            for client in clients:
                client.sendall(b" ")
            time.sleep(0.5)
        return Outcome(f"{count} slow bodies, {count} half heads", 0, 0, seconds, max(others.health), max(others.gaps))


def slow_readers(url: str, others: Others, count: int = 100, seconds: float = 6.0) -> Outcome:
    """Clients that ask for a long stream and read nothing of it."""
    parts = urlsplit(url)
    body = json.dumps({"prompt": "a", "max_tokens": 2000, "ignore_eos": True, "stream": True, "logprobs": 5}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    request = head + b"content-length: %d\r\n\r\n" % len(body) + body
    others.health.clear()
    others.gaps.clear()
    with ExitStack() as stack:
        for _ in range(count):
            client = stack.enter_context(closing(socket.socket()))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((str(parts.hostname), parts.port or 80))
            client.sendall(request)
        time.sleep(seconds)
        return Outcome(f"{count} slow readers", 0, 0, seconds, max(others.health), max(others.gaps))


def circuits_opened(url: str) -> int:
    """How many times the router has opened a replica's circuit."""
    with closing(connection(url)) as client:
        client.request("GET", "/metrics")
        text = client.getresponse().read().decode()
    return sum(
        int(float(count)) for count in re.findall(r"^foreword:router_breaker_opened_total{.*} (\S+)$", text, re.M)
    )


@contextmanager
def started(*arguments: str) -> Iterator[str]:
    """The URL of a Foreword process that is ready."""
    command = [sys.executable, "-m", "foreword", *arguments, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            url = next(found[0] for line in process.stderr if (found := re.search(r"http://\S+:\d+", line)))
            threading.Thread(target=process.stderr.read, daemon=True).start()
            while not is_ready(url):
                time.sleep(0.1)
            yield url
        finally:
            process.kill()


def is_ready(url: str) -> bool:
    with closing(connection(url)) as client:
        client.request("GET", "/ready")
        return client.getresponse().status == 200


def measure(url: str, size: int) -> list[Outcome]:
    """All kinds of bodies, one after the other."""
    others = Others(url)
    with others.running():
        found = [attack(url, others, kind, path, body) for kind, (path, body) in bodies(size).items()]
        return [*found, slow_bodies(url, others), slow_readers(url, others)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-body", default="32MiB", help="largest body that the servers take")
    parser.add_argument("--size", type=int, default=31 * MIB, help="bytes of the hostile bodies")
    parser.add_argument("--router", action="store_true", help="send everything through a router with three servers")
    parser.add_argument("--url", help="a server that runs already")
    given = parser.parse_args()
    with ExitStack() as stack:
        url = given.url
        if url is None:
            flags = ("serve", "--max-body", given.max_body, "--threads", "1", "--kv-memory", "65536 tokens")
            servers = [stack.enter_context(started(*flags)) for _ in range(3 if given.router else 1)]
            url = servers[0]
            if given.router:
                replicas = [part for server in servers for part in ("--replica", server)]
                url = stack.enter_context(started("route", "--max-body", given.max_body, *replicas))
        found = measure(url, given.size)
        opened = circuits_opened(url) if given.router else 0
    print(set_up({**machine(), "max body": given.max_body, "router": "yes" if given.router else "no"}))
    rows = [
        [one.kind, f"{one.size / MIB:.1f}", str(one.status or "-"), f"{one.seconds:.2f}", ms(one.health), ms(one.gap)]
        for one in found
    ]
    print(table(["body", "MiB", "status", "s to answer", "worst /health, ms", "longest gap, ms"], rows))
    worst = max(max(one.health, one.gap) for one in found)
    print(f"worst: {1000 * worst:.0f} ms (limit {1000 * LIMIT:.0f} ms)")
    if given.router:
        print(f"circuits opened: {opened}")


def ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f}"


if __name__ == "__main__":
    main()
