"""The transfers of one endpoint: those in progress, those in doubt, and the ids of those that were taken."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from typing import Final

from foreword.transfer.channel import Channel
from foreword.transfer.protocol import Action, Timings, TransferOutcome
from foreword.transfer.transfers import EndpointHooks, TransferService, TransferSide

_QUERY_INTERVAL: Final = 0.5
_REMEMBERED: Final = 1 << 16


class TransferRegistry:
    """Thread-safe.

    Args:
        limit: transfers in progress at a time.
    """

    def __init__(self, service: TransferService, timings: Timings, limit: int) -> None:
        self.hooks = EndpointHooks(service, timings, self._perform, self.count)
        self._limit = limit
        self._lock = threading.Lock()
        self._sides: dict[bytes, TransferSide] = {}
        self._taken: OrderedDict[bytes, float] = OrderedDict()
        self._next_query: dict[bytes, float] = {}
        self._counts: Counter[str] = Counter()
        self._ended: Counter[str] = Counter()

    def add(self, side: TransferSide) -> bool:
        """Add a transfer; False if there are too many or the registry is closed."""
        with self._lock:
            if len(self._sides) >= self._limit:
                return False
            self._sides[side.id] = side
            return True

    def find(self, transfer: bytes) -> TransferSide | None:
        return self._sides.get(transfer)

    def all(self) -> list[TransferSide]:
        with self._lock:
            return list(self._sides.values())

    def of_channel(self, channel: Channel) -> list[TransferSide]:
        return [side for side in self.all() if side.channel is channel]

    def was_taken(self, transfer: bytes) -> bool:
        """Whether this instance has taken a request over, as destination."""
        return transfer in self._taken

    def due_queries(self, now: float) -> list[TransferSide]:
        """The transfers in doubt whose peer should be asked now."""
        with self._lock:
            due = [number for number, at in self._next_query.items() if at <= now]
            self._next_query.update(dict.fromkeys(due, now + _QUERY_INTERVAL))
            return [self._sides[number] for number in due if number in self._sides]

    def close(self) -> None:
        """Accept no more transfers."""
        self._limit = 0

    def count(self, name: str) -> None:
        """Count a rare event."""
        with self._lock:
            self._counts[name] += 1

    def status(self) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
        """Transfers in progress by `role, state`, ended ones by outcome or reason, and the counts of rare events."""
        with self._lock:
            states = Counter(f"{side.role}, {side.state}" for side in self._sides.values())
            return dict(states), dict(self._ended), dict(self._counts)

    def _perform(self, side: TransferSide, action: Action) -> None:
        with self._lock:
            if action is Action.ASK:
                self._next_query[side.id] = 0.0
            elif action is Action.REMEMBER:
                self._remember(side)
            elif action is Action.NOTIFY_ENDED:
                self._sides.pop(side.id, None)
                self._next_query.pop(side.id, None)
                taken = side.outcome is TransferOutcome.TAKEN
                self._ended["taken" if taken else str(side.reason)] += 1

    def _remember(self, side: TransferSide) -> None:
        """Remember a taken request for longer than the source can ask: it waits one lease, then asks for another one."""
        now = time.monotonic()
        while self._taken and (next(iter(self._taken.values())) < now or len(self._taken) >= _REMEMBERED):
            self._taken.popitem(last=False)
        self._taken[side.id] = now + 3 * max(side.opening.seconds, self.hooks.timings.lease)
