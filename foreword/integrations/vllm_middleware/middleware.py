"""Named prefixes for a vLLM server that has Foreword's connector: an ASGI middleware that vLLM loads by name.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "ForewordConnector", ...}' \\
        --middleware foreword.integrations.vllm.NamedPrefixes

It adds `/v1/prefixes` and `/v1/cache/prefetch`, as Foreword's own server has them. It understands `"prefix": "NAME"` in the
bodies of `/v1/completions` and `/v1/chat/completions`: the prefix is put before the prompt or the messages, and vLLM sees an
ordinary request. It also adds `/v1/sessions`, and tells the connector the sessions of requests (`agent_sessions.py`), and
`/v1/foreword/weights_version`, for weights that are updated in place.

A connector cannot load blocks without a request. So for `/v1/cache/prefetch` vLLM gets a request for exactly the tokens that
the stores have, and one more, which is all that it computes. Its own prefix cache keeps the blocks then, in its own order.
Blocks in a `memory://` tier of the engine's process cannot be seen from here.

vLLM runs such a middleware outside its own, before the one that checks the API key. So this one only installs `PrefixRoutes`
directly before vLLM's routes when the server starts: what gets there has passed all other middleware.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Annotated, Any

from msgspec import Meta, MsgspecError, Struct
from msgspec.json import encode

from foreword.api import prefixes as prefix_routes
from foreword.api import session_control
from foreword.api.asgi import App, AsgiExchange, AsgiFront, Message, Receive, Scope, Send
from foreword.api.dialects.decode import Body, Limits, check_depth
from foreword.api.errors import error_response
from foreword.api.front import Answer, Call, Front, Handler
from foreword.api.outcomes import ClientGone, Outcome
from foreword.api.quotas import Quotas
from foreword.api.request_bodies import RequestBodies
from foreword.api.rights import Rights
from foreword.api.routes import NO_BODY, JsonBody, Meter, Right, Routes, SaltQuery
from foreword.api.tenants import Tenants
from foreword.api.work_queue import WorkQueue
from foreword.blocks.salt import Salt
from foreword.decoders import decode_json
from foreword.errors import BadRequest, ConfigError, ForewordError, NotFound, NotReady
from foreword.integrations.vllm.agent_sessions import SESSION_KEY
from foreword.integrations.vllm_middleware.prefix_storage import ConnectorStorage
from foreword.integrations.vllm_middleware.vllm_prefixes import InnerServer, VllmPrefixes
from foreword.prefixes.book import NamedPrefix
from foreword.tasks import to_its_end


class OpenPrefixBody(Body, kw_only=True):
    """`PUT /v1/prefixes/{name}` of another engine, with messages in any form that it reads."""

    content: str | None = None
    messages: list[dict[str, Any]] | None = None

    def check(self, limits: Limits) -> None:
        prefix_routes.check_content(self.content, self.messages, limits)
        check_depth(self.messages, "messages", limits)

    def plain_messages(self, limits: Limits) -> list[dict[str, Any]] | None:
        return self.messages


class NewOpenPrefixBody(OpenPrefixBody, kw_only=True):
    """`POST /v1/prefixes`, likewise."""

    name: str
    replace: bool = False


class PrefetchBody(Body, kw_only=True):
    """As on Foreword's own server. `ttl` and `priority` have no effect: vLLM evicts in its own order."""

    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    model: str | None = None
    cache_salt: str | None = None


class PrefetchEndpoint:
    """Answers with vLLM's own completions."""

    def __init__(self, storage: ConnectorStorage, server: InnerServer) -> None:
        self._storage = storage
        self._server = server

    async def answer(self, body: PrefetchBody) -> dict[str, Any]:
        """JSON. Raises BadRequest, EngineFailed."""
        tokens = await self._tokens(body)
        held = await asyncio.to_thread(self._storage.stored, tokens, Salt.parse(body.cache_salt))
        full = self._storage.position(len(tokens))
        if not held:
            return _answered(tokens, "refused", 0, "no store has it")
        try:
            cached = await self._load(body, [*tokens[:held], tokens[min(held, len(tokens) - 1)]])
        except NotReady as error:
            return _answered(tokens, "refused", 0, error.message)
        loaded = held if cached is None else min(cached, held)
        reason = "" if loaded == full else "the stores have no more of it"
        status = "accepted" if loaded == full else "clipped" if loaded else "refused"
        return _answered(tokens, status, loaded, reason if loaded == held else "vLLM did not load all of it")

    async def _tokens(self, body: PrefetchBody) -> Sequence[int]:
        if (body.prompt is None) == (body.messages is None):
            raise BadRequest("give either 'prompt' or 'messages'", param="prompt")
        if isinstance(body.prompt, list):
            return body.prompt
        names = ("model", "prompt", "messages", "tools", "chat_template_kwargs")
        given = {name: getattr(body, name) for name in names if getattr(body, name) is not None}
        return await self._server.tokens(given | ({"add_generation_prompt": False} if body.prompt is None else {}))

    async def _load(self, body: PrefetchBody, tokens: Sequence[int]) -> int | None:
        """The tokens that vLLM has not computed; None if it does not say."""
        given: dict[str, Any] = {"prompt": tokens, "max_tokens": 1, "temperature": 0.0, "stream": False}
        given |= {name: getattr(body, name) for name in ("model", "cache_salt") if getattr(body, name)}
        usage = (await self._server.post("/v1/completions", given)).get("usage") or {}
        return (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


class VllmSessionBody(session_control.SessionBody, kw_only=True):
    """`cache_salt`: the tenant, as its requests name it."""

    cache_salt: str | None = None


class SessionEndpoint:
    """Sessions are known to the connector, in each of vLLM's engines. Requests of one token speak with it."""

    def __init__(self, server: InnerServer, engines: int) -> None:
        self._server = server
        self._engines = engines

    async def act(self, body: VllmSessionBody) -> dict[str, Any]:
        """JSON. Raises BadRequest, NotFound, NotReady, EngineFailed."""
        given = {name: getattr(body, name) for name in ("session_id", "parent_session_id", "timeout", "keep_tokens")}
        told = await self._tell({"action": body.action, **given}, body.cache_salt)
        freed: Counter[str] = Counter()
        for one in told:
            freed.update(one.get("freed_blocks", {}))
        shown = {"object": "session", "id": body.session_id, "action": body.action}
        return shown if body.action in ("open", "fork") else {**shown, "freed_blocks": freed}

    async def listed(self, salt: str | None) -> dict[str, Any]:
        """JSON. An engine shows the requests of a session that it has served. Raises as `act` does."""
        found: dict[str, Any] = {}
        for told in await self._tell({"action": "list"}, salt):
            for one in told["data"]:
                known = found.setdefault(one["id"], one)
                found[one["id"]] = max(known, one, key=lambda shown: shown["requests"])
        return {"object": "list", "data": list(found.values())}

    async def _tell(self, told: Mapping[str, Any], salt: str | None) -> list[dict[str, Any]]:
        asked: dict[str, Any] = {"prompt": [0], "max_tokens": 1, "temperature": 0.0, "stream": False}
        asked |= {"kv_transfer_params": {SESSION_KEY: told}} | ({"cache_salt": salt} if salt else {})
        found = []
        for engine in range(self._engines):
            headers = {"x-data-parallel-rank": str(engine)} if self._engines > 1 else {}
            answer = ((await self._server.post(_COMPLETIONS, asked, headers)).get("kv_transfer_params") or {}).get(
                SESSION_KEY
            )
            if answer is None:
                raise NotReady("the connector does not answer: see the log of vLLM for why it was switched off")
            if "error" in answer:
                kind = NotFound if answer["status"] == NotFound.status else BadRequest
                raise kind(answer["error"], param=answer["param"])
            found.append(answer)
        return found


class _Metadata(Struct):
    user_id: str | None = None


class _NamesSession(Struct):
    """What names the session of a request, the first one that it has."""

    prompt_cache_key: str | None = None
    user: str | None = None
    metadata: _Metadata | None = None
    kv_transfer_params: dict[str, Any] | None = None


def in_session(data: bytes, header: str) -> bytes:
    """A body with its session in `kv_transfer_params`, where the connector finds it; as it is if it names none."""
    try:
        body = decode_json(data, _NamesSession)
    except (MsgspecError, UnicodeDecodeError, RecursionError):
        return data  # for vLLM to refuse
    user = body.metadata.user_id if body.metadata is not None else None
    name = body.prompt_cache_key or body.user or user or header
    if not name or len(name) > session_control.LONGEST_NAME or SESSION_KEY in (body.kv_transfer_params or {}):
        return data
    told = {SESSION_KEY: {"session_id": name}}
    if body.kv_transfer_params:
        return encode({**json.loads(data), "kv_transfer_params": {**body.kv_transfer_params, **told}})
    # Behind all else: a value that is null is replaced.
    return data.rstrip()[:-1] + b',"kv_transfer_params":' + encode(told) + b"}"


def _answered(tokens: Sequence[int], status: str, loaded: int, reason: str) -> dict[str, Any]:
    counts = {"prompt_tokens": len(tokens), "status": status, "tokens": loaded, "ttl": None, "reason": reason}
    return {"object": "cache.prefetch", **counts, "where": "device" if loaded else None}


_BODY_SECONDS = 30.0
_INLINE_BYTES = 128 << 10
_COMPLETIONS = "/v1/completions"
_CHAT = "/v1/chat/completions"
_GENERATES = (_COMPLETIONS, _CHAT, "/v1/responses", "/v1/messages")
# Under /v1, where vLLM asks for its API key.
_WEIGHTS = "/v1/foreword/weights_version"
_LAST_BYTES = 8192
# In the text of an answer the quotes would be escaped, so the expression does not match there.
_CACHED = re.compile(rb'(?<!\\)"cached_tokens":\s*(\d+)')


class NamedPrefixes:
    """The middleware. See the module."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self.app(scope, receive, send)
            return
        try:
            prefixes = await self._install(scope["app"])
        except ForewordError as error:
            await receive()
            await send({"type": "lifespan.startup.failed", "message": f"Foreword: {error.message}"})
            return

        async def watch(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                prefixes.start()
            elif message["type"] in ("lifespan.shutdown.complete", "lifespan.shutdown.failed"):
                await prefixes.close()
            await send(message)

        await self.app(scope, receive, watch)

    async def _install(self, host: Any) -> VllmPrefixes:
        """Raises ConfigError, ModelUnsupported, StoreError."""
        config = getattr(host.state, "vllm_config", None)
        routes = getattr(host.router, "middleware_stack", None)
        if config is None or routes is None:
            raise ConfigError("NamedPrefixes is a middleware for `vllm serve` of vLLM 0.31 or later")
        storage = await asyncio.to_thread(ConnectorStorage, config)
        inner = InnerServer(self.app, host, _api_key(host.state))
        prefixes = VllmPrefixes(storage, inner)
        weights = WeightsEndpoints(getattr(host.state, "engine_client", None))
        sessions = SessionEndpoint(inner, config.parallel_config.data_parallel_size)
        front = make_front(prefixes, weights, PrefetchEndpoint(storage, inner), sessions)
        host.router.middleware_stack = PrefixRoutes(routes, prefixes, front)
        return prefixes


def _api_key(state: Any) -> str | None:
    """One of the keys that the server accepts."""
    given = getattr(getattr(state, "args", None), "api_key", None)
    keys = [given] if isinstance(given, str) else list(given or [os.environ.get("VLLM_API_KEY")])
    return next((key for key in keys if key), None)


class _NewVersion(Body, kw_only=True, forbid_unknown_fields=True):
    version: Annotated[str, Meta(min_length=1, max_length=256)]


class WeightsEndpoints:
    """The version of weights that are updated in place.

    Args:
        client: vLLM's `EngineClient`.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._changing = asyncio.Lock()

    async def show(self) -> dict[str, Any]:
        """JSON. Raises NotFound."""
        if not hasattr(self._client, "update_weight_version"):
            raise NotFound("this vLLM knows no version of weights; vLLM 0.32 does")
        return {"version": await self._client.get_weight_version()}

    async def change(self, version: str) -> dict[str, Any]:
        """JSON. Raises NotFound."""
        await self.show()
        # A client that goes away cancels this call, which must not leave vLLM between a pause and its end.
        await to_its_end(self._set(version), "setting the version of the weights")
        return await self.show()

    async def _set(self, version: str) -> None:
        """Paused, vLLM drops all KV of other weights; no step comes before the new version. One at a time, so that none takes
        the pause of another for an operator's."""
        async with self._changing:
            paused = await self._client.is_paused()
            try:
                await self._client.pause_generation(mode="keep", clear_cache=True)
                await self._client.update_weight_version(version)
            finally:
                # A pause that fails has begun nevertheless.
                if not paused:
                    await self._client.resume_generation()


class _Counts:
    """vLLM counts the requests of its server, these among them."""

    def response(self, route: str, status: int) -> None: ...

    def outcome(self, dialect: str, outcome: Outcome) -> None: ...

    def rejected(self, tenant: str, code: str) -> None: ...

    def ignored(self, route: str) -> None: ...

    def unexpected(self, error: BaseException) -> None: ...


def make_front(
    prefixes: VllmPrefixes, weights: WeightsEndpoints, prefetch: PrefetchEndpoint, sessions: SessionEndpoint
) -> Front:
    """The middleware's routes. vLLM has checked its API key; all who have it are one tenant."""
    routes, right = Routes[Handler](), Right.TENANT
    prefix_routes.add_routes(routes, lambda: prefixes, lambda _: nullcontext(), NewOpenPrefixBody, OpenPrefixBody)

    @routes.add(
        "POST",
        "/v1/cache/prefetch",
        right=right,
        meter=Meter.REQUEST,
        body=JsonBody.of(PrefetchBody),
        tag="cache",
    )
    async def prefetch_prompt(call: Call) -> dict[str, Any]:
        """Load what the stores have of a coming prompt to the device."""
        return await prefetch.answer(call.body)

    @routes.add("GET", _WEIGHTS, right=right, meter=Meter.FREE, body=NO_BODY, tag="weights")
    async def show_version(call: Call) -> dict[str, Any]:
        """The version of the weights that are served."""
        return await weights.show()

    @routes.add("POST", _WEIGHTS, right=right, meter=Meter.FREE, body=JsonBody.of(_NewVersion), tag="weights")
    async def change_version(call: Call) -> dict[str, Any]:
        """The weights were updated in place: KV of other versions is not used from now on."""
        return await weights.change(call.body.version)

    async def session(call: Call) -> dict[str, Any]:
        """Open a session, fork it, compact it, or end it, which frees what only it has used."""
        return await sessions.act(call.body)

    async def open_sessions(call: Call) -> dict[str, Any]:
        """The open sessions of the caller, or of the tenant that `cache_salt` in the query names."""
        query: SaltQuery = call.query
        return await sessions.listed(next(iter(query.cache_salt), None))

    session_control.add_routes(routes, session, open_sessions, VllmSessionBody, SaltQuery)
    work = WorkQueue("foreword", inline=_INLINE_BYTES)
    return Front(routes, Rights(Tenants(), None), Quotas(), RequestBodies(_BODY_SECONDS), work, _Counts(), Limits)


class PrefixRoutes:
    """The routes of a front before those of vLLM, and named prefixes in requests for vLLM."""

    def __init__(self, app: App, prefixes: VllmPrefixes, front: Front) -> None:
        self._app = app
        self._prefixes = prefixes
        self._own = AsgiFront(front)
        self._routes = front.routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", "")) if scope["type"] == "http" else ""
        if self._routes.methods(path)[0]:
            await self._own(scope, receive, send)
            return
        if path not in _GENERATES or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        exchange = AsgiExchange(scope, receive, send)
        try:
            body = b"".join([piece async for piece in exchange.pieces()])
        except ClientGone:
            return
        try:
            prefix, changed = await self._with_prefix(path, body)
        except ForewordError as error:
            await exchange.send(Answer.of(error_response(error)))
            return
        data = in_session(
            body if prefix is None else json.dumps(changed).encode(), exchange.headers.get("x-session-id", "")
        )
        if prefix is None:
            await self._app(scope if data is body else _with_length(scope, len(data)), _replay(data, receive), send)
            return
        watched = CachedTokens(send)
        await self._app(_with_length(scope, len(data)), _replay(data, receive), watched)
        if watched.succeeded:
            self._prefixes.used(prefix, watched.count)

    async def _with_prefix(self, path: str, data: bytes) -> tuple[NamedPrefix | None, Mapping[str, Any]]:
        """The prefix that a body names, and the body with it in place. None if it names none, or is for vLLM to refuse."""
        if b'"prefix"' not in data or path not in (_COMPLETIONS, _CHAT):
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
        await self._prefixes.refresh(name=name)
        if path == _CHAT:
            prefix = self._prefixes.service.book.use(name, "messages")
            if isinstance(body.get("messages"), list):
                body["messages"] = [*prefix.content, *body["messages"]]
            return prefix, body
        prefix = self._prefixes.service.book.use(name, "text")
        given = body.get("prompt")
        several = isinstance(given, list) and not all(type(item) is int for item in given)
        prompts: list[Any] = given if several and given else [given]
        found = [[*prefix.tokens, *await self._prompt_tokens(prompt)] for prompt in prompts]
        body["prompt"] = found if several else found[0]
        return prefix, body

    async def _prompt_tokens(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return await self._prefixes.encode(prompt)
        if isinstance(prompt, list) and all(type(item) is int for item in prompt):
            return prompt
        raise BadRequest("with a prefix, prompt must be text, token ids, or a list of such", param="prompt")


def _replay(body: bytes, receive: Receive) -> Receive:
    """Receives the body, then what comes after it: that the client has gone."""
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return left.pop() if left else await receive()

    return again


def _with_length(scope: Scope, length: int) -> Scope:
    headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"content-length"]
    return {**scope, "headers": [*headers, (b"content-length", b"%d" % length)]}


class CachedTokens:
    """Sends an answer on unchanged, and reads the number of cached tokens from its usage."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._last = b""
        self.succeeded = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.succeeded = message["status"] < 400
        elif message["type"] == "http.response.body":
            self._last = (self._last + message.get("body", b""))[-_LAST_BYTES:]
        await self._send(message)

    @property
    def count(self) -> int:
        """0 if vLLM does not report it (it does with `--enable-prompt-tokens-details`; in a stream, with `stream_options`)."""
        found = _CACHED.findall(self._last)
        return int(found[-1]) if found else 0
