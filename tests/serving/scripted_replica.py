"""A server that a router takes for a replica; subclasses script its answers."""

from __future__ import annotations

from aiohttp import web
from router_parts import Loop


class ScriptedReplica:
    """`paths` has those that were asked for without there being an answer."""

    def __init__(self, loop: Loop, owner: str = "vllm") -> None:
        self.owner = owner
        self.paths: list[str] = []
        self.url: str = loop.call(self._start)

    def routes(self) -> list[web.RouteDef]:
        """The paths beside those that every replica has."""
        raise NotImplementedError

    async def _start(self) -> str:
        app = web.Application(client_max_size=1 << 27)
        app.add_routes([web.get("/health", self._health), web.get("/v1/models", self._models), *self.routes()])
        app.router.add_route("*", "/{path:.*}", self._other)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        return f"http://{host}:{port}"

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": "m", "object": "model", "owned_by": self.owner, "max_model_len": 8192}
        return web.json_response({"object": "list", "data": [card]})

    async def _other(self, request: web.Request) -> web.Response:
        self.paths.append(request.path)
        return web.json_response({"path": request.path}, status=404)
