"""`/v1/cache/prefetch` of a vLLM server: bring what the stores have of a coming prompt to the device.

A connector cannot load blocks without a request. So vLLM gets a request for exactly the tokens that the stores have, and one
more, which is all that it computes. Its own prefix cache keeps the blocks then, in its own order. Blocks in a `memory://` tier
of the engine's process cannot be seen from here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from foreword.api.bodies import Body
from foreword.blocks.salt import Salt
from foreword.errors import BadRequest, NotReady
from foreword.integrations.vllm.prefix_storage import ConnectorStorage
from foreword.integrations.vllm.prefixes import InnerServer


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


def _answered(tokens: Sequence[int], status: str, loaded: int, reason: str) -> dict[str, Any]:
    counts = {"prompt_tokens": len(tokens), "status": status, "tokens": loaded, "ttl": None, "reason": reason}
    return {"object": "cache.prefetch", **counts, "where": "device" if loaded else None}
