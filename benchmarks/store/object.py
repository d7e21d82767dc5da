"""Lookups and loads of one long prompt from an object store whose requests take a while.

    python -m benchmarks.store.object [--latency 20] [--bandwidth 100] [--block 65536] [--tokens 32000] [--json FILE]

An S3 server of our own (moto) stands behind a proxy that delays every request by `--latency` ms and limits all bodies
together to `--bandwidth` MB/s. One store writes the prompt in batches of 32 blocks of 16 tokens, as a server does; another
one that knows nothing of it finds and loads it. `ideal` is the time for the bytes at the proxy's bandwidth; the limit is
1.5 times that and four round trips.
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import random
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from benchmarks.harness import machine, median, set_up, table, version_of, write_figures
from foreword.errors import StoreTimeout
from foreword.store.frame import HEADER_BYTES, Frame
from foreword.store.object.object_store import ObjectStore

TOKENS_PER_BLOCK = 16
BATCH = 32
PART = 1 << 16
LIMIT_MS = 250.0
PATIENCE = 120.0


class Proxy:
    """Forwards requests to a server, each after a delay, with a limit of bytes per second for all of them together."""

    def __init__(self, backend: int, latency: float, bandwidth: float, requests: Any) -> None:
        self._backend = f"http://127.0.0.1:{backend}"
        self._latency = latency
        self._bandwidth = bandwidth
        self._requests = requests
        self._free_at = 0.0
        self._session: aiohttp.ClientSession | None = None

    async def serve(self, port: int) -> None:
        self._session = aiohttp.ClientSession(auto_decompress=False)
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._forward)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, backlog=1024).start()
        await asyncio.Event().wait()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        with self._requests.get_lock():
            self._requests.value += 1
        body = await request.read()
        await asyncio.sleep(self._latency)
        await self._pass(len(body))
        assert self._session is not None
        url = self._backend + request.raw_path
        async with self._session.request(request.method, url, data=body, headers=request.headers) as answer:
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP_BY_HOP}
            response = web.StreamResponse(status=answer.status, headers=kept)
            if request.method == "HEAD":
                response.content_length = int(answer.headers.get("Content-Length", 0))
                await response.prepare(request)
                return response
            response.content_length = len(data := await answer.read())
            await response.prepare(request)
            for start in range(0, len(data), PART):
                await self._pass(min(PART, len(data) - start))
                await response.write(data[start : start + PART])
            return response

    async def _pass(self, count: int) -> None:
        """Wait until this many bytes may pass."""
        now = time.monotonic()
        self._free_at = max(self._free_at, now - 0.005) + count / self._bandwidth
        if self._free_at > now + 0.001:
            await asyncio.sleep(self._free_at - now)


_HOP_BY_HOP = {"connection", "transfer-encoding", "content-length", "keep-alive"}


def measure(url: str, frames: list[Frame], requests: Any, rounds: int) -> dict[str, float]:
    """Requests and seconds of storing, finding and loading a prompt."""
    names = [one.name for one in frames]
    buffers = [memoryview(bytearray(len(one.data))) for one in frames]
    writer = ObjectStore(url)
    requests.value = 0
    started = time.perf_counter()
    for start in range(0, len(frames), BATCH):
        writer.put(frames[start : start + BATCH], deadline=time.monotonic() + PATIENCE)
    result = {"store": time.perf_counter() - started, "store requests": float(requests.value)}
    writer.close()
    lookups, loads = [], []
    for number in range(rounds + 1):
        reader = ObjectStore(url)
        reader.lookup([bytes(len(names[0]))], deadline=time.monotonic() + PATIENCE)  # opens the first connection
        requests.value = 0
        started = time.perf_counter()
        try:
            result["found"] = reader.lookup(names, deadline=time.monotonic() + LIMIT_MS / 1e3)
        except StoreTimeout:
            result["found"] = 0
        lookups.append(time.perf_counter() - started)
        result["lookup requests"] = float(requests.value)
        started = time.perf_counter()
        lengths = reader.get(names, buffers, deadline=time.monotonic() + PATIENCE)
        loads.append(time.perf_counter() - started)
        result["load requests"] = float(requests.value) - result["lookup requests"]
        result["loaded"] = sum(length > 0 for length in lengths)
        if not number and any(buffer != one.data for buffer, one in zip(buffers, frames, strict=True)):
            raise SystemExit("a block did not come back as it was")
        reader.close()
    return result | {"lookup": median(lookups[1:]), "load": median(loads[1:])}


def make_frames(count: int, size: int) -> list[Frame]:
    from foreword.conformance import make_frames as frames_of

    return frames_of(random.Random(count).randrange(1 << 30), count, size - HEADER_BYTES)


@contextlib.contextmanager
def bucket(latency: float, bandwidth: float, requests: Any) -> Iterator[str]:
    """An S3 server behind the proxy, and the URL of a bucket."""
    backend, port = _free_port(), _free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(backend)]
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    proxy = multiprocessing.get_context("fork").Process(
        target=lambda: asyncio.run(Proxy(backend, latency, bandwidth, requests).serve(port)), daemon=True
    )
    try:
        _wait(backend)
        proxy.start()
        _wait(port)
        make = urllib.request.Request(f"http://127.0.0.1:{backend}/blocks", method="PUT")
        urllib.request.urlopen(make, timeout=PATIENCE).close()
        options = "region=us-east-1&access_key_id=a&secret_access_key=b"
        yield f"s3://blocks/{sha256(b'benchmark').hexdigest()[:8]}?endpoint=http://127.0.0.1:{port}&{options}"
    finally:
        if proxy.is_alive():
            proxy.kill()
        server.kill()
        server.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(port: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise SystemExit("a server did not start")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency", type=float, default=20.0, help="ms per request")
    parser.add_argument("--bandwidth", type=float, default=100.0, help="MB/s")
    parser.add_argument("--block", type=int, default=1 << 16, help="bytes of a frame")
    parser.add_argument("--tokens", type=int, default=32_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _run(options: argparse.Namespace) -> None:
    latency, bandwidth = options.latency / 1e3, options.bandwidth * 1e6
    requests = multiprocessing.get_context("fork").Value("l", 0)
    facts = machine() | {
        "server": f"moto {version_of('moto')} behind a proxy: {options.latency:g} ms, {options.bandwidth:g} MB/s",
        "work": f"blocks of {options.block} bytes, {TOKENS_PER_BLOCK} tokens; median of {options.rounds} rounds",
    }
    print(set_up(facts), end="\n\n")
    rows, found = [], {}
    with bucket(latency, bandwidth, requests) as url:
        for tokens in sorted({1_000, 4_000, options.tokens}):
            count = tokens // TOKENS_PER_BLOCK
            one = measure(url, make_frames(count, options.block), requests, options.rounds)
            found[tokens] = one
            ideal = count * options.block / bandwidth
            asked = one["lookup requests"] + one["load requests"]
            limit = 1.5 * ideal + 4 * latency
            rows.append(
                [
                    f"{tokens:,}",
                    str(count),
                    f"{one['found']:.0f}",
                    f"{one['loaded']:.0f}",
                    f"{one['lookup'] * 1e3:.0f} ms",
                    f"{one['lookup requests']:.0f} + {one['load requests']:.0f}",
                    f"1/{count / asked:.0f}",
                    f"{one['load']:.2f} s",
                    f"{ideal:.2f} s",
                    f"{limit:.2f} s",
                    f"{one['store requests']:.0f}",
                ]
            )
    head = ["tokens", "blocks", f"found in {LIMIT_MS:.0f} ms", "loaded", "lookup", "requests", "per block"]
    head += ["load", "ideal", "limit", "requests to store"]
    print(table(head, rows))
    if options.json:
        write_figures(options.json, "An object store far away", head, rows, facts, prompts=found)


if __name__ == "__main__":
    _run(_arguments())
