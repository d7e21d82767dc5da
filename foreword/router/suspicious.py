"""Replicas that go silent: a request of the router's own tells one that hangs from one that computes a long prompt, and
requests after which several went silent are not sent again. Clients retry by themselves, and each retry could silence more
replicas.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, Final

import aiohttp
import msgspec

from foreword.errors import NoReplica, ReplicaFailed
from foreword.newest import Newest
from foreword.router.attempt import is_refusal
from foreword.router.replicas import CONNECTION_ERRORS, ReplicaProbe, Upstream, clock

_MESSAGE: Final = {"role": "user", "content": "a"}
_BODIES: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
    ("/v1/chat/completions", {"messages": [_MESSAGE], "max_tokens": 1}),
)
_MAX_REQUESTS: Final = 1024
_SECONDS: Final = 60.0


async def is_alive(probe: ReplicaProbe, upstream: Upstream, seconds: float) -> bool:
    """Whether the replica answers a request for one token within this time, in whatever way."""
    for path, body in _BODIES:
        data = msgspec.json.encode({"model": upstream.model, **body})
        try:
            status, _ = await probe.post(upstream.url + path, data, aiohttp.ClientTimeout(total=seconds))
        except (*CONNECTION_ERRORS, ReplicaFailed):
            return False
        if status not in (404, 405):
            return is_refusal(status)
    return True


class SuspiciousRequest(NoReplica, code="suspicious_request"):
    """Several replicas went silent on this request a short time ago."""


class SuspiciousRequests:
    """Bodies that silenced replicas in the last minute."""

    def __init__(self) -> None:
        self._until: Newest[bytes, float] = Newest(_MAX_REQUESTS)

    def add(self, raw: bytes) -> None:
        self._until[_digest(raw)] = clock() + _SECONDS

    def check(self, raw: bytes) -> None:
        """Raises SuspiciousRequest. Costs nothing while there are none."""
        if not self._until:
            return
        remaining = self._until.get(_digest(raw), 0.0) - clock()
        if remaining > 0:
            error = SuspiciousRequest("Several replicas went silent on this very request; it is not sent again for now")
            error.retry_after = remaining
            raise error

    def forget_old(self, now: float) -> None:
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)


def _digest(raw: bytes) -> bytes:
    return blake2b(raw, digest_size=16).digest()
