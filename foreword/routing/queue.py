"""Who is next when there is too much: a weighted fair queue between tenants, bounded, with deadlines. Pure; times are given.

Start-time fair queueing (Goyal, Vin and Cheng, 1996): an entry's start is the later of the virtual time and the finish of its
tenant's entry before it; its finish is its start plus cost over weight. The earliest start goes first, and the virtual time is
the start of what went last. So tenants with entries share what is served in proportion to their weights, and one that comes
after a pause is not paid for the pause.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from foreword.errors import ConfigError, QueueFull

Item = TypeVar("Item")

_LEAST_RETRY: Final = 1.0
_LONGEST_RETRY: Final = 60.0
_RATE_SECONDS: Final = 10.0


@dataclass(slots=True, eq=False)
class Entry(Generic[Item]):
    """Something that waits.

    Attributes:
        cost: in any unit, the same for all: expected seconds, or tokens.
        deadline: when nobody waits for it any more.
    """

    item: Item
    tenant: str
    cost: float
    deadline: float
    pushed_at: float
    start: float
    finish: float
    number: int
    queued: bool = True


@dataclass(slots=True)
class _Tenant(Generic[Item]):
    entries: deque[Entry[Item]] = field(default_factory=deque)
    finish: float = 0.0
    queued: int = 0


class FairQueue(Generic[Item]):
    """A weighted fair queue.

    Args:
        max_length: entries at most.
        weights: of tenants; any other tenant has weight 1.

    Raises ConfigError for no room, or a weight that is not more than 0.
    """

    def __init__(self, max_length: int = 1024, weights: dict[str, float] | None = None) -> None:
        if max_length < 1:
            raise ConfigError(f"a queue needs room for at least one request, not {max_length}")
        self.max_length = max_length
        self.weights = dict(weights or {})
        wrong = [name for name, weight in self.weights.items() if not (weight > 0 and math.isfinite(weight))]
        if wrong:
            raise ConfigError(f"the weight of tenant {wrong[0]!r} must be a number above 0")
        self._tenants: dict[str, _Tenant[Item]] = {}
        self._heads: list[tuple[float, int, Entry[Item]]] = []
        self._deadlines: list[tuple[float, int, Entry[Item]]] = []
        self._late: deque[Entry[Item]] = deque(maxlen=max_length)
        self._length = 0
        self._cost = 0.0
        self._time = 0.0
        self._numbers = itertools.count()
        self._served = 0.0
        self._served_at: float | None = None

    def __len__(self) -> int:
        return self._length

    def queued(self, tenant: str) -> int:
        """Entries of one tenant."""
        found = self._tenants.get(tenant)
        return found.queued if found else 0

    def push(
        self, item: Item, tenant: str, cost: float, deadline: float, now: float
    ) -> tuple[Entry[Item], Entry[Item] | None]:
        """Queue an item. Returns its entry, and the entry that had to leave for it, if there is one.

        In a full queue the tenant that has most entries for its weight gives up its newest one, so that a tenant who floods the
        queue does not shut out others. Raises QueueFull if that would be the one that pushes.
        """
        displaced = self._displace(tenant, now) if self._length >= self.max_length else None
        known = self._tenants.setdefault(tenant, _Tenant())
        start = max(self._time, known.finish)
        finish = start + max(cost, 0.0) / self._weight(tenant)
        entry = Entry(item, tenant, max(cost, 0.0), deadline, now, start, finish, next(self._numbers))
        known.finish = finish
        known.entries.append(entry)
        known.queued += 1
        self._length += 1
        self._cost += entry.cost
        if known.queued == 1:
            self._push_head(known)
        heapq.heappush(self._deadlines, (deadline, entry.number, entry))
        return entry, displaced

    def pop(self, now: float) -> Entry[Item] | None:
        """The next one; None if nothing waits. Those whose deadline has passed are passed over: `expired` tells of them."""
        while self._heads:
            _, _, entry = heapq.heappop(self._heads)
            if not entry.queued:
                continue
            if entry.deadline <= now:
                self._take(entry)
                self._late.append(entry)
                continue
            self._time = max(self._time, entry.start)
            self._take(entry)
            self._note_served(entry.cost, now)
            return entry
        return None

    def expired(self, now: float) -> list[Entry[Item]]:
        """Take out all whose deadline has passed. Each is told once: call it often enough."""
        found = list(self._late)
        self._late.clear()
        while self._deadlines and (self._deadlines[0][0] <= now or not self._deadlines[0][2].queued):
            entry = heapq.heappop(self._deadlines)[2]
            if entry.queued:
                self._take(entry)
                found.append(entry)
        return found

    def remove(self, entry: Entry[Item]) -> bool:
        """Take an entry out (its client went away); False if it is not in the queue any more."""
        if not entry.queued:
            return False
        self._take(entry)
        return True

    @property
    def next_deadline(self) -> float:
        """When `expired` has something to do at the earliest; infinite if never."""
        if self._late:
            return self._late[0].deadline
        return self._deadlines[0][0] if self._deadlines else math.inf

    def retry_after(self, now: float) -> float:
        """Seconds after which trying again makes sense: as long as half of what waits takes, at the pace of the last seconds;
        from 1 to 60."""
        rate = self._rate(now)
        if not rate:
            return _LEAST_RETRY if not self._length else _LONGEST_RETRY / 2
        return min(max(self._cost / 2 / rate, _LEAST_RETRY), _LONGEST_RETRY)

    # Inside

    def _weight(self, tenant: str) -> float:
        return self.weights.get(tenant, 1.0)

    def _displace(self, tenant: str, now: float) -> Entry[Item] | None:
        def share(name: str, more: int = 0) -> float:
            return (self.queued(name) + more) / self._weight(name)

        richest = max(self._tenants, key=lambda name: (share(name), name))
        if share(tenant, 1) >= share(richest):
            raise QueueFull(f"{self._length} requests wait already; try again in {self.retry_after(now):.0f} s")
        known = self._tenants[richest]
        entry = next(entry for entry in reversed(known.entries) if entry.queued)
        known.finish = entry.start
        self._take(entry)
        return entry

    def _take(self, entry: Entry[Item]) -> None:
        """Take an entry out, wherever it is in its tenant's line."""
        entry.queued = False
        tenant = self._tenants[entry.tenant]
        tenant.queued -= 1
        self._length -= 1
        self._cost -= entry.cost
        entries = tenant.entries
        was_head = bool(entries) and entries[0] is entry
        while entries and not entries[0].queued:
            entries.popleft()
        while entries and not entries[-1].queued:
            entries.pop()
        if was_head and entries:
            self._push_head(tenant)
        if not self._length:
            self._reset()
        elif not tenant.queued and tenant.finish <= self._time:
            del self._tenants[entry.tenant]
        self._tidy()

    def _push_head(self, tenant: _Tenant[Item]) -> None:
        head = tenant.entries[0]
        heapq.heappush(self._heads, (head.start, head.number, head))

    def _reset(self) -> None:
        self._tenants.clear()
        self._heads.clear()
        self._deadlines.clear()
        self._cost = 0.0
        self._time = 0.0

    def _tidy(self) -> None:
        """Entries that left are dropped from the heaps, and tenants without entries from the table, before they outnumber the
        rest."""
        most = 2 * self._length + 64
        if len(self._deadlines) > most:
            self._deadlines = [one for one in self._deadlines if one[2].queued]
            heapq.heapify(self._deadlines)
        if len(self._heads) > most:
            self._heads = [one for one in self._heads if one[2].queued]
            heapq.heapify(self._heads)
        if len(self._tenants) > most:
            idle = [name for name, tenant in self._tenants.items() if not tenant.queued]
            for name in idle:
                del self._tenants[name]

    def _note_served(self, cost: float, now: float) -> None:
        self._served = self._decayed(now) + cost
        self._served_at = now

    def _decayed(self, now: float) -> float:
        if self._served_at is None:
            return 0.0
        return self._served * math.exp(-max(now - self._served_at, 0.0) / _RATE_SECONDS)

    def _rate(self, now: float) -> float:
        """Cost served per second, of late."""
        return self._decayed(now) / _RATE_SECONDS
