"""`GET /v1/instance`: what this server is among others, for routers and for servers that move requests here."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request

from foreword.api.tenants import Tenant
from foreword.server.endpoint import Front

if TYPE_CHECKING:
    from foreword.entrypoints.async_engine import AsyncEngine


def router(front: Front) -> APIRouter:
    """The routes."""
    routes = APIRouter(prefix="/v1/instance", tags=["instance"])

    @routes.get("")
    async def show(request: Request) -> dict[str, Any]:
        """Role, transfer address, model and layout, and how busy it is now. `role` and `transfer` are null where the server
        works alone. Answers also while it drains."""
        tenant = front.tenant(request)
        loaded = front.gate.loaded
        engine = front.gate.engine() if loaded is None else loaded
        return {**describe(engine, tenant), "draining": front.gate.draining}

    return routes


def describe(engine: AsyncEngine, tenant: Tenant) -> dict[str, Any]:
    """This instance as JSON. `tenant` is a digest of the caller's salt: two servers that give the same one share its blocks."""
    info, status, instance = engine.info, engine.status(), engine.instance
    return {
        "role": None if instance is None else instance.role,
        "transfer": None if instance is None else instance.address,
        "model": info.name,
        "fingerprint": info.fingerprint,
        "layout": None if instance is None else instance.view.layout.fingerprint.hex(),
        "block_size": info.block_size,
        "max_model_len": info.max_model_len,
        "tenant": digest(tenant.salt),
        "load": {
            "running": status.running,
            "waiting": status.waiting,
            "blocks": info.num_blocks,
            "free_blocks": status.free_blocks,
            "cached_blocks": status.cached_blocks,
            "kv_usage": status.kv_usage,
        },
    }


def digest(salt: bytes) -> str:
    """Says whether two salts are equal, and nothing else about them."""
    return hashlib.sha256(b"foreword/tenant\x00" + salt).hexdigest()[:16]
