"""The paths that generate text: tokenize a request, then proxy it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from foreword.api.dialects.registry import DIALECTS
from foreword.api.front import Answer, Call, Handler
from foreword.api.outcomes import ClientGone
from foreword.api.request import GenerateRequest
from foreword.api.routes import ClientQuery, JsonBody, Meter, Right, Routes
from foreword.blocks.salt import Salt
from foreword.errors import BadRequest
from foreword.request_errors import DeadlineExceeded
from foreword.router.extras import Translation
from foreword.router.prompts import TokenizedPrompt
from foreword.router.proxied_request import TOKEN_BYTES, ProxiedRequest
from foreword.router.replica_body import PASSED, PATHS, parse_request
from foreword.router.replicas import clock
from foreword.router.response_proxy import proxy_response
from foreword.router.router import Router


def add_routes(routes: Routes[Handler], router: Router) -> None:
    right, tokens = Right.TENANT, Meter.TOKENS

    async def generate(call: Call) -> Answer | None:
        """Place a request, queue it per tenant, and retry and continue it on other replicas."""
        check_fields(router, call, call.body)
        return await proxy(router, call, call.body)

    for path, name in {PATHS["chat"]: "chat", PATHS["completions"]: "completions", **PASSED}.items():
        body = JsonBody(partial(parse_request, name, path=path))
        add = routes.add(
            "POST", path, right=right, meter=tokens, body=body, query=ClientQuery, tag="generate", outcome=name
        )
        add(generate)


def check_fields(router: Router, call: Call, given: GenerateRequest) -> None:
    """Refuse what a replica would ignore: fields without effect at Foreword's own servers, where the operator wants that, and a
    tenant's salt. Raises BadRequest, UnknownModel, NoReplica."""
    if call.path == "/v2/embed" and call.tenant.salt:
        raise BadRequest("vLLM's /v2/embed has no cache_salt: tenants would share its cache; use /v1/embeddings")
    if given.dialect in DIALECTS and router.pool(given.model).kind == "foreword":
        call.check_fields(DIALECTS[given.dialect].body, given.body.fields)


async def proxy(
    router: Router,
    call: Call,
    request: GenerateRequest,
    translation: Translation | None = None,
    rendered: GenerateRequest | None = None,
    keep: Callable[[bytes], None] | None = None,
) -> Answer | None:
    """Place and answer a request; None if the answer was streamed.

    Args:
        translation, keep: as for `ProxiedRequest`.
        rendered: the request as a chat, by which it is placed; None if it is one.
    """
    call.release_body()
    tenant, pool = call.tenant, router.pool(request.model)
    if request.prefix is not None:
        request = router.prefixes.expanded(pool, tenant, request)
    request = router.order.arranged(request, pool.model)
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
