"""A router as a process or a thread, and a relay in front of a real server that breaks connections on demand."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit

import http_client
import httpx
import openai
import typer
import uvloop
from config_constants import named_constants, split
from server_process import CommandProcess
from shared_server import until
from typer.testing import CliRunner

from foreword.api.http import bind
from foreword.cli.flags import with_router_config
from foreword.configuration import Config
from foreword.router.discovery import configured_replicas
from foreword.router.process import serving
from foreword.router.router import Router

R = TypeVar("R", bound="RunningRouter")
# Probes come often; how long an answer to one may take has nothing to do with what most tests promise.
# A measurement is a request that most of the tests do not count with.
QUICK = ["--health-interval", "0.2", "--measure-seconds", "0"]
QUICK += [f"router.{name}_timeout=60" for name in ("health", "connect", "tokenize")]
QUICK += ["router.tokenize_patience=60"]


ANY_PORT = ("--picker", "127.0.0.1:0")


class RunningRouter:
    """A router and its log, however it runs."""

    lines: list[str]

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def ended(self) -> bool:
        raise NotImplementedError

    def kill(self) -> None:
        raise NotImplementedError

    @property
    def url(self) -> str:
        until(lambda: "routes on" in self.text or self.ended(), 120)
        found = re.search(r"routes on (http://\S+:\d+)", self.text)
        assert found is not None, self.text
        return found[1]

    @property
    def picker_port(self) -> int:
        """The port that the system has given to its picker (`ANY_PORT`); one that is looked for before may be taken then."""
        until(lambda: "picks endpoints on" in self.text or self.ended(), 120)
        found = re.search(r"picks endpoints on \S+:(\d+)", self.text)
        assert found is not None, self.text
        return int(found[1])

    def wait_for(self: R, replicas: int) -> R:
        """Wait until this many replicas take requests."""
        until(lambda: self.text.count(" serves ") >= replicas or self.ended(), 120)
        until(lambda: http_client.get(f"{self.url}/ready").status_code == 200)
        return self

    def http(self, key: str | None = None) -> httpx.Client:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60)

    def openai(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's series with these labels."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        lines = http_client.get(f"{self.url}/metrics").text.splitlines()
        found = [line for line in lines if re.match(rf"{re.escape(name)}({{|\s)", line)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found if all(label in line for label in wanted))


class RouterProcess(CommandProcess, RunningRouter):
    """A `foreword route` process."""

    def __init__(self, *arguments: str, forked: bool = True) -> None:
        super().__init__("route", "--port", "0", *QUICK, *arguments, forked=forked)


class RouterThread(RunningRouter, logging.Handler):
    """A router on an event loop of this process, which starts much faster than a process."""

    def __init__(self, *arguments: str) -> None:
        logging.Handler.__init__(self, logging.INFO)
        self.lines = []
        config = _config(*QUICK, *arguments)
        self._loop = uvloop.new_event_loop()
        self._task = self._loop.create_task(self._serve(config, bind(config.server)))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._level = logging.root.level
        logging.root.addHandler(self)
        logging.root.setLevel(logging.INFO)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread == self._thread.ident:
            self.lines.append(self.format(record) + "\n")

    async def _serve(self, config: Config, listener: socket.socket) -> None:
        async with serving(listener, configured_replicas(config.router), Router(config)) as self.router:
            await asyncio.Event().wait()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._task)
        self._loop.close()

    def ended(self) -> bool:
        return not self._thread.is_alive()

    def kill(self) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(60)
        logging.root.removeHandler(self)
        logging.root.setLevel(self._level)


def _config(*arguments: str) -> Config:
    """The configuration that `foreword route` has with these arguments."""
    seen: list[Config] = []
    app = typer.Typer()
    app.command()(with_router_config(lambda config: seen.append(config)))
    environ = {key: None for key in os.environ if key.startswith("FOREWORD_")}
    given, own = split(arguments)
    with named_constants(given):
        CliRunner().invoke(app, ["--port", "0", *own], env=environ, catch_exceptions=False)
    return seen[0]


class Loop:
    """An event loop on a separate thread.

    Attributes:
        ends: coroutine functions that end what runs on it, for `close`.
    """

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.ends: list[Callable[[], Any]] = []
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End what runs, and the loop: one that is stopped only leaves tasks and sockets to the garbage collector."""
        for end in self.ends:
            self.call(end)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def call(self, make: Callable[[], Any]) -> Any:
        async def run() -> Any:
            made = make()
            return await made if asyncio.iscoroutine(made) else made

        future: Future[Any] = asyncio.run_coroutine_threadsafe(run(), self.loop)
        return future.result(200)


class Scissors:
    """Shared by relays: each of the next completions through any of them is reset after a given number of events."""

    def __init__(self) -> None:
        self._next: list[int] = []

    def cut_after(self, *events: int) -> None:
        self._next = list(events)

    def take(self) -> int | None:
        return self._next.pop(0) if self._next else None


class Relay:
    """A TCP relay to a real server, which looks like another replica. It can reset a connection in the middle of a response
    and refuse connections.

    Args:
        as_vllm: the router takes the server behind it for one of vLLM.
        shouts: its texts of token ids are in capitals.
    """

    def __init__(
        self,
        loop: Loop,
        target: str,
        scissors: Scissors | None = None,
        *,
        as_vllm: bool = False,
        shouts: bool = False,
    ) -> None:
        self._loop = loop
        self._shouts = shouts
        self._as_vllm = as_vllm
        self._scissors = scissors or Scissors()
        parts = urlsplit(target)
        self._target = (parts.hostname, parts.port)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0
        self.open()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def open(self) -> None:
        self._loop.call(self._open)

    async def _open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        """Like a killed process: stop listening and reset all connections."""
        self._loop.call(self._close)

    def _close(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, away = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, away}
        left: list[int | None] = [None]
        up = asyncio.ensure_future(self._up(reader, away, left))
        try:
            await self._down(there, writer, left)
        except ConnectionError:
            pass
        finally:
            up.cancel()
            for one in (writer, away):
                self._writers.discard(one)
                one.transport.abort() if left[0] == 0 else one.close()

    async def _up(self, reader: asyncio.StreamReader, away: asyncio.StreamWriter, left: list[int | None]) -> None:
        while data := await reader.read(1 << 16):
            if not await self._passes(data, left):
                away.transport.abort()
                return
            if self._as_vllm:
                for name in (b"tokenize", b"detokenize"):
                    data = data.replace(b"POST /" + name, b"POST /v1/" + name)
            away.write(data)
        away.close()

    async def _passes(self, data: bytes, left: list[int | None]) -> bool:
        """Whether to forward a piece of a request; otherwise its connection is reset. `left`: events that may still come
        back; None for any number."""
        if data.startswith((b"POST /v1/completions", b"POST /v1/chat/completions")):
            left[0] = self._scissors.take()
        elif data.startswith(b"POST /"):
            left[0] = None
        return left[0] != 0

    async def _down(self, there: asyncio.StreamReader, writer: asyncio.StreamWriter, left: list[int | None]) -> None:
        while left[0] != 0 and (data := await there.read(1 << 16)):
            count = left[0]
            if count is not None:
                parts = data.split(b"\n\n")
                passed = min(len(parts) - 1, count)
                left[0] = count - passed
                if left[0] == 0:
                    data = b"".join(part + b"\n\n" for part in parts[:passed])
            if self._as_vllm:
                data = data.replace(b'"owned_by":"foreword"', b'"owned_by":"vllm"    ')
            if self._shouts:
                data = re.sub(rb'(?<={"prompt":").*', lambda found: found[0].upper(), data)
            writer.write(data)
            await writer.drain()
