"""What the router learns about a replica before it sends requests there."""

from __future__ import annotations

import asyncio
import contextlib

import httpx
from aiohttp import web
from router_parts import Loop, RouterProcess


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
