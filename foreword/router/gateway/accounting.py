"""One request through a gateway, from its arrival to the end of its response: load, quotas, learning, metrics and log.
Its response is read and not changed."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from foreword.api.dialects.answer_reader import AnswerReader, UsageCounts
from foreword.api.errors import CLIENT_GONE
from foreword.api.front import Handler
from foreword.api.outcomes import log_request, outcome_of_status
from foreword.api.quotas import Admitted
from foreword.api.routes import Meter, Route
from foreword.api.sse import DONE, EventParser
from foreword.api.tenants import Tenant
from foreword.errors import BadRequest, ForewordError, ReplicaFailed
from foreword.router.attempt import Attempt
from foreword.router.gateway.picker import Answer, RequestHead
from foreword.router.replicas import clock
from foreword.router.routed_request import RoutedRequest
from foreword.router.service import Router

_MAX_WHOLE_BYTES: Final = 16 << 20


class ObservedResponse:
    """One response with status 200. What is malformed is ignored: the gateway sends it as it is.

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
            self._response = ObservedResponse(streams=routed.request.stream)
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
