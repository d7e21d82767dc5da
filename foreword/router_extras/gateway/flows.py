"""The fair queue of a picker whose gateway names flows: tenants share by their weights, and the flows of each by theirs.

Two levels of start-time fair queueing (`routing/queue.py`). A tenant gains nothing by how many flows its requests have, and its
flows are its own: no name leads into another tenant's.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final, Generic

from foreword.request_errors import QueueFull
from foreword.router.replica_pool import ReplicaPool
from foreword.router.router import Router
from foreword.routing.queue import FairQueue, Item, QueueEntry

# Flows without a weight in the queue of a tenant: ids beyond share them.
_FLOWS: Final = 1024
_BEHIND_TENANT: Final = "\n"  # is in no tenant's name, and in no header


def flow_name(tenant: str, fairness: str, weighted: Collection[str]) -> str:
    """Name of the flow of a tenant's requests with a fairness id. The ids that are not `weighted` have 1,024 flows."""
    if not fairness:
        return tenant
    if fairness not in weighted:
        fairness = f"{_BEHIND_TENANT}{zlib.crc32(fairness.encode('utf-8', 'surrogatepass')) % _FLOWS}"
    return tenant + _BEHIND_TENANT + fairness


def tenant_of(flow: str) -> str:
    return flow.partition(_BEHIND_TENANT)[0]


class _Flows(FairQueue[Item]):
    """The queue of one tenant, by flows. The weight of a flow is that of its id."""

    def _weight(self, tenant: str) -> float:
        return self.weights.get(tenant.partition(_BEHIND_TENANT)[2], 1.0)

    def share(self, flow: str, more: int = 0) -> float:
        return (self.queued(flow) + more) / self._weight(flow)

    def heaviest(self) -> str:
        return max(self._tenants, key=lambda flow: (self.share(flow), flow))

    def newest(self, flow: str) -> QueueEntry[Item]:
        return next(reversed(self._tenants[flow].entries))


@dataclass(slots=True)
class _Tenant(Generic[Item]):
    """A tenant's flows, and the start of the next one of its requests that is served."""

    flows: _Flows[Item]
    start: float = 0.0


class FlowQueue(FairQueue[Item]):
    """A fair queue of flows, named by `flow_name`. A weight counts among tenants for the tenant of this name, and among the
    flows of each tenant for the one of this name."""

    def __init__(self, max_length: int = 1024, weights: dict[str, float] | None = None) -> None:
        super().__init__(max_length, weights)
        self._of: dict[str, _Tenant[Item]] = {}

    def queued(self, tenant: str) -> int:
        found = self._of.get(tenant)
        return len(found.flows) if found else 0

    def push(
        self, item: Item, tenant: str, cost: float, now: float
    ) -> tuple[QueueEntry[Item], QueueEntry[Item] | None]:
        """Queue an entry as `FairQueue` does, where `tenant` is a flow. In a full queue, of the tenant with the most entries
        for its weight the flow with the most loses its newest one."""
        displaced = self._displace(tenant, now) if self._length >= self.max_length else None
        name = tenant_of(tenant)
        if name not in self._of:
            self._of[name] = _Tenant(_Flows(self.max_length, self.weights))
        own = self._of[name]
        if not len(own.flows):
            own.start = max(own.start, self._virtual_time)
        entry, _ = own.flows.push(item, tenant, cost, now)
        self._length += 1
        self.cost += entry.cost
        return entry, displaced

    def pop(self, now: float) -> QueueEntry[Item] | None:
        waiting = [name for name, one in self._of.items() if len(one.flows)]
        if not waiting:
            return None
        name = min(waiting, key=lambda name: self._of[name].start)
        first = self._of[name]
        entry = first.flows.pop(now)
        assert entry is not None
        self._virtual_time = max(self._virtual_time, first.start)
        first.start += entry.cost / self._weight(name)
        self._served, self._served_at = self._recently_served(now) + entry.cost, now
        self._left(entry)
        return entry

    def remove(self, entry: QueueEntry[Item]) -> bool:
        own = self._of.get(tenant_of(entry.tenant))
        if own is None or not own.flows.remove(entry):
            return False
        self._left(entry)
        return True

    def _displace(self, tenant: str, now: float) -> QueueEntry[Item]:
        def share(name: str, more: int = 0) -> float:
            return (self.queued(name) + more) / self._weight(name)

        name, heaviest = tenant_of(tenant), max(self._of, key=lambda name: (share(name), name))
        if share(name, 1) >= share(heaviest):
            heaviest = name  # only its own flows may lose something
        found = self._of.get(heaviest)
        flows = found.flows if found else None
        if not flows or (heaviest == name and flows.share(tenant, 1) >= flows.share(flows.heaviest())):
            raise QueueFull(f"{self._length} requests are queued already; try again in {self.retry_after(now):.0f} s")
        entry = flows.newest(flows.heaviest())
        self.remove(entry)
        return entry

    def _left(self, entry: QueueEntry[Item]) -> None:
        self._length -= 1
        self.cost -= entry.cost
        if not self._length:
            self._of.clear()
            self.cost = self._virtual_time = 0.0


def share_by_flows(router: Router) -> None:
    """Let the pools of a router queue by flows."""
    make = router.pool_type

    def made(*args: Any) -> ReplicaPool:
        pool = make(*args)
        _take_over(pool)
        return pool

    router.pool_type = made
    for pool in router.pools.values():
        _take_over(pool)


def _take_over(pool: ReplicaPool) -> None:
    """Give a pool a queue of flows, with what waits. Of that, a request whose client leaves keeps its place until its turn."""
    queue = FlowQueue[Any](pool.queue.max_length, pool.queue.weights)
    while (entry := pool.queue.pop(0.0)) is not None:
        queue.push(entry.item, entry.tenant, entry.cost, 0.0)
    pool.queue = queue
