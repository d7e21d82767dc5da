"""Requests after which replicas went silent. Clients retry by themselves, and each retry could silence more replicas."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import Final

from foreword.errors import NoReplica
from foreword.router.replicas import clock

_MAX_REQUESTS: Final = 1024
_SECONDS: Final = 60.0


class SuspiciousRequest(NoReplica, code="suspicious_request"):
    """Several replicas went silent on this request a short time ago."""


class SuspiciousRequests:
    """Bodies that silenced replicas in the last minute."""

    def __init__(self) -> None:
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def add(self, raw: bytes) -> None:
        name = _digest(raw)
        self._until[name] = clock() + _SECONDS
        self._until.move_to_end(name)
        while len(self._until) > _MAX_REQUESTS:
            self._until.popitem(last=False)

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
