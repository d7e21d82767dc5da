"""Completions and chat: request bodies become jobs, and the engine's deltas become answers."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from foreword.api import sse
from foreword.api.schemas import ChatRequest, CompletionRequest, Prompt, SamplingBody
from foreword.api.tenants import Tenant
from foreword.engine.request import Delta, Request, SamplingParams, TokenLogprob
from foreword.errors import BadRequest, EngineFailed, ShuttingDown
from foreword.prefixes.tokens import prefixed_chat, prefixed_prompt
from foreword.server import relay, stream
from foreword.server.endpoint import ServerContext, check_length, check_model, check_token_ids
from foreword.server.job import Caller, ChatFormat, ChoiceFormat, CompletionFormat, Job

if TYPE_CHECKING:
    from foreword.entrypoints.async_engine import AsyncEngine

DEFAULT_COMPLETION_TOKENS = 16

_numbers = itertools.count()


# Bodies to jobs


async def completion_job(
    context: ServerContext, tenant: Tenant, body: CompletionRequest, request_id: str, caller: Caller
) -> Job:
    """Raises BadRequest, PromptTooLong, UnknownModel or UnknownPrefix; nothing runs yet."""
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    engine, params = await _prepare(context, tenant, body, max_tokens, body.logprobs, prompts=len(body.prompt))
    prompts = [await context.tokenize(_completion_tokens, engine, tenant, body, prompt) for prompt in body.prompt]
    echoes = [await context.tokenize(_echo, engine, body, prompt) for prompt in body.prompt]
    formats = [CompletionFormat(engine.tokenizer, echo) for echo in echoes for _ in range(params.n)]
    return _job(context, engine, tenant, body, params, f"cmpl-{request_id}", caller, prompts, formats)


async def chat_job(context: ServerContext, tenant: Tenant, body: ChatRequest, request_id: str, caller: Caller) -> Job:
    """Raises BadRequest, PromptTooLong, UnknownModel or UnknownPrefix; nothing runs yet."""
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    alternatives = (body.top_logprobs or 0) if body.logprobs else None
    engine, params = await _prepare(context, tenant, body, max_tokens, alternatives)
    prompt = await context.tokenize(_chat_tokens, engine, tenant, body)
    formats = [ChatFormat(engine.tokenizer) for _ in range(params.n)]
    return _job(context, engine, tenant, body, params, f"chatcmpl-{request_id}", caller, [prompt], formats)


async def _prepare(
    context: ServerContext,
    tenant: Tenant,
    body: SamplingBody,
    max_tokens: int | None,
    alternatives: int | None,
    prompts: int = 1,
) -> tuple[AsyncEngine, SamplingParams]:
    """Check everything that needs no tokenizer."""
    engine = context.admission.engine()
    check_model(engine, body.model)
    params = _params(engine, body, max_tokens, alternatives)
    context.admission.check_queue(prompts * params.n)
    if body.prefix is not None:
        await engine.prefixes.refresh(tenant.salt, body.prefix)
    return engine, params


def _job(
    context: ServerContext,
    engine: AsyncEngine,
    tenant: Tenant,
    body: SamplingBody,
    params: SamplingParams,
    answer_id: str,
    caller: Caller,
    prompts: Sequence[Sequence[int]],
    formats: Sequence[ChoiceFormat],
) -> Job:
    # A client may use one X-Request-Id for two requests at a time; the engine's ids must differ.
    report, prefill = bool(body.cache_report), _prefill_address(context, engine, tenant, body)
    requests = tuple(
        Request(f"{answer_id}:{next(_numbers)}", tuple(tokens), params, tenant.salt, 0, report, prefill)
        for tokens in prompts
    )
    for request in requests:
        engine.validate(request)
    head = {
        "id": answer_id,
        "object": formats[0].chunk_object if body.stream else formats[0].whole_object,
        "created": int(time.time()),
        "model": engine.info.name,
        "system_fingerprint": f"fp_{engine.info.fingerprint[:12]}",
    }
    options = body.stream_options
    return Job(
        head,
        requests,
        tuple(formats),
        streams=bool(body.stream),
        include_usage=bool(options and options.include_usage),
        prefix=body.prefix,
        token_ids=bool(body.return_token_ids),
        caller=caller,
    )


def _prefill_address(context: ServerContext, engine: AsyncEngine, tenant: Tenant, body: SamplingBody) -> str:
    """The transfer address of the instance that shall compute the prompt; "" computes it here.

    Raises BadRequest, and Forbidden for an address that this client may not name. A router may name any: its own replicas.
    """
    wanted = body.kv_transfer_params.prefill if body.kv_transfer_params is not None else None
    instance = engine.instance
    if not wanted or instance is None or instance.role == "prefill":
        return ""
    if tenant.source != "router":
        context.peers.check_address(wanted, "kv_transfer_params.prefill")
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


async def run(context: ServerContext, job: Job) -> AsyncGenerator[tuple[int, Delta], None]:
    """The deltas of all prompts as they arrive, each with its prompt's number. Raises QueueFull before the first.

    If the request migrates and the caller reconnects by itself, the last delta says where to (`moved`). Otherwise this server
    fetches the other deltas from there.
    """
    sequences = len(job.requests) * job.n
    with (
        context.admission.admit(sequences, migrated=job.resumed is not None) as engine,
        context.recent.record(job) as requests,
        context.active.track(job),
    ):
        async with aclosing(_deltas(context, job, engine, requests)) as deltas:
            async for prompt, delta in deltas:
                job.progress[prompt].note(delta, time.monotonic())
                if delta.finish_reason == "error":
                    raise EngineFailed(delta.error or "A step of the engine failed")
                if delta.finish_reason == "abort":
                    raise ShuttingDown("The server is shutting down and ended the request before its end")
                yield prompt, delta
        if job.prefix is not None:
            # On the thread that counts uses, so that no count is lost.
            await context.tokenize(_note_hits, engine, job)


async def _deltas(
    context: ServerContext, job: Job, engine: AsyncEngine, requests: Sequence[Request]
) -> AsyncGenerator[tuple[int, Delta], None]:
    """The engine's deltas, then those of the servers to which the request migrates."""
    start = engine.follow if job.resumed is not None else None
    sources = [engine.generate(request) if start is None else start(request.id) for request in requests]
    async with aclosing(stream.merge(sources)) as deltas:
        async for prompt, delta in deltas:
            if delta.moved is not None:
                job.departure = delta.moved
            if delta.moved is None or (job.streams and job.caller.follows):
                yield prompt, delta
                continue
            async with aclosing(relay.follow(delta.moved, job.caller, context.admission.stopped)) as rest:
                async for relayed in rest:
                    yield prompt, relayed


def _note_hits(engine: AsyncEngine, job: Job) -> None:
    assert job.prefix is not None
    for prompt in job.progress:
        engine.prefixes.note_hit(job.prefix, prompt.cached_tokens, salt=job.requests[0].salt)


@dataclass(slots=True)
class _Choice:
    """One choice of an answer that is not streamed, while it grows."""

    text: list[str] = field(default_factory=list)
    entries: list[TokenLogprob] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


async def answer(context: ServerContext, job: Job) -> dict[str, Any]:
    """Run a job to its end and return the whole answer. Raises ForewordError."""
    choices = [_Choice() for _ in job.formats]
    async with aclosing(run(context, job)) as deltas:
        async for prompt, delta in deltas:
            choice = choices[prompt * job.n + delta.index]
            choice.text.append(delta.text)
            choice.entries.extend(delta.logprobs)
            choice.tokens.extend(delta.tokens)
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_match
    written = [_write(job, number, choice) for number, choice in enumerate(choices)]
    return {**job.head, "choices": written, "usage": job.usage(), **job.cache_report(), **_chat_prompt_ids(job)}


def _write(job: Job, number: int, choice: _Choice) -> dict[str, Any]:
    body = job.formats[number].whole("".join(choice.text), choice.entries if job.wants_logprobs else None)
    ids = {**_prompt_ids(job, number), "token_ids": choice.tokens} if job.token_ids else {}
    return {"index": number, **body, "finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason, **ids}


def _chat_prompt_ids(job: Job) -> dict[str, Any]:
    """A chat has one prompt; its token ids stand beside the choices."""
    if not job.token_ids or not isinstance(job.formats[0], ChatFormat):
        return {}
    return {"prompt_token_ids": list(job.requests[0].tokens)}


def _prompt_ids(job: Job, number: int) -> dict[str, Any]:
    """A completion's prompt stands in its choice."""
    if not job.token_ids or isinstance(job.formats[number], ChatFormat):
        return {}
    return {"prompt_token_ids": list(job.requests[number // job.n].tokens)}


async def events(context: ServerContext, job: Job) -> AsyncGenerator[bytes, None]:
    """Run a job and yield its answer as server-sent events. Raises ForewordError, also after some events."""
    head = {**job.head, "usage": None} if job.include_usage else job.head
    opened: set[int] = {0} if job.resumed else set()
    async with aclosing(run(context, job)) as deltas:
        async for prompt, delta in deltas:
            if delta.moved is not None:
                yield relay.moved_event(delta.moved)
                return
            number = prompt * job.n + delta.index
            choice = job.formats[number]
            ids: dict[str, Any] = {}
            if number not in opened:
                opened.add(number)
                ids = _prompt_ids(job, number)
                if (opening := choice.opening()) is not None:
                    yield sse.encode({**head, "choices": [_chunk(number, opening | ids)], **_chat_prompt_ids(job)})
                    ids = {}
            if delta.text or delta.logprobs or delta.finish_reason or (job.token_ids and delta.tokens):
                body = choice.chunk(delta.text, delta.logprobs if job.wants_logprobs else None) | ids
                if job.token_ids:
                    body["token_ids"] = list(delta.tokens)
                report = job.cache_report() if delta.finish_reason else {}
                yield sse.encode({**head, "choices": [_chunk(number, body, delta)], **report})
    if job.include_usage:
        yield sse.encode({**job.head, "choices": [], "usage": job.usage(), **job.cache_report()})
    yield stream.DONE


def _chunk(number: int, body: dict[str, Any], delta: Delta | None = None) -> dict[str, Any]:
    if delta is None or delta.finish_reason is None:
        return {"index": number, **body, "finish_reason": None}
    return {"index": number, **body, "finish_reason": delta.finish_reason, "stop_reason": delta.stop_match}
