"""OpenAI's endpoints: models, completions, chat. Beside them tokenize and detokenize."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from foreword.api.errors import CLIENT_GONE
from foreword.api.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from foreword.server import completion_jobs
from foreword.server.endpoint import ServerContext, check_length, check_model, check_token_ids
from foreword.server.job import Caller, Job
from foreword.server.routes import Routes
from foreword.server.stream import EventStream, unless_disconnected

if TYPE_CHECKING:
    from foreword.entrypoints.async_engine import AsyncEngine


def add_routes(routes: Routes, context: ServerContext) -> None:
    created = int(time.time())

    @routes.add("POST", "/v1/completions", "openai", CompletionRequest)
    async def completions(request: Request) -> Response:
        """Continue one or more prompts."""
        tenant, _ = context.tenant(request), context.admission.engine()
        body = await context.body(request, CompletionRequest)
        caller = Caller.of(request.headers)
        return await _respond(
            context,
            request,
            await completion_jobs.completion_job(context, tenant, body, request.state.request_id, caller),
        )

    @routes.add("POST", "/v1/chat/completions", "openai", ChatRequest)
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        tenant, _ = context.tenant(request), context.admission.engine()
        body = await context.body(request, ChatRequest)
        caller = Caller.of(request.headers)
        return await _respond(
            context, request, await completion_jobs.chat_job(context, tenant, body, request.state.request_id, caller)
        )

    @routes.add("GET", "/v1/models", "openai")
    async def models(request: Request) -> dict[str, Any]:
        """The model served here. `salt_from` says where the caller's tenant comes from: its `key`, a `router`, or `none`."""
        source = context.tenant(request).source
        return {"object": "list", "data": [_describe(context.admission.engine(), created)], "salt_from": source}

    # A model's name may contain slashes.
    @routes.add("GET", "/v1/models/{name:path}", "openai")
    async def model(request: Request) -> dict[str, Any]:
        """One model."""
        context.tenant(request)
        engine = context.admission.engine()
        check_model(engine, request.path_params["name"])
        return _describe(engine, created)

    @routes.add("POST", "/v1/tokenize", "openai", TokenizeRequest)
    async def tokenize(request: Request) -> dict[str, Any]:
        """A prompt, or messages as the chat template renders them, as token ids."""
        context.tenant(request)
        engine = context.admission.engine()
        body = await context.body(request, TokenizeRequest)
        check_model(engine, body.model)
        tokens = await context.tokenize(_tokens, engine, body)
        texts = {"token_strs": [engine.tokenizer.token_text(token) for token in tokens]}
        return {
            "count": len(tokens),
            "max_model_len": engine.info.max_model_len,
            "tokens": tokens,
            **(texts if body.return_token_strs else {}),
        }

    @routes.add("POST", "/v1/detokenize", "openai", DetokenizeRequest)
    async def detokenize(request: Request) -> dict[str, Any]:
        """Token ids as text."""
        context.tenant(request)
        engine = context.admission.engine()
        body = await context.body(request, DetokenizeRequest)
        check_model(engine, body.model)
        check_token_ids(engine, tuple(body.tokens), "tokens")
        return {"prompt": await context.tokenize(engine.tokenizer.decode, body.tokens)}


async def _respond(context: ServerContext, request: Request, job: Job) -> Response:
    if job.streams:
        return EventStream(completion_jobs.events(context, job))
    answer = await unless_disconnected(request.receive, completion_jobs.answer(context, job))
    return Response(status_code=CLIENT_GONE) if answer is None else JSONResponse(answer)


def _describe(engine: AsyncEngine, created: int) -> dict[str, Any]:
    info = engine.info
    return {
        "id": info.name,
        "object": "model",
        "created": created,
        "owned_by": "foreword",
        "max_model_len": info.max_model_len,
        "fingerprint": info.fingerprint,
        "dtype": info.dtype,
        "device": info.device,
    }


def _tokens(engine: AsyncEngine, body: TokenizeRequest) -> list[int]:
    if body.prompt is not None:
        check_length(engine, body.prompt, "prompt")
        return engine.tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens)
    messages = [message.plain() for message in body.messages or ()]
    check_length(engine, "".join(message["content"] for message in messages), "messages")
    return engine.tokenizer.render_chat(messages, add_generation_prompt=body.add_generation_prompt)
