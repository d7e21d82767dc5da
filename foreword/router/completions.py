"""One request on its way: placed, sent, answered, and sent again where that doubles nothing.

What has not reached the client can be asked for again. What has is continued: see `streaming` and `seam`.
"""

from __future__ import annotations

import asyncio

from aiohttp import web

from foreword.errors import DeadlineExceeded, ReplicaFailed
from foreword.router import client_request as asking
from foreword.router import disaggregated
from foreword.router.attempt import Call, again, answered, is_certain, sentence
from foreword.router.prompts import Prompt
from foreword.router.replicas import LOST, clock
from foreword.router.service import Router
from foreword.router.stream_proxy import streamed


async def handle(router: Router, request: web.Request, interface: asking.Interface) -> web.StreamResponse:
    """`/v1/completions` or `/v1/chat/completions`. Raises ForewordError before anything was sent."""
    arrived = clock()
    tenant = router.callers.tenant(request.headers.get("authorization"))
    request["tenant"] = tenant.name
    asked = asking.read(interface, await request.read())
    pool = router.pool(asked.model)
    deadline = arrived + _time_limit(request, router.config.request_timeout)
    try:
        async with asyncio.timeout_at(asyncio.get_running_loop().time() + deadline - clock()) as limit:
            prompt = await router.prompts.read(asked, pool.able) if pool.compares else Prompt((), "unread")
            session = asked.session(request.headers.get("x-session-id"))
            named = f"{tenant.name}/{session}" if session is not None else None
            call = Call(router, request, asked, tenant, request["id"], pool, prompt, named, deadline, arrived)
            return await (streamed(call) if asked.streams else _whole(call))
    except TimeoutError:
        if not limit.expired():
            raise
        raise DeadlineExceeded("The request's time is over before it was answered") from None


def _time_limit(request: web.Request, most: float) -> float:
    """Seconds that a request may take: the client may ask for less than the router allows."""
    try:
        wanted = float(request.headers.get("x-request-timeout", most))
    except ValueError:
        return most
    return min(wanted, most) if wanted > 0 else most


async def _whole(call: Call) -> web.StreamResponse:
    while True:
        ticket = await call.place()
        try:
            body = await disaggregated.body(call, ticket)
            call.pool.guess_first_token(ticket)
            response, data = await call.fetch(ticket.upstream, body)
        except (*LOST, ReplicaFailed) as error:
            call.lost(ticket, sentence(error), certain=is_certain(error))
            if not call.may_try_again():
                said = f"The request failed on {call.attempts} replicas; the last: {sentence(error)}"
                raise ReplicaFailed(said) from None
            call.router.metrics.retry()
            continue
        except BaseException:
            call.pool.failed(ticket)
            raise
        if not again(call, ticket, response, data):
            return answered(call, ticket, response, data)
