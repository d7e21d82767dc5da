"""Endpoints of the served model and its tokenizer: models, tokenize, detokenize."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from msgspec import Raw

from foreword.api.dialects.conversation_body import MessageBody, ToolBody, messages_of, tools_of
from foreword.api.dialects.decode import UNSET_RAW, Body, Limits, bounded_object, refuse
from foreword.api.dialects.decode import check_length as check_entries
from foreword.api.front import Call, Handler, Reply
from foreword.api.request import template_messages, template_tools
from foreword.api.routes import NO_BODY, JsonBody, Meter, Right, Routes
from foreword.server.endpoint import ServerContext, check_length, check_model, check_token_ids, encode_bounded

if TYPE_CHECKING:
    from foreword.entrypoints.async_engine import AsyncEngine


class TokenizeBody(Body, kw_only=True):
    """`POST /v1/tokenize`: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[MessageBody] | None = None
    tools: list[ToolBody] | None = None
    chat_template_kwargs: Raw = UNSET_RAW
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None

    def check(self, limits: Limits) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise refuse("prompt", "give either prompt or messages")

    def template(self, limits: Limits) -> dict[str, Any]:
        """Arguments of `Tokenizer.render_chat`. Raises BadRequest."""
        continues = bool(self.continue_final_message)
        return {
            "messages": template_messages(messages_of(self.messages or (), limits)),
            "tools": template_tools(tools_of(self.tools, limits)),
            "options": bounded_object(self.chat_template_kwargs, "chat_template_kwargs", limits) or {},
            "add_generation_prompt": self.add_generation_prompt is not False and not continues,
            "continue_final_message": continues,
        }


class DetokenizeBody(Body, kw_only=True):
    """`POST /v1/detokenize`."""

    tokens: list[int]
    model: str | None = None

    def check(self, limits: Limits) -> None:
        check_entries(self.tokens, limits.token_ids, "tokens")


def add_routes(routes: Routes[Handler], context: ServerContext) -> None:
    created = int(time.time())

    @routes.add("GET", "/v1/models", right=Right.TENANT, meter=Meter.FREE, body=NO_BODY, tag="models")
    async def models(call: Call) -> dict[str, Any]:
        """The model served here. `salt_from` says where the caller's tenant comes from: its `key`, a `router`, or `none`."""
        data = [_describe(context.admission.engine(), created)]
        return {"object": "list", "data": data, "salt_from": call.tenant.source}

    # A model's name may contain slashes.
    @routes.add("GET", "/v1/models/{name:path}", right=Right.TENANT, meter=Meter.FREE, body=NO_BODY, tag="models")
    async def model(call: Call) -> Reply:
        """A model."""
        if not call.names["name"]:  # a slash too many
            return await models(call)
        engine = context.admission.engine()
        check_model(engine, call.names["name"])
        return _describe(engine, created)

    body = JsonBody.of(TokenizeBody)

    @routes.add("POST", "/tokenize", right=Right.TENANT, meter=Meter.FREE, body=body, tag="models")
    @routes.add("POST", "/v1/tokenize", right=Right.TENANT, meter=Meter.FREE, body=body, tag="models")
    async def tokenize(call: Call) -> dict[str, Any]:
        """A prompt, or messages as the chat template renders them, as token ids."""
        engine = context.admission.engine()
        body: TokenizeBody = call.body
        check_model(engine, body.model)
        tokens = await context.work.run(_size(body), _tokens, engine, body, context.limits())
        texts = {"token_strs": [engine.tokenizer.token_text(token) for token in tokens]}
        return {
            "count": len(tokens),
            "max_model_len": engine.info.max_model_len,
            "tokens": tokens,
            **(texts if body.return_token_strs else {}),
        }

    body = JsonBody.of(DetokenizeBody)

    @routes.add("POST", "/detokenize", right=Right.TENANT, meter=Meter.FREE, body=body, tag="models")
    @routes.add("POST", "/v1/detokenize", right=Right.TENANT, meter=Meter.FREE, body=body, tag="models")
    async def detokenize(call: Call) -> dict[str, Any]:
        """Token ids as text."""
        engine = context.admission.engine()
        body: DetokenizeBody = call.body
        check_model(engine, body.model)
        check_token_ids(engine, tuple(body.tokens), "tokens")
        return {"prompt": await context.work.run(len(body.tokens), engine.tokenizer.decode, body.tokens)}


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
        "batch_invariant": not info.inexact,
        **({"inexact": info.inexact} if info.inexact else {}),
    }


def _size(body: TokenizeBody) -> int:
    return len(body.prompt or "") + sum(map(_message_size, body.messages or ()))


def _message_size(message: MessageBody) -> int:
    content = message.content or ""
    return len(content) if isinstance(content, str) else sum(len(part.text or "") for part in content)


def _tokens(engine: AsyncEngine, body: TokenizeBody, limits: Limits) -> list[int]:
    if body.prompt is not None:
        check_length(engine, len(body.prompt), "prompt")
        return encode_bounded(engine, body.prompt, "prompt", add_special_tokens=body.add_special_tokens is not False)
    check_length(engine, _size(body), "messages")
    return engine.tokenizer.render_chat(**body.template(limits))
