"""Real processes for benchmarks of the router: `foreword serve` that can be killed and started again, `foreword route`, and a
client that keeps what every stream said."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import httpx

START_SECONDS = 900.0
REQUEST_SECONDS = 600.0


def library() -> list[str]:
    """Real text that every machine has: the longest modules of Python's standard library."""
    sources = [path.read_text(encoding="utf-8", errors="replace") for path in Path(os.__file__).parent.glob("*.py")]
    return sorted(sources, key=lambda text: (-len(text), text))


class Process:
    """A process of `foreword`, or of a module that runs it, on its own port; what it says goes to a file."""

    def __init__(self, folder: Path, name: str, command: Sequence[str], module: Sequence[str] = ("foreword",)) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / f"{name}.log"
        self._command = [sys.executable, "-m", *module, *command, "--port", str(self.port)]
        self._popen: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        own = {key: value for key, value in os.environ.items() if not key.startswith("FOREWORD_")}
        with self.log.open("ab") as out:
            self._popen = subprocess.Popen(self._command, stdout=out, stderr=out, env=own | {"OMP_NUM_THREADS": "1"})

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            self._fail_if_ended()
            try:
                if httpx.get(f"{self.url}/ready", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise SystemExit(f"{self.url} is not ready after {START_SECONDS:.0f} s:\n{self.log.read_text()[-2000:]}")

    def kill(self) -> None:
        """SIGKILL: nothing is said, nothing is written."""
        if self._popen is not None:
            self._popen.kill()
            self._popen.wait()

    def stop(self) -> None:
        """SIGTERM, and wait: a server drains."""
        if self._popen is not None:
            self._popen.terminate()
            self._popen.wait(START_SECONDS)

    @property
    def pid(self) -> int:
        """Of the process that was started last."""
        assert self._popen is not None
        return self._popen.pid

    def forget(self) -> None:
        """A server's device is empty afterwards."""
        httpx.delete(f"{self.url}/v1/cache", timeout=60).raise_for_status()

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's series with these labels."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        lines = httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines()
        found = [line for line in lines if re.match(rf"{re.escape(name)}({{|\s)", line)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found if all(one in line for one in wanted))

    def _fail_if_ended(self) -> None:
        if self._popen is None or self._popen.poll() is not None:
            raise SystemExit(f"a process ended: {' '.join(self._command)}\n{self.log.read_text()[-2000:]}")


def free_port() -> int:
    """A port that is free, and none of those that the system gives out itself: a vLLM takes minutes until it listens."""
    while True:
        with suppress(OSError), socket.create_server(("", random.SystemRandom().randrange(10_000, 32_000))) as found:
            return int(found.getsockname()[1])


@contextmanager
def servers(folder: Path, names: Sequence[str], *flags: str, pace: float = 0.0) -> Iterator[list[Process]]:
    """Servers that are ready, one thread each. They are killed at the end; their state is not needed. `pace`: microseconds that
    each takes at least for a token (paced.py)."""
    module = ("benchmarks.router.paced", str(pace)) if pace else ("foreword",)
    common = ["--threads", "1", "--log-level", "warning", "--no-self-check", *flags]
    began = time.perf_counter()
    print(f"  starting {len(names)} servers", end=" ", file=sys.stderr, flush=True)
    with ExitStack() as stack:
        made = []
        for name in names:
            made.append(Process(folder, name, ["serve", *common], module))
            stack.callback(made[-1].kill)
            made[-1].start()
        for one in made:
            one.wait_ready()
        print(f"took {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        yield made


@contextmanager
def router(folder: Path, replicas: Sequence[Process], *flags: str) -> Iterator[Process]:
    """A new router, which knows nothing yet, once all replicas take requests."""
    named = [word for one in replicas for word in ("--replica", one.url)]
    made = Process(folder, "router", ["route", "--log-level", "warning", *named, *flags])
    try:
        made.start()
        made.wait_ready()
        _until_all(made, len(replicas))
        yield made
    finally:
        made.kill()


def _until_all(made: Process, count: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        listed = httpx.get(f"{made.url}/v1/router/replicas", timeout=30).json()["data"]
        if sum(one["takes_requests"] for one in listed) >= count:
            return
        time.sleep(0.1)
    raise SystemExit(f"not all replicas take requests:\n{made.log.read_text()[-2000:]}")


# The client


@dataclass(frozen=True)
class Request:
    """A request: `body` has either `prompt` (completions) or `messages` (chat)."""

    body: dict[str, Any]
    session: str = ""

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if "messages" in self.body else "/v1/completions"


@dataclass
class Answer:
    """A stream as the client saw it; filled while it runs. Times are of `time.perf_counter`, 0.0 if it never came.

    `events` are the times at which tokens came; `error` is empty for a stream that came to its end as streams do.
    """

    request: Request
    sent: float
    first: float = 0.0
    end: float = 0.0
    route: str = ""
    text: str = ""
    ids: list[int] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    finishes: list[str] = field(default_factory=list)
    events: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    done: int = 0
    error: str = ""

    @property
    def ttft(self) -> float:
        return self.first - self.sent

    @property
    def replica(self) -> str:
        """Its URL, from the header that explains the decision; empty before the answer began."""
        found = re.match(r"https?://[^\s:]+:\d+", self.route)
        return found[0] if found else ""

    @property
    def prompt_tokens(self) -> int:
        return int(self.usage.get("prompt_tokens", 0))

    @property
    def cached_tokens(self) -> int:
        return int((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    @property
    def longest_gap(self) -> float:
        """Seconds between two tokens, at most."""
        return max((late - early for early, late in zip(self.events, self.events[1:], strict=False)), default=0.0)

    def wrong(self) -> str:
        """The fault of a stream that is not complete; empty for one that is complete."""
        if self.error:
            return self.error
        if self.done != 1 or len(self.finishes) != 1:
            return f"{self.done} ends of the stream and the finish reasons {self.finishes}"
        if len(self.names) != 1:
            return f"{len(self.names)} different ids in one stream"
        return ""


class Client:
    """Streams over connections that are kept. `live` are the answers under way."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.live: set[int] = set()
        self.answers: list[Answer] = []

    async def __aenter__(self) -> Client:
        timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=connector, read_bufsize=1 << 20)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._session.close()

    def under_way(self) -> list[Answer]:
        return [self.answers[number] for number in sorted(self.live)]

    async def ask(self, request: Request) -> Answer:
        """Never raises for what the other side does: that is in the answer."""
        number = len(self.answers)
        answer = Answer(request, time.perf_counter())
        self.answers.append(answer)
        self.live.add(number)
        try:
            await self._stream(answer)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        finally:
            self.live.discard(number)
            answer.end = time.perf_counter()
        return answer

    async def _stream(self, answer: Answer) -> None:
        body = answer.request.body | {"stream": True, "stream_options": {"include_usage": True}}
        async with self._session.post(self._url + answer.request.path, json=body) as response:
            answer.route = response.headers.get("x-foreword-route", "")
            if response.status != 200:
                answer.error = f"status {response.status}: {(await response.text())[:300]}"
                return
            async for line in response.content:
                if line.startswith(b"data: [DONE]"):
                    answer.done += 1
                elif line.startswith(b"data: "):
                    _take(answer, json.loads(line[6:]), time.perf_counter())


def _take(answer: Answer, event: dict[str, Any], now: float) -> None:
    if "error" in event:
        answer.error = json.dumps(event["error"])[:300]
        return
    answer.names.add(event["id"])
    answer.usage = event.get("usage") or answer.usage
    for choice in event.get("choices", ()):
        text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        ids = choice.get("token_ids") or []
        answer.prompt_ids += choice.get("prompt_token_ids") or event.get("prompt_token_ids") or []
        answer.text += text
        answer.ids += ids
        if text or ids:
            answer.first = answer.first or now
            answer.events.append(now)
        if choice.get("finish_reason"):
            answer.finishes.append(choice["finish_reason"])


async def in_turn(client: Client, requests: Sequence[Request], at_a_time: int) -> list[Answer]:
    """Closed loop: so many at a time, the next when one has ended. Answers in the order of the requests."""
    queue = iter(enumerate(requests))
    answers: dict[int, Answer] = {}

    async def work() -> None:
        for number, request in queue:
            answers[number] = await client.ask(request)

    await asyncio.gather(*(work() for _ in range(at_a_time)))
    return [answers[number] for number in range(len(requests))]
