"""What the router learns of a replica before it sends requests there."""

from __future__ import annotations

import asyncio
import contextlib

import httpx
from aiohttp import web
from router_parts import Loop, RouterProcess


class InPieces:
    """A server that says about itself what vLLM says, its metrics in two pieces."""

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


def test_metrics_that_come_in_pieces() -> None:
    """A server's block size and room are known however its metrics are cut on their way: without them the router would not
    understand what its KV events tell."""
    server = InPieces(Loop())
    router = RouterProcess("--replica", server.url, "--admin-key", "admin").wait_for(1)
    try:
        headers = {"authorization": "Bearer admin"}
        [found] = httpx.get(f"{router.url}/v1/router/replicas", headers=headers, timeout=60).json()["data"]
        assert (found["block_size"], found["capacity_tokens"]) == (32, 3200)
    finally:
        router.kill()
