"""Handling of every request of every front, whatever HTTP stack it comes from.

A request is matched with a route, and then: rights, quota, body within its limits, handler, charge, errors in the route's
format, one outcome in the metrics, one line in the log. Handlers get a `Call` and return an `Answer`, an object that is sent as
JSON, or None after they have streamed one. They know neither aiohttp nor ASGI: an adapter gives a front its `Exchange`s.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import unquote

from msgspec import Raw, Struct

from foreword.api.dialects.decode import Limits, as_utf8, unknown_fields
from foreword.api.errors import (
    CLIENT_GONE,
    BodyTooLarge,
    ErrorResponse,
    internal_error_response,
    no_route_response,
    openai_error,
)
from foreword.api.outcomes import Access, ClientGone, Outcome, log_request, outcome_of, request_id_from
from foreword.api.quotas import Admitted, Quotas
from foreword.api.request_bodies import RequestBodies, check_media_type, declared_length
from foreword.api.rights import NO_TENANT, Rights, Tenant
from foreword.api.routes import JsonBody, Meter, Right, Route, Routes
from foreword.api.sse import utf8
from foreword.api.work_queue import WorkQueue
from foreword.errors import BadRequest, ForewordError, IntegrityError, did_you_mean
from foreword.tasks import to_its_end
from foreword.usage import TokenUsage

if TYPE_CHECKING:
    from foreword.observability.tracing import Span, Tracer

logger = logging.getLogger(__name__)

IGNORED: Final = "x-foreword-ignored"
# Say nothing about the answer. Clients of OpenAI send them, so they are never refused.
HARMLESS: Final = frozenset({"client_metadata", "metadata", "safety_identifier", "store", "user"})
_FIELD: Final = re.compile(r"[\w.\-\[\]]{1,64}", re.ASCII)
_MOST_NAMES: Final = 16
# Escapes of characters that need none: RFC 3986 calls both spellings equal.
_NEEDLESS: Final = re.compile("%(?:2[DE]|3[0-9]|[46][1-9A-F]|[57][0-9A]|5F|7E)", re.IGNORECASE)
_SHOWN_CHARACTERS: Final = 64
_EMPTY: Final = (b"", b"{}", b"null")
_EMPTY_BYTES: Final = 64
# `*` does not stand for Authorization.
_PREFLIGHT: Final = {
    "access-control-allow-headers": "Authorization, *",
    "access-control-allow-private-network": "true",
    "access-control-max-age": "600",
}


@dataclass(slots=True)
class Answer:
    """A whole response."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def json(cls, value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return cls(status, utf8(text), {"content-type": "application/json", **(headers or {})})

    @classmethod
    def of(cls, error: ErrorResponse) -> Answer:
        return cls(error.status, error.body, error.headers)


class ByteStream(Protocol):
    """The body of a response that is sent in pieces. `write` and `end` raise ClientGone."""

    def write_now(self, data: bytes) -> bool:
        """Send data if that waits for nothing: the head was sent, and the client keeps up. False if `write` must send it."""
        ...

    async def write(self, data: bytes) -> None: ...

    async def end(self, data: bytes = b"") -> None: ...


class Exchange(Protocol):
    """A request on an HTTP stack.

    Attributes:
        path: as the client wrote it, without the query. query: without its question mark.
        headers: by names in lower case.
        address: of the client.
    """

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    address: str | None

    def arrived(self, limit: int) -> bytes | None:
        """The whole body if it has come with the head and has at most `limit` bytes."""

    def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises ClientGone."""

    def watch(self) -> None:
        """No body is read from now on. The call is cancelled if the client leaves."""

    async def open(self, status: int, headers: Mapping[str, str], at_once: bool) -> ByteStream:
        """Begin a response in pieces. Its head may wait for the first one, unless `at_once`. Raises ClientGone."""


Reply = Answer | Mapping[str, Any] | None
Handler = Callable[["Call"], Coroutine[Any, Any, Reply]]


class Call:
    """A request as its handler sees it.

    Attributes:
        id: of the request, in the log and in the answer.
        path: without the query, as the client wrote it but for characters that need no escape.
        names: the parts of the path that the route names.
        tenant: the caller's; `NO_TENANT` on routes that are not for tenants.
        body: what the route's `parse` made of `raw`; None without a body.
        query: its parameters, as the route declares them.
        metered: whether the route counts against quotas, where the tenant has any.
        admitted: as the tenant's quotas count it; None where there are no quotas.
        charged: whether the handler has said how many tokens it used.
        usage: its tokens so far.
        failure: the error that ended a stream after its head.
        ignored: fields of the body that had no effect.
        span: of its trace; None without traces.
        streams: whether the head of a streamed answer was sent.
        arrived: when it came, by `time.monotonic`.
        replica: URL of the server that a router asked last.
        first_token_at: says when its first token came, by the same clock; None if none has come.
    """

    __slots__ = (
        "_front",
        "admitted",
        "arrived",
        "body",
        "charged",
        "exchange",
        "failure",
        "first_token_at",
        "held",
        "id",
        "ignored",
        "metered",
        "names",
        "path",
        "query",
        "raw",
        "replica",
        "route",
        "span",
        "streams",
        "tenant",
        "usage",
    )

    def __init__(self, front: Front, exchange: Exchange) -> None:
        self._front = front
        self.exchange = exchange
        self.arrived = time.monotonic()
        path = exchange.path
        self.path = _NEEDLESS.sub(lambda found: unquote(found[0]), path) if "%" in path else path
        self.id = request_id_from(exchange.headers.get("x-request-id"))
        self.route: Route[Handler] | None = None
        self.names: Mapping[str, str] = {}
        self.tenant = NO_TENANT
        self.metered = self.charged = False
        self.admitted: Admitted | None = None
        self.usage = TokenUsage()
        self.body: Any = None
        self.query: Any = None
        self.raw = b""
        self.ignored: list[str] = []
        self.held = front.bodies.hold()
        self.failure: BaseException | None = None
        self.span: Span | None = None
        self.streams = False
        self.replica = ""
        self.first_token_at: Callable[[], float | None] = lambda: None

    @property
    def method(self) -> str:
        return self.exchange.method

    @property
    def headers(self) -> Mapping[str, str]:
        return self.exchange.headers

    @property
    def limits(self) -> Limits:
        """Limits of a body's content."""
        return self._front.limits()

    @property
    def is_operator(self) -> bool:
        return self._front.rights.is_operator(self.headers, self.exchange.address)

    def check_fields(self, kind: type[Struct], given: Mapping[str, Raw]) -> None:
        """Refuse a body with fields that a body of this kind does not have, and without effect therefore, where the operator
        wants that. Raises BadRequest."""
        if self._front.unknown == "refuse":
            _check(getattr(self.body, "left_out", ()), unknown_fields(kind, given), kind)

    def require(self, right: Right, what: str) -> Tenant:
        """For what the route does not ask of all of its callers. Raises Unauthorized or Forbidden."""
        return self._front.rights.check(right, self.headers, self.exchange.address, what)

    def allows(self, right: Right) -> bool:
        """Whether `require` would not raise."""
        try:
            self.require(right, "")
        except ForewordError:
            return False
        return True

    @property
    def counts(self) -> bool:
        """Whether it counts against the tenant's quota."""
        if not self.metered or self.route is None:
            return False
        return self.route.meter is not Meter.CONTINUED or self.charged

    def charge(self, usage: TokenUsage) -> None:
        """Charge the caller for all tokens of this call so far. Earlier charges of it are counted in."""
        assert self.metered, "the route has no quota"
        self.usage, self.charged = usage, True
        if self.admitted is not None:
            self._front.quotas.charge(self.admitted, usage.charged, time.monotonic())

    def access(self) -> Access:
        """The tenant, tokens, replica and time to first token of it so far, for the log."""
        first = self.first_token_at()
        return Access(self.tenant.name, self.usage, self.replica, None if first is None else first - self.arrived)

    def release_body(self) -> None:
        """The bytes of the body are not needed any more."""
        self.held.release()

    async def open(self, headers: Mapping[str, str], *, at_once: bool) -> ByteStream:
        """Begin to stream the answer, at once or with its first bytes. Raises ClientGone."""
        stream = await self.exchange.open(200, {**headers, **self.own_headers()}, at_once)
        self.streams = True
        return stream

    def own_headers(self) -> dict[str, str]:
        """Headers that every answer to a request has."""
        own = {"x-request-id": self.id, "request-id": self.id}
        if self._front.origins and (shared := self._front.origins & {"*", self.headers.get("origin", "")}):
            own |= {"access-control-allow-origin": min(shared), "access-control-expose-headers": "*", "vary": "Origin"}
        if not self.ignored:
            return own
        names = [name for name in self.ignored if _FIELD.fullmatch(name)][:_MOST_NAMES]
        more = len(self.ignored) - len(names)
        return {**own, IGNORED: ", ".join([*names, f"and {more} more"] if more else names)}


def _check(tools: Sequence[str], unknown: Sequence[str], kind: type[Struct]) -> None:
    """Refuse tools that are not run here, and fields without effect that say something of the answer. Raises BadRequest."""
    if tools:
        raise BadRequest(f"{tools[0]}.type: this server has only tools of the client", param=tools[0])
    wrong = next((one for one in unknown if one not in HARMLESS), None)
    if wrong is not None:
        shown = wrong[:_SHOWN_CHARACTERS]
        hint = did_you_mean(shown, kind.__struct_encode_fields__)
        raise BadRequest(f"{shown}: there is no such field{hint}", param=shown)


class FrontMetrics(Protocol):
    """Counters of a front."""

    def response(self, route: str, status: int) -> None:
        """The path of the route, not of the request: their number has no bound."""

    def outcome(self, dialect: str, outcome: Outcome) -> None: ...

    def rejected(self, tenant: str, code: str) -> None: ...

    def ignored(self, route: str) -> None:
        """A request had fields without effect. Their names are the client's, so their number has no bound."""

    def unexpected(self, error: BaseException) -> None:
        """A request ended because something raised that no code expects."""


class UsageLog(Protocol):
    """Gets the requests that count against quotas (ledger.py)."""

    def note(self, name: str, tenant: str, route: str, status: int, seconds: float, usage: TokenUsage) -> None: ...


@dataclass(eq=False, slots=True)
class Ending:
    """A request that has begun, and what is known of how it ends.

    Attributes:
        error: that ended it; None if its status says how it ended.
    """

    call: Call
    _front: Front
    error: BaseException | None = None
    _ended: bool = False

    def end(self, status: int) -> None:
        """The request is over: it stops to count as running, against quotas too, and is counted by its status and outcome,
        logged, and noted in the ledger and its trace. A second call does nothing."""
        if self._ended:
            return
        self._ended = True
        front, call, route = self._front, self.call, self.call.route
        front.active -= 1
        call.held.release()
        if call.admitted is not None:
            front.quotas.finish(call.admitted)
        path = "unknown" if route is None else route.shown_path
        if route is not None and route.outcome:
            front.metrics.outcome(route.outcome, outcome_of(status, self.error))
        front.metrics.response(front.label + path, status)
        if call.ignored:
            front.metrics.ignored(path)
        seconds = time.monotonic() - call.arrived
        log_request(call.method, call.path, status, seconds, call.id, call.access)
        if front.ledger is not None and route is not None and call.counts:
            front.ledger.note(call.id, call.tenant.name, route.name, status, seconds, call.usage)
        if call.span is not None:
            call.span.note({"http.response.status_code": status})
            call.span.end(f"status {status}" if status >= 500 else "")
        self.error = call.failure = None  # its traceback has the request: a reference cycle


@dataclass(eq=False)
class Front:
    """All requests of one front. Runs on its event loop.

    Attributes:
        limits: what a body may contain now.
        origins: of web pages that may read answers; `*` for all.
        unknown: `report` names fields without effect in the answer, `refuse` refuses the request, `ignore` says nothing.
        ready: raises if requests of a route are not taken now.
        retry_after: seconds, where an error does not say after which time to try again.
        before: called before each request; None if nothing is to be done then.
        on_serving: called on the event loop on which the front is served, once or more often.
        ledger: gets the tokens of each request that counts against quotas.
        span_name: of the traces of requests that count against quotas.
        label: before the paths in the metric of responses.
        active: requests that are being answered.
    """

    routes: Routes[Handler]
    rights: Rights
    quotas: Quotas
    bodies: RequestBodies
    work: WorkQueue
    metrics: FrontMetrics
    limits: Callable[[], Limits]
    origins: frozenset[str] = frozenset()
    unknown: str = "report"
    ready: Callable[[Route[Handler]], object] = lambda route: None
    retry_after: Callable[[], float | None] = lambda: None
    before: Callable[[], None] | None = None
    on_serving: Sequence[Callable[[], None]] = ()
    tracer: Tracer | None = None
    ledger: UsageLog | None = None
    span_name: str = "request"
    label: str = ""
    active: int = 0

    async def serve(self, exchange: Exchange) -> Answer | None:
        """The answer, which the adapter sends; None if it was streamed, or the client has left."""
        ending = self.begin(exchange)
        call, answer, status = ending.call, None, CLIENT_GONE
        try:
            answer = await self._answer(ending)
            if answer is not None:
                status = answer.status
                answer.headers = {**answer.headers, **call.own_headers()}
            elif call.streams:
                status = 200
        except ClientGone:
            pass
        except Exception:
            status = 500  # the stream ends in its middle
            raise
        finally:
            ending.end(status)
        return answer

    def begin(self, exchange: Exchange) -> Ending:
        """A request has come. `Ending.end` accounts for it, whatever happens between."""
        if self.before is not None:
            self.before()
        self.active += 1
        call = Call(self, exchange)
        methods, call.names = self.routes.methods(call.path)
        call.route = methods.get("GET" if call.method == "HEAD" else call.method)
        return Ending(call, self)

    def admit(self, call: Call, route: Route[Handler]) -> None:
        """Check rights, readiness and quota. Raises Unauthorized, Forbidden, RateLimited, and what `ready` raises."""
        call.tenant = self.rights.check(route.right, call.headers, call.exchange.address, route.name)
        self.ready(route)
        if route.meter is Meter.FREE:
            return
        if self.quotas.limited:
            continued = route.meter is Meter.CONTINUED
            call.admitted = self.quotas.admit(call.tenant.name, call.arrived, continued=continued)
        call.metered = True
        if self.tracer is not None:
            attributes = {"url.path": call.path, "gen_ai.request.id": call.id}
            call.span = self.tracer.request(self.span_name, call.headers, attributes)

    async def read(self, call: Call, route: Route[Handler]) -> None:
        """Read the query and the body as the route declares them. Raises BadRequest, QueueFull, ClientGone."""
        call.query = route.read_query(call.exchange.query)
        if isinstance(route.body, JsonBody):
            await self._read(call, route.body)
        elif route.method == "DELETE":
            await self._check_empty(call)

    def refusal(self, call: Call, error: ForewordError) -> Answer:
        """An error in the format of the route's clients."""
        self.metrics.rejected(call.tenant.name, error.code)
        if error.status >= 500 and not error.retry:
            logger.error("request %s: %s %s: %s", call.id, call.method, call.path, error.message)
        respond: Any = call.route.errors if call.route is not None else openai_error
        return Answer.of(respond(error, error.retry_after or self.retry_after(), call.id))

    def unexpected(self, call: Call, error: Exception) -> Answer:
        """The answer where something raised that no code expects."""
        self.metrics.unexpected(error)
        logger.error("request %s: %s %s failed", call.id, call.method, call.path, exc_info=error)
        return Answer.of(internal_error_response(call.id))

    def no_route(self, call: Call) -> Answer:
        """The answer for a path or a method that is not in the table."""
        methods, _ = self.routes.methods(call.path)
        if call.path.endswith("/") and self.routes.methods(call.path[:-1])[0]:
            return Answer(307, headers={"location": "?".join(filter(None, (call.path[:-1], call.exchange.query)))})
        if methods and self.origins and "access-control-request-method" in call.headers:  # a browser asks for a page
            return Answer(204, headers={**_PREFLIGHT, "access-control-allow-methods": ", ".join(methods)})
        known = [route.shown_path for route in self.routes.shown]
        return Answer.of(no_route_response(call.method, call.path, methods, known))

    async def _answer(self, ending: Ending) -> Answer | None:
        """Raises ClientGone, CancelledError, and any error of a stream whose head was sent."""
        call = ending.call
        try:
            if call.route is None:
                return self.no_route(call)
            answer = await self._run(call, call.route)
            ending.error = call.failure
            return answer
        except ForewordError as error:
            ending.error = error
            if call.streams:
                raise
            return self.refusal(call, error)
        except (ClientGone, asyncio.CancelledError) as error:
            ending.error = error
            raise
        except (
            Exception
        ) as error:  # the edge of the process: one request that fails for an unknown reason ends no others
            ending.error = error
            answer = self.unexpected(call, error)
            if call.streams:
                raise
            return answer

    async def _run(self, call: Call, route: Route[Handler]) -> Answer | None:
        self.admit(call, route)
        await self.read(call, route)
        if route.ends_with_client:
            call.exchange.watch()
            reply = await route.handler(call)
        else:
            what = f"request {call.id}, whose client has left: {call.method} {call.path}"
            reply = await to_its_end(route.handler(call), what)
        answer = reply if isinstance(reply, Answer) or reply is None else Answer.json(reply)
        served = call.failure is None and (answer is None or answer.status < 400)
        if route.meter is Meter.TOKENS and served and call.metered and not call.charged:
            raise IntegrityError(f"{route.name} answered without a charge")
        return answer

    async def _check_empty(self, call: Call) -> None:
        """A body that a DELETE does not read would have said what not to delete. Raises BadRequest, BodyTimeout."""
        if not declared_length(call.headers) and "transfer-encoding" not in call.headers:
            return
        with suppress(BodyTooLarge):
            await self.bodies.fill(call.held, call.exchange.pieces(), declared_length(call.headers), _EMPTY_BYTES)
            if bytes(call.held.data).strip() in _EMPTY:
                return
        raise BadRequest(f"{call.method} {call.path} reads no body; its parameters are in its query")

    async def _read(self, call: Call, body: JsonBody) -> None:
        exchange, limits = call.exchange, self.limits()
        if body.optional and not declared_length(call.headers) and "transfer-encoding" not in call.headers:
            return
        check_media_type(call.headers)
        raw = exchange.arrived(min(self.work.inline, limits.body_bytes))
        if raw is None:
            await self.bodies.fill(call.held, exchange.pieces(), declared_length(call.headers), limits.body_bytes)
            raw = bytes(call.held.data)

        def read() -> tuple[Any, list[str]]:
            call.raw = as_utf8(raw)
            return body.read(call.raw, limits)

        call.body, unknown = read() if len(raw) <= self.work.inline else await self.work.run(len(raw), read)
        tools = getattr(call.body, "left_out", ())
        if self.unknown != "ignore":
            call.ignored = [*tools, *unknown]
        if body.shown is not None and (body.closed or (self.unknown == "refuse" and not body.passed_on)):
            _check(tools, unknown, body.shown)
