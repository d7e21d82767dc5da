"""A gRPC stream of a gateway: the messages about one request, and the answers.

Three ways of asking are known (`docs/guides/gateway.md`): the body at once (`BUFFERED`), in pieces that go through the picker
(`FULL_DUPLEX_STREAMED`, the rule of the Gateway API inference extension), and, in a second stream, copies of a response that
expect no answer (`observability_mode`).

The picker accounts for a request from its arrival to the end of its response: load, quotas, learning, metrics and log. The
response is read and not changed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any, Final

from foreword.api.dialects.answer_reader import AnswerReader, EventParser, UsageCounts
from foreword.api.errors import CLIENT_GONE
from foreword.api.front import Answer, ByteStream, Call, Ending
from foreword.api.sse import DONE
from foreword.errors import BadRequest, ConfigError, ForewordError
from foreword.request_errors import ReplicaFailed, RequestEnded
from foreword.router.attempt import Attempt
from foreword.router.proxied_request import RoutedRequest
from foreword.router.replicas import clock, is_refusal
from foreword.router.router import Router
from foreword.router_extras.gateway import envoy_messages as envoy
from foreword.router_extras.gateway.grpc_server import UNAVAILABLE, ClientFault, GrpcCall, GrpcError
from foreword.router_extras.gateway.picker import (
    DESTINATION,
    PICK,
    PICK_SECONDS,
    ROUTE,
    Pick,
    Picker,
    generates,
)
from foreword.usage import TokenUsage

logger = logging.getLogger(__name__)

_MAX_WHOLE_BYTES: Final = 16 << 20
# The usage is in the last event of a stream, or before one or two that end it.
_LAST_EVENTS: Final = 4
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
        # Events behind the first token are not read until the end, and then only those that may have the usage.
        self._last: deque[bytes] = deque(maxlen=_LAST_EVENTS)

    def feed(self, data: bytes) -> bool:
        """Take the next bytes. True if the first token is among them."""
        if not self.streams:
            if len(self._whole) <= _MAX_WHOLE_BYTES:
                self._whole += data
            return False
        begins = False
        with suppress(ReplicaFailed):
            for event in self._parser.feed(data):
                if not event.data or event.data == DONE:
                    continue
                self.events += 1
                if self._begun:
                    self._last.append(event.data)
                else:
                    begins = self._read(event.data)
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
        for data in self._last if self.streams else (bytes(self._whole),):
            self._read(data)
        return self._reader.counts


_MAX_PAUSE: Final = 5.0


class Accounting:
    """A request of a gateway, from its arrival to the end of its response: what the front's `Ending` does not know of it.

    Attributes:
        call: the request.
        observed: its response is being observed.
    """

    def __init__(self, router: Router, ending: Ending) -> None:
        self._router, self._ending, self.call = router, ending, ending.call
        self._placed: tuple[RoutedRequest, Attempt] | None = None
        self._pick: Pick | None = None
        self._response: ObservedResponse | None = None
        self._status = CLIENT_GONE
        self.observed = False

    def answered(self, pick: Pick) -> None:
        """The gateway gets the answer, and sends the request there."""
        self._pick, self._placed = pick, pick.placed
        if self._placed is not None:
            routed, attempt = self._placed
            self.call.replica = attempt.upstream.url
            if not routed.request.stream:
                routed.pool.expect_first_token(attempt)

    def end_with(self, status: int, error: BaseException | None = None) -> None:
        """The request is over, with this status, or with this error."""
        self._status, self._ending.error = status, error
        self.end()

    def response(self, status: int, headers: Mapping[str, str], served: str) -> None:
        """The head of the response came, from the endpoint `served`; empty if the gateway does not say."""
        self._status = status
        if self._placed is None or self._pick is None:
            return
        routed, attempt = self._placed
        router, upstream = self._router, attempt.upstream
        if served and served != self._pick.endpoints.partition(",")[0]:
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
        if self._placed is None or self._response is None:
            return
        routed, attempt = self._placed
        if self._response.feed(piece):
            now = attempt.first_token_at = clock()
            attempt.begun, self.call.first_token_at = True, lambda: now
            routed.pool.first_token(attempt)
            self._router.first_token(attempt.upstream, now - self.call.arrived)

    def complete(self) -> None:
        """The response came to its end."""
        if self._placed is not None and self._response is not None:
            routed, attempt = self._placed
            counts = self._response.counts()
            self._charge(routed, counts.usage if counts.usage.charged else self._seen(routed))
            routed.finished(attempt, counts)
            self._placed = None
        self.end()

    def end(self) -> None:
        """The request is over: its response is complete, its client left, or its replica broke. May be called again."""
        if self._placed is not None:
            routed = self._placed[0]
            self._status = CLIENT_GONE if self._status < 500 else self._status
            self._charge(routed, self._seen(routed))
            self._judge(*self._placed)
            self._give_up()
        self._ending.end(self._status)

    def _seen(self, routed: RoutedRequest) -> TokenUsage:
        """The tokens seen of the answer, and of the prompt, which is computed before it."""
        return TokenUsage(routed.prompt.count, self._response.events if self._response is not None else 0)

    def _charge(self, routed: RoutedRequest, usage: TokenUsage) -> None:
        self.call.charge(routed.named(usage))

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


class ExternalProcessor:
    """Service that Envoy calls for each request. Its exchanges share the picker, and answers that are observed elsewhere."""

    def __init__(self, picker: Picker) -> None:
        self.picker, self.front = picker, picker.front
        self.answered: dict[str, Accounting] = {}
        self._knows_replicas = False

    def knows_replicas(self) -> bool:
        """False after a start until a replica takes requests: the gateway's failure mode decides then. Where API keys are
        configured, requests are refused instead."""
        router = self.picker.router
        self._knows_replicas = self._knows_replicas or router.auth.has_tenants or router.ready() is None
        return self._knows_replicas

    def unexpected(self, call: Call, error: Exception) -> Answer | None:
        """The answer where something raised that no code expects; None if it was the client's fault."""
        return None if isinstance(error, ClientFault) else self.front.unexpected(call, error)

    async def process(self, call: GrpcCall) -> None:
        """The method `ExternalProcessor.Process`. Raises GrpcError."""
        if not self.knows_replicas():
            raise GrpcError(UNAVAILABLE, "no replica has answered yet")
        first = await anext(call, None)
        if first is None or not first.HasField("request_headers"):
            return
        if first.observability_mode:
            await self._observe(first, call)
            return
        exchange = _GatewayExchange(self, call, first)
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
            self.unexpected(accounting.call, error)
            raise
        finally:
            accounting.end()


class _GatewayExchange:
    """Stream of a gateway about one request: the front's `Exchange`, whose body comes in messages."""

    def __init__(
        self,
        shared: ExternalProcessor,
        gateway: GrpcCall,
        first: Any,
    ) -> None:
        self._shared = shared
        self._gateway = gateway
        self._first = first
        self.headers: Mapping[str, str] = envoy.headers_of(first.request_headers)
        self.method = self.headers.get(":method", "GET")
        self.path, _, self.query = self.headers.get(":path", "/").partition("?")
        self.address: str | None = None
        self._pick: Pick | None = None
        self._asking: asyncio.Future[None] | None = None
        self._trailers = False
        config = first.protocol_config
        self._duplex = config.request_body_mode == envoy.FULL_DUPLEX_STREAMED
        self._buffered = config.request_body_mode == envoy.BUFFERED
        self._duplex_response = config.response_body_mode == envoy.FULL_DUPLEX_STREAMED
        self._sees_response = config.response_body_mode != 0
        self._accounting = Accounting(shared.picker.router, shared.front.begin(self))
        self._call = self._accounting.call

    # Questions of the front

    def arrived(self, limit: int) -> bytes | None:
        """The body never comes with the head."""

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body. Raises BadRequest if it does not come to its end, _AnsweredEarly if the gateway has not waited for it."""
        if self._first.request_headers.end_of_stream:
            return
        if not self._duplex and not self._buffered:
            raise ConfigError("The gateway must send bodies: request_body_mode BUFFERED or FULL_DUPLEX_STREAMED")
        if self._buffered:
            # The headers wait in the gateway until the body was answered.
            await self._write(envoy.ProcessingResponse(request_headers={}))
        async for message in self._gateway:
            if message.HasField("request_trailers"):
                self._trailers = True
                return
            if not message.HasField("request_body"):
                raise _AnsweredEarly(message)
            yield message.request_body.body
            if message.request_body.end_of_stream:
                return
        raise BadRequest("The body did not arrive to its end")

    async def _write(self, message: Any) -> None:
        await self._gateway.write(message.SerializeToString())

    def watch(self) -> None:
        """The stream ends if the client leaves, and with it the call."""

    async def open(self, status: int, headers: Mapping[str, str], at_once: bool) -> ByteStream:
        """Nothing is streamed to the client from here."""
        raise NotImplementedError

    async def run(self) -> None:
        accounting, call, front = self._accounting, self._call, self._shared.front
        try:
            await self._request()
        except _AnsweredEarly as early:
            accounting.end_with(_status(early.message))
            if (response := self._response_answer(early.message)) is not None:
                await self._write(response)
        except ForewordError as error:
            answer = front.refusal(call, error)
            accounting.end_with(answer.status, error)
            await self._write(self._immediate(answer))
            return
        except Exception as error:  # the edge of one request
            if (unknown := self._shared.unexpected(call, error)) is None:
                raise
            accounting.end_with(unknown.status, error)
            await self._write(self._immediate(unknown))
            return
        else:
            if self._pick is None:
                return
        async for message in self._gateway:
            self._observe(accounting, message)
            response = self._response_answer(message)
            if response is not None:
                await self._write(response)

    def _observe(self, accounting: Accounting, message: Any) -> None:
        """Take a message about the response. What that raises is no reason to end a response that is right."""
        try:
            _observed(accounting, message)
        except Exception as error:  # noqa: BLE001 - the edge of one request
            self._shared.unexpected(self._call, error)
            accounting.end()

    def close(self) -> None:
        """The gateway closed the stream, or it was ended here."""
        accounting, pick = self._accounting, self._pick
        del self._accounting, self._call  # they have this exchange: a reference cycle
        if accounting.observed:
            return
        if pick is None or self._sees_response:
            accounting.end()
        else:
            asyncio.get_running_loop().call_later(UNOBSERVED_SECONDS, self._unobserved, pick.name, accounting)

    def _unobserved(self, name: str, accounting: Accounting) -> None:
        self._shared.answered.pop(name, None)
        if not accounting.observed:
            accounting.end()

    # The request

    async def _request(self) -> None:
        """Answer the messages of the request. Raises ForewordError for a request that gets an error."""
        picker, call = self._shared.picker, self._call
        if call.route is None:
            await self._answer(self._shared.front.no_route(call))
            return
        self._shared.front.admit(call, call.route)
        picker.check(call)
        await self._shared.front.read(call, call.route)
        if generates(call):
            await self._decide()
        elif call.route.method == "GET":  # the router itself knows the answer
            reply = await call.route.handler(call)
            await self._answer(reply if isinstance(reply, Answer) else Answer.json(reply))
        else:
            pick = await picker.anywhere(call, self._allowed())
            self._told(pick)
            await self._write(self._with_headers(pick))

    async def _answer(self, answer: Answer) -> None:
        """Give the client this answer."""
        self._accounting.end_with(answer.status)
        await self._write(self._immediate(answer))

    async def _decide(self) -> None:
        picker, call, raw = self._shared.picker, self._call, self._call.raw
        timer = (
            asyncio.get_running_loop().call_later(_ASK_FOR_TIME_SECONDS, self._ask_for_time) if self._buffered else None
        )
        try:
            pick = await picker.pick(call, self._allowed())
        finally:
            if timer is not None:
                timer.cancel()
            if self._asking is not None:
                await self._asking  # one message is written at a time
        self._told(pick)
        await self._write(self._with_headers(pick))
        if self._duplex:
            for piece in self._pieces(raw if pick.body is None else pick.body):
                await self._write(piece)
        call.release_body()

    def _ask_for_time(self) -> None:
        more = envoy.ProcessingResponse()
        seconds = int(PICK_SECONDS) + _MORE_SECONDS
        more.override_message_timeout.FromSeconds(seconds)
        self._asking = asyncio.ensure_future(self._write(more))

    def _allowed(self) -> frozenset[str] | None:
        """The endpoints that the gateway allows, as a list or separated by commas; None for all."""
        among = envoy.metadata_of(self._first, *_SUBSET)
        if among is None:
            return None
        return frozenset(str(one).strip() for one in (among.split(",") if isinstance(among, str) else among))

    def _told(self, pick: Pick) -> None:
        self._pick = pick
        self._accounting.answered(pick)
        if not self._sees_response:
            self._shared.answered[pick.name] = self._accounting

    # Answers

    def _with_headers(self, pick: Pick) -> Any:
        """The answer that carries the changes of the headers, and of a body that came at once."""
        message, headers = envoy.ProcessingResponse(), dict(pick.headers)
        if self._buffered and generates(self._call):
            common = message.request_body.response
            if pick.body is not None:
                common.body_mutation.body = pick.body
                if "content-length" in self.headers:
                    # Envoy refuses a body of another length than this header says.
                    headers["content-length"] = str(len(pick.body))
        else:
            common = message.request_headers.response
        envoy.mutate(common.header_mutation, headers)
        if pick.endpoints:
            fields = message.dynamic_metadata.fields["envoy.lb"].struct_value.fields
            fields[DESTINATION].string_value = pick.endpoints
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
            route = self._pick.headers.get(ROUTE) if self._pick is not None else None
            envoy.mutate(answer.response_headers.response.header_mutation, {ROUTE: route})
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

    def _immediate(self, answer: Answer) -> Any:
        """A whole response, for the client."""
        message = envoy.ProcessingResponse()
        message.immediate_response.status.code = answer.status
        message.immediate_response.body = answer.body
        envoy.mutate(message.immediate_response.headers, {**answer.headers, **self._call.own_headers()})
        return message


class _AnsweredEarly(Exception):
    """The gateway has answered the request itself, or given it up, before its body had come."""

    def __init__(self, message: Any) -> None:
        super().__init__()
        self.message = message


def _status(message: Any) -> int:
    """The status of a response, by a message about its headers; that of an unknown one is an error."""
    status = envoy.headers_of(message.response_headers).get(":status", "")
    return int(status) if len(status) == 3 and status.isascii() and status.isdigit() else 502


def _observed(accounting: Accounting, message: Any) -> bool:
    """Take a message about a response. True at its end."""
    if message.HasField("response_headers"):
        headers = envoy.headers_of(message.response_headers)
        served = envoy.metadata_of(message, *_SERVED)
        accounting.response(_status(message), headers, served if isinstance(served, str) else "")
        ended = message.response_headers.end_of_stream
    elif message.HasField("response_body"):
        accounting.data(message.response_body.body)
        ended = message.response_body.end_of_stream
    else:
        ended = message.HasField("response_trailers")
    if ended:
        accounting.complete()
    return bool(ended)
