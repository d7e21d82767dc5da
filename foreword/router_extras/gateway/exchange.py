"""One gRPC stream of a gateway: the messages about one request, and the answers.

Three ways of asking are known (`docs/guides/gateway.md`): the body at once (`BUFFERED`), in pieces that go through the picker
(`FULL_DUPLEX_STREAMED`, the rule of the Gateway API inference extension), and, in a second stream, copies of a response that
expect no answer (`observability_mode`).

The picker accounts for a request from its arrival to the end of its response: load, quotas, learning, metrics and log. The
response is read and not changed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Final
from urllib.parse import unquote

import msgspec

from foreword.api.dialects.answer_reader import AnswerReader, UsageCounts
from foreword.api.errors import CLIENT_GONE, internal_error_response, openai_error
from foreword.api.front import Handler
from foreword.api.outcomes import Access, log_request, outcome_of_status
from foreword.api.quotas import Admitted
from foreword.api.routes import Meter, Route
from foreword.api.sse import DONE, EventParser
from foreword.api.tenants import Tenant
from foreword.errors import BadRequest, ConfigError, ForewordError, ReplicaFailed, RequestEnded
from foreword.router.attempt import Attempt
from foreword.router.passthrough import listed_models
from foreword.router.proxied_request import RoutedRequest
from foreword.router.replicas import clock, is_refusal
from foreword.router.service import Router
from foreword.router_extras.gateway import envoy_messages as envoy
from foreword.router_extras.gateway.picker import (
    DESTINATION,
    FAULTS_OF_CLIENTS,
    PICK,
    PICK_SECONDS,
    ROUTE,
    Answer,
    Picker,
    RequestHead,
)
from foreword.tasks import log_failure
from foreword.usage import TokenUsage

logger = logging.getLogger(__name__)

_MAX_WHOLE_BYTES: Final = 16 << 20
# A gateway's own time limit for an answer is short, so that a hanging picker costs little; it is asked for more after this.
_ASK_FOR_TIME_SECONDS: Final = 0.05
_MORE_SECONDS: Final = 1
# An answer whose response is not observed counts as running for this time.
UNOBSERVED_SECONDS: Final = 5.0
# Below the limits that gateways set for a piece of a body.
_PIECE_BYTES: Final = 60 << 10
_SUBSET: Final = ("envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset")
_SERVED: Final = ("envoy.lb", "x-gateway-destination-endpoint-served")


class ObservedResponse:
    """A response with status 200. What is malformed is ignored: the gateway sends it as it is.

    Attributes:
        events: number of events; about the number of output tokens.
    """

    def __init__(self, *, streams: bool) -> None:
        self.streams = streams
        self.events = 0
        self._begun = False
        self._reader = AnswerReader()
        self._parser = EventParser()
        self._whole = bytearray()

    def feed(self, data: bytes) -> bool:
        """Take the next bytes. True if the first token is among them."""
        if not self.streams:
            if len(self._whole) <= _MAX_WHOLE_BYTES:
                self._whole += data
            return False
        begins = False
        with suppress(ReplicaFailed):
            for event in self._parser.feed(data):
                if event.data and event.data != DONE:
                    self.events += 1
                    begins = self._read(event.data) or begins
        return begins

    def _read(self, data: bytes) -> bool:
        """Whether an answer begins here."""
        with suppress(ReplicaFailed, BadRequest):
            ended = any(choice.finish_reason is not None for choice in self._reader.read(data).choices or ())
            if not self._begun and (self._reader.begun or ended):
                self._begun = True
                return True
        return False

    def counts(self) -> UsageCounts:
        """The counts in the usage, once the response is complete; None where there are none."""
        if not self.streams:
            self._read(bytes(self._whole))
        return self._reader.counts


_MAX_PAUSE: Final = 5.0


class Accounting:
    """A request that counts as running until `end`. Raises RateLimited if its tenant may send no more.

    Attributes:
        observed: its response is being observed.
    """

    def __init__(self, router: Router, head: RequestHead, route: Route[Handler], tenant: Tenant) -> None:
        self._router, self._head, self._tenant = router, head, tenant
        self._began = clock()
        self._admitted: Admitted | None = None
        if route.meter is not Meter.FREE:
            self._admitted = router.quotas.admit(tenant.name, self._began)
        self._placed: tuple[RoutedRequest, Attempt] | None = None
        self._answer: Answer | None = None
        self._response: ObservedResponse | None = None
        self._status = CLIENT_GONE
        self._ended = False
        self._usage = TokenUsage()
        self.observed = False
        router.picked += 1

    def answered(self, answer: Answer) -> None:
        """The gateway gets the answer, and sends the request there."""
        self._answer, self._placed = answer, answer.placed
        if self._placed is not None:
            routed, attempt = self._placed
            if not routed.request.stream:
                routed.pool.expect_first_token(attempt)

    def refused(self, error: ForewordError) -> None:
        """The gateway gets an error, to send to the client."""
        self._router.metrics.rejected(self._tenant.name, error.code)
        self.end_with(error.status)

    @property
    def request_id(self) -> str:
        return self._head.id

    def end_with(self, status: int) -> None:
        """The request is over, with this status."""
        self._status = status
        self.end()

    def response(self, status: int, headers: Mapping[str, str], served: str) -> None:
        """The head of the response came, from the endpoint `served`; empty if the gateway does not say."""
        self._status = status
        if self._placed is None or self._answer is None:
            return
        routed, attempt = self._placed
        router, upstream = self._router, attempt.upstream
        if served and served != self._answer.endpoints.partition(",")[0]:
            self._judge(routed, attempt)
            router.failed(upstream, f"the gateway used {served} instead")
        elif status == 200:
            self._response = ObservedResponse(streams=routed.request.stream)
            return
        elif status in (429, 503) and headers.get("retry-after", "").isdigit():
            router.paused(upstream, min(float(headers["retry-after"]), _MAX_PAUSE))
        elif not is_refusal(status) and headers.get("x-foreword-error") != RequestEnded.code:
            self._judge(routed, attempt)
            router.failed(upstream, f"status {status}")
        self._give_up()

    def data(self, piece: bytes) -> None:
        """The next bytes of the response."""
        if self._placed is None or self._answer is None or self._response is None:
            return
        routed, attempt = self._placed
        if self._response.feed(piece):
            attempt.begun, attempt.first_token_at = True, clock()
            routed.pool.first_token(attempt)
            self._router.first_token(attempt.upstream, attempt.first_token_at - self._began)

    def complete(self) -> None:
        """The response came to its end."""
        if self._placed is not None and self._answer is not None and self._response is not None:
            routed, attempt = self._placed
            counts = self._response.counts()
            self._charge(counts.usage if counts.usage.charged else self._seen(routed))
            routed.finished(attempt, counts)
            self._placed = None
        self.end()

    def end(self) -> None:
        """The request is over: its response is complete, its client left, or its replica broke. May be called again."""
        if self._ended:
            return
        self._ended = True
        if self._placed is not None:
            self._status = CLIENT_GONE if self._status < 500 else self._status
            self._charge(self._seen(self._placed[0]))
            self._judge(*self._placed)
            self._give_up()
        router, head = self._router, self._head
        router.picked -= 1
        if self._admitted is not None:
            router.quotas.finish(self._admitted)
        if head.outcome:
            router.metrics.outcome(head.outcome, outcome_of_status(self._status))
        router.metrics.response(f"picker {head.route.shown_path if head.route else 'unknown'}", self._status)
        seconds = clock() - self._began
        replica = "" if self._placed is None else self._placed[1].upstream.url
        log_request(
            *(head.method, head.path, self._status, seconds, head.id), Access(self._tenant.name, self._usage, replica)
        )
        if router.ledger is not None and self._admitted is not None and head.route is not None:
            router.ledger.note(head.id, self._tenant.name, head.route.name, self._status, seconds, self._usage)
        if head.span is not None:
            head.span.note({"http.response.status_code": self._status})
            head.span.end(f"status {self._status}" if self._status >= 500 else "")

    def _seen(self, routed: RoutedRequest) -> TokenUsage:
        """The tokens seen of the answer, and of the prompt, which is computed before it."""
        return TokenUsage(routed.prompt.count, self._response.events if self._response is not None else 0)

    def _charge(self, usage: TokenUsage) -> None:
        if self._admitted is not None and self._placed is not None:
            self._usage = self._placed[0].named(usage)
            self._router.quotas.charge(self._admitted, usage.charged, clock())

    def _judge(self, routed: RoutedRequest, attempt: Attempt) -> None:
        """The response failed, or the client left: find out whether replicas that may have had the request have died."""
        flight, router = attempt.flight, self._router
        if flight is not None and not flight.judged:
            replicas = [router.upstreams[url] for url in sorted(flight.urls) if url in router.upstreams]
            router.judge(routed.ask, flight, replicas, self._response.events if self._response is not None else 0)

    def _give_up(self) -> None:
        """The attempt teaches nothing."""
        assert self._placed is not None
        routed, attempt = self._placed
        self._placed = None
        routed.pool.failed(attempt)


class Exchanges:
    """State that the exchanges share: the picker, and answers whose responses are observed elsewhere."""

    def __init__(self, picker: Picker) -> None:
        self.picker = picker
        self.answered: dict[str, Accounting] = {}
        self._knows_replicas = False

    def knows_replicas(self) -> bool:
        """False after a start until a replica takes requests: the gateway's failure mode decides then. Where API keys are
        configured, requests are refused instead."""
        router = self.picker.router
        self._knows_replicas = self._knows_replicas or router.auth.has_tenants or router.ready() is None
        return self._knows_replicas

    def unexpected(self, request_id: str, error: Exception) -> None:
        """Something raised for this request that no code expects."""
        if type(error).__name__ not in FAULTS_OF_CLIENTS:
            self.picker.router.metrics.unexpected(error)
            logger.error("request %s of a gateway failed", request_id, exc_info=error)

    async def process(self, requests: AsyncIterator[Any], context: Any) -> None:
        """The method `ExternalProcessor.Process`. `context` is that of `grpc.aio`."""
        first = await anext(aiter(requests), None)
        if first is None or not first.HasField("request_headers"):
            return
        if first.observability_mode:
            await self._observe(first, requests)
            return
        exchange = _Exchange(self, requests, first, context.write)
        try:
            await exchange.run()
        finally:
            exchange.close()

    async def _observe(self, first: Any, requests: AsyncIterator[Any]) -> None:
        name = envoy.headers_of(first.request_headers).get(PICK, "")
        accounting = self.answered.pop(name, None)
        if accounting is None:
            return
        accounting.observed = True
        try:
            async for message in requests:
                if _observed(accounting, message):
                    return
        except Exception as error:
            self.unexpected(accounting.request_id, error)
            raise
        finally:
            accounting.end()


class _Exchange:
    def __init__(
        self, shared: Exchanges, requests: AsyncIterator[Any], first: Any, write: Callable[[Any], Awaitable[None]]
    ) -> None:
        self._shared = shared
        self._requests = requests
        self._write = write
        self._first = first
        self._head = RequestHead.of(
            envoy.headers_of(first.request_headers), shared.picker.routes, shared.picker.router.tracer
        )
        self._accounting: Accounting | None = None
        self._answer: Answer | None = None
        self._body = shared.picker.router.bodies.hold()
        self._trailers = False
        config = first.protocol_config
        self._duplex = config.request_body_mode == envoy.FULL_DUPLEX_STREAMED
        self._buffered = config.request_body_mode == envoy.BUFFERED
        self._duplex_response = config.response_body_mode == envoy.FULL_DUPLEX_STREAMED
        self._sees_response = config.response_body_mode != 0

    async def run(self) -> None:
        try:
            await self._request()
        except ForewordError as error:
            if self._accounting is not None:
                self._accounting.refused(error)
            await self._write(self._refusal(error))
            return
        except Exception as error:  # the edge of one request
            if type(error).__name__ in FAULTS_OF_CLIENTS:
                raise
            self._shared.unexpected(self._head.id, error)
            unknown = internal_error_response(self._head.id)
            if self._accounting is not None:
                self._accounting.end_with(unknown.status)
            await self._write(self._immediate(unknown.status, unknown.body, unknown.headers))
            return
        if self._accounting is None or self._answer is None:
            return
        async for message in self._requests:
            self._observe(self._accounting, message)
            answer = self._response_answer(message)
            if answer is not None:
                await self._write(answer)

    def _observe(self, accounting: Accounting, message: Any) -> None:
        """Take a message about the response. What that raises is no reason to end a response that is right."""
        try:
            _observed(accounting, message)
        except Exception as error:  # noqa: BLE001 - the edge of one request
            self._shared.unexpected(self._head.id, error)
            accounting.end()

    def close(self) -> None:
        """The gateway closed the stream, or it was ended here."""
        self._body.release()
        accounting, answer = self._accounting, self._answer
        if accounting is None or accounting.observed:
            return
        if answer is None or self._sees_response:
            accounting.end()
        else:
            asyncio.get_running_loop().call_later(UNOBSERVED_SECONDS, self._unobserved, answer.name, accounting)

    def _unobserved(self, name: str, accounting: Accounting) -> None:
        self._shared.answered.pop(name, None)
        if not accounting.observed:
            accounting.end()

    # The request

    async def _request(self) -> None:
        """Answer the messages of the request. Raises ForewordError for a request that gets an error."""
        picker, head = self._shared.picker, self._head
        route, tenant = picker.admit(head)
        self._accounting = Accounting(picker.router, head, route, tenant)
        if head.lists_models:
            listed = listed_models(picker.router, unquote(head.path.removeprefix("/v1/models").strip("/")))
            await self._write(self._immediate(200, msgspec.json.encode(listed), {}))
            self._accounting.response(200, {}, "")
            return
        if not head.generates:
            answer = await picker.anywhere(head, tenant, self._allowed())
            self._told(self._accounting, answer)
            await self._write(self._with_headers(answer))
            return
        if self._first.request_headers.end_of_stream:
            raise BadRequest("The request has no body")
        if not self._duplex and not self._buffered:
            raise ConfigError("The gateway must send bodies: request_body_mode BUFFERED or FULL_DUPLEX_STREAMED")
        if self._buffered:
            # The headers wait in the gateway until the body was answered.
            await self._write(envoy.ProcessingResponse(request_headers={}))
        await self._read_body()
        await self._decide(tenant, self._accounting)

    async def _decide(self, tenant: Tenant, accounting: Accounting) -> None:
        picker, raw = self._shared.picker, bytes(self._body.data)
        work = asyncio.ensure_future(picker.pick(self._head, tenant, raw, self._allowed()))
        try:
            if self._buffered:
                await asyncio.wait((work,), timeout=_ASK_FOR_TIME_SECONDS)
                if not work.done():
                    more = envoy.ProcessingResponse()
                    more.override_message_timeout.FromSeconds(int(PICK_SECONDS) + _MORE_SECONDS)
                    await self._write(more)
            answer = await work
        except BaseException:
            if work.cancel():
                log_failure(work, f"placing request {self._head.id}, whose client has left,")
            elif not work.cancelled() and work.exception() is None:
                accounting.answered(work.result())  # it was placed just now
            raise
        self._told(accounting, answer)
        await self._write(self._with_headers(answer))
        if self._duplex:
            for piece in self._pieces(raw if answer.body is None else answer.body):
                await self._write(piece)

    def _allowed(self) -> frozenset[str] | None:
        """The endpoints that the gateway allows, as a list or separated by commas; None for all."""
        among = envoy.metadata_of(self._first, *_SUBSET)
        if among is None:
            return None
        return frozenset(str(one).strip() for one in (among.split(",") if isinstance(among, str) else among))

    def _told(self, accounting: Accounting, answer: Answer) -> None:
        self._answer = answer
        accounting.answered(answer)
        if not self._sees_response:
            self._shared.answered[answer.name] = accounting

    async def _read_body(self) -> None:
        """Raises BodyTooLarge, QueueFull, or BadRequest for a body that comes too slowly or not to its end."""
        router = self._shared.picker.router
        await router.bodies.fill(self._body, self._pieces_of_body(), 0, router.limits().body_bytes)

    async def _pieces_of_body(self) -> AsyncIterator[bytes]:
        async for message in self._requests:
            if message.HasField("request_trailers"):
                self._trailers = True
                return
            yield message.request_body.body
            if message.request_body.end_of_stream:
                return
        raise BadRequest("The body did not arrive to its end")

    # Answers

    def _with_headers(self, answer: Answer) -> Any:
        """The answer that carries the changes of the headers, and of a body that came at once."""
        message, headers = envoy.ProcessingResponse(), dict(answer.headers)
        if self._buffered and self._head.generates:
            common = message.request_body.response
            if answer.body is not None:
                common.body_mutation.body = answer.body
                if "content-length" in self._head.headers:
                    # Envoy refuses a body of another length than this header says.
                    headers["content-length"] = str(len(answer.body))
        else:
            common = message.request_headers.response
        envoy.mutate(common.header_mutation, headers)
        if answer.endpoints:
            message.dynamic_metadata.update({"envoy.lb": {DESTINATION: answer.endpoints}})
        return message

    def _pieces(self, body: bytes) -> list[Any]:
        """The body for the replica, and the trailers if there are any."""
        pieces = []
        for start in range(0, max(len(body), 1), _PIECE_BYTES):
            message = envoy.ProcessingResponse()
            piece = message.request_body.response.body_mutation.streamed_response
            piece.body = body[start : start + _PIECE_BYTES]
            piece.end_of_stream = start + _PIECE_BYTES >= len(body) and not self._trailers
            pieces.append(message)
        return [*pieces, *([envoy.ProcessingResponse(request_trailers={})] if self._trailers else [])]

    def _response_answer(self, message: Any) -> Any:
        """The answer to a message about the response: the client gets the reason of the decision, and all bytes."""
        answer = envoy.ProcessingResponse()
        if message.HasField("response_headers"):
            assert self._answer is not None
            envoy.mutate(answer.response_headers.response.header_mutation, {ROUTE: self._answer.headers.get(ROUTE)})
            return answer
        bodies = {"response_body": self._duplex_response, "request_body": self._duplex}
        kind = next(filter(message.HasField, (*bodies, "response_trailers", "request_trailers")), None)
        if kind is None:
            return None
        part, given = getattr(answer, kind), getattr(message, kind)
        part.SetInParent()
        if bodies.get(kind):
            piece = part.response.body_mutation.streamed_response
            piece.body, piece.end_of_stream = given.body, given.end_of_stream
        return answer

    def _refusal(self, error: ForewordError) -> Any:
        router = self._shared.picker.router
        seconds = error.retry_after or router.retry_after()
        respond = self._head.route.errors if self._head.route is not None else openai_error
        made = respond(error, seconds, self._head.id)
        return self._immediate(made.status, made.body, made.headers)

    def _immediate(self, status: int, body: bytes, headers: Mapping[str, str]) -> Any:
        """A whole response, for the client."""
        message = envoy.ProcessingResponse()
        message.immediate_response.status.code = status
        message.immediate_response.body = body
        own: dict[str, str | None] = {"content-type": "application/json", **headers, "x-request-id": self._head.id}
        envoy.mutate(message.immediate_response.headers, own)
        return message


def _observed(accounting: Accounting, message: Any) -> bool:
    """Take a message about a response. True at its end."""
    if message.HasField("response_headers"):
        headers = envoy.headers_of(message.response_headers)
        status = headers.get(":status", "")
        served = envoy.metadata_of(message, *_SERVED)
        accounting.response(
            int(status) if status.isdigit() else 502, headers, served if isinstance(served, str) else ""
        )
        ended = message.response_headers.end_of_stream
    elif message.HasField("response_body"):
        accounting.data(message.response_body.body)
        ended = message.response_body.end_of_stream
    else:
        ended = message.HasField("response_trailers")
    if ended:
        accounting.complete()
    return bool(ended)
