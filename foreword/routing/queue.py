"""A bounded, weighted fair queue between tenants. Pure; times are given.

Start-time fair queueing (Goyal, Vin and Cheng, 1996): the start of an entry is the later of the virtual time and the finish of
its tenant's previous entry; its finish is its start plus cost over weight. The entry with the earliest start is served first,
and the virtual time is the start of the last served entry. So backlogged tenants share the service in proportion to
their weights, and an idle tenant collects no credit.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from foreword.errors import ConfigError
from foreword.request_errors import QueueFull

Item = TypeVar("Item")

_MIN_RETRY: Final = 1.0
_MAX_RETRY: Final = 60.0
_RATE_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True, eq=False)
class QueueEntry(Generic[Item]):
    """A queued item. `cost` is in any unit that is the same for all entries, such as tokens."""

    item: Item
    tenant: str
    cost: float
    start: float


@dataclass(slots=True)
class _TenantQueue(Generic[Item]):
    """The entries of one tenant in order, and the finish of the last one."""

    entries: OrderedDict[QueueEntry[Item], None] = field(default_factory=OrderedDict)
    finish: float = 0.0


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
        self._length = 0
        self.cost = 0.0  # of all entries
        self._virtual_time = 0.0
        self._served = 0.0
        self._served_at = -math.inf

    def __len__(self) -> int:
        return self._length

    def queued(self, tenant: str) -> int:
        """Number of entries of one tenant."""
        found = self._tenants.get(tenant)
        return len(found.entries) if found else 0

    def push(
        self, item: Item, tenant: str, cost: float, now: float
    ) -> tuple[QueueEntry[Item], QueueEntry[Item] | None]:
        """Queue an item. Returns its entry, and the entry that it displaced, if any.

        In a full queue the tenant with the most entries for its weight loses its newest entry, so that a tenant who floods the
        queue does not block others. Raises QueueFull if that tenant is the one that pushes.
        """
        displaced = self._displace(tenant, now) if self._length >= self.max_length else None
        known = self._tenants.setdefault(tenant, _TenantQueue())
        entry = QueueEntry(item, tenant, max(cost, 0.0), max(self._virtual_time, known.finish))
        known.finish = entry.start + entry.cost / self._weight(tenant)
        known.entries[entry] = None
        self._length += 1
        self.cost += entry.cost
        return entry, displaced

    def pop(self, now: float) -> QueueEntry[Item] | None:
        """Remove and return the next entry; None if the queue is empty."""
        heads = [next(iter(one.entries)) for one in self._tenants.values() if one.entries]
        if not heads:
            return None
        entry = min(heads, key=lambda head: head.start)
        self._virtual_time = max(self._virtual_time, entry.start)
        self._served, self._served_at = self._recently_served(now) + entry.cost, now
        self._unlink(entry)
        return entry

    def remove(self, entry: QueueEntry[Item]) -> bool:
        """Remove an entry, for example because its client disconnected. False if it is not queued any more."""
        tenant = self._tenants.get(entry.tenant)
        if tenant is None or entry not in tenant.entries:
            return False
        if entry is next(reversed(tenant.entries)):
            tenant.finish = entry.start
        self._unlink(entry)
        return True

    def retry_after(self, now: float) -> float:
        """A value for Retry-After, from 1 to 60 seconds: the time to serve half of the queue at the recent rate."""
        rate = self._recently_served(now) / _RATE_SECONDS
        if not rate:
            return _MIN_RETRY if not self._length else _MAX_RETRY / 2
        return min(max(self.cost / 2 / rate, _MIN_RETRY), _MAX_RETRY)

    # Internals

    def _weight(self, tenant: str) -> float:
        return self.weights.get(tenant, 1.0)

    def _displace(self, tenant: str, now: float) -> QueueEntry[Item]:
        def share(name: str, more: int = 0) -> float:
            return (self.queued(name) + more) / self._weight(name)

        heaviest = max(self._tenants, key=lambda name: (share(name), name))
        if share(tenant, 1) >= share(heaviest):
            raise QueueFull(f"{self._length} requests are queued already; try again in {self.retry_after(now):.0f} s")
        entry = next(reversed(self._tenants[heaviest].entries))
        self.remove(entry)
        return entry

    def _unlink(self, entry: QueueEntry[Item]) -> None:
        tenant = self._tenants[entry.tenant]
        del tenant.entries[entry]
        self._length -= 1
        self.cost -= entry.cost
        if not self._length:
            self._tenants.clear()
            self.cost = self._virtual_time = 0.0
        elif not tenant.entries and tenant.finish <= self._virtual_time:
            del self._tenants[entry.tenant]

    def _recently_served(self, now: float) -> float:
        """Cost served, exponentially decayed."""
        return self._served * math.exp(-max(now - self._served_at, 0.0) / _RATE_SECONDS)
