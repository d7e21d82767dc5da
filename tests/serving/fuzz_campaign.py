"""A seeded campaign of almost right requests at every front: a server, a router before two servers, and the endpoint picker.

    make fuzz [REQUESTS=200000] [SEED=1]

Each request has a connection of its own, eight at a time. The table counts per front:

- 2xx, 4xx, 5xx: answers; ours: those of 500 and more, and errors within a stream, that no other program caused,
- closed: connections that ended without an answer to a well-formed request whose client waited,
- late: no answer within a minute,
- tracebacks: in the log of the front's process,
- asked twice: requests that a replica refused and the router sent to another one, of all that replicas refused,
- memory after each quarter of the requests, in MiB above that after the first quarter.

At the end all blocks of the servers must be free.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import sys
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
import http_client
import psutil
from fault_campaign import print_campaign, scratch_folder
from fuzz_requests import FuzzRequest, fuzz_request
from ports import free_port
from router_parts import RouterProcess
from server_process import ServerProcess
from shared_server import until

from foreword.router_extras.gateway import envoy_messages as envoy

AT_A_TIME = 8
PATIENCE = 60.0
GROWTH = 16.0  # MiB, after the first quarter
# Errors of 500 and more that a request may ask for: other instances that do not answer, a limit of no time.
_ASKED_FOR = re.compile(rb'"code": ?"(transfer_\w+|deadline_exceeded|store_\w+)"')
_OWN = re.compile(rb'internal_error|engine_error|"server_error"|"api_error"|Traceback|Server got itself in trouble')

# The picker's last message before the replica answers.
_LAST = ("request_body", "immediate_response")


@dataclass
class Row:
    """The counts of one front."""

    label: str
    statuses: Counter[str] = field(default_factory=Counter)
    ours: int = 0
    closed: int = 0
    late: int = 0
    tracebacks: int = 0
    requests: int = 0
    memory: list[float] = field(default_factory=list)
    blocks_left: int = 0
    refused: int = 0
    asked_twice: int = 0
    seconds: float = 0.0
    kinds: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)

    def of(self, first: str) -> int:
        return sum(count for status, count in self.statuses.items() if status.startswith(first))

    @property
    def growth(self) -> list[float]:
        return [one - self.memory[0] for one in self.memory]

    @property
    def good(self) -> bool:
        return not (self.ours or self.closed or self.late or self.tracebacks or self.blocks_left)

    def note(self, what: str, request: FuzzRequest, answer: bytes = b"") -> None:
        self.notes[f"{what}: {request}: {answer[-300:]!r}"] += 1


async def _answer(reader: asyncio.StreamReader, method: str) -> tuple[int, bytes]:
    """Status and body. Raises IncompleteReadError where the connection ends before."""
    status = 100
    while status == 100:
        line, *heads = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(line.split(" ")[1])
    found = {name.lower(): value.strip() for name, _, value in (one.partition(":") for one in heads)}
    if method == "HEAD" or status in (204, 304):
        return status, b""
    if "content-length" in found:
        return status, await reader.readexactly(int(found["content-length"]))
    if found.get("transfer-encoding") != "chunked":
        return status, await reader.read()
    body = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readuntil(b"\r\n")
    return status, body


async def _over_http(port: int, row: Row, request: FuzzRequest) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request.data)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        if request.leaves:
            row.statuses["left"] += 1
            return
        status, body = await asyncio.wait_for(_answer(reader, request.method), PATIENCE)
        row.statuses[str(status)] += 1
        if (status >= 500 and not _ASKED_FOR.search(body)) or (status == 200 and _own(body)):
            row.ours += 1
            row.note(str(status), request, body)
    except TimeoutError:
        row.late += 1
        row.note("late", request)
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        row.statuses["closed"] += 1
        if request.well_formed:
            row.closed += 1
            row.note("closed", request, getattr(error, "partial", b""))
    finally:
        writer.close()


def _own(body: bytes) -> bool:
    """A stream that ended with an error of ours. A model may write the words of one."""
    if not body.startswith((b"event:", b"data:")):
        return False
    lines = (line.removeprefix(b"data:") for line in body.splitlines() if line.startswith(b"data:"))
    return any(_OWN.search(line) and b'"error":{' in line.replace(b" ", b"") for line in lines)


class _Picker:
    """Asks the picker as a gateway does."""

    def __init__(self, port: int) -> None:
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        self._process = self._channel.stream_stream(
            "/envoy.service.ext_proc.v3.ExternalProcessor/Process",
            request_serializer=envoy.ProcessingRequest.SerializeToString,
            response_deserializer=envoy.ProcessingResponse.FromString,
        )

    async def ask(self, row: Row, request: FuzzRequest) -> None:
        first, last = envoy.ProcessingRequest(), envoy.ProcessingRequest()
        first.protocol_config.request_body_mode = first.protocol_config.response_body_mode = envoy.BUFFERED
        heads = {":method": request.method, ":path": request.path, **{k.lower(): v for k, v in request.heads.items()}}
        for name, value in heads.items():
            first.request_headers.headers.headers.add(key=name, raw_value=value.encode("latin-1", "replace"))
        first.request_headers.end_of_stream = not request.body
        last.request_body.body, last.request_body.end_of_stream = request.body, True
        ended = asyncio.Event()

        async def messages() -> AsyncIterator[Any]:
            yield first
            if request.body and not request.leaves:
                yield last
            await ended.wait()  # the gateway's stream is open while the replica answers

        call, answer = self._process(messages(), timeout=PATIENCE), b""
        try:
            async for found in call:
                answer += found.SerializeToString()
                if request.leaves or not request.body or any(map(found.HasField, _LAST)):
                    break
            row.statuses["left" if request.leaves else "answered" if answer else "closed"] += 1
            if not answer:
                row.closed += 1
                row.note("closed", request)
            if _OWN.search(answer):
                row.ours += 1
                row.note("ours", request, answer)
        except grpc.aio.AioRpcError as error:
            row.ours += 1
            row.note(f"{error.code()} {error.details()}", request)
        finally:
            ended.set()
            call.cancel()

    async def close(self) -> None:
        await self._channel.close()


class Front:
    """A front under test. `process`: that serves it; `servers`: whose blocks its requests take."""

    def __init__(self, label: str, process: Any, servers: Sequence[str], port: int, *, picks: bool = False) -> None:
        self.label, self.process, self.servers, self.port, self.picks = label, process, servers, port, picks

    def memory(self) -> float:
        return float(psutil.Process(self.process.popen.pid).memory_info().rss) / (1 << 20)

    def refusals(self) -> tuple[int, int]:
        """Refusals of a router's replicas, and how many requests it has sent again. Of a server, none."""
        if self.label != "router":
            return 0, 0
        refused = sum(_total(url, "requests_total", 'outcome="client_error"') for url in self.servers)
        return int(refused), int(_total(f"http://127.0.0.1:{self.port}", "router_retries_total"))

    def blocks_left(self) -> int:
        """Blocks in use when all is quiet and nothing is kept."""
        left = 0.0
        for url in self.servers:
            http_client.delete(f"{url}/v1/prefixes/fuzz")
            http_client.post(f"{url}/v1/cache/release", json={"all": True})
            for one in http_client.get(f"{url}/v1/prefixes").json()["data"]:
                http_client.delete(f"{url}/v1/prefixes/{one['name']}")
            with contextlib.suppress(AssertionError):
                until(lambda url=url: _gauge(url, "blocks") == _gauge(url, "blocks_free"))  # type: ignore[misc]
            left += _gauge(url, "blocks") - _gauge(url, "blocks_free")
        return int(left)


def _total(url: str, name: str, label: str = "") -> float:
    found = re.findall(rf"^foreword:{name}(?:{{(.*)}})? (\S+)$", http_client.get(f"{url}/metrics").text, re.MULTILINE)
    return sum(float(value) for labels, value in found if label in labels)


def _gauge(url: str, name: str) -> float:
    found = re.search(rf"^foreword:{name}(?:{{.*}})? (\S+)$", http_client.get(f"{url}/metrics").text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def _panic(url: str) -> None:
    """The first panic of the grammar compiler, which it catches, reads its symbols into memory once: 49 MiB."""
    schema = {"json_schema": {"name": "p", "schema": {"required": "\xe9" * 60}}, "type": "json_schema"}
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "response_format": schema}
    said = http_client.post(f"{url}/v1/chat/completions", json=body).text
    assert "panic" in said, said


@contextlib.contextmanager
def fronts() -> Iterator[list[Front]]:
    """A server, and a router with a picker before two others."""
    with contextlib.ExitStack() as stack:
        flags = ("--dtype", "float32", "--no-self-check")
        servers = [ServerProcess(*flags) for _ in range(3)]
        for one in servers:
            stack.callback(one.kill)
        urls = [one.wait_ready() for one in servers]
        for url in urls:
            _panic(url)
        picker = free_port()
        replicas = [part for url in urls[1:] for part in ("--replica", url)]
        router = RouterProcess(*replicas, "--picker", f"127.0.0.1:{picker}", "--health-interval", "2")
        stack.callback(router.kill)
        router.wait_for(2)
        port = int(router.url.rpartition(":")[2])
        yield [
            Front("server", servers[0], urls[:1], int(urls[0].rpartition(":")[2])),
            Front("router", router, urls[1:], port),
            Front("picker", router, urls[1:], picker, picks=True),
        ]


async def _at_front(front: Front, requests: int, draw: Random, row: Row) -> None:
    picker = _Picker(front.port) if front.picks else None

    async def ask(request: FuzzRequest) -> None:
        await (_over_http(front.port, row, request) if picker is None else picker.ask(row, request))

    await _in_parallel(ask, requests, draw, row, front.memory)
    if picker is not None:
        await picker.close()


async def _in_parallel(
    ask: Callable[[FuzzRequest], Awaitable[None]], requests: int, draw: Random, row: Row, memory: Callable[[], float]
) -> None:
    async def work(count: int) -> None:
        for _ in range(count):
            request = fuzz_request(draw)
            row.kinds[request.path] += 1
            await ask(request)

    for quarter in range(4):
        share = requests * (quarter + 1) // 4 - requests * quarter // 4
        await asyncio.gather(*(work(share // AT_A_TIME + (one < share % AT_A_TIME)) for one in range(AT_A_TIME)))
        row.requests += share
        row.memory.append(memory())


def run(
    requests: int, seed: int, only: Sequence[str] = (), report: Callable[[Row], None] = lambda _: None
) -> list[Row]:
    """The campaign: this number of requests, divided among the fronts."""
    rows = []
    with scratch_folder(), fronts() as found:
        for front in found:
            if only and front.label not in only:
                continue
            row, draw, began = Row(front.label), Random(f"{seed}/{front.label}"), time.monotonic()
            logged = len(front.process.text)
            asyncio.run(_at_front(front, max(requests // len(found), AT_A_TIME), draw, row))
            row.seconds = time.monotonic() - began
            text = front.process.text[logged:]
            row.tracebacks = text.count("Traceback") + front.process.ended()
            row.notes.update(
                one[-900:] for one in re.findall(r"Traceback (?:.*\n)+?(?=\d{4}-|\S*Error|\S*Exc).*", text)
            )
            row.refused, row.asked_twice = front.refusals()
            row.blocks_left = front.blocks_left()
            rows.append(row)
            report(row)
    return rows


HEAD = (
    *("front", "requests", "2xx", "4xx", "5xx", "left", "ours", "closed", "late", "tracebacks", "asked twice"),
    *("memory after 2, 3, 4 quarters", "blocks in use", "seconds"),
)


def cells(row: Row) -> list[str]:
    counts = (row.requests, row.of("2"), row.of("4"), row.of("5"), row.statuses["left"])
    wrong = (row.ours, row.closed, row.late, row.tracebacks)
    grown = ", ".join(f"{one:+.1f}" for one in row.growth[1:])
    twice = f"{row.asked_twice:,} of {row.refused:,}" if row.refused else ""
    return [
        row.label,
        *(f"{one:,}" for one in (*counts, *wrong)),
        twice,
        grown,
        f"{row.blocks_left}",
        f"{row.seconds:.0f}",
    ]


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # end the processes
    rows, notes = print_campaign(__doc__, "requests", 200_000, HEAD, run, cells)
    for row in rows if notes else ():
        print(f"\n{row.label}: {dict(row.statuses)}")
        for note, count in row.notes.most_common(20):
            print(f"  {count} x {note}")
    return int(not all(row.good and row.growth[-1] <= GROWTH for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
