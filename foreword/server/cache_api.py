"""`DELETE /v1/cache`: a caller's blocks and named prefixes are removed, from the device and from every store."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from foreword.server.endpoint import Front


def router(front: Front) -> APIRouter:
    """The routes."""
    routes = APIRouter(prefix="/v1/cache", tags=["cache"])

    @routes.delete("")
    async def forget(request: Request) -> dict[str, Any]:
        """Forget everything that the caller's requests left, and say what was removed. What requests that still run use stays
        on the device until they end. The device forgets everybody's unused blocks with it: it does not know whose they are."""
        salt, engine = front.tenant(request).salt, front.gate.engine()
        return await engine.forget(salt)

    return routes
