"""Facts that the router learns about a replica before it sends requests there."""

from __future__ import annotations

import asyncio
import contextlib

import httpx
import pytest
from aiohttp import web
from router_parts import Loop, RouterProcess

from foreword.router.replica_metrics import parse_metrics
from foreword.router_extras.replica_memory import memory_of


class ChunkedMetrics:
    """A server that describes itself as vLLM does and sends its metrics in two chunks."""

    def __init__(self, loop: Loop) -> None:
        self.url = loop.call(self._start)

    async def _start(self) -> str:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        return f"http://{host}:{port}"

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": "m", "object": "model", "owned_by": "vllm", "max_model_len": 100}
        return web.json_response({"object": "list", "data": [card]})

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        out = web.StreamResponse()
        await out.prepare(request)
        await out.write(b"# TYPE python_info gauge\npython_info 1.0\n")
        await asyncio.sleep(0.2)  # nothing tells that the other side has read the first piece
        with contextlib.suppress(ConnectionError):  # the router is gone at the end
            await out.write(b'vllm:cache_config_info{block_size="32",num_gpu_blocks="100"} 1.0\n')
        return out


def test_metrics_in_several_chunks() -> None:
    """Block size and capacity are read even if the metrics arrive in chunks; without them KV events could not be
    used."""
    server = ChunkedMetrics(Loop())
    router = RouterProcess("--replica", server.url, "--admin-key", "admin").wait_for(1)
    try:
        headers = {"authorization": "Bearer admin"}
        [found] = httpx.get(f"{router.url}/v1/router/replicas", headers=headers, timeout=60).json()["data"]
        assert (found["block_size"], found["capacity_tokens"]) == (32, 3200)
    finally:
        router.kill()


def test_metrics_of_several_engines() -> None:
    """The numbers of a data-parallel vLLM server are those of all its engines together."""
    lines = [
        'vllm:num_requests_running{engine="0",model_name="m"} 40.0',
        'vllm:num_requests_running{engine="1",model_name="m"} 3.0',
        'vllm:num_requests_waiting{engine="0",model_name="m"} 90.0',
        'vllm:num_requests_waiting{engine="1",model_name="m"} 0.0',
        'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5',
        'vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.1',
        'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000"} 1.0',
        'vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="500"} 1.0',
    ]
    found = parse_metrics("\n".join(lines))
    assert (found.requests, found.block_size, found.capacity_tokens) == (133, 16, 24000)
    assert found.usage == pytest.approx(0.3)


def test_memory_of_a_server() -> None:
    """Device blocks and tiers of a Foreword server are kept as lines, in its own order, within a bound, and read when they are
    shown: without what is no number, and without other metrics of these names."""
    page = [
        "foreword:blocks 100.0", "foreword:blocks_free 60.0", "foreword:blocks_cached 30.0", "foreword:blocks_pinned NaN",
        "foreword:blocks_evicted_total 7.0",
        *(f'foreword:tier_load_seconds_bucket{{tier="memory",le="{number}"}} 1.0' for number in range(500)),
        'foreword:tier_bytes{tier="memory"} 5.0', 'foreword:tier_budget_bytes{tier="memory"} 8.0',
        'foreword:tier_open{tier="disk"} 1.0', 'foreword:tier_bytes{tier="disk"} word',
    ]  # fmt: skip
    device, tiers = memory_of(parse_metrics("\n".join(page)).memory)
    assert device == {"all": 100, "free": 60, "cached": 30, "pinned": 0}
    assert [(one["tier"], one["held"], one["budget"], one["open"]) for one in tiers] == [
        ("memory", 5, 8, False),
        ("disk", 0, 0, True),
    ]
    assert memory_of(parse_metrics("foreword:blocks 1.0").memory) == (None, ())
    kept = parse_metrics("\n".join(f'foreword:tier_bytes{{tier="{number}"}} 1' for number in range(10_000))).memory
    assert len(kept) < 1000


def test_weights_of_several_engines() -> None:
    """The fingerprint is that of all engines that have published one; weights that were replaced in place do not count. Engines
    with different weights have none that another server could have too."""
    series = 'vllm:foreword_model_info{{model_name="m",engine="{0}",fingerprint="{1}"}} {2:.1f}'.format
    told = [series(0, "aa", 0), series(0, "bb", 1), series(1, "bb", 1)]
    found = parse_metrics("\n".join([*told, "process_start_time_seconds 1.76403e+09"]))
    assert (found.fingerprint, found.has_connector, found.started) == ("bb", True, 1.76403e9)
    assert parse_metrics("\n".join([*told, series(1, "cc", 1)])).fingerprint is None
    assert parse_metrics('foreword:model_info{fingerprint="dd",dtype="float32"} 1').fingerprint == "dd"


def test_metrics_of_a_liar() -> None:
    """Numbers that cannot be true are not used."""
    lines = ["vllm:num_requests_running 1e400", 'vllm:cache_config_info{block_size="0",num_gpu_blocks="\u0663"} 1.0']
    found = parse_metrics("\n".join(lines))
    assert (found.requests, found.block_size, found.capacity_tokens, found.usage) == (None, None, None, None)
