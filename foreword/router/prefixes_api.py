"""`/v1/prefixes`: register, list, show and remove named prefixes. Each tenant sees its own."""

from __future__ import annotations

import msgspec
from aiohttp import web

from foreword.api.dialects import chat
from foreword.api.dialects.limits import Limits
from foreword.api.tenants import Tenant
from foreword.errors import BadRequest
from foreword.router.passthrough import foreword_replicas, send_to_all, send_to_one
from foreword.router.prefix_registry import NewPrefix
from foreword.router.service import Router


def add_routes(app: web.Application, router: Router) -> None:
    def authenticate(request: web.Request) -> Tenant:
        tenant = router.auth.tenant(request.headers)
        request["tenant"] = tenant.name
        return tenant

    async def add(request: web.Request) -> web.Response:
        """Register a prefix, or with PUT also a new version of it, on all replicas."""
        tenant = authenticate(request)
        limits = router.limits()
        raw = await router.bodies.whole(request, limits)
        new = _parse(raw, request, limits)
        prefix = router.prefixes.make(tenant, new)
        replicas = foreword_replicas(router)
        answer = await send_to_all(router, request, tenant, replicas, raw) if replicas else None
        if answer is None or answer.status < 300:
            await router.prefixes.add(tenant, prefix)
        return answer or web.json_response(prefix.describe(), status=201 if prefix.version == 1 else 200)

    async def list_all(request: web.Request) -> web.Response:
        """All named prefixes of the tenant, as one of the replicas has them."""
        tenant = authenticate(request)
        if replicas := foreword_replicas(router):
            return await send_to_one(router, request, tenant, replicas, request.rel_url.raw_path, b"")
        found = [prefix.describe() for prefix in router.prefixes.registry.of(tenant.name)]
        return web.json_response({"object": "list", "data": found})

    async def show(request: web.Request) -> web.Response:
        """One prefix with its content."""
        tenant = authenticate(request)
        if replicas := foreword_replicas(router):
            return await send_to_one(router, request, tenant, replicas, request.rel_url.raw_path, b"")
        prefix = router.prefixes.registry.get(tenant.name, request.match_info["name"])
        return web.json_response({**prefix.describe(), **prefix.body})

    async def remove(request: web.Request) -> web.Response:
        """Remove a prefix from all replicas."""
        tenant, name = authenticate(request), request.match_info["name"]
        known = router.prefixes.registry.find(tenant.name, name)
        if known is not None:
            await router.prefixes.remove(tenant, name)
        replicas = foreword_replicas(router)
        answer = await send_to_all(router, request, tenant, replicas, b"") if replicas else None
        if answer is not None and not (answer.status == 404 and known is not None):
            return answer
        known = known or router.prefixes.registry.get(tenant.name, name)
        return web.json_response({"id": name, "object": "prefix", "deleted": True, "version": known.version})

    app.router.add_post("/v1/prefixes", add)
    app.router.add_get("/v1/prefixes", list_all)
    app.router.add_put("/v1/prefixes/{name}", add)
    app.router.add_get("/v1/prefixes/{name}", show)
    app.router.add_delete("/v1/prefixes/{name}", remove)


def _parse(raw: bytes, request: web.Request, limits: Limits) -> NewPrefix:
    """Raises BadRequest."""
    limits.check(raw)
    try:
        new = msgspec.json.decode(raw, type=NewPrefix)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"The body is not a named prefix: {error}") from None
    if request.method == "PUT":
        new.name, new.replace = request.match_info["name"], True
    if new.messages is not None:
        # Raises for what is no conversation.
        chat.parse(msgspec.json.encode({"messages": new.messages}), limits)
    return new
