"""A client's request that is placed on replicas. For a gateway, which sends it itself, that is all; the router sends it, and
decides whether to try another replica.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import aiohttp
import msgspec
from multidict import CIMultiDict

from foreword.api.dialects.answer_reader import UsageCounts, check_whole, error_of, read_error, read_usage
from foreword.api.errors import error_body
from foreword.api.front import Answer, Call
from foreword.api.request import GenerateRequest
from foreword.api.rights import Tenant, credentials
from foreword.blocks.salt import Salt
from foreword.prefixes.errors import UnknownPrefix
from foreword.request_errors import PromptTooLong, ReplicaError, ReplicaFailed, RequestEnded, RequestLost, ShuttingDown
from foreword.router.attempt import Attempt, as_header, describe_error, describe_response, is_certain, retry_after
from foreword.router.auth import request_headers, response_headers
from foreword.router.extras import ServedRequest, Translation
from foreword.router.prompts import TokenizedPrompt
from foreword.router.replica_pool import PlacementRequest, ReplicaPool
from foreword.router.replicas import ABOUT_REQUEST, AwaitedResponse, Upstream, clock, is_refusal, read_whole
from foreword.router.router import MAX_STALLS, Router
from foreword.router.suspicious import Ask, asked_of
from foreword.routing.placement import PlacementQuery
from foreword.usage import TokenUsage

if TYPE_CHECKING:
    from foreword.api.misses.causes import Miss
    from foreword.observability.tracing import Span

# Tokens in a block of a replica that does not say. vLLM's has 16 to 128.
_UNKNOWN_BLOCK: Final = 128
logger = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_OVERLOADED: Final = 100
# Headers of a request that are about its body.
_OF_BODIES: Final = frozenset(("content-type", "content-length", "accept-encoding"))
# For so long after an answer of 5xx a connection that breaks may be one that its server has closed.
_CLOSING_SECONDS: Final = 1.0
# About, of a prompt that is not tokenized.
TOKEN_BYTES: Final = 4
# Only the request can cause these. Others may be a replica's own: a key, a path or a model that it does not know.
_ABOUT_REQUEST: Final = (400, 413, 415, 422)
# Another replica is always asked after these: what is said of one client's key is not true of another's.
_ABOUT_KEY: Final = (401, 403)
# Codes of errors that replicas may rightly disagree about.
_DIFFERS: Final = frozenset((UnknownPrefix.code, PromptTooLong.code))
# Codes of 5xx errors of replicas that are alive for certain.
_ALIVE: Final = frozenset(("queue_full", ShuttingDown.code, RequestEnded.code))


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
        priority: for replicas; None if there is nothing to say. flow: that has its share of the queue; "": the tenant.
        ask: what it asks, and which replicas have died at that.
    """

    router: Router
    request: GenerateRequest
    tenant: Tenant
    request_id: str
    pool: ReplicaPool
    prompt: TokenizedPrompt
    session: str | None
    arrived: float
    # Most of these stay as they are, so `__init__` does not set them.
    avoid: list[str] = field(default_factory=list, init=False)
    attempts: int = field(default=0, init=False)
    decision_text: str = field(default="", init=False)
    previous: str = field(default="", init=False)
    weights: str | None = field(default=None, init=False)
    miss: asyncio.Future[Miss] | None = field(default=None, init=False)
    span: Span | None = field(default=None, kw_only=True)
    trace_headers: Mapping[str, str] | None = field(default=None, init=False)
    flow: str = field(default="", init=False)
    cache_salt: str | None = field(init=False)
    salt: Salt = field(init=False)
    priority: int | None = field(init=False)
    ask: Ask = field(init=False)

    def __post_init__(self) -> None:
        self.ask = Ask(self.router.suspects, asked_of(self.request, self.pool.model), self.request_id)
        self.cache_salt = self.router.audit.salts_of(self.tenant.salt, self.request.cache_salt or None)[-1]
        self.salt = Salt.of(self.tenant.salt, self.cache_salt)
        self.priority = self.router.auth.priority(self.tenant, self.request.priority) or None

    @property
    def dialect(self) -> str:
        """In which the client speaks."""
        return self.request.dialect

    def named(self, usage: TokenUsage) -> TokenUsage:
        """Its tokens, with the model and the weights that computed them."""
        return msgspec.structs.replace(usage, model=self.pool.model, weights=self.weights or "")

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
        """Choose a replica, or wait in the queue for one. Raises NoReplica, SuspiciousRequest or QueueFull."""
        router, pool, request = self.router, self.pool, self.request
        prompt = prompt or self.prompt
        query = pool.query(
            prompt, request.model, self.salt, self.session, request.sampling.get("max_tokens"), self.weights
        )
        avoid = (*self.avoid, *router.not_serving(pool, request.model))
        name = router.attempt_name(self.request_id)
        overhead = clock() - self.arrived if not self.attempts else 0.0
        repeated = prompt.source != "known" and pool.repeats(query)
        if not self.ask.quiet:
            await self.ask.wait(self.avoid, lambda: pool.free(avoid, self.weights))
        attempt = await pool.place(
            PlacementRequest(name, self.flow or self.tenant.name, query, prompt, avoid, self.ask)
        )
        try:
            self._placed(attempt, query, prompt, overhead, repeated)
        except BaseException:
            pool.failed(attempt)
            raise
        return attempt

    def _placed(
        self, attempt: Attempt, query: PlacementQuery, prompt: TokenizedPrompt, overhead: float, repeated: bool
    ) -> None:
        """Note where it was placed."""
        router, pool, request = self.router, self.pool, self.request
        if (attempt.decision.home is None or repeated) and not self.attempts:
            if prompt.exact:
                # Later requests of a session go where it is: another replica has no use for their prompts.
                router.warm_up.record(self.tenant, request.model, self.cache_salt, prompt.tokens)
            if query.keys:
                router.on_placed(pool.model, self.request_id, self.tenant.name, request.prefix, query, attempt.decision)
        if prompt.chain is not None:
            pool.known.placed(prompt.chain, query.tokens, attempt.upstream.url, clock(), by_keys=prompt.exact)
        self.decision_text = router.decisions.record(
            self.request_id, self.tenant.name, self.dialect, attempt, self.previous
        )
        router.metrics.decision(
            attempt.upstream.url, attempt.decision.reason, prompt.source, query.tokens, overhead, attempt.queued
        )
        if self.span is not None:
            self._trace(self.span, attempt)
        if self.attempts:
            router.on_failover(self.tenant.name, self.arrived, attempt.upstream)

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
        self.router.ended(attempt, counts)
        alone = len(self.request.prompts) <= 1  # several prompts are counted together
        self.pool.finished(attempt, counts.cached, counts.output, counts.prompt if alone else None)
        self.miss = self.router.misses.finished(self._served(attempt, counts))
        self.router.succeeded(attempt.upstream)
        if self.attempts:
            self.router.on_failover(self.tenant.name, self.arrived, attempt.upstream)

    def _served(self, attempt: Attempt, counts: UsageCounts) -> ServedRequest:
        model = self.request.model or self.pool.model
        where = (model, self.session, attempt.upstream.url)
        times = (self.arrived, attempt.first_token_at or clock())
        info = attempt.upstream.info
        block_size = (info.block_size if info is not None else None) or _UNKNOWN_BLOCK
        return ServedRequest(
            self.request_id, self.tenant.name, self.request, *where, counts.prompt, counts.cached, *times, block_size
        )


@dataclass(eq=False)
class ProxiedRequest(RoutedRequest):
    """A request that this process sends to replicas.

    Attributes:
        timeout: the time limit that ends with a stream's first token; None if the whole request has one.
        translation: to the client's dialect; None if the client gets what replicas send.
        keep: called with a whole response of a replica, if the client may continue it later.
        overloaded: number of attempts that a replica refused as overloaded.
        repaired: a named prefix that the request needs was registered again.
        refused: the replica that called the request wrong, after which another one was asked; and the kind of its refusal.
        suspects: replicas that returned an error, and the error. They are at fault if another replica succeeds.
        usage: tokens that replicas handled. counts: of a whole response.
        was_sent: a replica may have computed something.
    """

    call: Call
    deadline: float
    timeout: asyncio.Timeout | None = None
    translation: Translation | None = None
    keep: Callable[[bytes], None] | None = None
    overloaded: int = field(default=0, init=False)
    suspects: list[tuple[Upstream, str]] = field(default_factory=list, init=False)
    refused: tuple[Upstream, Hashable] | None = field(default=None, init=False)
    repaired: bool = field(default=False, init=False)
    usage: TokenUsage = field(default=TokenUsage(), init=False)
    counts: UsageCounts = field(default=UsageCounts(), init=False)
    was_sent: bool = field(default=False, init=False)

    @property
    def dialect(self) -> str:
        """In which the client speaks."""
        return self.translation.dialect.name if self.translation is not None else super().dialect

    @property
    def wants_report(self) -> bool:
        """Whether the client asked for a cache report."""
        if self.translation is not None:
            return self.translation.request.cache_report
        return self.request.cache_report

    def noted_first(self, now: float) -> None:
        """A token has come from a replica: of the first one the log says when."""
        if self.call.first_token_at() is None:
            self.call.first_token_at = lambda: now

    def headers(self, upstream: Upstream) -> CIMultiDict[str]:
        """Headers for a replica."""
        client = self.call.headers
        headers = request_headers(client)
        headers.update(self.router.auth.headers(self.tenant, credentials(client), upstream.kind))
        headers.update(self.router.asked_headers)
        headers["x-request-id"] = self.request_id
        if self.trace_headers is not None:
            headers.update(self.trace_headers)
        return headers

    def asking(self, upstream: Upstream) -> Mapping[str, str]:
        """Headers with which a replica says whether it has the request."""
        return {name: value for name, value in self.headers(upstream).items() if name.lower() not in _OF_BODIES}

    def awaits(self, upstream: Upstream, streams: bool) -> Callable[..., AwaitedResponse]:
        """Makes what the watchdog knows of a response from a replica."""
        return partial(
            AwaitedResponse, request_id=self.request_id, headers=partial(self.asking, upstream), streams=streams
        )

    async def send(
        self, upstream: Upstream, body: bytes, path: str, *, streams: bool
    ) -> tuple[aiohttp.ClientResponse, bytes | None]:
        """Returns the response with its whole body, or with None if it is a stream.

        Raises what aiohttp raises, and ReplicaFailed if the replica dies meanwhile.
        """
        url, headers, self.was_sent = upstream.url + path, self.headers(upstream), True
        self.call.replica = upstream.url
        # A retry has a connection of its own: others of the same age may be as dead as that of the attempt before.
        session = self.router.fresh_session if self.attempts else self.router.session
        post = partial(session.post, url, data=body, headers=headers, allow_redirects=False)
        watched = self.awaits(upstream, streams)

        async def work() -> tuple[aiohttp.ClientResponse, bytes | None]:
            try:
                response = await post()
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                # After an exception that it has answered, a server closes the connection, which may be used again by then.
                if is_certain(error) or clock() - upstream.erred_at > _CLOSING_SECONDS:
                    raise
                response = await post()
            if not is_refusal(response.status):
                upstream.erred_at = clock()
            if streams and response.status == 200 and response.content_type == "text/event-stream":
                return response, None
            async with response:
                return response, await read_whole(response)

        return await self._retry_stalled(upstream, watched, work)

    async def _retry_stalled(
        self, upstream: Upstream, watched: Callable[..., AwaitedResponse], work: Callable[[], Coroutine[Any, Any, T]]
    ) -> T:
        """Retry a connection that timed out only because the router's event loop stalled: nothing was sent yet."""
        for _ in range(MAX_STALLS):
            began = clock()
            try:
                return await _abortable(upstream, watched, work())
            except aiohttp.ConnectionTimeoutError:
                if not await self.router.stalled_since(began):
                    raise
        return await _abortable(upstream, watched, work())

    # Results

    async def lost(
        self, attempt: Attempt, error: BaseException, *, at: Upstream | None = None, tokens: int = 0
    ) -> None:
        """A replica failed the request, after the client had these tokens: the attempt's, or the replica `at` to which it had
        migrated."""
        upstream, reason = at or attempt.upstream, describe_error(error)
        if isinstance(error, RequestLost):  # the next replica need not wait for what becomes of this one
            self.judge(attempt, upstream, tokens)
        elif not is_certain(error):  # it has had the request
            await self.judge(attempt, upstream, tokens)
        again = upstream.url in self.avoid  # one request counts once: it may be its fault
        self._failed(attempt, upstream, reason)
        if isinstance(error, ReplicaError) and not attempt.begun:
            self._add_suspect(upstream, reason)
        elif not again:
            self.router.failed(upstream, reason, certain=is_certain(error))

    def judge(self, attempt: Attempt, upstream: Upstream, tokens: int = 0) -> asyncio.Future[None]:
        """Find out whether a replica has died at the attempt."""
        assert attempt.flight is not None
        replicas = [one for one in (upstream, attempt.prefill) if one is not None]
        return self.router.judge(self.ask, attempt.flight, replicas, tokens)

    def left(self, attempt: Attempt) -> None:
        """The client has left, or the deadline has passed."""
        if self.was_sent and attempt.flight is not None and attempt.flight.waits and not attempt.flight.judged:
            self.router.judge(self.ask, attempt.flight, [attempt.upstream])
        self.pool.failed(attempt)

    def _failed(self, attempt: Attempt, upstream: Upstream, reason: str) -> None:
        self._ended(attempt, upstream, reason)
        self.previous = f"after {upstream.url} failed ({reason})"
        logger.warning("request %s: %s failed: %s", self.request_id, upstream.url, reason)

    def _ended(self, attempt: Attempt, upstream: Upstream, reason: str) -> None:
        self.attempts += 1
        self.avoid.append(upstream.url)
        attempt.problem = reason
        self.pool.failed(attempt)

    def finished(self, attempt: Attempt, counts: UsageCounts) -> None:
        """A replica served the request to its end."""
        super().finished(attempt, counts)
        self.router.audit.finished(self.request, self.tenant, self.cache_salt, attempt.upstream, counts)
        attempt.upstream.refusals.served()
        if self.refused is not None and self.refused[0] is not attempt.upstream:
            self.refused[0].refusals.compared(self.refused[1], False)
        if self.suspects:
            for upstream, reason in self.suspects:
                if upstream is not attempt.upstream:
                    self.router.failed(upstream, reason)
            self.suspects.clear()

    def began_stream(self) -> None:
        """A stream's first token came. From now on only its pauses are limited, unless the client set a limit."""
        if self.timeout is not None:
            self.timeout.reschedule(None)
            self.deadline = math.inf

    def may_retry(self) -> bool:
        return self.attempts < self.router.config.max_attempts

    async def repairs(self, attempt: Attempt, response: aiohttp.ClientResponse, data: bytes) -> bool:
        """Whether the replica had lost a named prefix and has it again. If so the attempt is ended, to be repeated."""
        name = self.request.prefix
        if name is None or self.repaired or response.status != 404 or error_of(data).code != UnknownPrefix.code:
            return False
        self.repaired = True
        if not await self.router.prefixes.repair(attempt.upstream, self.tenant, name):
            return False
        self.pool.failed(attempt)
        self.previous = f"after {attempt.upstream.url} got the named prefix again"
        return True

    async def retries(self, attempt: Attempt, response: aiohttp.ClientResponse, data: bytes) -> bool:
        """Whether an error response is retried on another replica. If so the attempt is ended.

        Raises ReplicaFailed for what no request can cause, SuspiciousRequest if too many replicas died at the request.
        """
        status, code = response.status, error_of(data).code if response.status != 200 else None
        if (
            code == RequestEnded.code
        ):  # its engine has ended this request and serves on, and another one would do the same
            return False
        if not is_refusal(status) and code not in _ALIVE:
            await self.judge(attempt, attempt.upstream)
            self.ask.check()
        if status == 429 or (status == 503 and code == "queue_full"):
            return self._retries_overloaded(attempt, response)
        if status == 200:
            return False
        if not 400 <= status < 600:
            raise ReplicaFailed(describe_response(status, data))
        if is_refusal(status) and self.refused is not None:
            first, kind = self.refused
            if first is not attempt.upstream and kind == self._kind(status, data):
                for upstream in (first, attempt.upstream):
                    upstream.refusals.compared(kind, True)
            return False
        if self.attempts + 1 >= self.router.config.max_attempts:
            return False
        if is_refusal(status) and not self._may_ask_another(attempt, status, data):
            return False
        self._suspect(attempt, response, data)
        self.router.metrics.retry()
        return True

    def _retries_overloaded(self, attempt: Attempt, response: aiohttp.ClientResponse) -> bool:
        if self.overloaded >= _MAX_OVERLOADED:
            return False
        self.overloaded += 1
        self.pool.failed(attempt)
        self.previous = f"after {attempt.upstream.url} was overloaded"
        self.router.paused(attempt.upstream, retry_after(response))
        return True

    def _may_ask_another(self, attempt: Attempt, status: int, data: bytes) -> bool:
        """Whether a second replica is asked after a first one has refused the request."""
        upstream = attempt.upstream
        now, avoid = clock(), (upstream.url, *self.avoid)
        others = [one for url, one in self.pool.upstreams.items() if url not in avoid and one.spec.role != "prefill"]
        able = [one for one in others if not one.excluded(now)]
        longer = [one for one in able if one.longest > upstream.longest]
        if longer and error_of(data).code == PromptTooLong.code:
            self.avoid += [one.url for one in others if one.longest < max(two.longest for two in longer)]
            return True
        return bool(able) and (upstream.refusals.checked(self._kind(status, data)) or status in _ABOUT_KEY)

    def _kind(self, status: int, data: bytes) -> Hashable:
        """The kind of refusal in which a replica is believed."""
        if error_of(data).code in _DIFFERS:
            return error_of(data).code, self.tenant.name, self.request.prefix
        return ABOUT_REQUEST if status in _ABOUT_REQUEST else (status, self.request.dialect, self.request.model)

    def _suspect(self, attempt: Attempt, response: aiohttp.ClientResponse, data: bytes) -> None:
        """Note an error that is the replica's fault if another replica succeeds."""
        upstream, reason, code = attempt.upstream, describe_response(response.status, data), error_of(data).code
        if is_refusal(response.status):
            self.refused = upstream, self._kind(response.status, data)
            self._ended(attempt, upstream, reason)
            self.previous = f"after {upstream.url} refused it ({reason})"
            logger.info(
                "request %s: %s refused it (%s); another replica is asked", self.request_id, upstream.url, reason
            )
        else:
            self._failed(attempt, upstream, reason)
        if response.status == 503:
            self.router.paused(upstream, retry_after(response))
        if self.request.refusal is None and code not in _DIFFERS:
            self._add_suspect(upstream, reason)

    def _add_suspect(self, upstream: Upstream, reason: str) -> None:
        if all(one is not upstream for one, _ in self.suspects):
            self.suspects.append((upstream, reason))

    def respond(self, attempt: Attempt, response: aiohttp.ClientResponse, data: bytes) -> Answer:
        """End the attempt and return the replica's whole response to the client. Raises ReplicaFailed if it is malformed."""
        status = response.status
        headers = response_headers(response.headers)
        if status == 200:
            counts = self.counts = self._passed(response, data) if self.request.path else check_whole(data)
            if self.translation is not None:
                data = self.translation.whole(data)
            if self.keep is not None:
                self.keep(data)
            self.usage = counts.usage
            self.finished(attempt, counts)
        else:
            if status in (401, 403) and (self.router.auth.uses_own_key or self.router.auth.has_tenants):
                raise ReplicaFailed("it does not accept the router's or the client's key")
            self.pool.failed(attempt)
            if not is_refusal(status) and error_of(data).code != RequestEnded.code:
                attempt.upstream.recent.problems.append(describe_response(status, data))
            if self.translation is not None:
                answer = self.translation.error_response(status, data)
                status, data = answer.status, answer.body
                headers.update(answer.headers)
            elif error_of(data).message is None:
                data = msgspec.json.encode(error_body(read_error(status, data)))
                headers["content-type"] = "application/json"
        headers["x-foreword-route"] = as_header(self.decision_text)
        return Answer(status, data, headers)

    def _passed(self, response: aiohttp.ClientResponse, data: bytes) -> UsageCounts:
        """The counts of an answer that is passed on: its own, those in vLLM's header where it is no JSON, or else an estimate.
        Raises ReplicaFailed for JSON that is none."""
        if not response.content_type.endswith("json"):
            data = response.headers.get("metadata", "{}").encode("utf-8", "replace")
        counts = read_usage(data)
        return (
            counts if counts.prompt is not None else counts._replace(prompt=len(self.request.body.raw) // TOKEN_BYTES)
        )


async def _abortable(upstream: Upstream, watched: Callable[..., AwaitedResponse], work: Coroutine[Any, Any, T]) -> T:
    """Await a response; the router's watchdog may abort it. Raises ReplicaFailed if it does."""
    task = asyncio.current_task()
    assert task is not None
    awaited = watched(task.cancel, clock())
    upstream.awaited.add(awaited)
    try:
        return await work
    except asyncio.CancelledError:
        if awaited.aborted and not task.uncancel():  # unless it was cancelled for another reason too
            raise awaited.error() from None
        raise
    finally:
        upstream.awaited.discard(awaited)
