"""A shared engine with the embedded model behind several HTTP servers on free ports, and helpers for tests that use them."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai

import foreword
from foreword.api.front import Front
from foreword.api.http import bind, serving
from foreword.configuration import Config
from foreword.engine_config import EngineConfig, PrefixConfig
from foreword.entrypoints.async_engine import AsyncEngine
from foreword.ledger import UsageLedger
from foreword.process_config import ServerConfig
from foreword.server.app import ServerApp
from foreword.server.engine_metrics import PrometheusObserver

# float32: in bfloat16 a cached and a computed prefix round differently, which can tip a sampled token.
ENGINE = EngineConfig(
    dtype="float32",
    max_model_len=1024,
    kv_memory="8192 tokens",
    max_num_seqs=4,
    max_batch_tokens=256,
    threads=1,
    seed=0,
)
# 10 % of the pool: 819 tokens, of which cache control may keep 409.
PREFIXES = PrefixConfig(budget="10%")
OPEN = ServerConfig(port=0)
# A pair of tenants for each test that counts cached tokens.
PAIRS = tuple(f"{name}{number}={name}{number}-secret" for number in range(5) for name in ("alice", "bob"))
KEYED = ServerConfig(port=0, api_keys=(*PAIRS, "lonely-secret"), tenant_secret="a secret of the tests")
SHORT = ServerConfig(port=0, max_queue=2)
LIMITED = ServerConfig(
    port=0,
    head_timeout=1,
    body_timeout=1,
    write_timeout=2,
    max_connections=40,
    stream_keep_alive=0.05,
    reasoning_parser="think",
    api_keys=("alice=alice-key", "bob=bob-key", "carol=carol-key", "dave=dave-key"),
    quotas=("alice requests=2", "bob concurrent=1", "carol tokens=30"),
)
# Headers of a router, for a server that believes it.
ROUTER_KEY = "router-key"
# Bytes that the kernel keeps for a client of LIMITED that does not read.
SEND_BUFFER = 1 << 16


@dataclass(frozen=True)
class SharedServer:
    """A running server."""

    url: str
    engine: AsyncEngine

    def http(self, key: str | None = None, timeout: float = 60) -> httpx.Client:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=timeout)

    def openai(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    @property
    def model(self) -> str:
        return self.engine.info.name


@dataclass(frozen=True)
class SharedServers:
    open: SharedServer
    keyed: SharedServer
    short: SharedServer
    limited: SharedServer


@contextmanager
def shared_servers() -> Iterator[SharedServers]:
    """Load an engine and serve it with several configurations: open, with API keys, with a short queue, with small limits."""
    registry = PrometheusObserver()
    engine = AsyncEngine.from_config(ENGINE, prefixes=PREFIXES, observers=[registry])
    registry.watch(engine)
    fronts, made = [], []
    for config in (OPEN, KEYED, SHORT, LIMITED):
        listener = bind(config)
        if config is LIMITED:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        app = ServerApp(engine, registry, Config(ENGINE, config, PREFIXES))
        fronts.append((app.front, listener, config))
        made.append(SharedServer("http://{}:{}".format(*listener.getsockname()[:2]), engine))
    with served(*fronts):
        yield SharedServers(*made)
    engine.close()


@contextmanager
def served(*fronts: tuple[Front, socket.socket, ServerConfig]) -> Iterator[None]:
    """Serve fronts on an event loop of another thread."""
    loop, stop, begun = asyncio.new_event_loop(), asyncio.Event(), threading.Event()

    async def run() -> None:
        async with AsyncExitStack() as stack:
            for one in fronts:
                await stack.enter_async_context(serving(*one))
            begun.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()), daemon=True)
    thread.start()
    assert begun.wait(60)
    yield
    loop.call_soon_threadsafe(stop.set)
    thread.join(60)


@contextmanager
def another_server(
    shared: SharedServers, config: ServerConfig, ledger: UsageLedger | None = None
) -> Iterator[tuple[str, ServerApp]]:
    """Starts one more server over the shared engine: its URL and what runs there."""
    app = ServerApp(shared.open.engine, PrometheusObserver(), Config(ENGINE, config, PREFIXES), ledger=ledger)
    listener = bind(config)
    with served((app.front, listener, config)):
        yield "http://{}:{}".format(*listener.getsockname()[:2]), app


def embedded_model(folder: Path, template: str) -> Path:
    """A copy of the embedded model with another chat template."""
    shutil.copytree(Path(foreword.__file__).parent / "models" / "stdlib-nano", folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template.strip()}))
    return folder


def until(condition: Callable[[], bool], seconds: float = 150) -> None:
    """Wait for a condition; fail if it does not come true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.01)


@contextmanager
def slow(server: SharedServer, step: float = 0.1) -> Iterator[None]:
    """Every step of the engine takes at least `step` seconds, so that a long answer outlasts the test."""
    runner: Any = server.engine._core._runner
    run = runner.run

    def slowly(*arguments: Any) -> Any:
        time.sleep(step)
        return run(*arguments)

    runner.run = slowly
    try:
        yield
    finally:
        runner.run = run


@contextmanager
def abandoned_request(url: str, body: dict[str, Any]) -> Iterator[None]:
    """Send a completion request. The client disconnects at the end of the block without having read anything."""
    parts, text = urlsplit(url), json.dumps(body).encode()
    with socket.create_connection((parts.hostname, parts.port or 80), 60) as client:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-length: {len(text)}\r\n"
        client.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + text)
        yield


def words(topic: str, count: int) -> str:
    """A text that is different for each topic, so that tests do not hit each other's cached prefixes."""
    return " ".join(f"{topic}{number}" for number in range(count))
