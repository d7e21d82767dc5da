"""Kept prefixes: which ones, for how long, for whom, and within which budget. Pure: no I/O.

What is kept is out of the eviction order. One budget bounds all of it. A named prefix does not yield: its blocks are reserved
before they are computed, and stay until it is removed. Retentions share what names leave. Each is known by the key of its last
block, so the same prefix is retained once, for a time after its last use. Tenants have equal rights; of one tenant's
retentions, those with the lowest priority, then those unused for longest, make room for others.

A retention never stands in the way of a request or of a name: its blocks are taken back (`yield_blocks`). It is known until
it expires, and keeps blocks again when it is used again.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from foreword.blocks.retention import Reservation, Retention, RetentionAnswer

_MAX_ENTRIES: Final = 16_384


@dataclass(slots=True, eq=False)
class Lease:
    """A prefix that is kept.

    Attributes:
        root: root key of its chain.
        keys: of its blocks.
        expires: on the book's clock; infinite if it is kept until it is released.
        blocks: device blocks that are kept; empty if they had to yield, or if this process never had them.
        stored: it is kept in the stores too.
    """

    tenant: str
    root: bytes
    keys: Sequence[bytes]
    tokens: int
    ttl: float | None
    priority: int
    expires: float
    used: int
    stored: bool
    blocks: Sequence[int] = field(default=())

    @property
    def key(self) -> bytes:
        return self.keys[-1]

    @property
    def rank(self) -> tuple[bool, int, int]:
        """The lowest rank yields first."""
        return self.ttl is None, self.priority, self.used


class LeaseListener(Protocol):
    """Is called when a retention begins, is used, or ends; under the book's lock, on any thread."""

    def kept(self, one: Lease) -> None: ...
    def dropped(self, one: Lease) -> None: ...


@dataclass(slots=True)
class _Tenant:
    entries: dict[bytes, Lease] = field(default_factory=dict)
    blocks: Counter[int] = field(default_factory=Counter)


class Leases:
    """The kept prefixes of one engine. All methods may be called from any thread.

    Args:
        budget: device blocks that may be kept.
        tenant_budget: device blocks that one tenant's retentions may keep.
        retain_budget: device blocks that all retentions may keep of the budget; None: all that names leave.
        most: retentions of one tenant.
        longest: seconds; a longer ttl is clipped.
        release: takes references to device blocks back. It must not block.
        clock: seconds that pass, from any time on.
    """

    def __init__(
        self,
        budget: int,
        tenant_budget: int,
        *,
        retain_budget: int | None = None,
        most: int = 128,
        longest: float = 86_400.0,
        release: Callable[[Sequence[int]], None] = lambda blocks: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.budget = budget
        self.tenant_budget = tenant_budget
        self.retain_budget = budget if retain_budget is None else retain_budget
        self.longest = longest
        self.listener: LeaseListener | None = None
        self._most = most
        self._release = release
        self._clock = clock
        self._lock = threading.RLock()
        self._tenants: dict[str, _Tenant] = {}
        self.entries: dict[bytes, Lease] = {}
        self._named: list[Reservation] = []
        self._named_blocks: Counter[int] = Counter()
        self._uses = 0
        self._next_expiry = math.inf  # nothing expires earlier

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, one: Lease) -> bool:
        return self.entries.get(one.key) is one

    @property
    def kept_blocks(self) -> int:
        """Device blocks that the retentions of all tenants keep."""
        with self._lock:
            return self._retained()

    @property
    def named_blocks(self) -> int:
        """Device blocks that named prefixes keep."""
        return len(self._named_blocks)

    @property
    def free(self) -> int:
        """Device blocks that further named prefixes may keep."""
        with self._lock:
            return self.budget - len(self._named_blocks) - sum(one.count for one in self._named)

    def of(self, tenant: str) -> list[Lease]:
        """A tenant's retentions, the one that yields last at the end."""
        with self._lock:
            known = self._tenants.get(tenant)
            return sorted(known.entries.values(), key=lambda one: one.rank) if known else []

    def all(self) -> list[Lease]:
        with self._lock:
            return list(self.entries.values())

    # Named prefixes

    def reserve(self, count: int) -> Reservation | None:
        """Room for a named prefix that is to be computed; retentions yield to it. None if other names leave too little."""
        with self._lock:
            if count > self.free:
                return None
            one = Reservation(count)
            self._named.append(one)
            while self._retained() > self._retainable():
                most = max(self._tenants.values(), key=lambda one: len(one.blocks))
                self._let_go(most.blocks, min((one for one in most.entries.values() if one.blocks), key=_rank))
            return one

    def fill(self, one: Reservation, blocks: Sequence[int]) -> None:
        """The blocks are computed, at most as many as were reserved. The book takes over one reference to each of them."""
        with self._lock:
            if one not in self._named:
                self._release(blocks)
                return
            one.count, one.blocks = 0, blocks
            self._named_blocks.update(blocks)

    def end(self, one: Reservation) -> None:
        """Give back what a named prefix keeps, or was to keep. Once is enough."""
        with self._lock:
            if one in self._named:
                self._named.remove(one)
                self._let_go(self._named_blocks, one)

    # Keeping

    def retain(
        self,
        tenant: str,
        root: bytes,
        keys: Sequence[bytes],
        blocks: Sequence[int],
        wish: Retention,
        *,
        block_size: int,
        whole: bool,
    ) -> RetentionAnswer:
        """Keep a prefix. The book takes over one reference to each of `blocks`, and releases those that it does not keep.

        Args:
            root: root key of the prefix.
            keys: of the prefix's full blocks; `blocks`: the device blocks that continuing behind it needs.
            whole: the blocks are useless without the last one, so the prefix cannot be clipped.
        """
        with self._lock:
            self.expire()
            return self._retain(tenant, root, keys, blocks, self._clip_ttl(wish), block_size, whole)

    def _clip_ttl(self, wish: Retention) -> Retention:
        if wish.ttl is None or wish.ttl <= self.longest:
            return wish
        return Retention(wish.end, self.longest, wish.priority, wish.stored)

    def _retain(
        self,
        tenant: str,
        root: bytes,
        keys: Sequence[bytes],
        blocks: Sequence[int],
        wish: Retention,
        size: int,
        whole: bool,
    ) -> RetentionAnswer:
        owner = self._tenants.setdefault(tenant, _Tenant())
        self._uses += 1
        rank = (wish.ttl is None, wish.priority, self._uses)
        count, reason = self._room(owner, blocks, rank)
        if whole and count < len(blocks):
            count = 0
        if not keys or not count:
            self._release(blocks)
            self._forget_empty(tenant)
            return RetentionAnswer("refused", 0, None, reason or f"shorter than a block of {size} tokens")
        clipped = count < len(blocks)
        keys = keys[:count] if clipped else keys
        full = self._count_refusal(owner, keys[-1], rank)
        if full:
            self._release(blocks)
            return RetentionAnswer("refused", 0, None, full)
        self._release(blocks[count:])
        one = self._enter(owner, tenant, root, keys, blocks[:count], wish, len(keys) * size)
        self._make_room(owner, one)
        return RetentionAnswer("clipped" if clipped else "accepted", one.tokens, one.ttl, reason if clipped else "")

    def _room(self, owner: _Tenant, blocks: Sequence[int], rank: tuple[bool, int, int]) -> tuple[int, str]:
        """How many leading blocks of a prefix fit beside what ranks higher, and why not more."""
        limit = self._limit(owner)
        if sum(owner.blocks.get(block, 0) == 0 for block in blocks) + len(owner.blocks) <= limit:
            return len(blocks), ""
        fixed: set[int] = set()
        for one in owner.entries.values():
            if one.rank > rank:
                fixed.update(one.blocks)
        room = limit - len(fixed)
        count = 0
        for block in blocks:
            room -= block not in fixed
            if room < 0:
                break
            count += 1
        reason = f"the budget of {limit} blocks is spent" if fixed else f"longer than the budget of {limit} blocks"
        return count, "" if count == len(blocks) else reason

    def _retained(self) -> int:
        return sum(len(one.blocks) for one in self._tenants.values())

    def _retainable(self) -> int:
        return min(self.retain_budget, self.free)

    def _limit(self, owner: _Tenant) -> int:
        """Blocks that a tenant may keep: what others leave, and at least an equal share."""
        using = [len(one.blocks) for one in self._tenants.values() if one is not owner and one.blocks]
        budget = self._retainable()
        return min(self.tenant_budget, max(budget - sum(using), budget // (len(using) + 1)))

    def _count_refusal(self, owner: _Tenant, key: bytes, rank: tuple[bool, int, int]) -> str:
        """Make room for one more retention of a tenant. Why that is impossible, if it is."""
        if key in owner.entries:
            return ""
        if len(owner.entries) >= self._most:
            lowest = min(owner.entries.values(), key=lambda one: one.rank)
            if lowest.rank > rank:
                return f"all {self._most} retentions have a higher priority"
            self._drop(lowest)
        return f"the engine has {_MAX_ENTRIES} retentions already" if len(self.entries) >= _MAX_ENTRIES else ""

    def _enter(
        self,
        owner: _Tenant,
        tenant: str,
        root: bytes,
        keys: Sequence[bytes],
        blocks: Sequence[int],
        wish: Retention,
        tokens: int,
    ) -> Lease:
        known = owner.entries.get(keys[-1])
        expires = math.inf if wish.ttl is None else self._clock() + wish.ttl
        self._next_expiry = min(self._next_expiry, expires)
        self._tenants[tenant] = owner
        if known is None:
            known = Lease(tenant, root, keys, tokens, wish.ttl, wish.priority, expires, self._uses, wish.stored)
            owner.entries[known.key] = self.entries[known.key] = known
        else:
            self._let_go(owner.blocks, known)
            if expires >= known.expires:
                known.ttl, known.expires = wish.ttl, expires
            known.priority, known.stored = max(known.priority, wish.priority), known.stored or wish.stored
            known.used = self._uses
        known.blocks = tuple(blocks)
        owner.blocks.update(known.blocks)
        if self.listener is not None and known.stored:
            self.listener.kept(known)
        return known

    def _make_room(self, owner: _Tenant, new: Lease) -> None:
        """Drop what ranks lowest until all budgets hold."""
        limit = self._limit(owner)
        while len(owner.blocks) > limit:
            self._drop(min((one for one in owner.entries.values() if one is not new and one.blocks), key=_rank))
        while self._retained() > self._retainable():
            most = max((one for one in self._tenants.values() if one is not owner), key=lambda one: len(one.blocks))
            self._drop(min((one for one in most.entries.values() if one.blocks), key=_rank))

    # Use and end

    def on_path(self, keys: Iterable[bytes]) -> list[Lease]:
        """The retentions that a prompt with these block keys passes, the shortest first. They count as used."""
        if not self.entries:
            return []
        with self._lock:
            self.expire()
            found = [one for key in keys if (one := self.entries.get(key)) is not None]
            for one in found:
                self._uses += 1
                one.used = self._uses
                if one.ttl is not None:
                    one.expires = self._clock() + one.ttl
                if self.listener is not None and one.stored:
                    self.listener.kept(one)
            return found

    def adopt(self, one: Lease) -> bool:
        """Enter a retention of another process, which has no blocks on this device yet. False if the tenant has too many."""
        with self._lock:
            known = self.entries.get(one.key)
            if known is not None:
                known.expires = max(known.expires, one.expires)
                return True
            owner = self._tenants.setdefault(one.tenant, _Tenant())
            if len(owner.entries) >= self._most or len(self.entries) >= _MAX_ENTRIES:
                self._forget_empty(one.tenant)
                return False
            owner.entries[one.key] = self.entries[one.key] = one
            self._next_expiry = min(self._next_expiry, one.expires)
            return True

    def yield_blocks(self) -> bool:
        """Give up the device blocks of the retention with the lowest rank. False if no retention has blocks."""
        with self._lock:
            holding = [one for one in self.entries.values() if one.blocks]
            if holding:
                one = min(holding, key=_rank)
                self._let_go(self._tenants[one.tenant].blocks, one)
            return bool(holding)

    def release(self, tenant: str, keys: Iterable[bytes]) -> list[Lease]:
        """End a tenant's retentions along a chain of keys."""
        with self._lock:
            found = [one for key in keys if (one := self.entries.get(key)) is not None and one.tenant == tenant]
            for one in found:
                self._drop(one)
            return found

    def expire(self) -> None:
        """End the retentions whose time is over."""
        with self._lock:
            now = self._clock()
            if now < self._next_expiry:
                return
            for one in [one for one in self.entries.values() if one.expires <= now]:
                self._drop(one)
            self._next_expiry = min((one.expires for one in self.entries.values()), default=math.inf)

    def _drop(self, one: Lease) -> None:
        owner = self._tenants[one.tenant]
        self._let_go(owner.blocks, one)
        del owner.entries[one.key], self.entries[one.key]
        self._forget_empty(one.tenant)
        if self.listener is not None and one.stored:
            self.listener.dropped(one)

    def _let_go(self, held: Counter[int], one: Lease | Reservation) -> None:
        blocks, one.blocks = one.blocks, ()
        for block in blocks:
            held[block] -= 1
            if not held[block]:
                del held[block]
        if blocks:
            self._release(blocks)

    def _forget_empty(self, tenant: str) -> None:
        if not self._tenants[tenant].entries:
            del self._tenants[tenant]


def _rank(one: Lease) -> tuple[bool, int, int]:
    return one.rank
