"""The paths of Responses and Messages: requests of other dialects than replicas know, and stored responses."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from functools import partial
from typing import Any, Final

from msgspec.structs import replace

from foreword.api import stored_responses
from foreword.api.dialects import messages, responses
from foreword.api.dialects.conversations import continued, followed
from foreword.api.dialects.dialect import Dialect
from foreword.api.dialects.registry import DIALECTS
from foreword.api.front import Answer, Call, Handler, Reply
from foreword.api.request import GenerateRequest
from foreword.api.routes import ClientQuery, JsonBody, Meter, Right, Routes
from foreword.api.stored_responses import StoredResponses
from foreword.errors import BadRequest, NotFound
from foreword.request_errors import NoReplica
from foreword.router.completions import proxy
from foreword.router.passthrough import send_to_one
from foreword.router.replica_body import ROUTER_FIELDS, TRANSLATED, edited, parse_request
from foreword.router.router import Router
from foreword.router_extras.translation import ChatTranslation, chat_request
from foreword.router_extras.worker_links import workers_of

_COUNTED: Final = dataclasses.replace(DIALECTS["messages"], parse=messages.parse_count)


def add_routes(routes: Routes[Handler], router: Router, kept: StoredResponses) -> None:
    """Add the paths. `kept`: responses that a later one may continue."""
    right = Right.TENANT
    stored_responses.add_routes(routes, kept)
    for dialect in map(DIALECTS.__getitem__, TRANSLATED):
        routes.add(
            "POST",
            dialect.path,
            right=right,
            meter=Meter.TOKENS,
            body=JsonBody(partial(parse_request, dialect.name), dialect.body, passed_on=True),
            query=ClientQuery,
            tag="generate",
            errors=dialect.error_response,
            outcome=dialect.name,
        )(_translated(router, dialect, kept))

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
        request = router.order.arranged(request, pool.model)
        prompt = await router.prompts.tokenize(request, pool, needed=True)
        if not prompt.exact:
            router.prefixes.check(call.tenant, request)
            raise NoReplica("No replica of this model can count tokens now")
        return {"input_tokens": len(prompt.tokens)}


def _translated(router: Router, dialect: Dialect, kept: StoredResponses) -> Handler:
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
            keep = partial(_keep, kept, call, given) if given.store and given.refusal is None else None
            return await proxy(router, call, given, rendered=rendered, keep=keep)
        call.check_fields(dialect.body, given.body.fields)
        if given.previous is not None:
            try:
                before = kept.get(salt, given.previous)
            except NotFound:  # another worker may have it
                await workers_of(router).settle()
                before = kept.get(salt, given.previous)
            given = continued(given, before.messages)
        model = given.model or pool.model
        translation = ChatTranslation(dialect, given, model, call.id, partial(kept.add, salt, began=call.arrived))
        return await proxy(router, call, chat_request(given, pool.kind), translation)

    return translate


def _keep(kept: StoredResponses, call: Call, request: GenerateRequest, response: bytes) -> None:
    """Keep a response as the replica sent it. One with output that cannot be continued here is not kept."""
    with suppress(BadRequest):
        name, said = responses.read_response(response)
        kept.add(call.tenant.salt, name, followed(request, said), response, call.arrived)
