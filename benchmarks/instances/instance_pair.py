"""Two engines of one process that prefill prompts for each other and migrate requests, over loopback TCP or shared memory."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Self

from foreword.engine.request import Delta, Request, SamplingParams
from foreword.engine_config import EngineConfig
from foreword.entrypoints.async_engine import AsyncEngine
from foreword.transfer.errors import CannotMigrate, TransferError
from foreword.transfer_config import TransferConfig


@dataclass
class Found:
    """A completed request.

    Attributes:
        received: tokens whose KV the second instance received.
        cached: tokens that were cached.
    """

    tokens: list[int] = field(default_factory=list)
    received: int = 0
    cached: int = 0


class InstancePair:
    """A first engine that is sent requests, and a second one that takes them over, or takes the KV of their prompts."""

    def __init__(self, model: str | None, **options: Any) -> None:
        transfer = TransferConfig(min_tokens=1, answer_timeout=120.0, progress_timeout=120.0, lease_seconds=120.0)
        config = EngineConfig(model=model, **options)
        self.first, self.second = (AsyncEngine.from_config(config, transfer=transfer, role="both") for _ in range(2))
        self._ids = itertools.count()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.second.close()
        self.first.close()

    def clear(self) -> None:
        """Forget what both have cached."""

        async def both() -> None:
            await self.first.clear_cache()
            await self.second.clear_cache()

        asyncio.run(both())

    def compute(self, prompts: Sequence[list[int]], params: SamplingParams) -> list[Found]:
        """Complete prompts on the first engine, together."""
        return self._all(prompts, lambda prompt: self._compute(prompt, params))

    def prefill(self, prompts: Sequence[list[int]], params: SamplingParams) -> list[Found]:
        """Complete prompts on the second engine, together; the first one computes them, or has them cached."""
        return self._all(prompts, lambda prompt: self._prefill(prompt, params))

    def migrate(self, prompts: Sequence[list[int]], params: SamplingParams) -> list[Found]:
        """Complete prompts, together; each request migrates after its first token, unless it ends before."""
        return self._all(prompts, lambda prompt: self._migrate(prompt, params))

    def _all(self, prompts: Sequence[list[int]], complete: Callable[[list[int]], Awaitable[Found]]) -> list[Found]:
        async def gather() -> list[Found]:
            return await asyncio.gather(*map(complete, prompts))

        return asyncio.run(gather())

    def _request(self, prompt: list[int], params: SamplingParams, prefill: str = "") -> Request:
        return Request(f"p{next(self._ids)}", tuple(prompt), params, want_cache_report=True, prefill=prefill)

    async def _compute(self, prompt: list[int], params: SamplingParams) -> Found:
        found = Found()
        await _read(self.first.generate(self._request(prompt, params)), found)
        return found

    async def _prefill(self, prompt: list[int], params: SamplingParams) -> Found:
        assert self.first.instance is not None
        request = self._request(prompt, params, self.first.instance.address)
        found = Found()
        await _read(self.second.generate(request), found)
        return found

    async def _migrate(self, prompt: list[int], params: SamplingParams) -> Found:
        assert self.second.instance is not None
        request = self._request(prompt, params)
        found, stream = Found(), self.first.generate(request)
        found.tokens += (await anext(stream)).tokens
        moving = asyncio.ensure_future(self.first.migrate(request.id, self.second.instance.address))
        await _read(stream, found)
        try:
            moved = await moving
        except (CannotMigrate, TransferError):  # it has ended
            return found
        found.received = moved.kv_tokens
        await _read(self.second.follow(moved.request_id), found)
        return found


async def _read(stream: AsyncGenerator[Delta, None], found: Found) -> None:
    async with aclosing(stream):
        async for delta in stream:
            found.tokens += delta.tokens
            if delta.finish_reason is not None:
                found.cached = delta.cached_tokens
                if delta.cache_report is not None:
                    found.received += sum(delta.cache_report.transferred_tokens.values())
            if delta.moved is not None or delta.finish_reason is not None:
                return
