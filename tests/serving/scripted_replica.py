"""A server that a router takes for a replica; subclasses script its answers."""

from __future__ import annotations

from aiohttp import web
from router_parts import Loop

# The fingerprint of weights in vLLM's metrics, if it has Foreword's connector.
WEIGHTS = "a1" * 32


def metrics_of(weights: str) -> str:
    """The page of `/metrics` of a replica with these weights; empty weights are not published."""
    return f'vllm:foreword_model_info{{model_name="m",engine="0",fingerprint="{weights}"}} 1.0\n' if weights else ""


class ScriptedReplica:
    """`paths` has those that were asked for without there being an answer. `weights` are published in its metrics."""

    def __init__(self, loop: Loop, owner: str = "vllm", weights: str = WEIGHTS) -> None:
        self.owner = owner
        self.weights = weights
        self.paths: list[str] = []
        self.url: str = loop.call(self._start)

    def routes(self) -> list[web.RouteDef]:
        """The paths beside those that every replica has."""
        raise NotImplementedError

    async def _start(self) -> str:
        app = web.Application(client_max_size=1 << 27)
        app.add_routes([web.get("/health", self._health), web.get("/v1/models", self._models), *self.routes()])
        app.add_routes([web.get("/metrics", self._metrics)])
        app.router.add_route("*", "/{path:.*}", self._other)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        return f"http://{host}:{port}"

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=metrics_of(self.weights))

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": "m", "object": "model", "owned_by": self.owner, "max_model_len": 8192}
        return web.json_response({"object": "list", "data": [card]})

    async def _other(self, request: web.Request) -> web.Response:
        self.paths.append(request.path)
        return web.json_response({"path": request.path}, status=404)
