"""Migrated requests whose client has not come for them yet: their output is kept until it does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from foreword.engine.request import Delta, Request
from foreword.store.background_jobs import BackgroundJobs

# Seconds in which the client must claim a request that migrated here; then the request is ended.
CLAIM_WITHIN: Final = 30.0


@dataclass(slots=True)
class UnclaimedRequest:
    """A request that continues here after the tokens `output`. `deltas` are what it has produced since."""

    request: Request
    output: Sequence[int]
    envelope: bytes
    deltas: list[Delta] = field(default_factory=list)

    @property
    def is_running(self) -> bool:
        """Whether the request runs: it has neither ended nor migrated again."""
        return not self.deltas or self.deltas[-1].finish_reason is None


class UnclaimedRequests:
    """The engine's thread adds and claims; any thread may look.

    Args:
        expired: called, on another thread, for a request that was not claimed within `CLAIM_WITHIN` seconds.
    """

    def __init__(self, expired: Callable[[str], object]) -> None:
        self._expired = expired
        self._waiting: dict[str, UnclaimedRequest] = {}
        self._jobs, self._closed = BackgroundJobs("unclaimed", most=None, bound=False), threading.Event()

    def add(self, unclaimed: UnclaimedRequest) -> None:
        name = unclaimed.request.id
        self._waiting[name] = unclaimed
        self._jobs.add(partial(self._expire, name, time.monotonic() + CLAIM_WITHIN))

    def close(self) -> None:
        """Nothing expires any more."""
        self._closed.set()
        self._jobs.stop()

    def _expire(self, name: str, due: float) -> None:
        # All have the same time, so the first that was added is due first.
        if not self._closed.wait(due - time.monotonic()):
            self._expired(name)

    def find(self, request_id: str) -> UnclaimedRequest | None:
        return self._waiting.get(request_id)

    def claim(self, request_id: str) -> UnclaimedRequest | None:
        """Take a request out: its client is here, or it has expired."""
        return self._waiting.pop(request_id, None)

    def keep(self, delta: Delta) -> None:
        """Keep what a request that is still unclaimed produced."""
        unclaimed = self._waiting.get(delta.request_id)
        if unclaimed is not None:
            unclaimed.deltas.append(delta)

    def all(self) -> Sequence[UnclaimedRequest]:
        return list(self._waiting.values())
