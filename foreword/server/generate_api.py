"""Endpoints that generate text: one pipeline for all dialects."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from foreword.api import stored_responses
from foreword.api.dialects import messages, responses
from foreword.api.dialects.chat import ChatBody
from foreword.api.dialects.completions import CompletionBody
from foreword.api.dialects.conversations import continued
from foreword.api.dialects.registry import DIALECTS, Dialect
from foreword.api.event_stream import send_events
from foreword.api.front import Call, Handler, Reply
from foreword.api.request import GenerateRequest
from foreword.api.rights import Right
from foreword.api.routes import JsonBody, Meter, Routes
from foreword.server import generation
from foreword.server.endpoint import ServerContext, check_model
from foreword.server.job import Caller, Job
from foreword.server.prepare import conversation_size, count_prompt, make_job

# What `/openapi.json` shows.
_BODIES: dict[str, type[Struct]] = {
    "chat": ChatBody,
    "completions": CompletionBody,
    "responses": responses.ResponsesBody,
    "messages": messages.MessagesBody,
}
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
            body=JsonBody(dialect.parse, _BODIES.get(dialect.name)),
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
        call.release_body()
        if not job.streams:
            return await generation.answer(context, job)
        await send_events(call, generation.events(context, job), job.writer.error, context.config.stream_keep_alive)
        return None

    generate.__name__ = dialect.name
    generate.__doc__ = _DESCRIPTIONS[dialect.name]
    return generate


async def _make_job(context: ServerContext, call: Call, parsed: GenerateRequest) -> Job:
    if parsed.previous is not None:
        parsed = continued(parsed, context.responses.get(call.tenant.salt, parsed.previous).messages)
    return await make_job(context, call.tenant, parsed, call.id, Caller.of(call.headers), len(call.raw))
