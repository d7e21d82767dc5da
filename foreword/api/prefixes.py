"""`/v1/prefixes`: register, list, replace and remove named prefixes, on Foreword's server and in the middleware for vLLM."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from foreword.api.dialects.decode import Body, Limits, check_length, refuse
from foreword.api.front import Answer, Call, Handler
from foreword.api.routes import NO_BODY, JsonBody, Meter, Right, Routes
from foreword.blocks.salt import PUBLIC
from foreword.prefixes.prefix_service import AsyncPrefixes
from foreword.usage import TokenUsage

PATH = "/v1/prefixes"
# The path of prefixes whose blocks all tenants share.
PUBLIC_PATH = "/v1/public/prefixes"


class AnyPrefixBody(Protocol):
    """The content of a prefix: text for completions, or messages for chat, in whatever form an engine reads them."""

    content: str | None

    def plain_messages(self, limits: Limits) -> list[dict[str, Any]] | None:
        """Convert messages to the form that chat templates expect. Raises BadRequest."""


def check_content(content: str | None, messages: list[Any] | None, limits: Limits) -> None:
    """Raises BadRequest unless exactly one of the two is given."""
    if (content is None) == (messages is None):
        raise refuse("content", "give either content (text, for completions) or messages (for chat)")
    if messages is not None:
        check_length(messages, limits.messages, "messages", least=1)


def add_routes(
    routes: Routes[Handler],
    prefixes: Callable[[], AsyncPrefixes],
    admit: Callable[[AnyPrefixBody], AbstractContextManager[object]],
    new: type[Body],
    version: type[Body],
) -> None:
    """Add the routes of named prefixes. Each tenant sees its own; an operator's are public.

    Args:
        prefixes: those of the engine. Raises NotReady and such.
        admit: the engine computes the prefix of this body in the block. Raises PromptTooLong, QueueFull.
        new, version: the bodies of POST and PUT, each an `AnyPrefixBody`; that of POST has `name` and `replace`.
    """

    _add_routes(routes, prefixes, admit, new, version, public=False)
    _add_routes(routes, prefixes, admit, new, version, public=True)


def _add_routes(
    routes: Routes[Handler],
    prefixes: Callable[[], AsyncPrefixes],
    admit: Callable[[AnyPrefixBody], AbstractContextManager[object]],
    new: type[Body],
    version: type[Body],
    *,
    public: bool,
) -> None:
    path = PUBLIC_PATH if public else PATH
    change, meter = (Right.OPERATOR, Meter.FREE) if public else (Right.TENANT, Meter.TOKENS)

    def owner(call: Call) -> bytes:
        return PUBLIC.tenant if public else call.tenant.salt

    @routes.add("POST", path, right=change, meter=meter, body=JsonBody.of(new), tag="prefixes", status=201)
    async def add(call: Call) -> Answer:
        """Compute a prefix, pin its blocks and give it a name."""
        return await register(call, call.body.name, replace=call.body.replace)

    @routes.add("GET", path, right=Right.TENANT, meter=Meter.FREE, body=NO_BODY, tag="prefixes")
    async def list_all(call: Call) -> dict[str, Any]:
        """All of them, the bytes they pin, and the server's budget for all tenants."""
        salt, service = owner(call), prefixes()
        await service.refresh(salt)
        found = service.list(salt=salt)
        return {
            "object": "list",
            "data": [prefix.describe() for prefix in found],
            "pinned_bytes": sum(prefix.bytes for prefix in found),
            "budget_bytes": service.budget_bytes,
        }

    @routes.add("GET", path + "/{name}", right=Right.TENANT, meter=Meter.FREE, body=NO_BODY, tag="prefixes")
    async def show(call: Call) -> dict[str, Any]:
        """A prefix with its content."""
        salt, name, service = owner(call), call.names["name"], prefixes()
        await service.refresh(salt, name)
        prefix = service.get(name, salt=salt)
        return {**prefix.describe(), **prefix.body}

    @routes.add("PUT", path + "/{name}", right=change, meter=meter, body=JsonBody.of(version), tag="prefixes")
    async def replace(call: Call) -> Answer:
        """Register a prefix, or a new version of it."""
        return await register(call, call.names["name"], replace=True)

    @routes.add("DELETE", path + "/{name}", right=change, meter=Meter.FREE, body=NO_BODY, tag="prefixes")
    async def remove(call: Call) -> dict[str, Any]:
        """Remove a prefix and unpin its blocks. They stay cached until they are evicted."""
        removed = await prefixes().remove(call.names["name"], salt=owner(call))
        return {"id": removed.name, "object": "prefix", "deleted": True, "version": removed.version}

    async def register(call: Call, name: str, *, replace: bool) -> Answer:
        body: AnyPrefixBody = call.body
        messages = body.plain_messages(call.limits)
        with admit(body):
            prefix = await prefixes().add(
                name,
                content=body.content,
                messages=messages,
                salt=owner(call),
                replace=replace,
                charge=lambda tokens: None if public else call.charge(TokenUsage(tokens)),
            )
        return Answer.json(prefix.describe(), 201 if prefix.version == 1 else 200)
