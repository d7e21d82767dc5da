"""Endpoints that generate text: one pipeline for all dialects, from a request to its answer, whole or streamed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import structs

from foreword.api import stored_responses
from foreword.api.dialects import messages
from foreword.api.dialects.conversations import continued, conversation
from foreword.api.dialects.dialect import Dialect
from foreword.api.dialects.registry import DIALECTS
from foreword.api.dialects.responses_writer import ResponsesWriter
from foreword.api.dialects.writer import to_json
from foreword.api.front import Call, Handler, Reply
from foreword.api.request import GenerateRequest
from foreword.api.routes import ClientQuery, JsonBody, Meter, Right, Routes
from foreword.engine.request import Delta, Request
from foreword.request_errors import ShuttingDown
from foreword.server import migration
from foreword.server.endpoint import ServerContext, check_model, send_events
from foreword.server.job import Caller, Job
from foreword.server.prepare import conversation_size, count_prompt, make_job

if TYPE_CHECKING:
    from foreword.entrypoints.async_engine import AsyncEngine

T = TypeVar("T")
PromptDelta = tuple[int, Delta]
# Descriptions that `/openapi.json` shows.
_DESCRIPTIONS = {
    "chat": "Answer a conversation, as OpenAI's chat completions.",
    "completions": "Continue one or more prompts.",
    "responses": "Answer a conversation, as OpenAI's responses.",
    "messages": "Answer a conversation, as Anthropic's messages.",
}


def add_routes(routes: Routes[Handler], context: ServerContext) -> None:
    for dialect in DIALECTS.values():
        routes.add(
            "POST",
            dialect.path,
            right=Right.TENANT,
            meter=Meter.TOKENS,
            body=JsonBody(dialect.parse, dialect.body),
            query=ClientQuery,
            tag="generate",
            errors=dialect.error_response,
            outcome=dialect.name,
        )(_endpoint(context, dialect))

    stored_responses.add_routes(routes, context.responses)

    @routes.add(
        "POST",
        "/v1/messages/count_tokens",
        right=Right.TENANT,
        meter=Meter.REQUEST,
        body=JsonBody(messages.parse_count, messages.MessagesBody),
        query=ClientQuery,
        tag="generate",
        errors=DIALECTS["messages"].error_response,
    )
    async def count_tokens(call: Call) -> dict[str, Any]:
        """Count the tokens of a conversation without answering it."""
        engine, parsed = context.admission.engine(), call.body
        check_model(engine, parsed.model)
        size = max(len(call.raw), conversation_size(parsed))
        return {"input_tokens": await context.work.run(size, count_prompt, engine, call.tenant, parsed)}


def _endpoint(context: ServerContext, dialect: Dialect) -> Handler:
    async def generate(call: Call) -> Reply:
        job = await _make_job(context, call, call.body)
        job.charge = call.charge
        call.first_token_at = job.first_token_at
        call.release_body()
        if not job.streams:
            return await answer(context, job)
        await send_events(call, events(context, job), job.writer.error, context.config.stream_keep_alive)
        return None

    generate.__name__ = dialect.name
    generate.__doc__ = _DESCRIPTIONS[dialect.name]
    return generate


async def _make_job(context: ServerContext, call: Call, parsed: GenerateRequest) -> Job:
    if parsed.previous is not None:
        parsed = continued(parsed, context.responses.get(call.tenant.salt, parsed.previous).messages)
    if parsed.session is None and (session := call.headers.get("x-session-id")):
        parsed = structs.replace(parsed, session=session)
    return await make_job(context, call.tenant, parsed, call.id, Caller.of(call.headers), len(call.raw))


async def run(context: ServerContext, job: Job) -> AsyncGenerator[PromptDelta | None, None]:
    """None once the job is admitted, then the deltas of all prompts as they arrive, each with its prompt's number. Raises
    QueueFull before the first.

    If the request migrates and the caller reconnects by itself, the last delta says where to (`moved`). Otherwise this server
    fetches the other deltas from there.
    """
    sequences = sum(request.params.n for request in job.requests)
    with (
        _traced(context, job),
        context.admission.admit(sequences, migrated=job.migrated_here) as engine,
        context.recent.record(job) as requests,
        context.active.track(job),
    ):
        requests = context.misses.begin(job, requests, time.monotonic())
        yield None
        try:
            async with aclosing(_deltas(context, job, engine, requests)) as deltas:
                async for prompt, delta in deltas:
                    job.progress[prompt].note(delta, time.monotonic())
                    context.misses.note(engine, job, prompt, delta)
                    _check(delta)
                    yield prompt, delta
        finally:
            job.charge(job.charged(engine.info.fingerprint))
        context.misses.answered(job)
        if job.request.prefix is not None:
            _note_hits(engine, job)


def _traced(context: ServerContext, job: Job) -> AbstractContextManager[None]:
    if context.traces is None:
        return nullcontext()
    attributes = {"gen_ai.request.id": job.head.id, "gen_ai.response.model": job.head.model}
    return context.traces.request(job.caller.headers, attributes, {one.id: len(one.tokens) for one in job.requests})


def _check(delta: Delta) -> None:
    if delta.finish_reason == "error":
        raise delta.failure
    if delta.finish_reason == "abort":
        raise ShuttingDown("The server is shutting down and ended the request before its end")


async def _deltas(
    context: ServerContext, job: Job, engine: AsyncEngine, requests: Sequence[Request]
) -> AsyncGenerator[PromptDelta, None]:
    """The engine's deltas, then those of the servers to which the request migrates."""
    sources = [
        engine.follow(one.id, noted.unread) if job.migrated_here else engine.generate(one, noted.unread)
        for one, noted in zip(requests, job.progress, strict=True)
    ]
    async with aclosing(merge(sources, lambda number, delta: job.progress[number].unread(delta))) as deltas:
        async for prompt, delta in deltas:
            if delta.moved is not None:
                job.departure = delta.moved
            if delta.moved is None or job.client_follows:
                yield prompt, delta
                continue
            async with aclosing(migration.follow(delta.moved, job.caller, context.admission.stopped)) as rest:
                async for relayed in rest:
                    yield prompt, relayed


def _note_hits(engine: AsyncEngine, job: Job) -> None:
    assert job.request.prefix is not None
    for prompt in job.progress[: job.prompts]:
        engine.prefixes.service.book.note_hit(job.request.prefix, prompt.cached_tokens, salt=job.owner)


async def answer(context: ServerContext, job: Job) -> dict[str, Any]:
    """Run a job to its end and return the whole answer. Raises ForewordError."""
    async with aclosing(run(context, job)) as deltas:
        async for item in deltas:
            if item is not None:
                job.writer.add(job.read(*item))
    _store(context, job)
    return job.writer.whole(job.usage(), job.cache_report())


def _store(context: ServerContext, job: Job) -> None:
    """Keep the response, so that the client can continue it. Its events refer to it, so it is kept before they end."""
    writer = job.writer
    if job.request.dialect == "responses" and job.request.store and isinstance(writer, ResponsesWriter):
        messages = conversation(job.request, writer.choice(0))
        body = to_json(writer.whole(job.usage(), job.cache_report()))
        context.responses.add(job.owner, job.head.id, messages, body, job.arrived)


async def events(context: ServerContext, job: Job) -> AsyncGenerator[bytes, None]:
    """Run a job and yield its answer as server-sent events; first an empty one, when it is admitted. Raises ForewordError, also
    after some events."""
    started = job.resumed is not None
    async with aclosing(run(context, job)) as deltas:
        async for item in deltas:
            if item is None:
                yield b""
                continue
            prompt, delta = item
            if delta.moved is not None:
                yield migration.moved_event(delta.moved)
                return
            if not started:
                started = True
                yield b"".join(job.writer.start(job.usage()))
            report = job.cache_report() if delta.finish_reason else None
            if written := job.writer.events(job.read(prompt, delta), report):
                yield b"".join(written)
    _store(context, job)
    yield job.writer.end(job.usage(), job.cache_report())


async def merge(
    streams: Sequence[AsyncGenerator[T, None]], unread: Callable[[int, T], None] = lambda number, item: None
) -> AsyncGenerator[tuple[int, T], None]:
    """The items of all streams as they arrive, each with its stream's number. When this generator is closed, `unread` gets
    those that have arrived since.

    Raises the first error of a stream. Every stream is closed before this generator returns.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as items:
            async for item in items:
                yield 0, item
        return
    arrived: asyncio.Queue[tuple[int, T] | asyncio.Task[None]] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(number, stream, arrived)) for number, stream in enumerate(streams)]
    for task in tasks:
        task.add_done_callback(arrived.put_nowait)
    try:
        unfinished = len(tasks)
        while unfinished:
            entry = await arrived.get()
            if isinstance(entry, asyncio.Task):
                entry.result()
                unfinished -= 1
            else:
                yield entry
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while not arrived.empty():
            if not isinstance(entry := arrived.get_nowait(), asyncio.Task):
                unread(*entry)


async def _pump(number: int, stream: AsyncGenerator[T, None], into: asyncio.Queue[tuple[int, T] | Any]) -> None:
    async with aclosing(stream) as items:
        async for item in items:
            into.put_nowait((number, item))
