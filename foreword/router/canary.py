"""A request of the router's own, to tell a replica that hangs from one that computes a long prompt."""

from __future__ import annotations

from typing import Any, Final

import aiohttp
import msgspec

from foreword.errors import ReplicaFailed
from foreword.router.replicas import CONNECTION_ERRORS, ReplicaProbe, Upstream

_MESSAGE: Final = {"role": "user", "content": "a"}
_BODIES: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
    ("/v1/chat/completions", {"messages": [_MESSAGE], "max_tokens": 1}),
)


async def is_alive(probe: ReplicaProbe, upstream: Upstream, seconds: float) -> bool:
    """Whether the replica answers a request for one token within this time, in whatever way."""
    for path, body in _BODIES:
        data = msgspec.json.encode({"model": upstream.model, **body})
        try:
            status, _ = await probe.post(upstream.url + path, data, aiohttp.ClientTimeout(total=seconds))
        except (*CONNECTION_ERRORS, ReplicaFailed):
            return False
        if status not in (404, 405):
            return status < 500
    return True
