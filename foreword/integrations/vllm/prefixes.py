"""Named prefixes for a vLLM server that has Foreword's connector: an ASGI middleware that vLLM loads by name.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "ForewordConnector", ...}' \\
        --middleware foreword.integrations.vllm.NamedPrefixes

It adds `/v1/prefixes`, as Foreword's own server has it, and understands `"prefix": "NAME"` in the bodies of `/v1/completions`
and `/v1/chat/completions`: the prefix is put before the prompt or the messages, and vLLM sees an ordinary request.

vLLM puts such a middleware outside its own, before the one that asks for the API key. So this one does nothing there but
install itself, when the server starts, directly before the routes: what comes so far has passed everything else.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foreword.errors import BadRequest, ConfigError, ForewordError, NotFound
from foreword.integrations.vllm.prefix_http import (
    CachedTokens,
    InnerServer,
    body_of,
    problem,
    read_body,
    replay,
    with_length,
)
from foreword.integrations.vllm.prefix_registry import PrefixRegistry
from foreword.integrations.vllm.prefix_store import PrefixStores
from foreword.prefixes.book import NamedPrefix

_PREFIXES = "/v1/prefixes"
_COMPLETIONS = "/v1/completions"
_CHAT = "/v1/chat/completions"


class NamedPrefixes:
    """The middleware. See the module."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self.app(scope, receive, send)
            return
        try:
            registry = await self._install(scope["app"])
        except ForewordError as error:
            await receive()
            await send({"type": "lifespan.startup.failed", "message": f"Foreword: {error.message}"})
            return

        async def noticing(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                registry.start()
            elif message["type"] in ("lifespan.shutdown.complete", "lifespan.shutdown.failed"):
                await registry.close()
            await send(message)

        await self.app(scope, receive, noticing)

    async def _install(self, host: Any) -> PrefixRegistry:
        """Raises ConfigError, ModelUnsupported, StoreError."""
        config = getattr(host.state, "vllm_config", None)
        routes = getattr(host.router, "middleware_stack", None)
        if config is None or routes is None:
            raise ConfigError(
                "NamedPrefixes is a middleware of `vllm serve`, of a version that it knows (0.31 or later)"
            )
        stores = await asyncio.to_thread(PrefixStores, config)
        registry = PrefixRegistry(stores, InnerServer(self.app, host, _api_key(host.state)))
        host.router.middleware_stack = PrefixRoutes(routes, registry)
        return registry


def _api_key(state: Any) -> str | None:
    """Any key that the server takes."""
    given = getattr(getattr(state, "args", None), "api_key", None)
    keys = [given] if isinstance(given, str) else list(given or [os.environ.get("VLLM_API_KEY")])
    return next((key for key in keys if key), None)


class PrefixRoutes:
    """The routes of named prefixes, before those of vLLM."""

    def __init__(self, app: ASGIApp, registry: PrefixRegistry) -> None:
        self._app = app
        self._registry = registry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            if path == _PREFIXES or path.startswith(_PREFIXES + "/"):
                await self._manage(path[len(_PREFIXES) + 1 :], scope, receive, send)
                return
            if path in (_COMPLETIONS, _CHAT) and scope["method"] == "POST":
                await self._complete(path, scope, receive, send)
                return
        await self._app(scope, receive, send)

    # /v1/prefixes

    async def _manage(self, name: str, scope: Scope, receive: Receive, send: Send) -> None:
        messages = await read_body(receive)
        if messages is None:
            return
        try:
            response = await self._answer(scope["method"], name, body_of(messages))
        except ForewordError as error:
            response = problem(error)
        await response(scope, receive, send)

    async def _answer(self, method: str, name: str, body: bytes) -> Response:
        registry = self._registry
        match method, name:
            case "GET", "":
                return await self._list()
            case "POST", "":
                return await self._add(_NewPrefix, None, body)
            case "GET", _:
                prefix = await registry.get(name)
                kind = "content" if prefix.kind == "text" else "messages"
                return JSONResponse({**describe(prefix), kind: prefix.content})
            case "PUT", _ if name:
                return await self._add(_Content, name, body)
            case "DELETE", _ if name:
                gone = await registry.remove(name)
                return JSONResponse({"id": gone.name, "object": "prefix", "deleted": True, "version": gone.version})
        raise NotFound(f"{method} {_PREFIXES}/{name} is nothing that can be asked for")

    async def _list(self) -> Response:
        found = await self._registry.all()
        return JSONResponse(
            {
                "object": "list",
                "data": [describe(prefix) for prefix in found],
                "pinned_bytes": sum(prefix.bytes for prefix in found),
                "budget_bytes": self._registry.budget_bytes,
            }
        )

    async def _add(self, kind: type[_Content], name: str | None, body: bytes) -> Response:
        asked = _parse(kind, body)
        named, replace = (asked.name, asked.replace) if isinstance(asked, _NewPrefix) else (name or "", True)
        prefix = await self._registry.add(named, content=asked.content, messages=asked.messages, replace=replace)
        return JSONResponse(describe(prefix), status_code=201 if prefix.version == 1 else 200)

    # Requests that may name a prefix

    async def _complete(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        messages = await read_body(receive)
        if messages is None:
            return
        try:
            used, body = await self._with_prefix(path, body_of(messages))
        except ForewordError as error:
            await problem(error)(scope, receive, send)
            return
        if used is None:
            await self._app(scope, replay(messages, receive), send)
            return
        data = json.dumps(body).encode()
        again = replay([{"type": "http.request", "body": data, "more_body": False}], receive)
        watched = CachedTokens(send)
        await self._app(with_length(scope, len(data)), again, watched)
        if watched.fine:
            self._registry.used(used, watched.count)

    async def _with_prefix(self, path: str, data: bytes) -> tuple[NamedPrefix | None, Mapping[str, Any]]:
        """The prefix that a body names, and the body with it in place; None if it names none, or is not for us to judge."""
        if b'"prefix"' not in data:
            return None, {}
        try:
            body = json.loads(data)
        except ValueError:
            return None, {}
        if not isinstance(body, dict) or body.get("prefix") is None:
            return None, {}
        name = body.pop("prefix")
        if not isinstance(name, str):
            raise BadRequest("prefix must be the name of a prefix", param="prefix")
        if path == _CHAT:
            return await self._chat(name, body)
        return await self._completion(name, body)

    async def _chat(self, name: str, body: dict[str, Any]) -> tuple[NamedPrefix, Mapping[str, Any]]:
        prefix = await self._registry.use(name, "messages")
        if isinstance(body.get("messages"), list):
            body["messages"] = [*prefix.content, *body["messages"]]
        return prefix, body

    async def _completion(self, name: str, body: dict[str, Any]) -> tuple[NamedPrefix, Mapping[str, Any]]:
        prefix = await self._registry.use(name, "text")
        given = body.get("prompt")
        several = isinstance(given, list) and not all(type(item) is int for item in given)
        prompts: list[Any] = given if several and given else [given]
        found = [[*prefix.tokens, *await self._tokens(prompt)] for prompt in prompts]
        body["prompt"] = found if several else found[0]
        return prefix, body

    async def _tokens(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return await self._registry.encode(prompt)
        if isinstance(prompt, list) and all(type(item) is int for item in prompt):
            return prompt
        raise BadRequest("with a prefix, prompt must be text, token ids, or a list of such", param="prompt")


def describe(prefix: NamedPrefix) -> dict[str, Any]:
    """A prefix as Foreword's own server describes it, without its content. `bytes` is what it pins in the stores."""
    return {
        "id": prefix.name,
        "object": "prefix",
        "name": prefix.name,
        "version": prefix.version,
        "kind": prefix.kind,
        "num_tokens": len(prefix.tokens),
        "bytes": prefix.bytes,
        "ready": prefix.ready,
        "created": int(prefix.created),
        "uses": prefix.uses,
        "hit_tokens": prefix.hit_tokens,
        "last_used": prefix.last_used,
    }


class _Content(BaseModel):
    """`PUT /v1/prefixes/{name}`."""

    model_config = ConfigDict(strict=True, extra="ignore")

    content: str | None = None
    messages: list[dict[str, Any]] | None = None


class _NewPrefix(_Content):
    """`POST /v1/prefixes`."""

    name: str
    replace: bool = False


def _parse(kind: type[_Content], body: bytes) -> _Content:
    try:
        parsed = kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise BadRequest(f"{place or 'the body'}: {first['msg']}", param=place or None) from None
    if (parsed.content is None) == (not parsed.messages):
        raise BadRequest(
            "give either content (text, for completions) or messages (a list that is not empty, for chat)",
            param="content",
        )
    return parsed
