"""The server's dashboard: its page, and the data that the page needs beyond `/metrics`. A caller sees its own tenant's data."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from foreword import __version__
from foreword.api.front import Call, Handler
from foreword.api.routes import NO_BODY, Meter, Right, Routes
from foreword.blocks.common_prefixes import CommonPrefix
from foreword.dashboard.metric_history import MetricsHistory
from foreword.dashboard.pages import add_pages
from foreword.errors import ForewordError
from foreword.newest import Newest
from foreword.server.endpoint import ServerContext

if TYPE_CHECKING:
    from foreword.entrypoints.async_engine import AsyncEngine
    from foreword.prefixes.book import NamedPrefix

_SHOWN_REQUESTS: Final = 50
_SHOWN_COMMON_PREFIXES: Final = 8
# Seconds before common prefixes are searched again. A search compares thousands of prompts.
_COMMON_PREFIXES_AGE: Final = 4.0
_MAX_TENANTS: Final = 256


def add_routes(routes: Routes[Handler], context: ServerContext, history: MetricsHistory) -> None:
    common_prefixes = _CommonPrefixes()

    @routes.add("GET", "/ui/data/kind", right=Right.ANYONE, meter=Meter.FREE, body=NO_BODY, tag="dashboard")
    async def kind(call: Call) -> dict[str, Any]:
        """Server or router, and whether the caller's key is accepted. Needs no key, so that browsers log no error 401."""
        return {"kind": "server", "version": __version__, "welcome": call.allows(Right.TENANT)}

    @routes.add("GET", "/ui/data/history", right=Right.TENANT, meter=Meter.FREE, body=NO_BODY, tag="dashboard")
    async def show_history(call: Call) -> dict[str, Any]:
        """The last hour of the metrics."""
        return await asyncio.to_thread(history.plain)

    @routes.add("GET", "/ui/data/now", right=Right.TENANT, meter=Meter.FREE, body=NO_BODY, tag="dashboard")
    async def now(call: Call) -> dict[str, Any]:
        """The server's state, and the caller's newest requests, named prefixes and common prefixes. No text."""
        salt = call.tenant.salt
        answer: dict[str, Any] = {
            "time": time.time(),
            "state": _state(context),
            "requests": context.recent.newest(salt, _SHOWN_REQUESTS),
            "prefixes": [],
            "common_prefixes": [],
        }
        engine = context.admission.loaded
        if engine is None or engine.failed is not None:
            return answer
        info, prefixes = engine.info, await _prefixes(engine, salt)
        answer["model"] = {
            "name": info.name,
            "dtype": info.dtype,
            "device": info.device,
            "max_model_len": info.max_model_len,
            "block_size": info.block_size,
            "kv_bytes_per_block": info.kv_bytes_per_block,
        }
        answer["prefixes"] = [prefix.describe() for prefix in prefixes]
        answer["common_prefixes"] = [_describe(one, prefixes) for one in await common_prefixes.of(engine, salt)]
        return answer

    add_pages(routes)


def _state(context: ServerContext) -> dict[str, str]:
    try:
        chains = len(context.admission.engine().quarantine.chains)
    except ForewordError as error:
        return {"status": error.code or "not_ready", "reason": error.message}
    if chains:
        return {"status": "quarantine", "reason": f"An audit found wrong KV: {chains} chains are not reused."}
    return {"status": "ready", "reason": ""}


async def _prefixes(engine: AsyncEngine, salt: bytes) -> Sequence[NamedPrefix]:
    try:
        await engine.prefixes.refresh(salt)
        return engine.prefixes.list(salt=salt)
    except ForewordError:
        return ()  # the server is shutting down, or its store does not answer


class _CommonPrefixes:
    """Common prefixes per tenant, found a few seconds ago."""

    def __init__(self) -> None:
        self._found: Newest[bytes, tuple[float, Sequence[CommonPrefix]]] = Newest(_MAX_TENANTS)
        self._searching = asyncio.Lock()

    async def of(self, engine: AsyncEngine, salt: bytes) -> Sequence[CommonPrefix]:
        async with self._searching:
            at, found = self._found.get(salt, (-_COMMON_PREFIXES_AGE, ()))
            if time.monotonic() - at < _COMMON_PREFIXES_AGE:
                return found
            try:
                found = await engine.common_prefixes(salt, _SHOWN_COMMON_PREFIXES)
            except ForewordError:
                return found  # the engine is shutting down
            self._found[salt] = time.monotonic(), found
            return found


def _describe(common: CommonPrefix, prefixes: Sequence[NamedPrefix]) -> dict[str, Any]:
    """A common prefix without its tokens. `starts_with` is the longest named prefix in it."""
    length, tokens = len(common.tokens), tuple(common.tokens)
    inside = [one for one in prefixes if 0 < len(one.tokens) <= length and tokens[: len(one.tokens)] == one.tokens]
    # Requests share only the full blocks of a named prefix that ends within a block.
    around = [one for one in prefixes if len(one.tokens) > length and one.tokens[:length] == tokens]
    longest = max(inside, key=lambda one: len(one.tokens)) if inside else None
    return {
        "tokens": length,
        "blocks": common.blocks,
        "users": common.users,
        "on_device": common.on_device,
        "starts_with": longest.name if longest is not None else None,
        "part_of": [one.name for one in around[:3]],
    }
