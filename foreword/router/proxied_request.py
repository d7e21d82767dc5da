"""A client's request and its attempts: place it, send it, and decide whether to try another replica."""

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
from foreword.errors import ReplicaFailed
from foreword.router.attempt import Attempt, describe_response, error_field, retry_after
from foreword.router.auth import cache_salt, request_headers, response_headers
from foreword.router.client_request import ClientRequest
from foreword.router.decision_log import as_header
from foreword.router.pool import PlacementRequest, ReplicaPool
from foreword.router.prompts import TokenizedPrompt
from foreword.router.replicas import AwaitedResponse, Upstream, clock
from foreword.router.service import MAX_STALLS, Router

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_OVERLOADED: Final = 100
_RETRIED: Final = frozenset((500, 502, 503, 504))


@dataclass(eq=False)
class ProxiedRequest:
    """A client's request and its attempts.

    Attributes:
        avoid: URLs of replicas that failed it.
        attempts: number of failed attempts. `overloaded`: number of attempts that a replica refused as overloaded.
        decision_text: the last placement decision in words.
        previous: why the previous attempt failed, in words.
        suspects: replicas that returned an error, and the error. They are at fault if another replica succeeds.
    """

    router: Router
    http_request: web.Request
    request: ClientRequest
    tenant: Tenant
    request_id: str
    pool: ReplicaPool
    prompt: TokenizedPrompt
    session: str | None
    deadline: float
    arrived: float
    avoid: list[str] = field(default_factory=list)
    attempts: int = 0
    overloaded: int = 0
    decision_text: str = ""
    previous: str = ""
    suspects: list[tuple[Upstream, str]] = field(default_factory=list)

    @property
    def salt(self) -> str | None:
        return cache_salt(self.tenant)

    async def place(self, prompt: TokenizedPrompt | None = None) -> Attempt:
        """Choose a replica, or wait in the queue for one. Raises NoReplica or QueueFull."""
        router, pool, request = self.router, self.pool, self.request
        prompt = prompt or self.prompt
        query = pool.query(prompt, request.model, self.salt, self.session, request.max_tokens)
        avoid = tuple({*self.avoid, *router.not_serving(pool, request.model)})
        name = router.attempt_name(self.request_id)
        overhead = clock() - self.arrived if not self.attempts else 0.0
        attempt = await pool.place(PlacementRequest(name, self.tenant.name, query, prompt, avoid))
        self.decision_text = router.decisions.record(self.request_id, self.tenant.name, attempt, self.previous)
        router.metrics.decision(
            attempt.upstream.url, attempt.decision.reason, prompt.source, query.tokens, overhead, attempt.queued
        )
        return attempt

    def headers(self, upstream: Upstream) -> CIMultiDict[str]:
        """Headers for a replica."""
        client = self.http_request.headers
        headers = request_headers(client)
        headers.update(self.router.auth.headers(self.tenant, client.get("authorization"), upstream.kind))
        headers["content-type"], headers["accept-encoding"] = "application/json", "identity"
        headers["x-request-id"], headers["x-foreword-follow"] = self.request_id, "1"
        return headers

    async def send(
        self, upstream: Upstream, body: bytes, path: str, *, streams: bool
    ) -> tuple[aiohttp.ClientResponse, bytes | None]:
        """Returns the response with its whole body, or with None if it is a stream.

        Raises what aiohttp raises, and ReplicaFailed if the replica dies meanwhile.
        """
        url, headers = upstream.url + path, self.headers(upstream)

        async def work() -> tuple[aiohttp.ClientResponse, bytes | None]:
            response = await self.router.session.post(url, data=body, headers=headers, allow_redirects=False)
            if streams and response.status == 200 and response.content_type == "text/event-stream":
                return response, None
            async with response:
                return response, await response.read()

        return await self._retry_stalled(upstream, work)

    async def _retry_stalled(self, upstream: Upstream, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Retry a connection that timed out only because the router's event loop stalled: nothing was sent yet."""
        for _ in range(MAX_STALLS):
            began = clock()
            try:
                return await _abortable(upstream, work())
            except aiohttp.ConnectionTimeoutError:
                if not await self.router.stalled_since(began):
                    raise
        return await _abortable(upstream, work())

    # Results

    def lost(self, attempt: Attempt, reason: str, *, certain: bool = False, at: Upstream | None = None) -> None:
        """A replica failed the request: the attempt's, or the replica `at` to which it had migrated."""
        upstream = at or attempt.upstream
        self._failed(attempt, upstream, reason)
        self.router.failed(upstream, reason, certain=certain)

    def _failed(self, attempt: Attempt, upstream: Upstream, reason: str) -> None:
        self.attempts += 1
        self.avoid.append(upstream.url)
        self.previous = f"after {upstream.url} failed ({reason})"
        logger.warning("request %s: %s failed: %s", self.request_id, upstream.url, reason)
        self.pool.failed(attempt)

    def succeeded(self, attempt: Attempt) -> None:
        """A replica served the request."""
        self.router.succeeded(attempt.upstream)
        for upstream, reason in self.suspects:
            if upstream is not attempt.upstream:
                self.router.failed(upstream, reason)
        self.suspects.clear()

    def may_retry(self) -> bool:
        return self.attempts < self.router.config.max_attempts

    def retries(self, attempt: Attempt, response: aiohttp.ClientResponse, data: bytes) -> bool:
        """Whether an error response is retried on another replica. If so the attempt is ended."""
        status = response.status
        if status == 429 or (status == 503 and error_field(data, "code") == "queue_full"):
            if self.overloaded >= _MAX_OVERLOADED:
                return False
            self.overloaded += 1
            self.pool.failed(attempt)
            self.previous = f"after {attempt.upstream.url} was overloaded"
            self.router.paused(attempt.upstream, retry_after(response))
            return True
        if status not in _RETRIED or self.attempts + 1 >= self.router.config.max_attempts:
            return False
        reason = describe_response(status, data)
        if status == 503:
            self.lost(attempt, reason, certain=True)
        else:
            self.suspects.append((attempt.upstream, reason))
            self._failed(attempt, attempt.upstream, reason)
        self.router.metrics.retry()
        return True

    def respond(self, attempt: Attempt, response: aiohttp.ClientResponse, data: bytes) -> web.Response:
        """End the attempt and return the replica's whole response to the client."""
        if response.status == 200:
            self.pool.finished(attempt, *_usage(data))
            self.succeeded(attempt)
        else:
            self.pool.failed(attempt)
            if response.status < 500:
                self.succeeded(attempt)
        headers = response_headers(response.headers)
        headers["x-foreword-route"] = as_header(self.decision_text)
        headers["x-request-id"] = self.request_id
        return web.Response(body=data, status=response.status, headers=headers)


async def _abortable(upstream: Upstream, work: Coroutine[Any, Any, T]) -> T:
    """Await a response; the router's watchdog may abort it. Raises ReplicaFailed if it does."""
    task = asyncio.ensure_future(work)
    awaited = AwaitedResponse(task.cancel, clock())
    upstream.awaited.add(awaited)
    try:
        return await task
    except asyncio.CancelledError:
        if awaited.aborted:
            raise ReplicaFailed(awaited.aborted) from None
        raise
    finally:
        upstream.awaited.discard(awaited)


class _TokenDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _TokenDetails | None = None


class _ResponseBody(msgspec.Struct):
    usage: _Usage | None = None


def _usage(data: bytes) -> tuple[int | None, int | None, int | None]:
    """Cached, output and prompt tokens of a response."""
    try:
        usage = msgspec.json.decode(data, type=_ResponseBody).usage
    except msgspec.DecodeError:
        usage = None
    if usage is None:
        return None, None, None
    details = usage.prompt_tokens_details
    return details.cached_tokens if details else None, usage.completion_tokens, usage.prompt_tokens
