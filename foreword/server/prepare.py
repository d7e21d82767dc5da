"""From a client's request to a job: checks, sampling parameters, tokens, and what the answer shows of the prompt."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from foreword.api import breakpoints
from foreword.api.dialects.dialect_writers import WRITERS
from foreword.api.dialects.registry import DIALECTS
from foreword.api.dialects.writer import ResponseHead
from foreword.api.output import PromptInfo
from foreword.api.request import Continuation, GenerateRequest, Prompt, chat_text
from foreword.api.rights import Tenant
from foreword.api.tools.constraint import after_reasoning, forced_calls
from foreword.api.tools.parser import AnswerFormats, detect, formats_named
from foreword.blocks.retention import Retention
from foreword.blocks.salt import Salt
from foreword.engine.request import Request, SamplingParams
from foreword.errors import BadRequest
from foreword.process_config import ServerConfig
from foreword.server.endpoint import ServerContext, check_length, check_model, check_token_ids, encode_bounded
from foreword.server.job import Caller, Job, prompt_opens_reasoning, reader_for
from foreword.tokens.structured_output import StructuredOutput

if TYPE_CHECKING:
    from foreword.entrypoints.async_engine import AsyncEngine
    from foreword.tokens.tokenizer import Tokenizer

_numbers = itertools.count()
_CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt as the engine takes it, and what the response shows of it."""

    tokens: tuple[int, ...]
    retain: tuple[Retention, ...] = ()
    shown: PromptInfo | None = None


async def make_job(
    context: ServerContext, tenant: Tenant, request: GenerateRequest, request_id: str, caller: Caller, body_bytes: int
) -> Job:
    """Raises BadRequest, PromptTooLong, UnknownModel, UnknownPrefix or QueueFull; nothing runs yet.

    Args:
        body_bytes: size of the body, which bounds the work on tools and options.
    """
    engine = context.admission.engine()
    check_model(engine, request.model)
    _check_supported(request, tenant)
    formats = formats_of(engine.tokenizer, context.config)
    _check_tools(request, formats)
    params = _params(engine, request, formats)
    context.admission.check_queue(max(len(request.prompts), 1) * params.n)
    if request.prefix is not None:
        await engine.prefixes.refresh(tenant.salt, request.prefix)
    prompts = await _render_all(context, engine, tenant, request, body_bytes)
    if request.continuation is not None:
        prompts = [_continued_prompt(engine, request.continuation, prompts)]
    is_open = False
    if request.dialect != "completions" and formats.divided:
        is_open = prompt_opens_reasoning(engine.tokenizer, formats, request, prompts[0].tokens)
        if not request.stop_in_reasoning:
            params = replace(params, reasoning=formats.stops_behind(is_open))
    structured = _structured(request, formats, engine.tokenizer, is_open)
    if structured is not None:
        params = replace(params, structured=structured)
        await engine.compile(params, Salt.of(tenant.salt, request.cache_salt))
    job = _job(context, engine, tenant, request, request_id, caller, formats, params, prompts)
    if request.continuation is not None:
        outputs = [output for _, output in request.continuation.parts]
        await context.work.run(_CHARACTERS_PER_TOKEN * sum(map(len, outputs)), job.resume, engine.tokenizer, outputs)
    size = conversation_size(request) + sum(map(len, request.prompts))
    job.conversations = await context.misses.outlines(context.work, engine, job, size)
    return job


def _check_supported(request: GenerateRequest, tenant: Tenant) -> None:
    # A router has ordered its queue by priority already.
    if request.priority != 0 and tenant.source != "router":
        raise BadRequest("priority: this server serves requests in the order of their arrival", param="priority")


def parser_names(config: ServerConfig) -> tuple[str | None, str | None]:
    """The configured parsers; None for `auto` and `none`."""
    names = (config.tool_parser, config.reasoning_parser)
    tools, reasoning = (None if name in ("auto", "none") else name for name in names)
    return tools, reasoning


@functools.lru_cache(maxsize=16)
def _formats(template: str, config: ServerConfig) -> AnswerFormats:
    found, named = detect(template), formats_named(*parser_names(config))
    return AnswerFormats(
        found.tools if config.tool_parser == "auto" else named.tools,
        found.reasoning if config.reasoning_parser == "auto" else named.reasoning,
    )


def formats_of(tokenizer: Tokenizer, config: ServerConfig) -> AnswerFormats:
    """How the model writes tool calls and reasoning: as configured, or as its chat template does."""
    return _formats(tokenizer.chat_template, config)


def _job(
    context: ServerContext,
    engine: AsyncEngine,
    tenant: Tenant,
    request: GenerateRequest,
    request_id: str,
    caller: Caller,
    formats: AnswerFormats,
    params: SamplingParams,
    prompts: Sequence[RenderedPrompt],
) -> Job:
    dialect, created = DIALECTS[request.dialect], int(time.time())
    fingerprint = f"fp_{engine.info.fingerprint[:12]}"
    head = ResponseHead(f"{dialect.id_prefix}{request_id}", engine.info.name, created, fingerprint)
    salt = Salt.of(tenant.salt, request.cache_salt)
    prefill, given = _prefill_address(context, engine, tenant, request), request.continuation
    # Each choice that is continued is a sequence of its own, whose random numbers follow from its index.
    one_each = params if given is None else replace(params, n=1)
    parts = ((0, ()),) if given is None else given.parts
    # A client may use one X-Request-Id for two requests at a time; the engine's ids must differ.
    requests = tuple(
        Request(
            f"{head.id}:{next(_numbers)}",
            prompt.tokens,
            one_each,
            salt,
            index=index,
            want_cache_report=request.cache_report,
            prefill=prefill,
            retain=prompt.retain if not number else (),
            output=output,
            session=request.cache.key or request.session or "",
        )
        for prompt in prompts
        for number, (index, output) in enumerate(parts)
    )
    for one in requests:
        engine.validate(one)
    if given is None:
        readers = tuple(
            reader_for(engine.tokenizer, request, formats, one, number * params.n + index, prompt.shown)
            for number, (one, prompt) in enumerate(zip(requests, prompts, strict=True))
            for index in range(params.n)
        )
    else:
        readers = tuple(
            reader_for(engine.tokenizer, request, formats, one, one.index, None if one.output else prompts[0].shown)
            for one in requests
        )
    writer = WRITERS[request.dialect](request, head)
    resumed = given.sent_tokens if given is not None else None
    return Job(request, head, writer, requests, readers, tenant.salt, request.stream, caller, resumed)


def _prefill_address(context: ServerContext, engine: AsyncEngine, tenant: Tenant, request: GenerateRequest) -> str:
    """The transfer address of the instance that shall compute the prompt; "" computes it here.

    Raises BadRequest, and Forbidden for an address that this client may not name. A router may name any: its own replicas.
    """
    instance = engine.instance
    if not request.prefill or request.continuation is not None or instance is None or instance.role == "prefill":
        return ""
    if tenant.source != "router":
        context.peers.check_address(request.prefill, "kv_transfer_params.prefill")
    return request.prefill


# Sampling parameters


def _params(engine: AsyncEngine, request: GenerateRequest, formats: AnswerFormats) -> SamplingParams:
    given: dict[str, Any] = dict(request.sampling)
    for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
        check_token_ids(engine, tuple(given.get(name) or ()), name)
    if request.dialect != "completions" and formats.special_tokens:
        given["skip_special_tokens"] = False
    if request.echo and "logprobs" in given and request.continuation is None:
        given.setdefault("prompt_logprobs", given["logprobs"])
    return engine.info.sampling_params(given)


def _check_tools(request: GenerateRequest, formats: AnswerFormats) -> None:
    if request.tools and formats.tools is None:
        raise BadRequest(
            "tools: the format in which this model calls tools is not known; the server's operator can name it "
            "with --tool-parser",
            param="tools",
        )


def _structured(
    request: GenerateRequest, formats: AnswerFormats, tokenizer: Tokenizer, reasoning_open: bool
) -> StructuredOutput | None:
    """The format that the text must match: a call of a tool, or what the client asks for."""
    if request.tools and request.tool_choice.mode in ("required", "named"):
        return forced_calls(
            request.tools,
            request.tool_choice,
            formats,
            tokenizer.token_id,
            parallel=request.parallel_tool_calls,
            reasoning_open=reasoning_open,
        )
    if request.output_format is None or not reasoning_open:
        return request.output_format
    return after_reasoning(request.output_format, formats, tokenizer.token_id)


# Tokens


async def _render_all(
    context: ServerContext, engine: AsyncEngine, tenant: Tenant, request: GenerateRequest, body_bytes: int
) -> list[RenderedPrompt]:
    run = context.work.run
    if request.prompts:
        return [
            await run(len(prompt), _completion_prompt, engine, tenant, request, prompt) for prompt in request.prompts
        ]
    # A continued conversation is longer than its last body.
    size = max(body_bytes, conversation_size(request))
    return [await run(size, _chat_prompt, engine, tenant, request)]


def conversation_size(request: GenerateRequest) -> int:
    """Characters of a conversation, about."""
    calls = sum(len(call.arguments) for message in request.messages for call in message.tool_calls)
    return calls + sum(len(message.content) + len(message.reasoning) for message in request.messages)


def _completion_prompt(engine: AsyncEngine, tenant: Tenant, request: GenerateRequest, prompt: Prompt) -> RenderedPrompt:
    if isinstance(prompt, str):
        check_length(engine, len(prompt), "prompt")
    else:
        check_token_ids(engine, prompt, "prompt")
    tokenizer = engine.tokenizer
    before: tuple[int, ...] = ()
    if request.prefix is not None:
        before = tuple(engine.prefixes.service.book.use(request.prefix, "text", salt=tenant.salt).tokens)
    if isinstance(prompt, str):
        special = request.add_special_tokens and request.prefix is None
        prompt_tokens = tuple(encode_bounded(engine, prompt, "prompt", add_special_tokens=special))
    else:
        prompt_tokens = prompt
    tokens = (*before, *prompt_tokens)
    echo = "" if not request.echo else prompt if isinstance(prompt, str) else tokenizer.complete_text(prompt)
    retain = breakpoints.retentions(tokenizer, request, len(tokens)) if _retains(request) else ()
    return RenderedPrompt(tokens, retain, _shown(request, tokens, echo))


def count_prompt(engine: AsyncEngine, tenant: Tenant, request: GenerateRequest) -> int:
    """Tokens of a conversation. Raises BadRequest, PromptTooLong, UnknownPrefix."""
    return len(_chat_prompt(engine, tenant, request).tokens)


def _chat_prompt(engine: AsyncEngine, tenant: Tenant, request: GenerateRequest) -> RenderedPrompt:
    tokenizer = engine.tokenizer
    if not tokenizer.has_chat_template:
        raise BadRequest("This model has no chat template; use /v1/completions", param="messages")
    check_length(engine, conversation_size(request), "messages")
    before: Sequence[Any] = ()
    if request.prefix is not None:
        content = engine.prefixes.service.book.use(request.prefix, "messages", salt=tenant.salt).content
        assert not isinstance(content, str)
        before = content
    text = chat_text(tokenizer, request, before)
    tokens = tuple(encode_bounded(engine, text, "messages", add_special_tokens=False))
    retain: tuple[Retention, ...] = ()
    if _retains(request):
        retain = breakpoints.retentions(tokenizer, request, len(tokens), text, before=before)
    return RenderedPrompt(tokens, retain, _shown(request, tokens))


def _retains(request: GenerateRequest) -> bool:
    """Whether a request has cache control."""
    marks = (*(one.breakpoint for one in request.messages), *(one.breakpoint for one in request.tools))
    return request.cache.retention is not None or any(marks)


def _continued_prompt(engine: AsyncEngine, given: Continuation, prompts: Sequence[RenderedPrompt]) -> RenderedPrompt:
    """The prompt that the other server used, also if it differs here: a template may show the date."""
    if len(prompts) != 1:
        raise BadRequest("continuation: needs a request with one prompt", param="continuation")
    check_token_ids(engine, given.prompt, "continuation")
    for _, output in given.parts:
        check_token_ids(engine, output, "continuation")
    same = prompts[0].tokens == given.prompt
    return RenderedPrompt(given.prompt, prompts[0].retain if same else (), prompts[0].shown)


def _shown(request: GenerateRequest, tokens: tuple[int, ...], text: str = "") -> PromptInfo | None:
    if not request.return_token_ids and not text:
        return None
    return PromptInfo(tokens if request.return_token_ids else None, text)
