"""One request through a gateway, from its arrival to the end of its response: load, quotas, learning, metrics and log.
Its response is read and not changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from foreword.api.errors import CLIENT_GONE
from foreword.api.front import Handler
from foreword.api.outcomes import outcome_of_status
from foreword.api.quotas import Admitted
from foreword.api.request_log import log_request
from foreword.api.routes import Meter, Route
from foreword.api.sse import EventParser
from foreword.api.tenants import Tenant
from foreword.errors import ForewordError, ReplicaFailed
from foreword.router.attempt import Attempt
from foreword.router.gateway.picker import Answer, RequestHead
from foreword.router.replicas import clock
from foreword.router.routed_request import RoutedRequest
from foreword.router.service import Router
from foreword.router.whole_response import UsageCounts

# The usage stands at the end of a stream.
_TAIL_BYTES: Final = 32 << 10
_MAX_WHOLE_BYTES: Final = 16 << 20
_MOST_TOKENS: Final = 2**32


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    """The usage in any dialect."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None

    def counts(self) -> UsageCounts:
        details = self.prompt_tokens_details or self.input_tokens_details
        cached, prompt = details.cached_tokens if details is not None else None, self.prompt_tokens
        if prompt is None and self.input_tokens is not None:
            # Anthropic's input_tokens are without those that were read from and written to the cache.
            read, written = self.cache_read_input_tokens, self.cache_creation_input_tokens or 0
            cached = read if read is not None else cached
            prompt = self.input_tokens + (read or 0) + written
        output = self.completion_tokens if self.completion_tokens is not None else self.output_tokens
        return UsageCounts(*(_valid(found) for found in (cached, output, prompt)))


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def has_output(self) -> bool:
        delta = self.delta or _Delta()
        texts = (self.text, delta.content, delta.reasoning, delta.reasoning_content, delta.tool_calls)
        return any(texts) or self.finish_reason is not None


class _Nested(msgspec.Struct):
    usage: _Usage | None = None


class _Message(msgspec.Struct):
    """An event, or a whole response, in any dialect."""

    type: str | None = None
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    response: _Nested | None = None

    @property
    def has_output(self) -> bool:
        if self.choices is not None:
            return any(choice.has_output for choice in self.choices)
        return self.type is not None and self.type.endswith("delta")


class ObservedResponse:
    """One response with status 200.

    Attributes:
        begun: output was seen.
        events: number of events; about the number of output tokens.
        kept: the whole response, or the end of a stream.
    """

    def __init__(self, *, streams: bool) -> None:
        self.streams = streams
        self.begun = False
        self.events = 0
        self._parser = EventParser()
        self.kept = bytearray()

    def feed(self, data: bytes) -> bool:
        """Take the next bytes. True if the first token is among them."""
        self._keep(data)
        if not self.streams:
            return False
        self.events += data.count(b"data:")
        if self.begun:
            return False
        try:
            events = self._parser.feed(data)
        except ReplicaFailed:
            events = []
        self.begun = any(event.data and _decoded(event.data).has_output for event in events)
        return self.begun

    def _keep(self, data: bytes) -> None:
        self.kept += data
        if self.streams and len(self.kept) > 2 * _TAIL_BYTES:
            del self.kept[:-_TAIL_BYTES]
        elif len(self.kept) > _MAX_WHOLE_BYTES:
            self.kept.clear()

    def counts(self) -> UsageCounts:
        """The counts in the usage, once the response is complete; None where there are none."""
        data = bytes(self.kept)
        if not self.streams:
            return _counts(_decoded(data))
        found = data.rfind(b'"usage"')
        while found >= 0:
            start, end = data.rfind(b"\n", 0, found) + 1, data.find(b"\n", found)
            line = data[start : end if end >= 0 else len(data)]
            if line.startswith(b"data:") and (counts := _counts(_decoded(line[5:].strip()))) != UsageCounts():
                return counts
            found = data.rfind(b'"usage"', 0, start)
        return UsageCounts()


def _decoded(data: bytes) -> _Message:
    try:
        return msgspec.json.decode(data, type=_Message)
    except (msgspec.DecodeError, RecursionError):
        return _Message()


def _counts(message: _Message) -> UsageCounts:
    usage = message.usage or (message.response.usage if message.response is not None else None)
    return usage.counts() if usage is not None else UsageCounts()


def _valid(found: int | None) -> int | None:
    return found if found is not None and 0 <= found < _MOST_TOKENS else None


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
        self.observed = False
        router.picked += 1

    def answered(self, answer: Answer) -> None:
        """The gateway gets the answer, and sends the request there."""
        self._answer, self._placed = answer, answer.placed
        if self._placed is not None:
            routed, attempt = self._placed
            if not routed.request.streams:
                routed.pool.expect_first_token(attempt)

    def refused(self, error: ForewordError) -> None:
        """The gateway gets an error, to send to the client."""
        self._router.metrics.rejected(self._tenant.name, error.code)
        self._status = error.status
        self.end()

    def response(self, status: int, headers: Mapping[str, str], served: str) -> None:
        """The head of the response came, from the endpoint `served`; empty if the gateway does not say."""
        self._status = status
        if self._placed is None or self._answer is None:
            return
        routed, attempt = self._placed
        router, upstream = self._router, attempt.upstream
        if served and served != self._answer.endpoints.partition(",")[0]:
            router.failed(upstream, f"the gateway used {served} instead")
        elif status == 200:
            self._response = ObservedResponse(streams=routed.request.streams)
            return
        elif status in (429, 503) and headers.get("retry-after", "").isdigit():
            router.paused(upstream, min(float(headers["retry-after"]), _MAX_PAUSE))
        elif status >= 500:
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
            self._router.metrics.first_token(attempt.upstream.url, attempt.first_token_at - self._began)

    def complete(self) -> None:
        """The response came to its end."""
        if self._placed is not None and self._answer is not None and self._response is not None:
            routed, attempt = self._placed
            counts = self._response.counts()
            if counts.output is not None and counts.output > 1 and attempt.first_token_at is not None:
                self._router.metrics.token_time((clock() - attempt.first_token_at) / (counts.output - 1))
            self._charge(counts.used or len(routed.prompt.tokens) + self._response.events)
            routed.finished(attempt, counts)
            self._placed = None
        self.end()

    def end(self) -> None:
        """The request is over: its response is complete, its client left, or its replica broke. May be called again."""
        if self._ended:
            return
        self._ended = True
        if self._placed is not None:
            self._status = CLIENT_GONE
            # What was seen of the answer, and the prompt, which is computed before it.
            events = self._response.events if self._response is not None else 0
            self._charge(len(self._placed[0].prompt.tokens) + events)
            self._give_up()
        router, head = self._router, self._head
        router.picked -= 1
        if self._admitted is not None:
            router.quotas.finish(self._admitted)
        if head.outcome:
            router.metrics.outcome(head.outcome, outcome_of_status(self._status))
        router.metrics.response(f"picker {head.route.shown_path if head.route else 'unknown'}", self._status)
        log_request(head.method, head.path, self._status, clock() - self._began, head.id)
        if head.span is not None:
            head.span.note({"http.response.status_code": self._status})
            head.span.end(f"status {self._status}" if self._status >= 500 else "")

    def _charge(self, tokens: int) -> None:
        if self._admitted is not None:
            self._router.quotas.charge(self._admitted, tokens, clock())

    def _give_up(self) -> None:
        """The attempt teaches nothing."""
        assert self._placed is not None
        routed, attempt = self._placed
        self._placed = None
        routed.pool.failed(attempt)
