"""Fair shares of tenants in device memory or a store: from which tenant a block is evicted.

A tenant is the part of the root in the names of its blocks that a client's own salt does not change (`blocks/salt.py`), so a
client cannot be several tenants. A tenant with at most its share, the budget divided by the number of
tenants, is protected while others have more. Among the other tenants, and if there is only one, the least recently used
block is evicted. A tenant that has not used a store for an hour is neither protected nor counted. With a quota, a tenant
that has reached it evicts its own blocks, even if there is room.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from typing import Final, NamedTuple, TypeVar

Tenant = TypeVar("Tenant")

COMPARED: Final = 16  # with more tenants, as many are drawn at random for each eviction
IDLE_SECONDS: Final = 3600.0


class TenantUse(NamedTuple):
    """Use of a store by a tenant: bytes, slots or blocks, and the time of its last use."""

    amount: int
    used_at: float

    def plus(self, amount: int) -> TenantUse:
        return TenantUse(self.amount + amount, self.used_at)


def compared(tenants: Collection[Tenant]) -> list[Tenant]:
    """The tenants to compare for one eviction."""
    listed = list(tenants)
    return listed if len(listed) <= COMPARED else random.sample(listed, COMPARED)


def share(usage: Collection[TenantUse], budget: int, now: float, idle: float = IDLE_SECONDS) -> float:
    """The share of each tenant that was in use in the last `idle` units of time."""
    return budget / max(sum(now - one.used_at < idle for one in usage), 1)


def choose(
    oldest: Mapping[Tenant, int],
    usage: Mapping[Tenant, TenantUse],
    share_: float,
    now: float,
    idle: float = IDLE_SECONDS,
) -> Tenant:
    """The tenant to evict from.

    Args:
        oldest: for each tenant that has a block to evict, the last use of the least recently used one.
        usage: of these tenants, with what is about to be written.
    """
    over = [one for one in oldest if usage[one].amount > share_ or now - usage[one].used_at >= idle]
    return min(over, key=oldest.__getitem__) if over else max(oldest, key=lambda one: usage[one].amount)
