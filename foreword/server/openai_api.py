"""OpenAI's routes: models, completions, chat; and tokenize and detokenize beside them."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from foreword.api.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from foreword.server import openai
from foreword.server.endpoint import Front, check_length, check_model, check_token_ids
from foreword.server.errors import CLIENT_GONE
from foreword.server.job import Caller, Job
from foreword.server.openapi import json_body
from foreword.server.stream import EventStream, unless_disconnected

if TYPE_CHECKING:
    from foreword.entrypoints.async_engine import AsyncEngine


def router(front: Front) -> APIRouter:
    """The routes."""
    routes = APIRouter(prefix="/v1", tags=["openai"])
    created = int(time.time())

    @routes.post("/completions", openapi_extra=json_body(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Continue one or more prompts."""
        tenant, engine = front.tenant(request), front.gate.engine()
        body = await front.body(request, CompletionRequest)
        job = await openai.completion_job(front, engine, tenant, body, request.state.request_id)
        return await _respond(front, request, job)

    @routes.post("/chat/completions", openapi_extra=json_body(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        tenant, engine = front.tenant(request), front.gate.engine()
        body = await front.body(request, ChatRequest)
        job = await openai.chat_job(front, engine, tenant, body, request.state.request_id)
        return await _respond(front, request, job)

    @routes.get("/models")
    async def models(request: Request) -> dict[str, Any]:
        """The models served here: one. `salt_from` says what keeps this caller's blocks from others'."""
        source = front.tenant(request).source
        return {"object": "list", "data": [_describe(front.gate.engine(), created)], "salt_from": source}

    # A model's name may contain slashes.
    @routes.get("/models/{name:path}")
    async def model(request: Request, name: str) -> dict[str, Any]:
        """One model."""
        front.tenant(request)
        engine = front.gate.engine()
        check_model(engine, name)
        return _describe(engine, created)

    @routes.post("/tokenize", openapi_extra=json_body(TokenizeRequest))
    async def tokenize(request: Request) -> dict[str, Any]:
        """A prompt, or messages as the chat template renders them, as token ids."""
        front.tenant(request)
        engine = front.gate.engine()
        body = await front.body(request, TokenizeRequest)
        check_model(engine, body.model)
        tokens = await front.tokenize(_tokens, engine, body)
        texts = {"token_strs": [engine.tokenizer.token_text(token) for token in tokens]}
        return {
            "count": len(tokens),
            "max_model_len": engine.info.max_model_len,
            "tokens": tokens,
            **(texts if body.return_token_strs else {}),
        }

    @routes.post("/detokenize", openapi_extra=json_body(DetokenizeRequest))
    async def detokenize(request: Request) -> dict[str, Any]:
        """Token ids as text."""
        front.tenant(request)
        engine = front.gate.engine()
        body = await front.body(request, DetokenizeRequest)
        check_model(engine, body.model)
        check_token_ids(engine, tuple(body.tokens), "tokens")
        return {"prompt": await front.tokenize(engine.tokenizer.decode, body.tokens)}

    return routes


async def _respond(front: Front, request: Request, job: Job) -> Response:
    job = dataclasses.replace(job, caller=Caller.of(request.headers))
    if job.streams:
        return EventStream(openai.events(front, job))
    answer = await unless_disconnected(request.receive, openai.answer(front, job))
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
