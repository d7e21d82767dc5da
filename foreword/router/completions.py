"""`/v1/completions` and `/v1/chat/completions`: place the request, send it, and retry it while nothing was sent to the client.

Once output was sent, a failed request is continued instead (`stream_proxy`, `continuation`).
"""

from __future__ import annotations

import asyncio

from aiohttp import web

from foreword.errors import DeadlineExceeded, ReplicaFailed
from foreword.router import disaggregated
from foreword.router.attempt import describe_error, is_certain
from foreword.router.client_request import Interface, parse_request
from foreword.router.prompts import TokenizedPrompt
from foreword.router.proxied_request import ProxiedRequest
from foreword.router.replicas import CONNECTION_ERRORS, clock
from foreword.router.service import Router
from foreword.router.stream_proxy import proxy_stream


async def handle(router: Router, http_request: web.Request, interface: Interface) -> web.StreamResponse:
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
            return await (proxy_stream(proxied) if request.streams else _proxy_whole(proxied))
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


async def _proxy_whole(proxied: ProxiedRequest) -> web.StreamResponse:
    """A response that is not streamed."""
    while True:
        attempt = await proxied.place()
        try:
            body = await disaggregated.decode_body(proxied, attempt)
            proxied.pool.expect_first_token(attempt)
            response, data = await proxied.fetch(attempt.upstream, body)
        except (*CONNECTION_ERRORS, ReplicaFailed) as error:
            proxied.lost(attempt, describe_error(error), certain=is_certain(error))
            if not proxied.may_retry():
                raise ReplicaFailed(
                    f"The request failed on {proxied.attempts} replicas; the last: {describe_error(error)}"
                ) from None
            proxied.router.metrics.retry()
            continue
        except BaseException:
            proxied.pool.failed(attempt)
            raise
        if not proxied.retries(attempt, response, data):
            return proxied.respond(attempt, response, data)
