"""Named prefixes of one vLLM server: vLLM tokenizes and computes them, the connector writes them, and the stores pin them."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, Final

import httpx
from msgspec import Struct, ValidationError

from foreword.api.asgi import App, Receive, Scope, Send
from foreword.blocks.salt import PUBLIC, Salt
from foreword.decoders import convert
from foreword.errors import BadRequest
from foreword.integrations.vllm_middleware.prefix_storage import ConnectorStorage
from foreword.newest import Newest
from foreword.prefixes.book import Content, Message, NamedPrefix
from foreword.prefixes.prefix_service import AsyncPrefixes, PrefixService, Registration
from foreword.request_errors import EngineFailed, NotReady

# How often the pins of a prefix in use are checked.
_CHECK_SECONDS: Final = 30.0
# Blocks are written in the background: how long to wait for all of them, and for the next one.
_WRITTEN_WITHIN: Final = 60.0
_NEXT_WITHIN: Final = 5.0
_POLL_SECONDS: Final = 0.05
_MOST_CHECKED: Final = 2048


class _Tokenized(Struct):
    tokens: list[int]


class InnerServer:
    """Calls the server's own routes within the process.

    Args:
        app: what a request passes after the middleware.
        host: the FastAPI application.
        key: an API key that the server accepts, or None.
    """

    def __init__(self, app: App, host: Any, key: str | None) -> None:
        async def call(scope: Scope, receive: Receive, send: Send) -> None:
            await app({**scope, "app": host, "state": {}}, receive, send)

        self._client = httpx.AsyncClient(
            transport=httpx.ASGITransport(call, raise_app_exceptions=False),
            base_url="http://foreword",
            timeout=None,
            # Other middleware may set cookies, which belong to the request of one client.
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
            headers={} if key is None else {"authorization": f"Bearer {key}"},
        )

    async def post(self, path: str, body: Mapping[str, object], headers: Mapping[str, str] | None = None) -> Any:
        """The answer's JSON. Raises BadRequest, NotReady or EngineFailed with the server's own message."""
        answer = await self._client.post(path, json=body, headers=headers)
        try:
            found = answer.json()
        except ValueError:
            raise EngineFailed(f"vLLM's {path} answered HTTP {answer.status_code} and no JSON") from None
        if answer.status_code < 400:
            if not isinstance(found, dict):
                raise EngineFailed(f"vLLM's {path} answered HTTP {answer.status_code} and no object")
            return found
        error = found.get("error", found) if isinstance(found, dict) else found
        reason = error.get("message", error) if isinstance(error, dict) else error
        message = f"vLLM's {path} answered HTTP {answer.status_code}: {reason}"
        if answer.status_code in (429, 503):
            raise NotReady(message)
        if answer.status_code >= 500:
            raise EngineFailed(message)
        raise BadRequest(message)

    async def tokens(self, body: Mapping[str, object]) -> list[int]:
        """Tokens of a prompt or of messages, from vLLM's `/tokenize`. Raises as `post` does."""
        found = await self.post("/tokenize", body)
        try:
            return convert(found, _Tokenized).tokens
        except ValidationError as error:
            raise EngineFailed(f"vLLM's /tokenize does not answer with tokens: {error}") from None


class VllmPrefixes(AsyncPrefixes):
    """Named prefixes of the whole server: vLLM's API keys are not tenants. Make it on the server's event loop. Public ones are
    computed with the salt PUBLIC; the connector learns of them by their records."""

    def __init__(self, storage: ConnectorStorage, server: InnerServer) -> None:
        # The stores' own limits are the budget.
        service = PrefixService(
            # Called on a thread.
            lambda content: asyncio.run_coroutine_threadsafe(self._content_tokens(content), self._loop).result(),
            lambda name, tokens: None,
            storage,
            storage.mark,
        )
        super().__init__(service, self._pin_computed, storage.budget_bytes)
        self._storage = storage
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._pinning = asyncio.Lock()
        self._checked: Newest[str, float] = Newest(_MOST_CHECKED)

    def start(self) -> None:
        """Read what the stores know, and compute what they have lost."""
        self.later(self.refresh())
        self.follow_public()

    async def close(self) -> None:
        await super().close()
        await asyncio.to_thread(self._storage.close)

    async def encode(self, text: str) -> list[int]:
        """Tokens of what follows a prefix."""
        return await self._server.tokens({"prompt": text, "add_special_tokens": False}) if text else []

    def used(self, prefix: NamedPrefix, cached: int) -> None:
        """A request that named the prefix has ended, with `cached` tokens of its prompt found in the cache."""
        book = self.service.book
        book.note_hit(prefix.name, cached)
        now = time.monotonic()
        if now - self._checked.get(prefix.name, -math.inf) > _CHECK_SECONDS:
            self._checked[prefix.name] = now
            salt = b"" if book.version(prefix.name, salt=b"") else PUBLIC.tenant
            self.later(self.repin(prefix, salt, compute=self._pin_written))

    # Questions of the service to vLLM

    async def _content_tokens(self, content: Content) -> list[int]:
        """The tokens that every prompt with this prefix starts with. Raises BadRequest with vLLM's message."""
        if isinstance(content, str):
            return await self._server.tokens({"prompt": content})
        if not all(_is_text(message.get("content")) for message in content):
            raise BadRequest(
                "a named prefix is text: the parts of its messages must be of type 'text'", param="messages"
            )
        try:
            # A chat template may write the last message in another way than one that is followed: so two follow, and differ.
            one, other = [await self._render([*content, {"role": "user", "content": text}]) for text in ("a", "b")]
        except BadRequest:
            return await self._render(content)
        common = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))
        return one[:common]

    async def _render(self, messages: Sequence[Message]) -> list[int]:
        return await self._server.tokens({"messages": list(messages), "add_generation_prompt": False})

    async def _pin_computed(self, one: Registration) -> None:
        """Pin a prefix: vLLM computes (or loads) it, and what the connector writes is pinned. An adopted prefix is computed
        only if the stores have lost blocks of it."""
        self._checked[one.prefix.name] = time.monotonic()
        if not one.adopted:
            await self._compute_and_pin_written(one)
            return
        async with self._pinning:
            if not await self._pin(one):
                await self._compute_and_pin_written(one)

    async def _compute_and_pin_written(self, one: Registration) -> None:
        body: dict[str, Any] = {"prompt": list(one.tokens), "max_tokens": 1, "temperature": 0.0, "stream": False}
        body |= {"cache_salt": Salt(one.salt).text} if one.salt else {}
        await self._server.post("/v1/completions", body)
        await self._pin_written(one)

    async def _pin_written(self, one: Registration) -> None:
        """Pin blocks as another process writes them, until all are there or no more come."""
        started = last_change = time.monotonic()
        while True:
            before, whole, now = one.pinned, await self._pin(one), time.monotonic()
            if one.pinned > before:
                last_change = now
            if whole or now - last_change > _NEXT_WITHIN or now - started > _WRITTEN_WITHIN:
                return
            await asyncio.sleep(_POLL_SECONDS)

    async def _pin(self, one: Registration) -> bool:
        """Pin what the stores have of a prefix. Whether that is all of it."""
        one.pinned, whole = await asyncio.to_thread(self._storage.pin, one.tokens, one.salt)
        return whole


def _is_text(content: object) -> bool:
    parts = content if isinstance(content, list) else []
    return all(not isinstance(part, dict) or part.get("type", "text") == "text" for part in parts)
