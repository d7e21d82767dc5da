"""One client's request, what was tried for it, and what a replica's response means for the next attempt."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import aiohttp
import msgspec
from aiohttp import web
from multidict import CIMultiDict

from foreword.api.tenants import Tenant
from foreword.errors import ForewordError, ReplicaFailed
from foreword.router import auth as tenancy
from foreword.router.client_request import Asked
from foreword.router.decisions import header
from foreword.router.pool import Pool, Ticket
from foreword.router.prompts import Prompt
from foreword.router.replicas import Live, Upstream, clock
from foreword.router.service import HELD_UP_TIMES, Router

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LONGEST_PAUSE: Final = 5.0
_MOST_REFUSALS: Final = 100
_RETRIED: Final = frozenset((500, 502, 503, 504))


@dataclass(eq=False)
class Call:
    """One request of a client, and what was tried for it."""

    router: Router
    request: web.Request
    asked: Asked
    tenant: Tenant
    request_id: str
    pool: Pool
    prompt: Prompt
    session: str | None
    deadline: float
    arrived: float
    avoid: list[str] = field(default_factory=list)
    attempts: int = 0
    refusals: int = 0
    words: str = ""
    why: str = ""
    suspects: list[tuple[Upstream, str]] = field(default_factory=list)

    @property
    def salt(self) -> str | None:
        return tenancy.cache_salt(self.tenant)

    async def place(self, prompt: Prompt | None = None) -> Ticket:
        """Find a replica. Raises NoReplica, QueueFull or DeadlineExceeded."""
        wanted = prompt or self.prompt
        query = self.pool.query(wanted, self.asked.model, self.salt, self.session, self.asked.max_tokens)
        others = self.router.elsewhere(self.pool, self.asked.model)
        name = self.router.request_name(self.request_id)
        overhead = clock() - self.arrived if not self.attempts else 0.0
        ticket = await self.pool.place(
            name, self.tenant.name, query, wanted, self.deadline, tuple({*self.avoid, *others})
        )
        self.words = self.router.decisions.note(self.request_id, self.tenant.name, ticket, self.why)
        self.router.metrics.decision(
            ticket.upstream.url, ticket.decision.reason, wanted.source, query.tokens, overhead, ticket.queued
        )
        return ticket

    def headers(self, upstream: Upstream) -> CIMultiDict[str]:
        """For a replica."""
        client = self.request.headers
        headers = tenancy.forwarded(client)
        headers.update(self.router.callers.headers(self.tenant, client.get("authorization"), upstream.kind))
        headers["content-type"], headers["accept-encoding"] = "application/json", "identity"
        headers["x-request-id"], headers["x-foreword-follow"] = self.request_id, "1"
        return headers

    async def send(self, ticket: Ticket, body: bytes, path: str | None = None) -> aiohttp.ClientResponse:
        """The response's head. Raises what aiohttp raises, and ReplicaFailed if the replica is found dead meanwhile."""
        upstream = ticket.upstream
        url, headers = upstream.url + (path or self.asked.path), self.headers(upstream)
        return await self._sent(
            upstream, lambda: self.router.session.post(url, data=body, headers=headers, allow_redirects=False)
        )

    async def fetch(self, upstream: Upstream, body: bytes) -> tuple[aiohttp.ClientResponse, bytes]:
        """A response with its whole body. Raises as `send`."""
        headers = self.headers(upstream)

        async def work() -> tuple[aiohttp.ClientResponse, bytes]:
            async with self.router.session.post(
                upstream.url + self.asked.path, data=body, headers=headers, allow_redirects=False
            ) as response:
                return response, await response.read()

        return await self._sent(upstream, work)

    async def _sent(self, upstream: Upstream, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """A connection that was not there in time only because the router was held up is tried again: nothing was sent yet."""
        for _ in range(HELD_UP_TIMES):
            began = clock()
            try:
                return await _while_alive(upstream, work())
            except aiohttp.ConnectionTimeoutError:
                if not await self.router.was_held_up(began):
                    raise
        return await _while_alive(upstream, work())

    def lost(self, ticket: Ticket, reason: str, *, certain: bool = False, at: Upstream | None = None) -> None:
        """A replica failed this request: the ticket's, or the one `at` which the answer had moved."""
        upstream = at or ticket.upstream
        self.attempts += 1
        self.avoid.append(upstream.url)
        self.why = f"after {upstream.url} failed ({reason})"
        logger.warning("request %s: %s failed: %s", self.request_id, upstream.url, reason)
        self.pool.failed(ticket)
        self.router.failed(upstream, reason, certain=certain)

    def unhappy(self, ticket: Ticket, reason: str) -> None:
        """A replica answered with an error. Whose fault that is shows when another one answers the same request."""
        upstream = ticket.upstream
        self.attempts += 1
        self.avoid.append(upstream.url)
        self.why = f"after {upstream.url} failed ({reason})"
        self.suspects.append((upstream, reason))
        logger.warning("request %s: %s failed: %s", self.request_id, upstream.url, reason)
        self.pool.failed(ticket)

    def succeeded(self, ticket: Ticket) -> None:
        """A replica answered well."""
        self.router.succeeded(ticket.upstream)
        for upstream, reason in self.suspects:
            if upstream is not ticket.upstream:
                self.router.failed(upstream, reason)
        self.suspects.clear()

    def may_try_again(self) -> bool:
        return self.attempts < self.router.config.max_attempts

    def refused(self, ticket: Ticket, response: aiohttp.ClientResponse) -> None:
        """A replica has too much to do: it is left alone for as long as it says, and the request waits."""
        self.refusals += 1
        self.pool.failed(ticket)
        self.why = f"after {ticket.upstream.url} had no room"
        self.router.paused(ticket.upstream, pause_of(response))


async def _while_alive(upstream: Upstream, work: Coroutine[Any, Any, T]) -> T:
    """Wait for an answer, but not from a replica that does not live any more."""
    task = asyncio.ensure_future(work)
    live = Live(task.cancel, clock())
    upstream.lives.add(live)
    try:
        return await task
    except asyncio.CancelledError:
        if live.aborted:
            raise ReplicaFailed(live.aborted) from None
        raise
    finally:
        upstream.lives.discard(live)


def pause_of(response: aiohttp.ClientResponse) -> float:
    """Seconds for which a replica that refused wants to be left alone."""
    try:
        pause = float(response.headers.get("retry-after", "1"))
    except ValueError:
        pause = 1.0
    return min(max(pause, 0.1), _LONGEST_PAUSE)


def again(call: Call, ticket: Ticket, response: aiohttp.ClientResponse, data: bytes) -> bool:
    """Whether a refusal or a failure is a reason to ask another replica. If so the ticket is ended."""
    status = response.status
    if status == 429 or (status == 503 and _code(data) == "queue_full"):
        if call.refusals < _MOST_REFUSALS:
            call.refused(ticket, response)
            return True
    elif status in _RETRIED and call.attempts + 1 < call.router.config.max_attempts:
        if status == 503:
            call.lost(ticket, f"it says {status}{said(data)}", certain=True)
        else:
            call.unhappy(ticket, f"it says {status}{said(data)}")
        call.router.metrics.retry()
        return True
    return False


def answered(call: Call, ticket: Ticket, response: aiohttp.ClientResponse, data: bytes) -> web.Response:
    if response.status == 200:
        counts = _usage(data)
        call.pool.finished(ticket, *counts)
        call.succeeded(ticket)
    else:
        call.pool.failed(ticket)
        if response.status < 500:
            call.succeeded(ticket)
    return web.Response(body=data, status=response.status, headers=_head(call, response))


def _head(call: Call, response: aiohttp.ClientResponse) -> CIMultiDict[str]:
    headers = tenancy.returned(response.headers)
    headers["x-foreword-route"] = header(call.words)
    headers["x-request-id"] = call.request_id
    return headers


def _usage(data: bytes) -> tuple[int | None, int | None, int | None]:
    """Cached, generated and prompt tokens."""
    try:
        usage = msgspec.json.decode(data, type=_Whole).usage
    except msgspec.DecodeError:
        return None, None, None
    if usage is None:
        return None, None, None
    details = usage.prompt_tokens_details
    return details.cached_tokens if details else None, usage.completion_tokens, usage.prompt_tokens


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Whole(msgspec.Struct):
    usage: _Usage | None = None


def sentence(error: BaseException) -> str:
    if isinstance(error, ForewordError):
        return error.message
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot connect: {error.strerror or error}"
    if isinstance(error, asyncio.TimeoutError):
        return "no answer in time"
    return f"the connection broke ({type(error).__name__})"


def is_certain(error: BaseException) -> bool:
    return isinstance(error, aiohttp.ClientConnectorError)


def _code(data: bytes) -> object:
    try:
        found = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return None
    error = found.get("error") if isinstance(found, dict) else None
    return error.get("code") if isinstance(error, dict) else None


def said(data: bytes) -> str:
    """What an error response says, shortened."""
    try:
        found: Any = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return ""
    error = found.get("error") if isinstance(found, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return f": {str(message)[:200]}" if message else ""
