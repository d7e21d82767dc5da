"""OpenTelemetry traces of requests through a router and a real server, as a collector gets them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import httpx
import pytest
import uvicorn
from otlp_receiver import ReceivedSpan, Receiver, otlp_receiver
from router_parts import Loop, RouterThread
from shared_server import until
from test_router_faults import Scripted

from foreword.api.http import bind
from foreword.configuration import Config
from foreword.engine_config import EngineConfig
from foreword.entrypoints.async_engine import AsyncEngine
from foreword.errors import ConfigError
from foreword.observability.tracing import Tracer
from foreword.process_config import ServerConfig
from foreword.server.app import ServerApp
from foreword.server.engine_metrics import PrometheusObserver
from foreword.server.engine_observers import EngineTraces
from foreword.store_config import StoreConfig

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

TRACE = "0af7651916cd43dd8448eb211c80319c"
CLIENT = "b7ad6b7169203331"
# A pool that one long prompt fills, so that the next one evicts it.
SMALL = EngineConfig(dtype="float32", max_model_len=512, kv_memory="512 tokens", max_num_seqs=2, threads=1, seed=0)
# On a busy machine a load is neither late nor slower than computing.
STORE = StoreConfig(urls=("memory://?size=64MiB",), lookup_timeout=60.0, load_timeout=60.0)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with otlp_receiver() as one:
        yield one


@contextmanager
def server(endpoint: str) -> Iterator[str]:
    """A server with a store, whose traces go to an endpoint."""
    registry, traces = PrometheusObserver(), EngineTraces(Tracer(endpoint, "foreword-server"))
    engine = AsyncEngine.from_config(SMALL, store=STORE, observers=[registry, traces])
    assert engine.offload is not None
    engine.offload.costs.prefill_rate = float
    registry.watch(engine)
    config = ServerConfig(port=0)
    listener = bind(config)
    app = ServerApp(engine, registry, Config(SMALL, config), traces=traces)
    running = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=lambda: asyncio.run(running.serve([listener])), daemon=True)
    thread.start()
    try:
        yield "http://{}:{}".format(*listener.getsockname()[:2])
    finally:
        running.should_exit = True
        thread.join(60)
        engine.close()
        traces.tracer.close()


def ask(url: str, prompt: list[int], trace: str, *, sampled: bool = True, **more: object) -> httpx.Response:
    headers = {"traceparent": f"00-{trace}-{CLIENT}-{'01' if sampled else '00'}", "tracestate": "vendor=1"}
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, **more}
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)


def saved_blocks(url: str) -> float:
    text = httpx.get(f"{url}/metrics", timeout=60).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("foreword:store_saved_blocks"))


def has_saved(url: str, blocks: float) -> bool:
    return saved_blocks(url) >= blocks


def by_name(spans: list[ReceivedSpan]) -> dict[str, ReceivedSpan]:
    return {one.name: one for one in spans}


@pytest.mark.slow
def test_a_request_from_client_to_engine(receiver: Receiver) -> None:
    """Client, router, queue, load from a store, prefill and decode are one trace, nested and in order. What the client does not
    sample is not sent."""
    with server(receiver.url) as url:
        router = RouterThread("--replica", url, "--otlp-endpoint", receiver.url)
        try:
            router.wait_for(1)
            first, second = ([seed, *range(100, 480)] for seed in (7, 8))
            for prompt in (first, second):
                before = saved_blocks(url)
                assert ask(router.url, prompt, "1" * 32, sampled=False).status_code == 200
                # Otherwise the second prompt may fill the write queue.
                until(partial(has_saved, url, before + len(prompt) // 16))
            assert ask(router.url, first, TRACE, stream=True).status_code == 200
            until(lambda: len(receiver.of(TRACE)) >= 7)
        finally:
            router.kill()
    assert {one.trace for one in receiver.spans} == {TRACE}
    spans = by_name(receiver.of(TRACE))
    request, call, served = spans["router request"], spans["replica"], spans["llm_request"]
    assert (request.service, served.service) == ("foreword-router", "foreword-server")
    assert (request.parent, call.parent, served.parent) == (CLIENT, request.id, call.id)
    assert call.attributes["server.address"] == url and call.events == ["first token"]
    assert request.attributes["http.response.status_code"] == 200
    parts = [spans[name] for name in ("queue", "load", "prefill", "decode")]
    assert all(one.parent == served.id and one.start <= one.end for one in parts)
    assert [one.start for one in parts] == sorted(one.start for one in parts)
    assert served.start <= parts[0].start + 1_000_000 and parts[-1].end <= served.end + 1_000_000
    assert parts[2].attributes["foreword.cached_tokens"] > 300
    assert not any(one.failed for one in receiver.spans)


def test_a_failover_is_two_calls(receiver: Receiver) -> None:
    """A replica that fails a request is a failed call; the next one belongs to the same trace. Each replica gets the context of
    its own call."""
    loop = Loop()
    broken, good = Scripted(loop), Scripted(loop)
    broken.behaviour = "broken"
    router = RouterThread("--replica", broken.url, "--replica", good.url, "--otlp-endpoint", receiver.url)
    try:
        router.wait_for(2)
        for number in range(8):
            assert ask(router.url, [number], f"{number + 1:032x}", model="m").status_code == 200
            if broken.seen:
                break
        until(lambda: len(receiver.of(f"{number + 1:032x}")) >= 4)
    finally:
        router.kill()
    request, tokenized, first, second = receiver.of(f"{number + 1:032x}")
    assert tokenized.name == "tokenize" and tokenized.parent == request.id
    assert request.name == "router request" and request.parent == CLIENT and not request.failed
    assert [(one.name, one.parent, one.failed) for one in (first, second)] == [
        ("replica", request.id, True),
        ("replica", request.id, False),
    ]
    for replica, call in ((broken, first), (good, second)):
        headers = {name.lower(): value for name, value in replica.headers[-1].items()}
        assert headers["traceparent"] == f"00-{call.trace}-{call.id}-01" and headers["tracestate"] == "vendor=1"


def test_a_collector_that_is_named_wrongly() -> None:
    """An endpoint that is no URL is a configuration error."""
    with pytest.raises(ConfigError, match="otlp-endpoint"):
        Tracer("collector:4318", "foreword-router")
