"""A seeded campaign that looks for memory that grows with requests: of a server, a router, and an endpoint picker, each a real
process, under a mixture of requests whose names, salts, sessions, tools, grammars, models and paths are new each time.

    make memory [REQUESTS=40000] [SEED=1] [MORE="--only router --trace"]

The table has the resident memory of the process, in MiB, after a quarter, a half and all of the requests, the growth between
the last two in percent, and how much of that malloc has given out (the rest lies unused between pieces that are in use).
Stored responses are what clients asked to keep; with `--store-nothing` they are not among what grows. With `--notes` follow the
containers and the types of objects that grew most between the last two, and with `--trace` the lines of Python whose memory
grew most. A replica of the router and the picker is a server of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1] / "store"))

import grpc.aio
from mixed_requests import MODEL, TENANTS, MixedRequest, key_of, mixed_request, unstored
from ports import free_port
from router_parts import RouterProcess
from server_process import ServerProcess
from shared_server import until

from foreword.router_extras.gateway import envoy_messages as envoy

AT_A_TIME = 8
PATIENCE = 120.0
MOST_GROWTH = 0.02
SHOWN = 25
COUNTS = 5
ADMIN, REPLICA = "key-of-the-admin-0123456789abcdef", "key-of-replicas-0123456789abcdef"
FRONTS = ("server", "router", "picker")
_STEPS = (0.25, 0.5, 1.0)


@dataclass
class Row:
    """Memory that one process kept. `counts`: after each step."""

    label: str
    counts: list[dict[str, Any]] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def resident(self, step: int) -> float:
        return float(self.counts[step]["allocator"]["resident"])

    def growth(self, name: str = "resident") -> float:
        """MiB between the last two steps."""
        return float(self.counts[-1]["allocator"][name] - self.counts[-2]["allocator"][name])

    @property
    def good(self) -> bool:
        return self.growth() <= MOST_GROWTH * self.resident(-2)

    def grown(self, name: str) -> list[tuple[str, int]]:
        before, after = self.counts[-2].get(name, {}), self.counts[-1].get(name, {})
        found = {key: value - before.get(key, 0) for key, value in after.items()}
        return [(key, value) for key, value in sorted(found.items(), key=lambda one: -one[1])[:SHOWN] if value > 0]


class Counted:
    """A process of `counted_process.py`, that tells what it keeps."""

    def __init__(self, kind: type[ServerProcess | RouterProcess], folder: Path, arguments: Sequence[str]) -> None:
        self.folder = folder
        program = (str(Path(__file__).with_name("counted_process.py")), str(folder))
        counted = type(kind.__name__, (kind,), {"program": program})
        self.process: ServerProcess | RouterProcess = counted(*arguments, forked=False)

    def count(self) -> dict[str, Any]:
        """Raises RuntimeError with what the process raised. It counts what changes meanwhile, so it is asked a few times."""
        counted: dict[str, Any] = {}
        for _ in range(COUNTS):
            (self.folder / "count").touch()
            until((self.folder / "counted.json").exists, 300)
            counted = json.loads((self.folder / "counted.json").read_text())
            (self.folder / "counted.json").unlink()
            if "error" not in counted:
                return counted
        raise RuntimeError(counted["error"])


class _Client:
    """A connection that is kept while answers end as they should."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: MixedRequest, row: Row) -> None:
        if self._streams is None or self._streams[0].at_eof():
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        heads = {"host": "x", "content-length": str(len(request.body)), **request.heads}
        lines = "".join(f"{name}: {value}\r\n" for name, value in heads.items())
        try:
            writer.write(f"{request.method} {request.path} HTTP/1.1\r\n{lines}\r\n".encode() + request.body)
            status, kept = await asyncio.wait_for(self._read(reader, leaves=request.leaves), PATIENCE)
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError) as error:
            status, kept = type(error).__name__, False
        row.statuses[f"{request.kind} {status}"] += 1
        if not kept:
            writer.transport.abort()
            self._streams = None

    @staticmethod
    async def _read(reader: asyncio.StreamReader, *, leaves: bool) -> tuple[str, bool]:
        """The status, and whether the connection can be used again."""
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        found = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        version, status, *_ = first.split(" ")
        # The HTTP server answers what it cannot parse as HTTP/1.0, which closes without saying so.
        closes = version == "HTTP/1.0" or found.get("connection") == "close"
        if "content-length" in found:
            await reader.readexactly(int(found["content-length"]))
            return status, not closes
        while size := int(await reader.readuntil(b"\r\n"), 16):
            await reader.readexactly(size + 2)
            if leaves:
                return status, False
        await reader.readuntil(b"\r\n")
        return status, not closes

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()


class _Gateway:
    """Asks the picker as Envoy does, and tells it how the replica's answer ended. Streams end in order, but for
    those of clients that leave: of each cancelled stream gRPC's core keeps 30 to 90 bytes (1.85, also in a server that does
    nothing else)."""

    def __init__(self, port: int) -> None:
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        self._process = self._channel.stream_stream(
            "/envoy.service.ext_proc.v3.ExternalProcessor/Process",
            request_serializer=envoy.ProcessingRequest.SerializeToString,
            response_deserializer=envoy.ProcessingResponse.FromString,
        )

    async def ask(self, request: MixedRequest, row: Row) -> None:
        first, last = envoy.ProcessingRequest(), envoy.ProcessingRequest()
        first.protocol_config.request_body_mode = first.protocol_config.response_body_mode = envoy.BUFFERED
        for name, value in {":method": request.method, ":path": request.path, **request.heads}.items():
            first.request_headers.headers.headers.add(key=name, raw_value=value.encode())
        first.request_headers.end_of_stream = not request.body
        last.request_body.body, last.request_body.end_of_stream = request.body, True
        picked: asyncio.Queue[bool] = asyncio.Queue()

        async def messages() -> AsyncIterator[Any]:
            yield first
            if request.body:
                yield last
            if await picked.get() and not request.leaves:
                for one in _replica_answer():
                    yield one

        call, found = self._process(messages(), timeout=PATIENCE), "none"
        try:
            async for answer in call:
                if answer.HasField("immediate_response"):
                    found = str(answer.immediate_response.status.code)
                if answer.HasField("request_body") or (not request.body and answer.HasField("request_headers")):
                    found = "picked"
                    picked.put_nowait(True)
                    if request.leaves:
                        call.cancel()
                        break
        except grpc.aio.AioRpcError as error:
            found = str(error.code())
        finally:
            picked.put_nowait(False)
        row.statuses[f"{request.kind} {found}"] += 1

    async def close(self) -> None:
        await self._channel.close()


def _replica_answer() -> tuple[Any, Any]:
    head, body = envoy.ProcessingRequest(), envoy.ProcessingRequest()
    head.response_headers.headers.headers.add(key=":status", raw_value=b"200")
    head.response_headers.headers.headers.add(key="content-type", raw_value=b"application/json")
    usage = {"prompt_tokens": 20, "completion_tokens": 2, "total_tokens": 22}
    body.response_body.body = json.dumps({"choices": [{"text": "a", "index": 0}], "usage": usage}).encode()
    body.response_body.end_of_stream = True
    return head, body


class Front:
    """A process under test. `ask` sends one request to it."""

    def __init__(self, label: str, counted: Counted, port: int) -> None:
        self.label, self.counted, self.port = label, counted, port
        self.stores = True  # clients let responses be stored

    async def run(self, requests: int, draw: Random, row: Row) -> None:
        gateway = _Gateway(self.port) if self.label == "picker" else None
        done = 0
        for step in _STEPS:
            count = round(requests * step) - done
            done += count
            left = iter(range(count))
            clients = [_Client(self.port) for _ in range(AT_A_TIME)]
            asks = [gateway.ask if gateway is not None else client.ask for client in clients]
            await asyncio.gather(*(self._work(ask, left, draw, row) for ask in asks))
            for client in clients:
                client.close()
            await asyncio.sleep(2)  # what the clients left behind ends
            row.counts.append(await asyncio.to_thread(self.counted.count))
            print(f"{self.label}: {done:,} requests", file=sys.stderr, flush=True)
        if gateway is not None:
            await gateway.close()

    async def _work(
        self, ask: Callable[[MixedRequest, Row], Awaitable[None]], left: Iterator[int], draw: Random, row: Row
    ) -> None:
        for _ in left:
            request = mixed_request(draw)
            await ask(request if self.stores else unstored(request), row)


@contextlib.contextmanager
def started(labels: Sequence[str], folder: Path, *, trace: bool = False) -> Iterator[list[Front]]:
    """The processes: the server; a server behind the router; one behind the picker."""
    keys = folder / "keys"
    keys.write_text("".join(f"{tenant}={key_of(tenant)}\n" for tenant in TENANTS))
    keys.chmod(0o600)
    common = ("--api-key-file", str(keys), "--admin-key", ADMIN, "--tenant-secret", "secret-of-tenants-0123456789")

    with contextlib.ExitStack() as stack:

        def start(kind: type[Any], name: str, *more: str) -> Counted:
            own = folder / name
            own.mkdir()
            if trace and name in labels:
                (own / "trace").touch()
            counted = Counted(kind, own, (*common, "--usage-ledger", str(own / "ledger"), *more))
            stack.callback(counted.process.kill)
            return counted

        def server(name: str) -> Counted:
            stores = ("memory://?size=16MiB", f"disk://{folder / name}-store?size=32MiB")
            more = [part for url in stores for part in ("--store", url)]
            flags = ("--dtype", "float32", "--no-self-check", "--served-model-name", MODEL, "--router-key", REPLICA)
            return start(ServerProcess, name, *flags, *more)

        fronts = []
        for label in labels:
            counted = server(label if label == "server" else f"replica of {label}")
            url = counted.process.wait_ready()  # type: ignore[union-attr]
            port = int(url.rpartition(":")[2])
            if label != "server":
                picker = free_port()
                more = ("--replica", url, "--replica-key", REPLICA)
                if label == "picker":
                    more = (*more, "--picker", f"127.0.0.1:{picker}")
                counted = start(RouterProcess, label, *more, "--health-interval", "2")
                counted.process.wait_for(1)  # type: ignore[union-attr]
                port = picker if label == "picker" else int(counted.process.url.rpartition(":")[2])  # type: ignore[operator,union-attr]
            fronts.append(Front(label, counted, port))
        yield fronts


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # end the processes
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=40_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="append", choices=FRONTS, help="a process; may be given several times")
    parser.add_argument("--notes", action="store_true", help="print what grew")
    parser.add_argument(
        "--store-nothing", action="store_true", help="responses with `store: false`, which are not kept"
    )
    parser.add_argument("--trace", action="store_true", help="trace allocations of Python")
    given = parser.parse_args()
    print(
        f"{time.strftime('%Y-%m-%d')}, load {os.getloadavg()[0]:.1f}, seed {given.seed}, {given.requests:,} requests\n"
    )
    head = [f"RSS after {round(given.requests * step):,}" for step in _STEPS]
    head += ["growth", "of that malloc gave out", "python blocks", "seconds"]
    print("| process | " + " | ".join(head) + " |\n|---|" + "---:|" * len(head), flush=True)
    rows = []
    with tempfile.TemporaryDirectory(prefix="foreword-memory-") as folder:
        for label in given.only or FRONTS:
            own = Path(folder) / f"of {label}"
            own.mkdir()
            with started([label], own, trace=given.trace) as fronts:
                fronts[0].stores = not given.store_nothing
                row, began = Row(label), time.monotonic()
                asyncio.run(fronts[0].run(given.requests, Random(f"{given.seed}/{label}"), row))
                row.seconds = time.monotonic() - began
                text = fronts[0].counted.process.text
            rows.append(row)
            _show(row)
            if given.notes:
                _note(row, text)
    return int(not all(row.good for row in rows))


def _show(row: Row) -> None:
    cells = [row.label, *(f"{row.resident(step):.1f}" for step in range(len(row.counts)))]
    cells += [
        f"{row.growth():+.1f} MiB, {row.growth() / row.resident(-2):+.2%}",
        f"{row.growth('malloc used'):+.1f} MiB",
    ]
    cells += [f"{row.growth('python blocks'):+,.0f}", f"{row.seconds:.0f}"]
    print("| " + " | ".join(cells) + " |", flush=True)


def _note(row: Row, text: str) -> None:
    print(f"\n{row.label}: {dict(sorted(row.statuses.items()))}")
    print([{name: round(value, 1) for name, value in one["allocator"].items()} for one in row.counts])
    for name in ("entries", "types", "lines"):
        for key, value in row.grown(name):
            print(f"  {name}: {value:+,} {key} ({row.counts[-1][name][key]:,})")
    print(f"  {text.count('Traceback')} tracebacks\n", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
