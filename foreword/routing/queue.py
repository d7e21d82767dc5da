"""A bounded, weighted fair queue between tenants, with deadlines. Pure; times are given.

Start-time fair queueing (Goyal, Vin and Cheng, 1996): the start of an entry is the later of the virtual time and the finish of
its tenant's previous entry; its finish is its start plus cost over weight. The entry with the earliest start is served first,
and the virtual time is the start of the last served entry. So backlogged tenants share the service in proportion to
their weights, and an idle tenant collects no credit.
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

_MIN_RETRY: Final = 1.0
_MAX_RETRY: Final = 60.0
_RATE_SECONDS: Final = 10.0


@dataclass(slots=True, eq=False)
class QueueEntry(Generic[Item]):
    """A queued item.

    Attributes:
        cost: in any unit that is the same for all entries, such as tokens.
        deadline: the entry expires at this time.
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
class _TenantQueue(Generic[Item]):
    entries: deque[QueueEntry[Item]] = field(default_factory=deque)
    finish: float = 0.0
    queued: int = 0


class FairQueue(Generic[Item]):
    """A weighted fair queue.

    Args:
        max_length: maximum number of entries.
        weights: weights of tenants; the default weight is 1.

    Raises ConfigError for a maximum length below 1, or a weight that is not above 0.
    """

    def __init__(self, max_length: int = 1024, weights: dict[str, float] | None = None) -> None:
        if max_length < 1:
            raise ConfigError(f"the maximum length of a queue must be at least 1, not {max_length}")
        self.max_length = max_length
        self.weights = dict(weights or {})
        wrong = [name for name, weight in self.weights.items() if not (weight > 0 and math.isfinite(weight))]
        if wrong:
            raise ConfigError(f"the weight of tenant {wrong[0]!r} must be a number above 0")
        self._tenants: dict[str, _TenantQueue[Item]] = {}
        self._heads: list[tuple[float, int, QueueEntry[Item]]] = []
        self._deadlines: list[tuple[float, int, QueueEntry[Item]]] = []
        self._missed: deque[QueueEntry[Item]] = deque(maxlen=max_length)
        self._length = 0
        self._cost = 0.0
        self._virtual_time = 0.0
        self._numbers = itertools.count()
        self._served = 0.0
        self._served_at: float | None = None

    def __len__(self) -> int:
        return self._length

    def queued(self, tenant: str) -> int:
        """Number of entries of one tenant."""
        found = self._tenants.get(tenant)
        return found.queued if found else 0

    def push(
        self, item: Item, tenant: str, cost: float, deadline: float, now: float
    ) -> tuple[QueueEntry[Item], QueueEntry[Item] | None]:
        """Queue an item. Returns its entry, and the entry that it displaced, if any.

        In a full queue the tenant with the most entries for its weight loses its newest entry, so that a tenant who floods the
        queue does not block others. Raises QueueFull if that tenant is the one that pushes.
        """
        displaced = self._displace(tenant, now) if self._length >= self.max_length else None
        known = self._tenants.setdefault(tenant, _TenantQueue())
        start = max(self._virtual_time, known.finish)
        finish = start + max(cost, 0.0) / self._weight(tenant)
        entry = QueueEntry(item, tenant, max(cost, 0.0), deadline, now, start, finish, next(self._numbers))
        known.finish = finish
        known.entries.append(entry)
        known.queued += 1
        self._length += 1
        self._cost += entry.cost
        if known.queued == 1:
            self._push_head(known)
        heapq.heappush(self._deadlines, (deadline, entry.number, entry))
        return entry, displaced

    def pop(self, now: float) -> QueueEntry[Item] | None:
        """Remove and return the next entry, or None. Expired entries are skipped; `expired` returns them."""
        while self._heads:
            _, _, entry = heapq.heappop(self._heads)
            if not entry.queued:
                continue
            if entry.deadline <= now:
                self._unlink(entry)
                self._missed.append(entry)
                continue
            self._virtual_time = max(self._virtual_time, entry.start)
            self._unlink(entry)
            self._note_served(entry.cost, now)
            return entry
        return None

    def expired(self, now: float) -> list[QueueEntry[Item]]:
        """Remove and return all expired entries. Each is returned once."""
        found = list(self._missed)
        self._missed.clear()
        while self._deadlines and (self._deadlines[0][0] <= now or not self._deadlines[0][2].queued):
            entry = heapq.heappop(self._deadlines)[2]
            if entry.queued:
                self._unlink(entry)
                found.append(entry)
        return found

    def remove(self, entry: QueueEntry[Item]) -> bool:
        """Remove an entry, for example because its client disconnected. False if it is not queued any more."""
        if not entry.queued:
            return False
        self._unlink(entry)
        return True

    @property
    def next_deadline(self) -> float:
        """The earliest time at which `expired` may return an entry; infinite if there is none."""
        if self._missed:
            return self._missed[0].deadline
        return self._deadlines[0][0] if self._deadlines else math.inf

    def retry_after(self, now: float) -> float:
        """A value for Retry-After, from 1 to 60 seconds: the time to serve half of the queue at the recent rate."""
        rate = self._rate(now)
        if not rate:
            return _MIN_RETRY if not self._length else _MAX_RETRY / 2
        return min(max(self._cost / 2 / rate, _MIN_RETRY), _MAX_RETRY)

    # Internals

    def _weight(self, tenant: str) -> float:
        return self.weights.get(tenant, 1.0)

    def _displace(self, tenant: str, now: float) -> QueueEntry[Item] | None:
        def share(name: str, more: int = 0) -> float:
            return (self.queued(name) + more) / self._weight(name)

        heaviest = max(self._tenants, key=lambda name: (share(name), name))
        if share(tenant, 1) >= share(heaviest):
            raise QueueFull(f"{self._length} requests are queued already; try again in {self.retry_after(now):.0f} s")
        known = self._tenants[heaviest]
        entry = next(entry for entry in reversed(known.entries) if entry.queued)
        known.finish = entry.start
        self._unlink(entry)
        return entry

    def _unlink(self, entry: QueueEntry[Item]) -> None:
        """Remove an entry from any position of its tenant's queue."""
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
        elif not tenant.queued and tenant.finish <= self._virtual_time:
            del self._tenants[entry.tenant]
        self._compact()

    def _push_head(self, tenant: _TenantQueue[Item]) -> None:
        head = tenant.entries[0]
        heapq.heappush(self._heads, (head.start, head.number, head))

    def _reset(self) -> None:
        self._tenants.clear()
        self._heads.clear()
        self._deadlines.clear()
        self._cost = 0.0
        self._virtual_time = 0.0

    def _compact(self) -> None:
        """Drop removed entries from the heaps and idle tenants from the table before they outnumber the others."""
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
        """Cost served per second, recently."""
        return self._decayed(now) / _RATE_SECONDS
