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
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Final, TypeVar

from msgspec import Meta, MsgspecError, Raw, Struct
from msgspec.json import encode

from foreword.api import prefixes as prefix_routes
from foreword.api import session_control
from foreword.api.asgi import App, AsgiExchange, AsgiFront, Message, Receive, Scope, Send
from foreword.api.dialects.decode import NO_JSON, UNSET_RAW, Body, Limits, as_utf8, check_depth, is_set
from foreword.api.errors import error_response, internal_error_response
from foreword.api.front import Answer, Call, Front, Handler
from foreword.api.outcomes import ClientGone, Outcome, request_id_from
from foreword.api.quotas import Quotas
from foreword.api.request_bodies import RequestBodies, declared_length
from foreword.api.rights import Rights, Tenants
from foreword.api.routes import NO_BODY, JsonBody, Meter, Right, Routes, SaltQuery
from foreword.api.work_queue import WorkQueue
from foreword.blocks.salt import Salt
from foreword.decoders import convert, decode_json
from foreword.errors import BadRequest, ConfigError, ForewordError, NotFound
from foreword.integrations.vllm.connector_extras import SESSION_KEY
from foreword.integrations.vllm_middleware.prefix_storage import ConnectorStorage
from foreword.integrations.vllm_middleware.vllm_prefixes import InnerServer, VllmPrefixes
from foreword.prefixes.book import NamedPrefix
from foreword.request_errors import NotReady, QueueFull
from foreword.tasks import to_its_end

logger = logging.getLogger(__name__)


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
    """A prefetch, as on Foreword's own server. `ttl` and `priority` have no effect: vLLM evicts in its own order."""

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
    """Fields that name the session of a request: the first that it has counts."""

    prompt_cache_key: str | None = None
    user: str | None = None
    metadata: _Metadata | None = None
    kv_transfer_params: Raw = UNSET_RAW


class _Told(Struct):
    foreword_session: Raw = UNSET_RAW


def in_session(data: bytes, header: str) -> bytes:
    """A body with its session in `kv_transfer_params`, where the connector finds it; as it is if it names none. No other value
    is read or written anew."""
    try:
        body = decode_json(data, _NamesSession)
        user = body.metadata.user_id if body.metadata is not None else None
        name = body.prompt_cache_key or body.user or user or header
        given = body.kv_transfer_params if is_set(body.kv_transfer_params) else Raw(b"{}")
        if (
            not name
            or len(name) > session_control.LONGEST_NAME
            or decode_json(given, _Told).foreword_session is not NO_JSON
        ):
            return data
    except (MsgspecError, UnicodeError, RecursionError):
        return data  # for vLLM to refuse
    return _with_field(data, "kv_transfer_params", _with_field(bytes(given), SESSION_KEY, encode({"session_id": name})))


def _with_field(data: bytes, name: str, value: bytes) -> bytes:
    """A JSON object with a field behind all others: of equal names, the last one counts."""
    fields = data.rstrip()[:-1].rstrip()
    return b"".join((fields, b"" if fields.endswith(b"{") else b",", encode(name), b":", value, b"}"))


class _NamesPrefix(Struct):
    prefix: Raw = UNSET_RAW


def named_prefix(data: bytes, limits: Limits) -> str | None:
    """The name of the prefix in a body; None if it names none, or is for vLLM to refuse. Raises BadRequest."""
    try:
        given = decode_json(data, _NamesPrefix).prefix
    except (MsgspecError, UnicodeError, RecursionError) as error:
        if _names_prefix(data, limits):
            raise BadRequest(f"The body is not valid JSON: {error}") from None
        return None
    if not is_set(given):
        return None
    try:
        return decode_json(given, str)
    except (MsgspecError, UnicodeError, RecursionError):
        raise BadRequest("prefix must be the name of a prefix", param="prefix") from None


def _answered(tokens: Sequence[int], status: str, loaded: int, reason: str) -> dict[str, Any]:
    counts = {"prompt_tokens": len(tokens), "status": status, "tokens": loaded, "ttl": None, "reason": reason}
    return {"object": "cache.prefetch", **counts, "where": "device" if loaded else None}


_BODY_SECONDS: Final = 30.0
# Bytes of all bodies that are being read; vLLM reads them without a limit.
_ALL_BODIES: Final = 1 << 30
_INLINE_BYTES: Final = 128 << 10
# Calls of one kind that run at a time. Each asks vLLM, and some go on when their clients have left.
_REGISTRATIONS: Final = 64
_PREFETCHES: Final = 256
_SESSION_CALLS: Final = 1024
_WEIGHT_CHANGES: Final = 16
_COMPLETIONS = "/v1/completions"
_CHAT = "/v1/chat/completions"
_GENERATES = (_COMPLETIONS, _CHAT, "/v1/responses", "/v1/messages")
# Under /v1, where vLLM asks for its API key.
_WEIGHTS = "/v1/foreword/weights_version"
_LAST_BYTES = 8192
# In the text of an answer the quotes would be escaped, so the expression does not match there.
_CACHED = re.compile(rb'(?<!\\)"cached_tokens":\s*(\d{1,12})')
_ONE_PROMPT: Final[Any] = str | list[int]
_PROMPTS: Final[Any] = str | list[int | str | list[int]]
_T = TypeVar("_T")


def _names_prefix(data: bytes, limits: Limits) -> bool:
    """Whether a body that is no JSON names a prefix as vLLM reads it, which takes `NaN` and halves of characters: vLLM would
    answer without the prefix. Raises BadRequest."""
    limits.check(data)
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.get("prefix") is not None


class AtATime:
    """Calls of one kind that run.

    Args:
        most: more than these are refused.
    """

    def __init__(self, most: int, what: str) -> None:
        self._most, self._what = most, what
        self._running = 0

    @contextmanager
    def call(self) -> Iterator[None]:
        """Raises QueueFull."""
        if self._running >= self._most:
            raise QueueFull(f"{self._most:,} {self._what} are running; retry later")
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1


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
        limits = Limits.for_model(int(config.model_config.max_model_len))
        front = make_front(prefixes, weights, PrefetchEndpoint(storage, inner), sessions, limits)
        host.router.middleware_stack = PrefixRoutes(routes, prefixes, front)
        return prefixes


def _api_key(state: Any) -> str | None:
    """The first API key that the server accepts."""
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
        self._calls = AtATime(_WEIGHT_CHANGES, "changes of the weights' version")

    async def show(self) -> dict[str, Any]:
        """JSON. Raises NotFound."""
        if not hasattr(self._client, "update_weight_version"):
            raise NotFound("this vLLM knows no version of weights; vLLM 0.32 does")
        return {"version": await self._client.get_weight_version()}

    async def change(self, version: str) -> dict[str, Any]:
        """JSON. Raises NotFound, QueueFull."""
        await self.show()
        # A client that goes away cancels this call, which must not leave vLLM between a pause and its end.
        await to_its_end(self._set(version), "setting the version of the weights")
        return await self.show()

    async def _set(self, version: str) -> None:
        """Paused, vLLM drops all KV of other weights; no step comes before the new version. One at a time, so that none takes
        the pause of another for an operator's."""
        with self._calls.call():
            async with self._changing:
                await self._set_paused(version)

    async def _set_paused(self, version: str) -> None:
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
    prefixes: VllmPrefixes,
    weights: WeightsEndpoints,
    prefetch: PrefetchEndpoint,
    sessions: SessionEndpoint,
    limits: Limits,
) -> Front:
    """The middleware's routes. vLLM has checked its API key; all who have it are one tenant."""
    routes, right = Routes[Handler](), Right.TENANT
    registrations = AtATime(_REGISTRATIONS, "registrations of prefixes")
    prefetches, session_calls = AtATime(_PREFETCHES, "prefetches"), AtATime(_SESSION_CALLS, "calls of sessions")
    prefix_routes.add_routes(
        routes, lambda: prefixes, lambda _: registrations.call(), NewOpenPrefixBody, OpenPrefixBody
    )

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
        with prefetches.call():
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
        with session_calls.call():
            return await sessions.act(call.body)

    async def open_sessions(call: Call) -> dict[str, Any]:
        """The open sessions of the caller, or of the tenant that `cache_salt` in the query names."""
        query: SaltQuery = call.query
        with session_calls.call():
            return await sessions.listed(next(iter(query.cache_salt), None))

    session_control.add_routes(routes, session, open_sessions, VllmSessionBody, SaltQuery)
    work = WorkQueue("foreword", inline=_INLINE_BYTES)
    bodies = RequestBodies(_BODY_SECONDS, _ALL_BODIES)
    rights = Rights(Tenants(), None)
    return Front(routes, rights, Quotas(), bodies, work, _Counts(), lambda: limits, before=prefixes.follow_public)


class PrefixRoutes:
    """The routes of a front before those of vLLM, and named prefixes in requests for vLLM."""

    def __init__(self, app: App, prefixes: VllmPrefixes, front: Front) -> None:
        self._app = app
        self._prefixes = prefixes
        self._front = front
        self._own = AsgiFront(front)
        self._routes = front.routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", "")) if scope["type"] == "http" else ""
        if self._routes.methods(path)[0]:
            await self._own(scope, receive, send)
        elif path in _GENERATES and scope["method"] == "POST":
            await self._generate(path, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _generate(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = AsgiExchange(scope, receive, send)
        try:
            prefix, changed, left = await self._read(path, exchange)
        except ClientGone:
            return
        except ForewordError as error:
            await exchange.send(Answer.of(error_response(error)))
            return
        except Exception:  # the edge of the middleware: one request that fails for an unknown reason ends no others
            name = request_id_from(exchange.headers.get("x-request-id"))
            logger.exception("request %s: POST %s failed before vLLM had it", name, path)
            await exchange.send(Answer.of(internal_error_response(name)))
            return
        if changed:
            scope = _with_length(scope, len(left[0]))
        # The body is vLLM's now: it is not kept here while vLLM answers.
        if prefix is None:
            await self._app(scope, _replay(left, receive), send)
            return
        watched = CachedTokens(send)
        await self._app(scope, _replay(left, receive), watched)
        if watched.succeeded:
            self._prefixes.used(prefix, watched.count)

    async def _read(self, path: str, exchange: AsgiExchange) -> tuple[NamedPrefix | None, bool, list[bytes]]:
        """The prefix that a body names, whether the body was changed, and the body for vLLM. Raises ClientGone, and
        ForewordError for a body that is not for vLLM."""
        front = self._front
        held = front.bodies.hold()
        try:
            await front.bodies.fill(
                held, exchange.pieces(), declared_length(exchange.headers), front.limits().body_bytes
            )
            raw = bytes(held.data)
        finally:
            held.release()
        session, names = exchange.headers.get("x-session-id", ""), path in (_COMPLETIONS, _CHAT)

        def looked_at() -> tuple[str | None, bytes]:
            data = as_utf8(raw)
            name = named_prefix(data, front.limits()) if names else None
            if name is not None:
                return name, data
            told = in_session(data, session)
            return None, raw if told is data else told

        name, data = await self._run(len(raw), looked_at)
        if name is None:
            return None, data is not raw, [data]
        self._prefixes.follow_public()
        await self._prefixes.refresh(name=name)
        prefix = self._prefixes.service.book.use(name, "messages" if path == _CHAT else "text")
        fields = await self._run(len(data), lambda: _fields(data, front.limits()))
        if path == _CHAT:
            put = await self._run(len(data), lambda: _before_messages(prefix, fields))
        else:
            put = await self._before_prompts(prefix, fields)
        size = len(data) + sum(map(len, put.values()))
        changed = {**fields, **{name: Raw(value) for name, value in put.items()}}
        return prefix, True, [await self._run(size, lambda: in_session(encode(changed), session))]

    async def _run(self, size: int, work: Callable[[], _T]) -> _T:
        """Work on about this number of bytes: at once, or on a thread."""
        queue = self._front.work
        return work() if size <= queue.inline else await queue.run(size, work)

    async def _before_prompts(self, prefix: NamedPrefix, fields: Mapping[str, Raw]) -> dict[str, bytes]:
        """The prompts with a prefix. Its tokens come once for each: how many that is, is known before anything is tokenized.
        Raises BadRequest."""
        raw, limits = fields.get("prompt", Raw(b"null")), self._front.limits()
        given, several = await self._run(len(memoryview(raw)), lambda: _prompts(raw))
        count = len(given) * len(prefix.tokens) + sum(len(one) for one in given if not isinstance(one, str))

        def check() -> None:
            if len(given) > limits.prompts or count > limits.token_ids:
                raise BadRequest(
                    f"prompt: with the prefix {prefix.name!r} these are more than {limits.prompts:,} prompts, or more than "
                    f"{limits.token_ids:,} tokens",
                    param="prompt",
                )

        check()
        found = list[Sequence[int]]()
        for one in given:
            found.append(await self._prefixes.encode(one) if isinstance(one, str) else one)
            count += len(found[-1]) if isinstance(one, str) else 0
            check()
        return {"prompt": await self._run(8 * count, lambda: _behind(prefix.tokens, found, several=several))}


def _fields(data: bytes, limits: Limits) -> dict[str, Raw]:
    """The fields of a body but for the name of its prefix. Raises BadRequest."""
    limits.check(data)
    try:
        found = decode_json(data, dict[str, Raw])
    except (MsgspecError, UnicodeError, RecursionError) as error:
        raise BadRequest(f"The body is not valid JSON: {error}") from None
    return {name: value for name, value in found.items() if name != "prefix"}


def _before_messages(prefix: NamedPrefix, fields: Mapping[str, Raw]) -> dict[str, bytes]:
    try:
        messages = decode_json(fields["messages"], list[Raw])
    except (KeyError, MsgspecError):
        return {}  # for vLLM to refuse
    return {"messages": encode([*prefix.content, *messages])}


def _prompts(raw: Raw) -> tuple[list[str | list[int]], bool]:
    """The prompts in a body, and whether they are a list. Raises BadRequest."""
    try:
        given: str | list[Any] = decode_json(raw, _PROMPTS)
        if isinstance(given, str) or all(isinstance(one, int) for one in given):
            return [convert(given, _ONE_PROMPT)], False
        return convert(given, list[_ONE_PROMPT]), True
    except (MsgspecError, UnicodeError, RecursionError):
        raise BadRequest("with a prefix, prompt must be text, token ids, or a list of such", param="prompt") from None


def _behind(prefix: Sequence[int], prompts: Sequence[Sequence[int]], *, several: bool) -> bytes:
    """JSON of prompts behind a prefix, which is written once."""
    head = encode(prefix)[:-1]
    found = [head + b"," + encode(one)[1:] if one else head + b"]" for one in prompts]
    return b"[" + b",".join(found) + b"]" if several else found[0]


def _replay(left: list[bytes], receive: Receive) -> Receive:
    """Receives the body, which is not kept then, and what comes after it: that the client has gone."""

    async def again() -> Message:
        return {"type": "http.request", "body": left.pop(), "more_body": False} if left else await receive()

    return again


def _with_length(scope: Scope, length: int) -> Scope:
    framing = (b"content-length", b"transfer-encoding")
    headers = [(name, value) for name, value in scope["headers"] if name.lower() not in framing]
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
            self._last = (self._last + message.get("body", b"")[-_LAST_BYTES:])[-_LAST_BYTES:]
        await self._send(message)

    @property
    def count(self) -> int:
        """0 if vLLM does not report it (it does with `--enable-prompt-tokens-details`; in a stream, with `stream_options`)."""
        found = _CACHED.findall(self._last)
        return int(found[-1]) if found else 0
