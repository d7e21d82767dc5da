"""Requests that came from other instances and that nobody listens to yet: what they say is kept until somebody fetches it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from foreword.engine.request import Delta, Request

# Seconds in which somebody must fetch a request that has moved here; then it is ended.
FETCH_WITHIN: Final = 30.0


@dataclass(slots=True)
class Adopted:
    """A request that goes on here after the tokens `output`. `said` is what it has said since."""

    request: Request
    output: Sequence[int]
    envelope: bytes
    said: list[Delta] = field(default_factory=list)

    @property
    def goes_on(self) -> bool:
        """It has neither ended here nor moved on."""
        return not self.said or self.said[-1].finish_reason is None


class AdoptedRequests:
    """Those that wait to be fetched. The engine's thread adds and takes; any thread may look.

    Args:
        give_up: called for one that nobody fetched in time, on a thread of its own.
    """

    def __init__(self, give_up: Callable[[str], object], within: float = FETCH_WITHIN) -> None:
        self._give_up = give_up
        self._within = within
        self._waiting: dict[str, Adopted] = {}

    def add(self, adopted: Adopted) -> None:
        name = adopted.request.id
        self._waiting[name] = adopted
        timer = threading.Timer(self._within, self._give_up, (name,))
        timer.daemon = True
        timer.start()

    def find(self, request_id: str) -> Adopted | None:
        return self._waiting.get(request_id)

    def take(self, request_id: str) -> Adopted | None:
        """Somebody listens from now on, or nobody ever will."""
        return self._waiting.pop(request_id, None)

    def keep(self, delta: Delta) -> None:
        """What one of them says."""
        adopted = self._waiting.get(delta.request_id)
        if adopted is not None:
            adopted.said.append(delta)

    def all(self) -> Sequence[Adopted]:
        return list(self._waiting.values())
