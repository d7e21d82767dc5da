"""A streamed answer: one client, one replica after the other."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Mapping
from typing import Final
from urllib.parse import quote

import aiohttp
import msgspec
from aiohttp import web
from yarl import URL

from foreword.api.errors import error_body
from foreword.api.sse import EventParser, ServerSentEvent, encode
from foreword.errors import DeadlineExceeded, ForewordError, ReplicaFailed
from foreword.router import auth as tenancy
from foreword.router import client_request as asking
from foreword.router import continuation as seam
from foreword.router import disaggregated
from foreword.router.attempt import Call, again, answered, is_certain, said, sentence
from foreword.router.decisions import header
from foreword.router.pool import Ticket
from foreword.router.prompts import Prompt
from foreword.router.replicas import LOST, Live, Upstream, clock
from foreword.router.response_stream import Answer

logger = logging.getLogger(__name__)

MOVED: Final = "foreword.moved"
# What a completion without `max_tokens` has, in Foreword and vLLM.
_COMPLETION_TOKENS: Final = 16
_END_SECONDS: Final = 0.5


class ClientGone(Exception):
    """Nobody reads the answer any more."""


async def streamed(call: Call) -> web.StreamResponse:
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
                call.lost(ticket, sentence(error), certain=is_certain(error), at=self._at)
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
        if again(call, ticket, response, data):
            return None
        if self.out is not None:
            raise ReplicaFailed(f"it says {response.status}{said(data)}")
        return answered(call, ticket, response, data)

    def _with_salt(self, upstream: Upstream, body: bytes) -> bytes:
        if upstream.kind != "vllm" or not self.call.salt:
            return body
        return msgspec.json.encode({**msgspec.json.decode(body), "cache_salt": self.call.salt})

    async def _relay(self, ticket: Ticket, response: aiohttp.ClientResponse) -> None:
        """Events from the replica to the client, to the end. Raises what a lost replica raises, or ClientGone."""
        while (moved := await self._pass_on(ticket, response)) is not None:
            response = await self._follow(moved)
        end = self.answer.end()
        if end is not None:
            await self._write(response, end)

    async def _pass_on(self, ticket: Ticket, response: aiohttp.ClientResponse) -> ServerSentEvent | None:
        """One server's events. Returns the one by which it moves the answer, if it does. Raises ReplicaFailed or ClientGone.

        A coroutine and not a generator, with little between reading and writing: this is what every token costs.
        """
        answer, upstream = self.answer, self._at or ticket.upstream
        live = Live(response.close, clock(), answer.begun)
        upstream.lives.add(live)
        events, read, moved = EventParser(), response.content.readany, None
        try:
            while not (answer.done or answer.cut or moved):
                try:
                    piece = await read()
                except LOST as error:
                    raise ReplicaFailed(live.aborted or sentence(error)) from error
                if not piece:
                    if live.aborted:
                        raise ReplicaFailed(live.aborted)
                    return None
                live.last = clock()
                moved = await self._take(ticket, response, events.feed(piece))
                live.begun = answer.begun
            if answer.done and moved is None:
                await _read_to_end(response)
        finally:
            upstream.lives.discard(live)
            if answer.done and moved is None:
                response.release()
            else:
                response.close()
        return moved

    async def _take(
        self, ticket: Ticket, response: aiohttp.ClientResponse, batch: list[ServerSentEvent]
    ) -> ServerSentEvent | None:
        """What came at once, to the client at once. Returns the event by which the answer moves; nothing follows it."""
        answer, pieces = self.answer, list[bytes]()
        try:
            for event in batch:
                if event.name == MOVED:
                    return event
                if (piece := answer.take(event)) is not None:
                    pieces.append(piece)
                if answer.done or answer.cut:
                    break
        finally:
            # Also what came before an event that ends it: it counts as sent.
            if answer.begun and not ticket.begun:
                self._begin(ticket)
            if pieces:
                await self._write(response, pieces[0] if len(pieces) == 1 else b"".join(pieces))
        return None

    async def _follow(self, moved: ServerSentEvent) -> aiohttp.ClientResponse:
        """Go on reading where the answer went. Raises ReplicaFailed."""
        call = self.call
        try:
            told = json.loads(moved.data)
            there = call.router.upstreams.get(str(told["to"]).rstrip("/"))
            name, count = str(told["request_id"]), int(told["tokens"])
        except (ValueError, KeyError, TypeError):
            raise ReplicaFailed("the replica moved the answer without saying where to") from None
        if there is None:
            raise ReplicaFailed(f"the answer moved to {told['to']}, which is not one of the router's replicas")
        url = f"{there.url}/v1/requests/{quote(name, safe='')}/stream?from={count}"
        headers = call.headers(there)
        try:
            response = await call.router.session.get(URL(url, encoded=True), headers=headers)
        except LOST as error:
            raise ReplicaFailed(f"the answer moved to {there.url}: {sentence(error)}") from None
        if response.status != 200:
            data = await response.read()
            raise ReplicaFailed(f"the answer moved to {there.url}, which says {response.status}{said(data)}")
        self._at = there
        call.router.metrics.moved()
        logger.info("request %s moved to %s", call.request_id, there.url)
        return response

    def _begin(self, ticket: Ticket) -> None:
        call = self.call
        ticket.begun = True
        if ticket.upstream.trying and self._at is None:
            # It is well again; the others need not wait for the end of this answer.
            ticket.upstream.trying = False
            call.router.succeeded(ticket.upstream)
            call.router.refresh(ticket.upstream)
        call.pool.first_token(ticket)
        call.router.metrics.first_token(ticket.upstream.url, clock() - call.arrived)

    def _note_end(self, ticket: Ticket) -> None:
        answer, call = self.answer, self.call
        count = answer.output_tokens if answer.seam is None else None
        cached = answer.cached_tokens if answer.seam is None else None
        call.pool.finished(ticket, cached, count, answer.prompt_tokens)
        call.succeeded(ticket)

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
            raise ReplicaFailed(f"The request failed on {call.attempts} replicas; the last: {sentence(error)}")
        if not answer.begun:
            answer.begin_again()
            call.router.metrics.retry()
            return False
        try:
            return await self._continue(error)
        except ReplicaFailed as problem:
            call.router.metrics.continued("impossible")
            raise ReplicaFailed(
                f"The replica that answered is gone ({sentence(error)}), and no other can go on exactly there: "
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
        able = self.call.pool.able(self.call.avoid)
        count, text = await self.call.router.prompts.text_of(answer.prompt_ids, tokens, sent, able)
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
        await self._write(None, encode(error_body(error)))
        await self._close()


async def _read_to_end(response: aiohttp.ClientResponse) -> None:
    """The end of the response follows the last event; a connection that has seen it can be used again."""
    with contextlib.suppress(*LOST):
        async with asyncio.timeout(_END_SECONDS):
            while await response.content.readany():
                pass
