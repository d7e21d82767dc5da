"""OpenAI's completions and chat: bodies become the engine's requests, and its deltas become answers.

A `Job` is one HTTP request on its way through: its prompts as engine requests, and a `Shape` that knows how its answer
is written. Choice `prompt * n + index` is sequence `index` of prompt `prompt`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from foreword.api.schemas import ChatRequest, CompletionRequest, Prompt, SamplingBody
from foreword.api.tenants import Tenant
from foreword.engine.request import Delta, Request, SamplingParams, TokenLogprob
from foreword.errors import BadRequest, EngineFailed, ShuttingDown
from foreword.prefixes.tokens import prefixed_chat, prefixed_prompt
from foreword.server import relay, stream
from foreword.server.endpoint import Front, check_length, check_model, check_token_ids
from foreword.server.job import ChatShape, CompletionShape, Job, Shape, Tally

if TYPE_CHECKING:
    from foreword.entrypoints.async_engine import AsyncEngine

DEFAULT_COMPLETION_TOKENS = 16

_numbers = itertools.count()


# Bodies to jobs


async def completion_job(
    front: Front, engine: AsyncEngine, tenant: Tenant, body: CompletionRequest, request_id: str
) -> Job:
    """Raises BadRequest, PromptTooLong, UnknownModel or UnknownPrefix; nothing runs yet."""
    check_model(engine, body.model)
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    params = _params(engine, body, max_tokens, body.logprobs)
    front.gate.check_room(len(body.prompt) * params.n)
    if body.prefix is not None:
        await engine.prefixes.refresh(tenant.salt, body.prefix)
    prompts = [await front.tokenize(_completion_tokens, engine, tenant, body, prompt) for prompt in body.prompt]
    echoes = [await front.tokenize(_echo, engine, body, prompt) for prompt in body.prompt]
    shapes = [CompletionShape(engine.tokenizer, echo) for echo in echoes for _ in range(params.n)]
    return _job(front, engine, tenant, body, params, f"cmpl-{request_id}", prompts, shapes)


async def chat_job(front: Front, engine: AsyncEngine, tenant: Tenant, body: ChatRequest, request_id: str) -> Job:
    """Raises BadRequest, PromptTooLong, UnknownModel or UnknownPrefix; nothing runs yet."""
    check_model(engine, body.model)
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params = _params(engine, body, max_tokens, (body.top_logprobs or 0) if body.logprobs else None)
    front.gate.check_room(params.n)
    if body.prefix is not None:
        await engine.prefixes.refresh(tenant.salt, body.prefix)
    prompt = await front.tokenize(_chat_tokens, engine, tenant, body)
    shapes = [ChatShape(engine.tokenizer) for _ in range(params.n)]
    return _job(front, engine, tenant, body, params, f"chatcmpl-{request_id}", [prompt], shapes)


def _job(
    front: Front,
    engine: AsyncEngine,
    tenant: Tenant,
    body: SamplingBody,
    params: SamplingParams,
    answer_id: str,
    prompts: Sequence[Sequence[int]],
    shapes: Sequence[Shape],
) -> Job:
    # A client may send the same X-Request-Id twice at a time; the engine's ids must differ all the same.
    report, prefill = bool(body.cache_report), _prefill(front, engine, tenant, body)
    requests = tuple(
        Request(f"{answer_id}:{next(_numbers)}", tuple(tokens), params, tenant.salt, 0, report, prefill)
        for tokens in prompts
    )
    for request in requests:
        engine.validate(request)
    head = {
        "id": answer_id,
        "object": shapes[0].chunk_object if body.stream else shapes[0].whole_object,
        "created": int(time.time()),
        "model": engine.info.name,
        "system_fingerprint": f"fp_{engine.info.fingerprint[:12]}",
    }
    options = body.stream_options
    include_usage = bool(options and options.include_usage)
    shows_ids = bool(body.return_token_ids)
    return Job(head, requests, tuple(shapes), bool(body.stream), include_usage, body.prefix, shows_ids)


def _prefill(front: Front, engine: AsyncEngine, tenant: Tenant, body: SamplingBody) -> str:
    """Which instance computes the prompt; nobody else's business where this one has no door for transfers. Raises BadRequest,
    Forbidden for an address that a client may not send this server to; a router names its own replicas."""
    wanted = body.kv_transfer_params.prefill if body.kv_transfer_params is not None else None
    instance = engine.instance
    if not wanted or instance is None or instance.role == "prefill":
        return ""
    if tenant.source != "router":
        front.peers.check_address(wanted, "kv_transfer_params.prefill")
    return wanted


def _params(
    engine: AsyncEngine, body: SamplingBody, max_tokens: int | None, alternatives: int | None
) -> SamplingParams:
    stop_token_ids = tuple(body.stop_token_ids or ())
    logit_bias = dict(body.logit_bias or {})
    check_token_ids(engine, stop_token_ids, "stop_token_ids")
    check_token_ids(engine, tuple(logit_bias), "logit_bias")
    given: dict[str, Any] = {
        "max_tokens": max_tokens,
        "min_tokens": body.min_tokens,
        "temperature": body.temperature,
        "top_k": 0 if body.top_k == -1 else body.top_k,
        "top_p": body.top_p,
        "min_p": body.min_p,
        "seed": body.seed,
        "stop": body.stop,
        "stop_token_ids": stop_token_ids,
        "include_stop": body.include_stop_str_in_output,
        "ignore_eos": body.ignore_eos,
        "logprobs": alternatives,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "repetition_penalty": body.repetition_penalty,
        "logit_bias": logit_bias,
        "n": body.n,
    }
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


def _completion_tokens(engine: AsyncEngine, tenant: Tenant, body: CompletionRequest, prompt: Prompt) -> Sequence[int]:
    if isinstance(prompt, str):
        check_length(engine, prompt, "prompt")
    else:
        check_token_ids(engine, prompt, "prompt")
    if body.prefix is not None:
        return prefixed_prompt(engine.prefixes.service, engine.tokenizer, body.prefix, prompt, tenant.salt)
    if not isinstance(prompt, str):
        return prompt
    return engine.tokenizer.encode(prompt, add_special_tokens=body.add_special_tokens is not False)


def _echo(engine: AsyncEngine, body: CompletionRequest, prompt: Prompt) -> str:
    if not body.echo:
        return ""
    return prompt if isinstance(prompt, str) else engine.tokenizer.decode(prompt)


def _chat_tokens(engine: AsyncEngine, tenant: Tenant, body: ChatRequest) -> Sequence[int]:
    messages = [message.plain() for message in body.messages]
    check_length(engine, "".join(message["content"] for message in messages), "messages")
    if body.prefix is not None:
        return prefixed_chat(engine.prefixes.service, engine.tokenizer, body.prefix, messages, tenant.salt)
    if not engine.tokenizer.has_chat_template:
        raise BadRequest("This model has no chat template; use /v1/completions", param="messages")
    return engine.tokenizer.render_chat(messages, add_generation_prompt=body.add_generation_prompt is not False)


# Deltas to answers


async def run(front: Front, job: Job) -> AsyncGenerator[tuple[int, Delta], None]:
    """The deltas of all prompts as they come, each with its prompt's number. Raises QueueFull before the first.

    A request that moves to another server ends with a delta that says so (`moved`), if the caller follows; else its deltas are
    fetched there and go on.
    """
    hits: dict[int, int] = {}
    inside = front.gate.admit(len(job.requests) * job.n, checked=job.resumed is None)
    with inside as engine, front.recent.watch(job.requests, job.prefix) as watch:
        async with aclosing(_deltas(front, job, engine, watch.requests)) as deltas:
            async for prompt, delta in deltas:
                watch.note(prompt, delta)
                if delta.finish_reason == "error":
                    raise EngineFailed(delta.error or "A step of the engine failed")
                if delta.finish_reason == "abort":
                    raise ShuttingDown("The server is shutting down and ended the request before its end")
                hits.setdefault(prompt, delta.cached_tokens)
                yield prompt, delta
        if job.prefix is not None:
            # On the thread that counts uses, so that no count is lost.
            await front.tokenize(_note_hits, engine, job.prefix, job.requests[0].salt, list(hits.values()))


async def _deltas(
    front: Front, job: Job, engine: AsyncEngine, requests: Sequence[Request]
) -> AsyncGenerator[tuple[int, Delta], None]:
    """What the engine says, and what other servers say where a request moves without its caller."""
    if job.resumed is None:
        sources = [engine.generate(request) for request in requests]
    else:
        sources = [engine.follow(request.id) for request in requests]
    with front.in_flight.enter(job) as running:
        async with aclosing(stream.merge(sources)) as deltas:
            async for prompt, delta in deltas:
                running.note(delta)
                if delta.moved is None or (job.streams and job.caller.follows):
                    yield prompt, delta
                    continue
                async with aclosing(relay.follow(delta.moved, job.caller, front.gate.ended)) as elsewhere:
                    async for passed_on in elsewhere:
                        running.note(passed_on)
                        yield prompt, passed_on


def _note_hits(engine: AsyncEngine, prefix: str, salt: bytes, hits: Sequence[int]) -> None:
    for tokens in hits:
        engine.prefixes.note_hit(prefix, tokens, salt=salt)


@dataclass(slots=True)
class _Choice:
    """One choice of an answer that is not streamed, while it grows."""

    text: list[str] = field(default_factory=list)
    entries: list[TokenLogprob] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


async def answer(front: Front, job: Job) -> dict[str, Any]:
    """Run a job to its end and return the whole answer. Raises ForewordError."""
    tally = Tally(job)
    choices = [_Choice() for _ in job.shapes]
    async with aclosing(run(front, job)) as deltas:
        async for prompt, delta in deltas:
            tally.add(prompt, delta)
            choice = choices[prompt * job.n + delta.index]
            choice.text.append(delta.text)
            choice.entries.extend(delta.logprobs)
            choice.tokens.extend(delta.tokens)
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_match
    written = [_write(job, number, choice) for number, choice in enumerate(choices)]
    return {**job.head, "choices": written, "usage": tally.usage(), **tally.report(), **_chat_prompt_ids(job)}


def _write(job: Job, number: int, choice: _Choice) -> dict[str, Any]:
    body = job.shapes[number].whole("".join(choice.text), choice.entries if job.wants_logprobs else None)
    ids = {**_prompt_ids(job, number), "token_ids": choice.tokens} if job.token_ids else {}
    return {"index": number, **body, "finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason, **ids}


def _chat_prompt_ids(job: Job) -> dict[str, Any]:
    """A conversation's prompt is one and stands beside the choices."""
    if not job.token_ids or not isinstance(job.shapes[0], ChatShape):
        return {}
    return {"prompt_token_ids": list(job.requests[0].tokens)}


def _prompt_ids(job: Job, number: int) -> dict[str, Any]:
    """A completion's prompt stands in its choice."""
    if not job.token_ids or isinstance(job.shapes[number], ChatShape):
        return {}
    return {"prompt_token_ids": list(job.requests[number // job.n].tokens)}


async def events(front: Front, job: Job) -> AsyncGenerator[bytes, None]:
    """Run a job and yield its answer as server-sent events. Raises ForewordError, also after some events."""
    tally = Tally(job, job.resumed or 0)
    head = {**job.head, "usage": None} if job.include_usage else job.head
    opened: set[int] = {0} if job.resumed else set()
    async with aclosing(run(front, job)) as deltas:
        async for prompt, delta in deltas:
            if delta.moved is not None:
                yield relay.moved_event(delta.moved)
                return
            tally.add(prompt, delta)
            number = prompt * job.n + delta.index
            shape = job.shapes[number]
            ids: dict[str, Any] = {}
            if number not in opened:
                opened.add(number)
                ids = _prompt_ids(job, number)
                if (opening := shape.opening()) is not None:
                    yield stream.encode({**head, "choices": [_chunk(number, opening | ids)], **_chat_prompt_ids(job)})
                    ids = {}
            if delta.text or delta.logprobs or delta.finish_reason or (job.token_ids and delta.tokens):
                body = shape.chunk(delta.text, delta.logprobs if job.wants_logprobs else None) | ids
                if job.token_ids:
                    body["token_ids"] = list(delta.tokens)
                report = tally.report() if delta.finish_reason else {}
                yield stream.encode({**head, "choices": [_chunk(number, body, delta)], **report})
    if job.include_usage:
        yield stream.encode({**job.head, "choices": [], "usage": tally.usage(), **tally.report()})
    yield stream.DONE


def _chunk(number: int, body: dict[str, Any], delta: Delta | None = None) -> dict[str, Any]:
    if delta is None or delta.finish_reason is None:
        return {"index": number, **body, "finish_reason": None}
    return {"index": number, **body, "finish_reason": delta.finish_reason, "stop_reason": delta.stop_match}
