"""Routes that every front has for programs that watch it: metrics, version, and the description of its API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from foreword import __version__
from foreword.api.front import Answer, Call, Handler
from foreword.api.routes import NO_BODY, Meter, Right, Routes


def add_routes(routes: Routes[Handler], render: Callable[[str], Any]) -> None:
    """`render` gives the metrics and their media type for an `Accept` header, or an awaitable of them."""

    @routes.add("GET", "/metrics", right=Right.ANYONE, meter=Meter.FREE, body=NO_BODY, tag="probes")
    async def metrics(call: Call) -> Answer:
        """The metrics for Prometheus."""
        found = render(call.headers.get("accept", ""))
        content, media_type = await found if isinstance(found, Awaitable) else found
        return Answer(200, content, {"content-type": media_type})

    @routes.add("GET", "/version", right=Right.ANYONE, meter=Meter.FREE, body=NO_BODY, tag="probes")
    async def show_version(call: Call) -> dict[str, Any]:
        """Foreword's version."""
        return {"version": __version__}

    @routes.add("GET", "/openapi.json", right=Right.ANYONE, meter=Meter.FREE, body=NO_BODY, tag="probes")
    async def openapi(call: Call) -> dict[str, Any]:
        """This API as OpenAPI 3.1."""
        return routes.openapi()
