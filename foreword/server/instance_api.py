"""`/v1/instance` and `/v1/cache`: this server as one of several, and the removal of a caller's KV."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foreword.api.cache_control import EraseQuery
from foreword.api.front import Answer, Call, Handler
from foreword.api.routes import NO_BODY, Meter, Right, Routes
from foreword.blocks.salt import Salt, tenant_digest
from foreword.server.endpoint import ServerContext

if TYPE_CHECKING:
    from foreword.entrypoints.async_engine import AsyncEngine


def add_routes(routes: Routes[Handler], context: ServerContext) -> None:
    @routes.add("GET", "/v1/instance", right=Right.TENANT, meter=Meter.FREE, body=NO_BODY, tag="instance")
    async def show(call: Call) -> dict[str, Any]:
        """Role, transfer address, model, KV layout and load. `role` and `transfer` are null on a server that works alone.
        Answers also while the server drains."""
        salt = call.tenant.salt
        admission = context.admission
        engine = admission.engine() if admission.loaded is None else admission.loaded
        return {**describe(engine, salt), "draining": admission.draining}

    @routes.add(
        "DELETE",
        "/v1/cache",
        right=Right.OWNER_OR_OPERATOR,
        meter=Meter.FREE,
        body=NO_BODY,
        query=EraseQuery,
        tag="cache",
    )
    async def forget(call: Call) -> Answer | dict[str, Any]:
        """Remove the caller's blocks, named prefixes and stored responses from the device and from every store, and return a
        receipt. Running requests go on and leave nothing behind. `cache_salt`, which may be repeated,
        removes the blocks of requests with it instead. The status is 207 if a place is open: it is erased as soon as it can be
        reached, which `GET /v1/cache/erasures/{id}` tells. With `scope=device` an operator drops the unused blocks of all
        tenants from the device, and with `cache_salt` a caller those of its requests with it."""
        query: EraseQuery = call.query
        given = query.cache_salt
        if query.scope == "device" and not given:
            call.require(Right.OPERATOR, "clearing the cache of all tenants")
            return {"what": "device", "device_blocks": await context.admission.engine().clear_cache()}
        tenant = call.require(Right.OWNER, "clearing the cache")
        engine, salts = context.admission.engine(), [Salt.of(tenant.salt, one) for one in given or (None,)]
        if query.scope == "device":
            return {"what": "device", "device_blocks": sum([await engine.clear_cache(salt) for salt in salts])}
        if not given:
            context.responses.forget(tenant.salt)
        receipt = await engine.forget(*salts)
        return Answer.json(receipt, 200 if receipt["complete"] else 207)

    @routes.add(
        "GET", "/v1/cache/erasures/{name}", right=Right.OWNER_OR_OPERATOR, meter=Meter.FREE, body=NO_BODY, tag="cache"
    )
    async def erasure(call: Call) -> dict[str, Any]:
        """The receipt of an erasure, so far."""
        tenant = call.require(Right.OWNER, "the receipt of an erasure")
        return context.admission.engine().erasure(call.names["name"], Salt(tenant.salt))


def describe(engine: AsyncEngine, salt: bytes) -> dict[str, Any]:
    """This instance as JSON. `tenant` is a digest of the caller's salt: servers that give the same digest share its blocks."""
    info, status, instance = engine.info, engine.status(), engine.instance
    return {
        "role": None if instance is None else instance.role,
        "transfer": None if instance is None else instance.address,
        "model": info.name,
        "fingerprint": info.fingerprint,
        "layout": None if instance is None else instance.view.layout.fingerprint.hex(),
        "block_size": info.block_size,
        "max_model_len": info.max_model_len,
        "tenant": tenant_digest(salt)[:16],
        "load": {
            "running": status.running,
            "waiting": status.waiting,
            "blocks": info.num_blocks,
            "free_blocks": status.free_blocks,
            "cached_blocks": status.cached_blocks,
            "kv_usage": status.kv_usage,
        },
    }
