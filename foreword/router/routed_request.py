"""A client's request that is placed on replicas: by the router, which sends it there itself, or for a gateway, which does."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from foreword.api.dialects.answer_reader import UsageCounts
from foreword.api.misses.causes import Miss
from foreword.api.request import GenerateRequest
from foreword.api.tenants import Tenant
from foreword.blocks.salt import Salt
from foreword.observability.tracing import Span
from foreword.router.attempt import Attempt
from foreword.router.misses import ServedRequest
from foreword.router.prompts import TokenizedPrompt
from foreword.router.replica_pool import PlacementRequest, ReplicaPool
from foreword.router.replicas import clock
from foreword.router.service import Router

# Tokens in a block of a replica that does not say. vLLM's has 16 to 128.
_UNKNOWN_BLOCK: Final = 128


@dataclass(eq=False)
class RoutedRequest:
    """A client's request and its attempts.

    Attributes:
        avoid: URLs of replicas that failed it, or that it must not use.
        attempts: number of failed attempts.
        decision_text: the last placement decision in words.
        previous: why the previous attempt failed, in words.
        weights: those that began its response; only a replica that has them may continue it. None before its first output.
        miss: why part of its prompt was not cached, once it has ended; None if it is not explained.
        span: of its trace; None without traces. trace_headers: of its present attempt, for the replica.
        cache_salt: the client's own, or what the router has changed it to. salt: of its blocks.
        priority: for replicas; None if there is nothing to say.
    """

    router: Router
    request: GenerateRequest
    tenant: Tenant
    request_id: str
    pool: ReplicaPool
    prompt: TokenizedPrompt
    session: str | None
    arrived: float
    avoid: list[str] = field(default_factory=list, kw_only=True)
    attempts: int = field(default=0, kw_only=True)
    decision_text: str = field(default="", kw_only=True)
    previous: str = field(default="", kw_only=True)
    weights: str | None = field(default=None, kw_only=True)
    miss: asyncio.Future[Miss] | None = field(default=None, kw_only=True)
    span: Span | None = field(default=None, kw_only=True)
    trace_headers: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    cache_salt: str | None = field(init=False)
    salt: Salt = field(init=False)
    priority: int | None = field(init=False)

    def __post_init__(self) -> None:
        self.cache_salt = self.router.audit.salts.all_of(self.tenant.salt, self.request.cache_salt or None)[-1]
        self.salt = Salt.of(self.tenant.salt, self.cache_salt)
        self.priority = self.router.auth.priority(self.tenant, self.request.priority) or None

    @property
    def dialect(self) -> str:
        """In which the client speaks."""
        return self.request.dialect

    def body_salt(self, kind: str) -> str | None:
        """`cache_salt` in the body for a replica of this kind. Foreword's servers know the tenant."""
        if kind == "foreword":
            return self.cache_salt
        return self.salt.text if kind == "vllm" or self.request.cache_salt else None

    def own_fields(self, kind: str) -> dict[str, Any]:
        """The fields that the router sets in a body for a replica of this kind."""
        fields = {"cache_salt": self.body_salt(kind) or None, "priority": self.priority}
        return {name: value for name, value in fields.items() if value is not None}

    async def place(self, prompt: TokenizedPrompt | None = None) -> Attempt:
        """Choose a replica, or wait in the queue for one. Raises NoReplica or QueueFull."""
        router, pool, request = self.router, self.pool, self.request
        prompt = prompt or self.prompt
        query = pool.query(
            prompt, request.model, self.salt, self.session, request.sampling.get("max_tokens"), self.weights
        )
        avoid = tuple({*self.avoid, *router.not_serving(pool, request.model)})
        name = router.attempt_name(self.request_id)
        overhead = clock() - self.arrived if not self.attempts else 0.0
        repeated = pool.repeats(query)
        attempt = await pool.place(PlacementRequest(name, self.tenant.name, query, prompt, avoid))
        if (attempt.decision.home is None or repeated) and not self.attempts and prompt.exact:
            # Later requests of a session go where it is: another replica has no use for their prompts.
            router.warm_up.record(self.tenant, request.model, self.cache_salt, prompt.tokens)
        self.decision_text = router.decisions.record(
            self.request_id, self.tenant.name, self.dialect, attempt, self.previous
        )
        router.metrics.decision(
            attempt.upstream.url, attempt.decision.reason, prompt.source, query.tokens, overhead, attempt.queued
        )
        if self.span is not None:
            self._trace(self.span, attempt)
        return attempt

    def _trace(self, span: Span, attempt: Attempt) -> None:
        if attempt.queued:
            span.part("queue", clock() - attempt.queued, clock())
        estimate = attempt.decision.estimate
        expected = estimate.reused if estimate is not None else 0
        attributes = {"server.address": attempt.upstream.url, "foreword.placement": attempt.decision.reason}
        attempt.span = span.call("replica", {**attributes, "foreword.expected_cached_tokens": expected})
        self.trace_headers = attempt.span.headers()

    def finished(self, attempt: Attempt, counts: UsageCounts) -> None:
        """A replica served the request to its end."""
        self.pool.finished(attempt, counts.cached, counts.output, counts.prompt)
        self.miss = self.router.misses.finished(self._served(attempt, counts))
        self.router.succeeded(attempt.upstream)

    def _served(self, attempt: Attempt, counts: UsageCounts) -> ServedRequest:
        model = self.request.model or self.pool.model
        where = (model, self.session, attempt.upstream.url)
        times = (self.arrived, attempt.first_token_at or clock())
        info = attempt.upstream.info
        block_size = (info.block_size if info is not None else None) or _UNKNOWN_BLOCK
        return ServedRequest(
            self.request_id, self.tenant.name, self.request, *where, counts.prompt, counts.cached, *times, block_size
        )
