"""One request on its way: placed, sent, answered, and sent again where that doubles nothing.

What has not reached the client can be asked for again. What has is continued: see `seam`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import quote

import aiohttp
import msgspec
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from foreword.errors import DeadlineExceeded, ForewordError, ReplicaFailed
from foreword.serving.router import asked as asking
from foreword.serving.router import disaggregated, faults, seam, tenancy
from foreword.serving.router.answer import Answer
from foreword.serving.router.asked import Asked
from foreword.serving.router.decisions import header
from foreword.serving.router.pool import Pool, Ticket
from foreword.serving.router.prompts import Prompt
from foreword.serving.router.replicas import LOST, Live, Upstream, clock
from foreword.serving.router.service import Router
from foreword.serving.router.sse import Event, Events
from foreword.serving.tenants import Tenant

logger = logging.getLogger(__name__)

MOVED: Final = "foreword.moved"
_LONGEST_PAUSE: Final = 5.0
_MOST_REFUSALS: Final = 100
# What a completion without `max_tokens` has, in Foreword and vLLM.
_COMPLETION_TOKENS: Final = 16
_RETRIED: Final = frozenset((500, 502, 503, 504))
_END_SECONDS: Final = 0.5


class ClientGone(Exception):
    """Nobody reads the answer any more."""


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
        """Raises what aiohttp raises."""
        url = ticket.upstream.url + (path or self.asked.path)
        return await self.router.session.post(
            url, data=body, headers=self.headers(ticket.upstream), allow_redirects=False
        )

    def lost(self, ticket: Ticket, reason: str, *, certain: bool = False, at: Upstream | None = None) -> None:
        """A replica failed this request: the ticket's, or the one `at` which the answer had moved."""
        upstream = at or ticket.upstream
        self.attempts += 1
        self.avoid.append(upstream.url)
        self.why = f"after {upstream.url} failed ({reason})"
        logger.warning("request %s: %s failed: %s", self.request_id, upstream.url, reason)
        self.pool.failed(ticket)
        self.router.failed(upstream, reason, certain=certain)

    def may_try_again(self) -> bool:
        return self.attempts < self.router.config.max_attempts

    def refused(self, ticket: Ticket, response: aiohttp.ClientResponse) -> None:
        """A replica has too much to do: it is left alone for as long as it says, and the request waits."""
        self.refusals += 1
        self.pool.failed(ticket)
        try:
            pause = float(response.headers.get("retry-after", "1"))
        except ValueError:
            pause = 1.0
        self.why = f"after {ticket.upstream.url} had no room"
        self.router.paused(ticket.upstream, min(max(pause, 0.1), _LONGEST_PAUSE))


async def handle(router: Router, request: web.Request, interface: asking.Interface) -> web.StreamResponse:
    """`/v1/completions` or `/v1/chat/completions`. Raises ForewordError before anything was sent."""
    arrived = clock()
    tenant = router.callers.tenant(request.headers.get("authorization"))
    request["tenant"] = tenant.name
    asked = asking.read(interface, await request.read())
    pool = router.pool(asked.model)
    deadline = arrived + _time_limit(request, router.config.request_timeout)
    try:
        async with asyncio.timeout_at(asyncio.get_running_loop().time() + deadline - clock()) as limit:
            prompt = await router.prompts.read(asked, pool.able) if pool.compares else Prompt((), "unread")
            session = asked.session(request.headers.get("x-session-id"))
            named = f"{tenant.name}/{session}" if session is not None else None
            call = Call(router, request, asked, tenant, request["id"], pool, prompt, named, deadline, arrived)
            return await (_streamed(call) if asked.streams else _whole(call))
    except TimeoutError:
        if not limit.expired():
            raise
        raise DeadlineExceeded("The request's time is over before it was answered") from None


def _time_limit(request: web.Request, most: float) -> float:
    """Seconds that a request may take: the client may ask for less than the router allows."""
    try:
        wanted = float(request.headers.get("x-request-timeout", most))
    except ValueError:
        return most
    return min(wanted, most) if wanted > 0 else most


# Answers that are not streamed


async def _whole(call: Call) -> web.StreamResponse:
    while True:
        ticket = await call.place()
        response: aiohttp.ClientResponse | None = None
        try:
            body = await disaggregated.body(call, ticket)
            call.pool.guess_first_token(ticket)
            response = await call.send(ticket, body)
            data = await response.read()
        except LOST as error:
            call.lost(ticket, _sentence(error), certain=_is_certain(error))
            if not call.may_try_again():
                raise ReplicaFailed(
                    f"The request failed on {call.attempts} replicas; the last: {_sentence(error)}"
                ) from None
            call.router.metrics.retry()
            continue
        except BaseException:
            if response is not None:
                response.close()
            call.pool.failed(ticket)
            raise
        if _again(call, ticket, response, data):
            continue
        return _answered(call, ticket, response, data)


def _again(call: Call, ticket: Ticket, response: aiohttp.ClientResponse, data: bytes) -> bool:
    """Whether a refusal or a failure is a reason to ask another replica. If so the ticket is ended."""
    status = response.status
    if status == 429 or (status == 503 and _code(data) == "queue_full"):
        if call.refusals < _MOST_REFUSALS:
            call.refused(ticket, response)
            return True
    elif status in _RETRIED and call.attempts + 1 < call.router.config.max_attempts:
        call.lost(ticket, f"it says {status}{_said(data)}", certain=status == 503)
        call.router.metrics.retry()
        return True
    return False


def _answered(call: Call, ticket: Ticket, response: aiohttp.ClientResponse, data: bytes) -> web.Response:
    if response.status == 200:
        usage = _usage(data)
        call.pool.finished(ticket, *usage)
        call.router.succeeded(ticket.upstream)
    else:
        call.pool.failed(ticket)
        if response.status in _RETRIED:
            call.router.failed(ticket.upstream, f"it says {response.status}{_said(data)}")
        elif response.status < 500:
            call.router.succeeded(ticket.upstream)
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


# Streams


async def _streamed(call: Call) -> web.StreamResponse:
    stream = _Stream(call)
    try:
        return await stream.run()
    except ClientGone:
        raise asyncio.CancelledError from None
    except asyncio.CancelledError:
        if stream.out is None or not _time_is_over(call):
            raise
        # The deadline, not the client: it learns why its stream ends.
        await stream.fail(DeadlineExceeded("The request's time is over"))
        return stream.out


def _time_is_over(call: Call) -> bool:
    return clock() >= call.deadline - 0.001


class _Stream:
    """A streamed answer: one client, one replica after the other."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.answer = Answer(call.asked)
        self.out: web.StreamResponse | None = None
        self._path = call.asked.path
        self._body: bytes | None = None
        self._prompt: Prompt | None = None
        # Where the answer comes from now: not where it was sent, once it has moved.
        self._at: Upstream | None = None

    async def run(self) -> web.StreamResponse:
        call = self.call
        while True:
            try:
                ticket = await call.place(self._prompt)
            except ForewordError as error:
                return await self._end_with(error)
            try:
                response = await self._open(ticket)
                if response is None:
                    continue
                if isinstance(response, web.StreamResponse):
                    return response
                await self._relay(ticket, response)
            except ClientGone:
                call.pool.failed(ticket)
                raise
            except (*LOST, ReplicaFailed) as error:
                # aiohttp's errors about the client's connection are ClientGone by now.
                call.lost(ticket, _sentence(error), certain=_is_certain(error), at=self._at)
                self._at = None
                try:
                    finished = await self._prepare_next(error)
                except ForewordError as fatal:
                    return await self._end_with(fatal)
                if finished:
                    return await self._close()
                continue
            except BaseException:
                call.pool.failed(ticket)
                raise
            self._note_end(ticket)
            return await self._close()

    async def _open(self, ticket: Ticket) -> aiohttp.ClientResponse | web.StreamResponse | None:
        """Send it. A response that streams, the whole response of another kind, or None: the next replica, please."""
        call = self.call
        body = self._body if self._body is not None else await disaggregated.body(call, ticket)
        if self._body is not None:
            body = self._with_salt(ticket.upstream, self._body)
        response = await call.send(ticket, body, self._path)
        if response.status == 200 and response.content_type == "text/event-stream":
            return response
        data = await response.read()
        if _again(call, ticket, response, data):
            return None
        if self.out is not None:
            raise ReplicaFailed(f"it says {response.status}{_said(data)}")
        return _answered(call, ticket, response, data)

    def _with_salt(self, upstream: Upstream, body: bytes) -> bytes:
        if upstream.kind != "vllm" or not self.call.salt:
            return body
        return msgspec.json.encode({**msgspec.json.decode(body), "cache_salt": self.call.salt})

    async def _relay(self, ticket: Ticket, response: aiohttp.ClientResponse) -> None:
        """Events from the replica to the client, to the end. Raises what a lost replica raises, or ClientGone."""
        async with aclosing(self._events(ticket, response)) as events:
            async for batch in events:
                answer = self.answer
                pieces: list[bytes] = []
                try:
                    for event in batch:
                        if (piece := answer.take(event)) is not None:
                            pieces.append(piece)
                finally:
                    # Also what came before an event that ends it: it counts as sent.
                    if answer.begun and not ticket.begun:
                        self._begin(ticket)
                    if pieces:
                        await self._write(response, b"".join(pieces))
                if answer.cut:
                    break
                if answer.done:
                    await _read_to_end(events)
                    return
        end = self.answer.end()
        if end is not None:
            await self._write(response, end)

    async def _events(self, ticket: Ticket, response: aiohttp.ClientResponse) -> AsyncGenerator[list[Event], None]:
        """What a replica sends, and what the server sends to which it moves the answer."""
        while True:
            moved: Event | None = None
            live, upstream = Live(response, clock(), self.answer.begun), self._at or ticket.upstream
            upstream.lives.add(live)
            try:
                parser = Events()
                async for piece in response.content.iter_any():
                    live.last = clock()
                    batch = parser.feed(piece)
                    moved = next((event for event in batch if event.name == MOVED), None)
                    if moved is not None:
                        batch = batch[: batch.index(moved)]
                    if batch:
                        yield batch
                        live.begun = self.answer.begun
                    if moved is not None:
                        break
                if live.aborted:
                    raise ReplicaFailed(live.aborted)
            except LOST as error:
                raise ReplicaFailed(live.aborted or _sentence(error)) from error
            finally:
                upstream.lives.discard(live)
                if self.answer.done and moved is None:
                    response.release()
                else:
                    response.close()
            if moved is None:
                return
            response = await self._follow(moved)

    async def _follow(self, moved: Event) -> aiohttp.ClientResponse:
        """Go on reading where the answer went. Raises ReplicaFailed."""
        call = self.call
        try:
            said = json.loads(moved.data)
            there = call.router.upstreams.get(str(said["to"]).rstrip("/"))
            name, count = str(said["request_id"]), int(said["tokens"])
        except (ValueError, KeyError, TypeError):
            raise ReplicaFailed("the replica moved the answer without saying where to") from None
        if there is None:
            raise ReplicaFailed(f"the answer moved to {said['to']}, which is not one of the router's replicas")
        url = f"{there.url}/v1/requests/{quote(name, safe='')}/stream?from={count}"
        headers = call.headers(there)
        try:
            response = await call.router.session.get(URL(url, encoded=True), headers=headers)
        except LOST as error:
            raise ReplicaFailed(f"the answer moved to {there.url}: {_sentence(error)}") from None
        if response.status != 200:
            data = await response.read()
            raise ReplicaFailed(f"the answer moved to {there.url}, which says {response.status}{_said(data)}")
        self._at = there
        call.router.metrics.moved()
        logger.info("request %s moved to %s", call.request_id, there.url)
        return response

    def _begin(self, ticket: Ticket) -> None:
        call = self.call
        ticket.begun = True
        call.pool.first_token(ticket)
        call.router.metrics.first_token(ticket.upstream.url, clock() - call.arrived)

    def _note_end(self, ticket: Ticket) -> None:
        answer, call = self.answer, self.call
        count = answer.output_tokens if answer.seam is None else None
        cached = answer.cached_tokens if answer.seam is None else None
        call.pool.finished(ticket, cached, count, answer.prompt_tokens)
        call.router.succeeded(ticket.upstream)

    # The next replica

    async def _prepare_next(self, error: BaseException) -> bool:
        """What the next replica is asked. True if the answer was complete but for its end. Raises ForewordError."""
        call, answer = self.call, self.answer
        if answer.done:
            return True
        if answer.finish_reason is not None:
            await self._write(None, answer.end() or b"")
            return True
        if not call.may_try_again():
            raise ReplicaFailed(f"The request failed on {call.attempts} replicas; the last: {_sentence(error)}")
        if not answer.begun:
            answer.begin_again()
            call.router.metrics.retry()
            return False
        try:
            return await self._continue(error)
        except ReplicaFailed as problem:
            call.router.metrics.continued("impossible")
            raise ReplicaFailed(
                f"The replica that answered is gone ({_sentence(error)}), and no other can go on exactly there: "
                f"{problem.message}"
            ) from None

    async def _continue(self, error: BaseException) -> bool:
        call, answer = self.call, self.answer
        reason = seam.why_not(call.asked)
        if reason is None and not answer.continues:
            reason = "its tokens are not known" if answer.plain else "part of it is no plain text"
        if reason is not None:
            raise ReplicaFailed(reason)
        known = await self._known()
        joint = seam.Seam(call.asked, known)
        ended = answer.go_on(joint, known)
        if ended is None:
            longest = max(
                (one.facts.max_model_len or 0 for one in call.pool.upstreams.values() if one.facts), default=0
            )
            default = _COMPLETION_TOKENS if call.asked.interface == "completion" else None
            body = seam.continuation(call.asked, answer.prompt_ids, known, longest or None, default)
            if body["max_tokens"] == 0:
                ended = answer.finish(joint.flush(), "length")
        if ended is not None:
            await self._write(None, ended)
            return True
        self._path, self._body = asking.PATHS["completion"], msgspec.json.encode(body)
        self._prompt = Prompt(body["prompt"], "client") if call.pool.compares else call.prompt
        call.router.metrics.continued("continued")
        logger.info("request %s goes on after %d tokens", call.request_id, len(known.tokens))
        return False

    async def _known(self) -> seam.Known:
        """What is certain of the answer. Raises ReplicaFailed."""
        answer = self.answer
        sent, tokens = answer.sent_text(), list(answer.tokens)
        if answer.settled and not self.call.asked.body.get("stop"):
            return seam.Known(tokens, sent, sent, max(answer.entries - len(tokens), 0))
        count, text = await self.call.router.prompts.text_of(
            answer.prompt_ids, tokens, self.call.pool.able(self.call.avoid)
        )
        return seam.Known(tokens[:count], text, sent, max(answer.entries - count, 0))

    # The client

    async def _write(self, response: aiohttp.ClientResponse | None, data: bytes) -> None:
        try:
            if self.out is None:
                self.out = await self._prepare(response)
            await self.out.write(data)
        except (ConnectionError, aiohttp.ClientConnectionError) as error:
            raise ClientGone from error

    async def _prepare(self, response: aiohttp.ClientResponse | None) -> web.StreamResponse:
        given: Mapping[str, str] = response.headers if response is not None else {}
        headers = tenancy.returned(given)
        headers["x-foreword-route"], headers["x-request-id"] = header(self.call.words), self.call.request_id
        headers["content-type"], headers["cache-control"] = "text/event-stream; charset=utf-8", "no-cache"
        headers["x-accel-buffering"] = "no"
        out = web.StreamResponse(headers=headers)
        await out.prepare(self.call.request)
        return out

    async def _close(self) -> web.StreamResponse:
        if self.out is None:
            raise ReplicaFailed("The replica's answer was empty")
        try:
            await self.out.write_eof()
        except (ConnectionError, aiohttp.ClientConnectionError) as error:
            raise ClientGone from error
        return self.out

    async def _end_with(self, error: ForewordError) -> web.StreamResponse:
        """An error before anything was sent has a status of its own; one after it is an event and ends the stream."""
        if self.out is None:
            raise error
        await self.fail(error)
        return self.out

    async def fail(self, error: ForewordError) -> None:
        if self.out is None:
            raise error
        logger.warning("request %s ends with an error: %s", self.call.request_id, error.message)
        await self._write(None, b"data: " + msgspec.json.encode(faults.body_of(error)) + b"\n\n")
        await self._close()


async def _read_to_end(events: AsyncGenerator[list[Event], None]) -> None:
    """The end of the response follows the last event; a connection that has seen it can be used again."""
    with contextlib.suppress(ReplicaFailed, TimeoutError):
        async with asyncio.timeout(_END_SECONDS):
            async for _ in events:
                pass


def _sentence(error: BaseException) -> str:
    if isinstance(error, ForewordError):
        return error.message
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot connect: {error.strerror or error}"
    if isinstance(error, asyncio.TimeoutError):
        return "no answer in time"
    return f"the connection broke ({type(error).__name__})"


def _is_certain(error: BaseException) -> bool:
    return isinstance(error, aiohttp.ClientConnectorError)


def _code(data: bytes) -> object:
    try:
        found = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return None
    error = found.get("error") if isinstance(found, dict) else None
    return error.get("code") if isinstance(error, dict) else None


def _said(data: bytes) -> str:
    """What an error response says, shortened."""
    try:
        found: Any = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return ""
    error = found.get("error") if isinstance(found, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return f": {str(message)[:200]}" if message else ""
