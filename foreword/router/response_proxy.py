"""Forwards a response to the client, with failover to other replicas.

While nothing was sent to the client, a failed request is retried. After that its response is continued (`continuation`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import aiohttp
import msgspec
from yarl import URL

from foreword.api import sse
from foreword.api.dialects.answer_reader import EventParser, ServerSentEvent, UsageCounts, read_error
from foreword.api.dialects.decode import is_set
from foreword.api.dialects.registry import DIALECTS
from foreword.api.event_stream import HEADERS, EventStream, comments_of
from foreword.api.front import Answer
from foreword.api.outcomes import ClientGone
from foreword.errors import ForewordError
from foreword.request_errors import DeadlineExceeded, NoReplica, ReplicaFailed, RequestEnded
from foreword.router.attempt import Attempt, as_header, describe_error, describe_response
from foreword.router.auth import response_headers
from foreword.router.continuation import (
    ContinuedResponse,
    StreamPosition,
    continuation_body,
    repeating_body,
    why_not_continuable,
)
from foreword.router.extras import Translation, extras_for
from foreword.router.prompts import TokenizedPrompt
from foreword.router.proxied_request import ProxiedRequest
from foreword.router.replica_body import PATHS, TRANSLATED, path_of, replica_body, resuming_fields
from foreword.router.replica_connection import take_all
from foreword.router.replicas import CONNECTION_ERRORS, AwaitedResponse, Upstream, clock, stamp_of
from foreword.router.response_stream import NotReproduced, ResponseStream, report_of
from foreword.router.stream_states import FIRST, StreamAction, StreamEvent, StreamMachine, StreamState
from foreword.router.suspicious import SuspiciousRequest

if TYPE_CHECKING:
    from foreword.api.misses.causes import Miss

logger = logging.getLogger(__name__)

MIGRATED_EVENT: Final = "foreword.moved"
_END_SECONDS: Final = 0.5
# How long the end of a stream waits for the cause of its cache miss.
_EXPLAIN_SECONDS: Final = 2.0


async def proxy_response(proxied: ProxiedRequest) -> Answer | None:
    """The answer; None if it was streamed. Raises ForewordError if nothing was sent to the client."""
    proxied.ask.check()
    proxy = _ResponseProxy(proxied)
    if proxied.request.stream:
        proxy.client.send_comments()
    try:
        return await proxy.run()
    except (ForewordError, ClientGone):
        raise
    except Exception as error:
        if not proxy.client.begun:
            raise
        await proxy.broke(error)
        return None
    except asyncio.CancelledError:
        if not proxy.client.begun or clock() < proxied.deadline - 0.001:
            raise
        # The deadline, not the client: report it.
        await proxy.fail(DeadlineExceeded("The request's deadline passed"))
        return None
    finally:
        proxy.client.stop()
        vars(proxy).pop("_error", None)  # its traceback refers to the proxy
        if proxy.stream.begun or proxy.stream.done:  # an answer may have tokens and no text
            proxied.usage = proxy.stream.usage


class _ResponseProxy:
    """A response, streamed or whole: performs the actions of `StreamMachine` for one client and one replica after another.

    Attributes:
        client: the stream to the client.
    """

    # Defaults that most requests leave as they are. A continuation sets body and prompt of the next attempt.
    _translated = False
    _body: dict[str, Any] | None = None
    _prompt: TokenizedPrompt | None = None
    # The present attempt, and its replica's response while that is open.
    _attempt: Attempt | None = None
    _response: aiohttp.ClientResponse | None = None
    _moved: ServerSentEvent | None = None
    _unsent: bytes | None = None
    # The replica to which the request migrated, if it did.
    _migrated_to: Upstream | None = None
    # A whole response of a replica, and its body; the answer to the client.
    _whole: tuple[aiohttp.ClientResponse, bytes] | None = None
    _answer: Answer | None = None
    # Why the last attempt ended; what the client gets if there is no other one, set before it is needed.
    _broke = ""
    _error: BaseException

    def __init__(self, proxied: ProxiedRequest) -> None:
        self.proxied = proxied
        self.machine = StreamMachine()
        self.stream = ResponseStream(proxied.request)
        keep_alive = proxied.router.stream_keep_alive
        # A reference to this object from there would keep each request until the garbage collector comes.
        self.client = EventStream(proxied.call, partial(_head, proxied), keep_alive)
        self._path = path_of(proxied.request)

    async def run(self) -> Answer | None:
        """The answer; None if it was streamed. Raises ForewordError if nothing was sent, and ClientGone."""
        event, actions = None, FIRST.actions
        while True:
            for action in actions:
                try:
                    event = await _PERFORM[action](self)
                except BaseException:
                    self._leave()
                    raise
                if event is not None:
                    break
            if event is None:
                return self._answer
            actions, event = self.machine.handle(event, headed=self.client.begun), None

    def _leave(self) -> None:
        """The client has left, the deadline has passed, or something raised that no code expects."""
        if self.machine.ended:
            return
        if StreamAction.LEAVE in self.machine.handle(StreamEvent.LEFT, headed=self.client.begun):
            self.proxied.left(self._present)

    @property
    def _present(self) -> Attempt:
        assert self._attempt is not None
        return self._attempt

    async def broke(self, error: Exception) -> None:
        """Something raised that no code expects, for this request alone: its client gets an error, also behind the head."""
        proxied = self.proxied
        proxied.router.metrics.unexpected(error)
        logger.error("request %s failed", proxied.request_id, exc_info=error)
        await self.fail(ForewordError(f"Internal error; the log has the details under request id {proxied.request_id}"))

    # To a replica

    async def _place(self) -> StreamEvent:
        proxied = self.proxied
        try:
            self._attempt = await proxied.place(self._prompt)
        except ForewordError as error:
            impossible = isinstance(error, NoReplica) and proxied.weights is not None
            self._error = self._impossible(self._broke, error) if impossible else error
            return StreamEvent.UNPLACED
        return StreamEvent.PLACED

    async def _at_replica(self, work: Coroutine[Any, Any, StreamEvent]) -> StreamEvent:
        """Work of an attempt, whose failure is an event. Errors of the client's connection are raised as ClientGone."""
        try:
            return await work
        except ClientGone:
            raise
        except NotReproduced as error:
            self._error = self._impossible(self._broke, error)
            return StreamEvent.FATAL
        except (RequestEnded, SuspiciousRequest) as error:
            self._error = error
            return StreamEvent.FATAL
        except (*CONNECTION_ERRORS, ReplicaFailed) as error:
            self._error = error
            return StreamEvent.BREAKS

    async def _ask(self) -> StreamEvent:
        return await self._at_replica(self._send())

    async def _send(self) -> StreamEvent:
        proxied, attempt = self.proxied, self._present
        if self._body is None:
            prefill, kind = attempt.prefill, attempt.upstream.kind
            transfer = None if prefill is None else await extras_for("--prefill").prefilled(proxied, attempt, prefill)
            body = replica_body(proxied.request, kind, proxied.own_fields(kind), transfer)
        else:
            body = msgspec.json.encode({**self._body, **proxied.own_fields(attempt.upstream.kind)})
        streams = proxied.request.stream
        if not streams:
            proxied.pool.expect_first_token(attempt)
        response, data = await proxied.send(attempt.upstream, body, self._path, streams=streams)
        self.stream.holds_end = proxied.wants_report and attempt.upstream.kind != "foreword"
        if data is None:
            self._response = response
            return StreamEvent.HEAD
        if await proxied.repairs(attempt, response, data) or await proxied.retries(attempt, response, data):
            return StreamEvent.ELSEWHERE
        passed = proxied.translation is None and proxied.dialect in TRANSLATED
        if response.status in (404, 405) and passed and not proxied.pool.speaks(proxied.dialect):
            # The replica does not speak the client's dialect, and the request cannot be translated.
            if proxied.request.refusal is None and not self.client.begun:
                raise ReplicaFailed("it does not know this path")
            self._error = proxied.request.refusal or ReplicaFailed("it does not know this path")
            return StreamEvent.FATAL
        if streams and response.status == 200:
            said = describe_response(response.status, data) if self.client.begun else "it did not send a stream"
            raise ReplicaFailed(said)
        self._whole, self._error = (response, data), ReplicaFailed(describe_response(response.status, data))
        if self.machine.state is StreamState.ASKED:
            # An answer that is none for any client fails the attempt.
            answer = proxied.respond(attempt, response, data)
            explained = self.stream.holds_end
            self._answer = await _with_report(answer, proxied.counts, proxied.miss) if explained else answer
        return StreamEvent.ANSWERED

    async def _judge(self) -> StreamEvent:
        """The attempt's replica was lost: note it, and whether another attempt is allowed."""
        proxied, attempt, error = self.proxied, self._present, self._error
        tokens = self.stream.entries or self.stream.begun
        try:
            await proxied.lost(attempt, error, at=self._migrated_to, tokens=tokens)
        except BaseException:
            proxied.pool.failed(attempt)
            raise
        self._migrated_to = None
        self._broke = describe_error(error)
        try:
            proxied.ask.check()
        except ForewordError as suspicious:
            self._error = suspicious
            return StreamEvent.NO_MORE
        if proxied.may_retry():
            return StreamEvent.AGAIN
        self._error = ReplicaFailed(f"The request failed {proxied.attempts} times; the last: {self._broke}")
        return StreamEvent.NO_MORE

    async def _restart(self) -> None:
        self.stream.restart()
        self.proxied.router.metrics.retry()

    async def _note_continued(self) -> None:
        self.proxied.router.metrics.continued("continued")

    async def _release(self) -> None:
        self.proxied.pool.failed(self._present)

    # From the replica to the client

    async def _relay(self) -> StreamEvent:
        """Forward all events of a response."""
        return await self._at_replica(self._forward_all())

    async def _forward_all(self) -> StreamEvent:
        assert self._response is not None
        await self._forward(self._present, self._response)
        if self._moved is not None:
            return StreamEvent.MOVED
        end = self.stream.end()
        if end is not None:
            await self._write(self._response, end)
        return StreamEvent.COMPLETE

    async def _follow(self) -> StreamEvent | None:
        """Open the stream at the server to which the request migrated."""
        try:
            self._response = await self._follow_migration()
        except ReplicaFailed as error:
            self._error = error
            return StreamEvent.BREAKS
        return None

    async def _forward(self, attempt: Attempt, response: aiohttp.ClientResponse) -> None:
        """Forward one response and close it. If the request migrates, `_moved` is set."""
        stream, upstream = self.stream, self._migrated_to or attempt.upstream
        watch, comments = self.proxied.awaits(upstream, True), comments_of(response.headers)
        awaited = watch(response.close, clock(), stream.begun, headless=False, comments=comments)
        upstream.awaited.add(awaited)
        self._moved = None
        stream.next_response(upstream.kind)
        try:
            if self.proxied.weights is not None:
                await self.proxied.router.confirm(upstream, self.proxied.weights)
            await self._forward_events(response, awaited)
            if stream.done and self._moved is None and not response.content.is_eof():
                with contextlib.suppress(*CONNECTION_ERRORS):
                    async with asyncio.timeout(_END_SECONDS):
                        await take_all(response.content, lambda _: True)
        finally:
            upstream.awaited.discard(awaited)
            if stream.done and self._moved is None:
                response.release()
            else:
                response.close()

    async def _forward_events(self, response: aiohttp.ClientResponse, awaited: AwaitedResponse) -> None:
        """Forward a response's events, to its end or that of the client's stream."""
        take = partial(self._take, EventParser(), self._present, awaited)
        while not self._over:
            try:
                await take_all(response.content, take)
            except CONNECTION_ERRORS as error:
                raise awaited.error() if awaited.aborted else ReplicaFailed(describe_error(error)) from error
            except ForewordError:
                await self._send_unsent(response, awaited)
                raise
            await self._send_unsent(response, awaited)
            if awaited.aborted and not self._over:
                raise awaited.error()
            if response.content.at_eof():
                return

    async def _send_unsent(self, response: aiohttp.ClientResponse, awaited: AwaitedResponse) -> None:
        if self._unsent is not None:
            # While the client reads, or does not, the replica is not late.
            awaited.last, data, self._unsent = math.inf, self._unsent, None
            last = self.stream.done and not self.stream.end_held and response.content.is_eof()
            await self._write(response, data, last=last)
            awaited.last = clock()

    @property
    def _over(self) -> bool:
        return self.stream.done or self.stream.cut or self._moved is not None

    def _take(self, parser: EventParser, attempt: Attempt, awaited: AwaitedResponse, data: bytes) -> bool:
        """Send events that arrived together in one write. False if no more is to be taken: what could not be sent at once, or
        ends the stream, is in `_unsent`. This is the cost of every token: keep it short."""
        stream = self.stream
        pieces: list[bytes] = []
        try:
            for event in parser.feed(data):
                if event.name == MIGRATED_EVENT:
                    self._moved = event
                    break
                if (piece := stream.take(event)) is not None:
                    pieces.append(piece)
                if stream.done or stream.cut:
                    break
        finally:
            # Also if an event raised: what came before it counts as sent.
            awaited.last, awaited.begun = clock(), stream.begun
            if stream.begun and not attempt.begun:
                self._tell(StreamEvent.OUTPUT)
            if stream.finished and self.machine.state is not StreamState.FINISHED:
                self._tell(StreamEvent.FINISH)
            if pieces:
                ready = pieces[0] if len(pieces) == 1 else b"".join(pieces)
                if stream.done or not ready or self.proxied.translation is not None or not self.client.write_now(ready):
                    self._unsent = ready
        return self._unsent is None and not self._over

    def _tell(self, event: StreamEvent) -> None:
        """An event while others are forwarded."""
        if StreamAction.NOTE_OUTPUT in self.machine.handle(event, headed=self.client.begun):
            self._first_token(self._present)

    async def _follow_migration(self) -> aiohttp.ClientResponse:
        """Raises ReplicaFailed."""
        proxied, migrated = self.proxied, self._moved
        assert migrated is not None
        try:
            target = json.loads(migrated.data)
            upstream = proxied.router.upstreams.get(str(target["to"]).rstrip("/"))
            name, count = str(target["request_id"]), int(target["tokens"])
        except (ValueError, KeyError, TypeError):
            raise ReplicaFailed("the request migrated, but the replica did not say where to") from None
        if upstream is None:
            raise ReplicaFailed(f"the request migrated to {target['to']}, which is not one of the router's replicas")
        url = f"{upstream.url}/v1/requests/{quote(name, safe='')}/stream?from={count}"
        try:
            response = await proxied.router.fresh_session.get(URL(url, encoded=True), headers=proxied.headers(upstream))
        except CONNECTION_ERRORS as error:
            raise ReplicaFailed(f"the request migrated to {upstream.url}: {describe_error(error)}") from None
        if response.status != 200:
            problem = describe_response(response.status, await response.read())
            raise ReplicaFailed(f"the request migrated to {upstream.url}: {problem}")
        self._migrated_to = upstream
        proxied.router.metrics.migrated()
        logger.info("request %s migrated to %s", proxied.request_id, upstream.url)
        return response

    def _first_token(self, attempt: Attempt) -> None:
        proxied, upstream = self.proxied, attempt.upstream
        attempt.begun, attempt.first_token_at = True, clock()
        proxied.noted_first(attempt.first_token_at)
        proxied.router.stamped(upstream, self.stream.last_stamp)
        proxied.began_stream()
        if upstream.trial and self._migrated_to is None:
            # The trial request succeeds: other requests need not wait for the end of this response.
            upstream.trial = False
            proxied.router.succeeded(upstream)
            proxied.router.refresh(upstream)
        proxied.pool.first_token(attempt)
        proxied.router.first_token(upstream, clock() - proxied.arrived)

    async def _succeed(self) -> None:
        stream, proxied = self.stream, self.proxied
        if proxied.keep is not None and is_set(stream.reader.last):
            proxied.keep(bytes(stream.reader.last))
        # The usage of a continuation counts the output so far as prompt.
        exact = not (stream.converts or stream.resumed)
        counts = stream.reader.counts if exact else UsageCounts(prompt=stream.reader.counts.prompt)
        try:
            proxied.finished(self._present, counts)
        except BaseException:
            proxied.left(self._present)
            raise

    # Failover

    async def _plan(self) -> StreamEvent:
        """Find out how another replica can continue."""
        try:
            whole = await self._prepare_continuation(self._present)
        except (ReplicaFailed, NoReplica) as problem:
            self._error = self._impossible(self._broke, problem)
            return StreamEvent.STUCK
        except ForewordError as error:
            self._error = error
            return StreamEvent.STUCK
        return StreamEvent.WHOLE if whole else StreamEvent.CONTINUES

    async def _send_rest(self) -> None:
        try:
            await self._write(None, self.stream.end() or b"")
        except ForewordError as error:
            await self.fail(error)

    def _impossible(self, broke: str, problem: ForewordError) -> ReplicaFailed:
        self.proxied.router.metrics.continued("impossible")
        return ReplicaFailed(
            f"The replica failed in the middle of the response ({broke}), and no other replica can continue it exactly: "
            f"{problem.message}"
        )

    def _weights(self, attempt: Attempt) -> str:
        """Weights of the replica that began the response. Raises ReplicaFailed if they are not known."""
        proxied, upstream, stamp = self.proxied, attempt.upstream, self.stream.stamp
        weights = proxied.weights
        if weights is None and upstream.kind == "foreword" and stamp is not None:
            # The response's stamp was true when it began, whatever the replica serves now.
            known = [attempt.weights, *(one.weights for one in proxied.pool.upstreams.values())]
            weights = next((one for one in known if one is not None and stamp_of(one) == stamp), None)
        elif weights is None and upstream.weights == attempt.weights:
            weights = attempt.weights
        if weights is None:
            raise ReplicaFailed("which weights began it is not known")
        return weights

    async def _prepare_continuation(self, attempt: Attempt) -> bool:
        """The next attempt continues the response. True if the response is already complete.

        Raises ReplicaFailed, and NoReplica if no replica with the same weights is in service.
        """
        proxied, stream = self.proxied, self.stream
        request, reason = proxied.request, why_not_continuable(proxied.request)
        repeats = not request.single
        if reason is None and not (stream.can_repeat if repeats else stream.can_continue):
            reason = "its tokens are not known" if stream.text_only else "part of it is not text"
        if reason is not None and not stream.can_resume:
            raise ReplicaFailed(reason)
        pool, weights = proxied.pool, self._weights(attempt)
        proxied.weights = weights
        same = pool.with_weights(weights) or [attempt.upstream]
        if stream.can_resume and all(one.kind == "foreword" for one in same):
            pool.check_continuable(weights)
            self._resume()
            return False
        if reason is not None:
            raise ReplicaFailed(reason)
        lengths = [one.info.max_model_len or 0 for one in same if one.info]
        longest = max(lengths, default=0) or None
        if repeats:
            if any(one.kind != attempt.upstream.kind for one in same):
                raise ReplicaFailed("servers of different kinds draw different choices from a seed")
            body = repeating_body(request, stream.prompt_ids, longest)
            pool.check_continuable(weights)
            stream.repeat()
            self._path = PATHS["completions"]
            self._continue_with(body, body["prompt"], 0)
            return False
        position = await self._position()
        continuation = ContinuedResponse(request, position)
        end = stream.continue_from(continuation, position)
        if end is None:
            body = continuation_body(request, stream.prompt_ids, position, longest)
            if body["max_tokens"] == 0:
                end = stream.finish(continuation.flush(), "length")
        if end is not None:
            await self._write(None, end)
            return True
        pool.check_continuable(weights)
        self._path = PATHS["completions"]
        self._continue_with(body, body["prompt"], len(position.tokens))
        return False

    def _resume(self) -> None:
        """Another Foreword server writes the rest, also in the middle of a tool call, and follows a grammar from there."""
        stream, request = self.stream, self.proxied.request
        prompt, outputs = list(stream.prompt_ids), [list(choice.tokens) for choice in stream.choices]
        ended = [choice.finish_reason is not None for choice in stream.choices]
        stream.resume()
        known = [*prompt, *outputs[0]] if len(outputs) == 1 else prompt
        self._continue_with(resuming_fields(request, prompt, outputs, ended), known, stream.tokens)

    def _continue_with(self, body: dict[str, Any], prompt: Sequence[int], count: int) -> None:
        """The next attempt sends this body, to continue after `count` tokens of output."""
        proxied = self.proxied
        self._body = body
        self._prompt = TokenizedPrompt(prompt, "client") if proxied.pool.needs_prompts else proxied.prompt
        logger.info("request %s is to continue after %d tokens", proxied.request_id, count)

    async def _position(self) -> StreamPosition:
        """Where the stream broke. Raises ReplicaFailed."""
        proxied, stream = self.proxied, self.stream
        choice = stream.choices[0]
        given, sent, tokens = proxied.request.sampling, choice.sent_text, list(choice.tokens)
        # With stop strings no chunk shows where the text ends: a server holds back what could begin one.
        settled, length = (0, 0) if given.get("stop") else choice.settled
        count, text = 0, ""
        if settled < len(tokens) or length < len(sent):
            replicas = proxied.pool.tokenizing_replicas(proxied.avoid, proxied.weights)
            before, rest = [*stream.prompt_ids, *tokens[:settled]], sent[length:]
            try:
                count, text = await proxied.router.prompts.text_of(before, tokens[settled:], rest, replicas)
            except ReplicaFailed:
                # Greedy decoding generates the same tokens again.
                if given.get("temperature") != 0:
                    raise
        count += settled
        return StreamPosition(tokens[:count], sent[:length] + text, sent, max(choice.entries - count, 0))

    # The response to the client

    def _write(
        self, response: aiohttp.ClientResponse | None, data: bytes, *, last: bool = False
    ) -> Coroutine[Any, Any, None]:
        """Send events of a completion to the client, in its dialect. `last`: they end the stream."""
        if self.proxied.translation is not None:
            data = self._translate(self.proxied.translation, data)
        return self.client.write(data, response.headers if response is not None else None, last=last)

    def _translate(self, translation: Translation, data: bytes) -> bytes:
        begin = b""
        if not self._translated:
            begin = translation.begin(len(self.stream.prompt_ids) or self.proxied.prompt.count)
        self._translated = True
        try:
            return begin + translation.events(data)
        except ForewordError as error:
            # Part of what the replica sent never reaches the client.
            self.stream.exact = False
            raise ReplicaFailed(error.message) from None

    async def _close(self) -> None:
        if not self.client.begun:
            raise ReplicaFailed("The replica's response was empty")
        if self.stream.end_held:
            await self._write(None, self.stream.held_end(await self._miss()))
        await self.client.close()

    async def _miss(self) -> Miss | None:
        """Why part of the prompt was not cached, if that is known soon."""
        if self.proxied.miss is None:
            return None
        done, _ = await asyncio.wait((self.proxied.miss,), timeout=_EXPLAIN_SECONDS)
        return self.proxied.miss.result() if done else None

    # Answers and errors

    async def _give_answer(self) -> None:
        """Nothing is left to do: `run` returns `_answer`."""

    async def _send_answer(self) -> None:
        """The replica's error, as the end of a stream whose head was sent already."""
        assert self._whole is not None
        response, data = self._whole
        answer, self._answer = self._answer, None
        failure = self.proxied.call.failure = read_error(response.status, data)
        if self.proxied.translation is not None or self.proxied.request.dialect in TRANSLATED:
            await self.client.write(self._error_event(failure))
        else:
            await self.client.write(sse.encode(msgspec.json.decode((answer and answer.body) or b"{}")))
        await self._close()

    async def _give_error(self) -> None:
        raise self._error

    async def _send_error(self) -> None:
        assert isinstance(self._error, ForewordError)
        await self.fail(self._error)

    async def fail(self, error: ForewordError) -> None:
        """Raise an error if nothing was sent; otherwise send it as an event and end the stream."""
        if not self.client.begun:
            raise error
        logger.warning("request %s ends with an error: %s", self.proxied.request_id, error.message)
        self.proxied.call.failure = error
        error.__traceback__ = error.__context__ = error.__cause__ = None  # they refer to the call
        held = self.stream.take_finish() if self.proxied.translation is None else b""
        await self.client.write(held + self._error_event(error))
        await self._close()

    def _error_event(self, error: ForewordError) -> bytes:
        """The end of a stream that failed, in the client's dialect."""
        proxied = self.proxied
        if proxied.translation is not None:
            return proxied.translation.error_event(error)
        return DIALECTS[proxied.request.dialect].error_event(proxied.request, error)


_PERFORM: Final[Mapping[StreamAction, Callable[[_ResponseProxy], Awaitable[StreamEvent | None]]]] = {
    StreamAction.PLACE: _ResponseProxy._place,
    StreamAction.ASK: _ResponseProxy._ask,
    StreamAction.RELAY: _ResponseProxy._relay,
    StreamAction.FOLLOW: _ResponseProxy._follow,
    StreamAction.JUDGE: _ResponseProxy._judge,
    StreamAction.RESTART: _ResponseProxy._restart,
    StreamAction.PLAN: _ResponseProxy._plan,
    StreamAction.NOTE_CONTINUED: _ResponseProxy._note_continued,
    StreamAction.SUCCEED: _ResponseProxy._succeed,
    StreamAction.RELEASE: _ResponseProxy._release,
    StreamAction.SEND_REST: _ResponseProxy._send_rest,
    StreamAction.CLOSE: _ResponseProxy._close,
    StreamAction.GIVE_ANSWER: _ResponseProxy._give_answer,
    StreamAction.GIVE_ERROR: _ResponseProxy._give_error,
    StreamAction.SEND_ANSWER: _ResponseProxy._send_answer,
    StreamAction.SEND_ERROR: _ResponseProxy._send_error,
}


def _head(proxied: ProxiedRequest, given: Mapping[str, str]) -> Mapping[str, str]:
    """The head of a stream. A replica that was not found yet is not named."""
    headers = response_headers(given)
    if proxied.decision_text:
        headers["x-foreword-route"] = as_header(proxied.decision_text)
    headers.update(HEADERS)
    return headers


async def _with_report(response: Answer, counts: UsageCounts, explained: asyncio.Future[Miss] | None) -> Answer:
    """A whole response of an engine that has no cache report of its own, with the cause of its miss."""
    if explained is None:
        return response
    body: dict[str, Any] = msgspec.json.decode(response.body)
    body["cache_report"] = report_of(counts, await explained)
    response.body = msgspec.json.encode(body)
    return response
