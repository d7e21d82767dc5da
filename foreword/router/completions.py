"""The paths that generate text: admit, parse and tokenize a request, then proxy it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Final, TypeVar

from aiohttp import web

from foreword.api.dialects import messages
from foreword.api.dialects.conversations import continued
from foreword.api.dialects.limits import Limits
from foreword.api.dialects.registry import DIALECTS
from foreword.api.outcomes import Ending
from foreword.api.quotas import Admitted
from foreword.api.request import DialectName
from foreword.api.tenants import Tenant
from foreword.errors import BadRequest, DeadlineExceeded, NoReplica
from foreword.router.client_request import DIALECT_NAMES, ClientRequest, Interface, parse_request
from foreword.router.prompts import TokenizedPrompt
from foreword.router.proxied_request import ProxiedRequest
from foreword.router.replicas import clock
from foreword.router.response_proxy import proxy_response
from foreword.router.service import Router
from foreword.router.translation import Translation, chat_request

T = TypeVar("T")

# Larger bodies are parsed on a thread.
_INLINE_BYTES: Final = 128 << 10


async def handle(router: Router, interface: Interface, http_request: web.Request) -> web.StreamResponse:
    """A path whose format replicas know. Raises ForewordError if nothing was sent to the client."""
    arrived = clock()
    with Ending(router.metrics.outcome, DIALECT_NAMES[interface]) as ending:
        tenant = _authenticate(router, http_request)
        with router.quotas.admit(tenant.name, arrived) as admitted:
            request = await _parsed(router, http_request, partial(parse_request, interface))
            return await _proxy(router, http_request, request, tenant, admitted, arrived, ending)


async def handle_translated(router: Router, name: DialectName, http_request: web.Request) -> web.StreamResponse:
    """A path whose format only the router needs to know. Raises ForewordError if nothing was sent to the client."""
    arrived, dialect = clock(), DIALECTS[name]
    http_request["dialect"] = dialect
    with Ending(router.metrics.outcome, name) as ending, ExitStack() as stack:
        tenant = _authenticate(router, http_request)
        admitted = stack.enter_context(router.quotas.admit(tenant.name, arrived))
        given = await _parsed(router, http_request, dialect.parse)
        if given.previous is not None:
            given = continued(given, router.responses.get(tenant.salt, given.previous).messages)
        pool = router.pool(given.model)
        translation = Translation(
            dialect, given, given.model or pool.model, http_request["id"], partial(router.responses.add, tenant.salt)
        )
        request = chat_request(given, pool.kind)
        return await _proxy(router, http_request, request, tenant, admitted, arrived, ending, translation)


async def count_tokens(router: Router, http_request: web.Request) -> web.StreamResponse:
    """`/v1/messages/count_tokens`: the tokens of a conversation. Raises ForewordError."""
    http_request["dialect"] = DIALECTS["messages"]
    tenant = _authenticate(router, http_request)
    with router.quotas.admit(tenant.name, clock()):
        given = await _parsed(router, http_request, messages.parse_count)
        pool = router.pool(given.model)
        request = router.prefixes.expanded(pool, tenant, chat_request(given, pool.kind))
        prompt = await router.prompts.tokenize(request, pool.tokenizing_replicas)
        if not prompt.exact:
            raise NoReplica("No replica of this model can count tokens now")
        return web.json_response({"input_tokens": len(prompt.tokens)})


def _authenticate(router: Router, http_request: web.Request) -> Tenant:
    tenant = router.auth.tenant(http_request.headers)
    http_request["tenant"] = tenant.name
    return tenant


async def _parsed(router: Router, http_request: web.Request, parse: Callable[[bytes, Limits], T]) -> T:
    limits = router.limits()
    if (raw := router.bodies.arrived(http_request, min(_INLINE_BYTES, limits.body_bytes))) is not None:
        return parse(raw, limits)
    async with router.bodies.read(http_request, limits.body_bytes) as raw:
        if len(raw) <= _INLINE_BYTES:
            return parse(raw, limits)
        return await asyncio.to_thread(parse, raw, limits)


async def _proxy(
    router: Router,
    http_request: web.Request,
    request: ClientRequest,
    tenant: Tenant,
    admitted: Admitted,
    arrived: float,
    ending: Ending,
    translation: Translation | None = None,
) -> web.StreamResponse:
    pool = router.pool(request.model)
    request = router.prefixes.expanded(pool, tenant, request)
    wanted = _wanted_seconds(http_request)
    deadline = arrived + min(wanted, router.config.request_timeout)
    try:
        async with asyncio.timeout_at(asyncio.get_running_loop().time() + deadline - clock()) as limit:
            read = clock()
            if pool.needs_prompts:
                prompt = await router.prompts.tokenize(request, pool.tokenizing_replicas)
            else:
                prompt = TokenizedPrompt((), "unread")
            session = request.session(http_request.headers.get("x-session-id"))
            proxied = ProxiedRequest(
                router,
                request,
                tenant,
                http_request["id"],
                pool,
                prompt,
                f"{tenant.name}/{session}" if session is not None else None,
                arrived,
                http_request,
                deadline,
                None if math.isfinite(wanted) else limit,
                translation,
            )
            proxied.span = http_request.get("span")
            if proxied.span is not None and prompt.source != "unread":
                proxied.span.part("tokenize", read, clock(), {"gen_ai.usage.prompt_tokens": len(prompt.tokens)})
            try:
                response = await proxy_response(proxied)
                ending.status, ending.error = response.status, proxied.failure
                return response
            finally:
                router.quotas.charge(admitted, proxied.used_tokens, clock())
    except TimeoutError:
        if not limit.expired():
            raise
        raise DeadlineExceeded("The request's deadline passed before it was answered") from None


def _wanted_seconds(http_request: web.Request) -> float:
    """The client's own limit for the whole request; infinite if it set none. Raises BadRequest."""
    header = http_request.headers.get("x-request-timeout")
    try:
        wanted = math.inf if header is None else float(header)
    except ValueError:
        wanted = math.nan
    if not wanted > 0:
        raise BadRequest("x-request-timeout: must be a number of seconds above 0", param="x-request-timeout")
    return wanted
