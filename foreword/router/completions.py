"""The paths that generate text: tokenize a request, then proxy it."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

from msgspec.structs import replace

from foreword.api.dialects import messages, responses
from foreword.api.dialects.conversations import continued, followed
from foreword.api.dialects.registry import DIALECTS, Dialect
from foreword.api.front import Answer, Call, Handler, Reply
from foreword.api.outcomes import ClientGone
from foreword.api.request import GenerateRequest
from foreword.api.routes import ClientQuery, JsonBody, Meter, Right, Routes
from foreword.blocks.salt import Salt
from foreword.errors import BadRequest, DeadlineExceeded, NoReplica
from foreword.router.passthrough import send_to_one
from foreword.router.prompts import TokenizedPrompt
from foreword.router.proxied_request import TOKEN_BYTES, ProxiedRequest
from foreword.router.replica_body import (
    PASSED,
    PATHS,
    ROUTER_FIELDS,
    TRANSLATED,
    Translation,
    arranged,
    chat_request,
    edited,
    parse_request,
)
from foreword.router.replicas import clock
from foreword.router.response_proxy import proxy_response
from foreword.router.service import Router

_COUNTED: Final = dataclasses.replace(DIALECTS["messages"], parse=messages.parse_count)


def add_routes(routes: Routes[Handler], router: Router) -> None:
    right, tokens = Right.TENANT, Meter.TOKENS

    async def generate(call: Call) -> Answer | None:
        """Place a request, queue it per tenant, and retry and continue it on other replicas."""
        check_fields(router, call, call.body)
        return await _proxy(router, call, call.body)

    for path, name in {PATHS["chat"]: "chat", PATHS["completions"]: "completions", **PASSED}.items():
        body = JsonBody(partial(parse_request, name, path=path))
        add = routes.add(
            "POST", path, right=right, meter=tokens, body=body, query=ClientQuery, tag="generate", outcome=name
        )
        add(generate)
    for dialect in map(DIALECTS.__getitem__, TRANSLATED):
        routes.add(
            "POST",
            dialect.path,
            right=right,
            meter=tokens,
            body=JsonBody(partial(parse_request, dialect.name), dialect.body, passed_on=True),
            query=ClientQuery,
            tag="generate",
            errors=dialect.error_response,
            outcome=dialect.name,
        )(_translated(router, dialect))

    @routes.add(
        "POST",
        "/v1/messages/count_tokens",
        right=right,
        meter=Meter.REQUEST,
        body=JsonBody(_COUNTED.read, messages.MessagesBody, passed_on=True),
        query=ClientQuery,
        tag="generate",
        errors=DIALECTS["messages"].error_response,
    )
    async def count_tokens(call: Call) -> Answer | dict[str, Any]:
        """Count the tokens of a conversation without answering it."""
        given: GenerateRequest = call.body
        pool = router.pool(given.model)
        if pool.kind == "vllm" and pool.speaks("messages") and given.prefix is None and not router.order:
            call.ignored = []
            body = edited(given.body, ROUTER_FIELDS, {})
            return await send_to_one(router, call, pool.tokenizing_replicas(), call.path, body)
        call.check_fields(messages.MessagesBody, given.body.fields)
        request = router.prefixes.expanded(pool, call.tenant, chat_request(given, pool.kind))
        request = arranged(request, router.order, pool.model)
        prompt = await router.prompts.tokenize(request, pool, needed=True)
        if not prompt.exact:
            router.prefixes.check(call.tenant, request)
            raise NoReplica("No replica of this model can count tokens now")
        return {"input_tokens": len(prompt.tokens)}


def check_fields(router: Router, call: Call, given: GenerateRequest) -> None:
    """Refuse what a replica would ignore: fields without effect at Foreword's own servers, where the operator wants that, and a
    tenant's salt. Raises BadRequest, UnknownModel, NoReplica."""
    if call.path == "/v2/embed" and call.tenant.salt:
        raise BadRequest("vLLM's /v2/embed has no cache_salt: tenants would share its cache; use /v1/embeddings")
    if given.dialect in DIALECTS and router.pool(given.model).kind == "foreword":
        call.check_fields(DIALECTS[given.dialect].body, given.body.fields)


def _translated(router: Router, dialect: Dialect) -> Handler:
    async def translate(call: Call) -> Reply:
        """Generate in another dialect. Replicas of vLLM that speak this format get it as it came, and so do others what the
        router does not understand. Else they get chat completions."""
        given: GenerateRequest = call.body
        salt, pool = call.tenant.salt, router.pool(given.model)
        ours = given.previous is not None or given.prefix is not None or given.cache_report
        # Only chats can be put into another order.
        speaks = pool.kind == "vllm" and not ours and not router.order and pool.speaks(dialect.name)
        unknown = given.left_out and pool.kind != "foreword" and not speaks and given.previous is None
        if unknown and given.refusal is None:
            # The replica may run tools of its own.
            refusal = BadRequest(f"{given.left_out[0]}.type: no replica runs this tool", param=given.left_out[0])
            given = replace(given, refusal=refusal)
        if given.refusal is not None and (pool.kind == "foreword" or given.previous is not None):
            raise given.refusal
        if speaks or given.refusal is not None:
            call.ignored = []  # the replica decides
            rendered = chat_request(given, pool.kind) if given.refusal is None else given
            keep = partial(_keep, router, call, given) if given.store and given.refusal is None else None
            return await _proxy(router, call, given, rendered=rendered, keep=keep)
        call.check_fields(dialect.body, given.body.fields)
        if given.previous is not None:
            given = continued(given, router.responses.get(salt, given.previous).messages)
        model = given.model or pool.model
        translation = Translation(
            dialect, given, model, call.id, partial(router.responses.add, salt, began=call.arrived)
        )
        return await _proxy(router, call, chat_request(given, pool.kind), translation)

    return translate


def _keep(router: Router, call: Call, request: GenerateRequest, response: bytes) -> None:
    """Keep a response as the replica sent it. One with output that cannot be continued here is not kept."""
    with suppress(BadRequest):
        name, said = responses.read_response(response)
        router.responses.add(call.tenant.salt, name, followed(request, said), response, call.arrived)


async def _proxy(
    router: Router,
    call: Call,
    request: GenerateRequest,
    translation: Translation | None = None,
    rendered: GenerateRequest | None = None,
    keep: Callable[[bytes], None] | None = None,
) -> Answer | None:
    """`rendered`: the request as a chat, by which it is placed; None if it is one."""
    call.release_body()
    tenant, pool = call.tenant, router.pool(request.model)
    if request.prefix is not None:
        request = router.prefixes.expanded(pool, tenant, request)
    request = arranged(request, router.order, pool.model)
    wanted = _wanted_seconds(call)
    deadline = call.arrived + min(wanted, router.config.request_timeout)
    try:
        async with asyncio.timeout_at(asyncio.get_running_loop().time() + deadline - clock()) as limit:
            read = clock()
            if pool.needs_prompts:
                prompt = await router.prompts.tokenize(
                    rendered or request, pool, Salt.of(tenant.salt, request.cache_salt or None)
                )
            else:
                prompt = TokenizedPrompt((), "unread")
            session = request.session_name(call.headers)
            proxied = ProxiedRequest(
                router,
                request,
                tenant,
                call.id,
                pool,
                prompt,
                f"{tenant.name}/{session}" if session is not None else None,
                call.arrived,
                call,
                deadline,
                None if math.isfinite(wanted) else limit,
                translation,
                keep,
            )
            proxied.span = call.span
            if proxied.span is not None and prompt.source != "unread":
                proxied.span.part("tokenize", read, clock(), {"gen_ai.usage.prompt_tokens": prompt.count})
            try:
                return await proxy_response(proxied)
            except (asyncio.CancelledError, ClientGone):
                # How far the replica came is not known: it computes a prompt before its answer begins.
                if proxied.was_sent and not proxied.usage.prompt:
                    proxied.usage = replace(proxied.usage, prompt=prompt.count or len(call.raw) // TOKEN_BYTES)
                raise
            finally:
                call.charge(proxied.named(proxied.usage))
    except TimeoutError:
        if not limit.expired():
            raise
        raise DeadlineExceeded("The request's deadline passed before it was answered") from None


def _wanted_seconds(call: Call) -> float:
    """The client's own limit for the whole request; infinite if it set none. Raises BadRequest."""
    try:
        wanted = float(call.headers.get("x-request-timeout", "inf"))
    except ValueError:
        wanted = math.nan
    if not wanted > 0:
        raise BadRequest("x-request-timeout: must be a number of seconds above 0", param="x-request-timeout")
    return wanted
