"""Run jobs: admission, the engine's deltas, relayed deltas of migrated requests, and answers, whole or streamed."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext
from typing import TYPE_CHECKING, Any

from foreword.api.dialects.conversations import conversation
from foreword.api.dialects.responses_writer import ResponsesWriter
from foreword.api.dialects.writer import to_json
from foreword.engine.request import Delta, Request
from foreword.errors import ShuttingDown
from foreword.server import relay, stream
from foreword.server.endpoint import ServerContext
from foreword.server.job import Job

if TYPE_CHECKING:
    from foreword.entrypoints.async_engine import AsyncEngine

PromptDelta = tuple[int, Delta]


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
        context.misses.begin(job, time.monotonic())
        yield None
        try:
            async with aclosing(_deltas(context, job, engine, requests)) as deltas:
                async for prompt, delta in deltas:
                    job.progress[prompt].note(delta, time.monotonic())
                    context.misses.note(engine, job, prompt, delta)
                    _check(delta)
                    yield prompt, delta
        finally:
            job.charge(job.prompt_tokens + job.output_tokens)
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
    sources = [engine.follow(one.id) if job.migrated_here else engine.generate(one) for one in requests]
    async with aclosing(stream.merge(sources)) as deltas:
        async for prompt, delta in deltas:
            if delta.moved is not None:
                job.departure = delta.moved
            if delta.moved is None or job.client_follows:
                yield prompt, delta
                continue
            async with aclosing(relay.follow(delta.moved, job.caller, context.admission.stopped)) as rest:
                async for relayed in rest:
                    yield prompt, relayed


def _note_hits(engine: AsyncEngine, job: Job) -> None:
    assert job.request.prefix is not None
    for prompt in job.progress:
        engine.prefixes.note_hit(job.request.prefix, prompt.cached_tokens, salt=job.owner)


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
        context.responses.add(job.owner, job.head.id, messages, to_json(writer.whole(job.usage(), job.cache_report())))


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
                yield relay.moved_event(delta.moved)
                return
            if not started:
                started = True
                yield b"".join(job.writer.start(job.usage()))
            report = job.cache_report() if delta.finish_reason else None
            if written := job.writer.events(job.read(prompt, delta), report):
                yield b"".join(written)
    _store(context, job)
    yield job.writer.end(job.usage(), job.cache_report())
