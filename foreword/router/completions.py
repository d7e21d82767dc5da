"""`/v1/completions` and `/v1/chat/completions`: authenticate, parse and tokenize a request, then proxy it."""

from __future__ import annotations

import asyncio

from aiohttp import web

from foreword.errors import DeadlineExceeded
from foreword.router.client_request import Interface, parse_request
from foreword.router.prompts import TokenizedPrompt
from foreword.router.proxied_request import ProxiedRequest
from foreword.router.replicas import clock
from foreword.router.response_proxy import proxy_response
from foreword.router.service import Router


async def handle(router: Router, interface: Interface, http_request: web.Request) -> web.StreamResponse:
    """Raises ForewordError if nothing was sent to the client."""
    arrived = clock()
    tenant = router.auth.tenant(http_request.headers.get("authorization"))
    http_request["tenant"] = tenant.name
    request = parse_request(interface, await http_request.read())
    pool = router.pool(request.model)
    deadline = arrived + _time_limit(http_request, router.config.request_timeout)
    try:
        async with asyncio.timeout_at(asyncio.get_running_loop().time() + deadline - clock()) as limit:
            if pool.needs_prompts:
                prompt = await router.prompts.tokenize(request, pool.tokenizing_replicas)
            else:
                prompt = TokenizedPrompt((), "unread")
            session = request.session(http_request.headers.get("x-session-id"))
            if session is not None:
                session = f"{tenant.name}/{session}"
            proxied = ProxiedRequest(
                router, http_request, request, tenant, http_request["id"], pool, prompt, session, deadline, arrived
            )
            return await proxy_response(proxied)
    except TimeoutError:
        if not limit.expired():
            raise
        raise DeadlineExceeded("The request's deadline passed before it was answered") from None


def _time_limit(http_request: web.Request, maximum: float) -> float:
    """Seconds that the request may take. The client may ask for less than the maximum."""
    try:
        wanted = float(http_request.headers.get("x-request-timeout", maximum))
    except ValueError:
        return maximum
    return min(wanted, maximum) if wanted > 0 else maximum
