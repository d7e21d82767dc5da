"""Endpoints that generate text: one pipeline for all dialects.

Authentication, quotas, body, parsing, limits, tokens, queue, and the dialect's writer, in this order.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from typing import Any

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from foreword.api.dialects import messages, responses
from foreword.api.dialects.chat import ChatBody
from foreword.api.dialects.completions import CompletionBody
from foreword.api.dialects.conversations import continued
from foreword.api.dialects.registry import DIALECTS, Dialect
from foreword.api.errors import CLIENT_GONE
from foreword.api.outcomes import Ending
from foreword.api.tenants import Tenant
from foreword.server import generation
from foreword.server.endpoint import ServerContext, check_model
from foreword.server.job import Caller, Job
from foreword.server.prepare import conversation_size, count_prompt, make_job
from foreword.server.routes import Handler, Routes
from foreword.server.stream import EventStream, unless_disconnected

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


def add_routes(routes: Routes, context: ServerContext) -> None:
    for dialect in DIALECTS.values():
        routes.add("POST", dialect.path, "generate", _BODIES.get(dialect.name))(_endpoint(context, dialect))

    @routes.add("GET", "/v1/responses/{name}", "generate")
    async def stored_response(request: Request) -> Response:
        """A stored response."""
        owner, name = context.tenant(request).salt, request.path_params["name"]
        return Response(context.responses.get(owner, name).body, media_type="application/json")

    @routes.add("DELETE", "/v1/responses/{name}", "generate")
    async def forget_response(request: Request) -> dict[str, Any]:
        """Remove a stored response. Responses that continue it stay."""
        owner, name = context.rights.check_own(request, "removing responses").salt, request.path_params["name"]
        context.responses.remove(owner, name)
        return {"id": name, "object": "response", "deleted": True}

    @routes.add("POST", "/v1/messages/count_tokens", "generate", messages.MessagesBody)
    async def count_tokens(request: Request) -> dict[str, Any]:
        """Count the tokens of a conversation without answering it."""
        _answer_errors_as(DIALECTS["messages"], request)
        tenant, engine = context.tenant(request), context.admission.engine()
        with context.quotas.admit(tenant.name, time.monotonic()):
            async with context.bodies.read(request, context.max_body) as raw:
                parsed = await context.work.run(len(raw), messages.parse_count, raw, context.limits)
                check_model(engine, parsed.model)
                size = max(len(raw), conversation_size(parsed))
                return {"input_tokens": await context.work.run(size, count_prompt, engine, tenant, parsed)}


def _endpoint(context: ServerContext, dialect: Dialect) -> Handler:
    async def generate(request: Request) -> Response:
        _answer_errors_as(dialect, request)
        with ExitStack() as stack:
            ending = stack.enter_context(Ending(context.count_outcome, dialect.name))
            tenant, _ = context.tenant(request), context.admission.engine()
            admitted = stack.enter_context(context.quotas.admit(tenant.name, time.monotonic()))
            job = await _read_job(context, dialect, request, tenant)
            job.admitted = admitted
            if job.streams:
                return EventStream(
                    generation.events(context, job),
                    job.writer.error,
                    context.config.stream_keep_alive,
                    partial(_end, stack.pop_all(), ending),
                )
            answer = await unless_disconnected(request.receive, generation.answer(context, job))
            if answer is None:
                ending.status = CLIENT_GONE
        return Response(status_code=CLIENT_GONE) if answer is None else JSONResponse(answer)

    generate.__name__ = dialect.name
    generate.__doc__ = _DESCRIPTIONS[dialect.name]
    return generate


def _end(request: ExitStack, ending: Ending, error: BaseException | None) -> None:
    """The stream of a request has ended."""
    ending.error = error
    request.close()


def _answer_errors_as(dialect: Dialect, request: Request) -> None:
    request.state.error_response = partial(dialect.error_response, request_id=request.state.request_id)


async def _read_job(context: ServerContext, dialect: Dialect, request: Request, tenant: Tenant) -> Job:
    async with context.bodies.read(request, context.max_body) as raw:
        parsed = await context.work.run(len(raw), dialect.parse, raw, context.limits)
        if parsed.previous is not None:
            parsed = continued(parsed, context.responses.get(tenant.salt, parsed.previous).messages)
        return await make_job(context, tenant, parsed, request.state.request_id, Caller.of(request.headers), len(raw))
