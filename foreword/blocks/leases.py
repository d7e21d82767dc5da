"""Leases: KV that stays for later requests; which, for how long, for whom, and within which budget. Pure: no I/O.

What is leased is out of the eviction order: on a device a lease has references to blocks, in stores its blocks are pinned. One
budget in bytes bounds all of it. A lease with a name does not yield: its bytes are reserved before they are computed, and stay
until the name is removed. The others, retentions, share what names leave. Each is known by its tenant and the key of its last
block, so the same prefix is retained once, for a time after its last use. Tenants have equal rights; of one tenant's
retentions, those with the lowest priority, then those unused for longest, make room for others.

A retention never stands in the way of a request or of a name: its blocks are taken back (`yield_blocks`). It is known until
it expires, and has blocks again when it is used again.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from foreword.blocks.retention import Retention, RetentionAnswer

_MAX_LEASES: Final = 16_384

# A block on a device, by its number; or one that stores pin, by its key.
Block = TypeVar("Block", int, bytes)


@dataclass(slots=True, eq=False)
class Lease(Generic[Block]):
    """A prefix that is kept for later requests.

    Attributes:
        tenant: its digest; empty, as root and keys are, in leases with a name, whose records say it.
        root: root key of its chain.
        keys: of its blocks.
        ttl: seconds from its last use to its end; None: it lasts until it is released.
        expires: its end, on the book's clock.
        used: its last use, as a number that grows.
        stored: it is kept in the stores too.
        name: of the named prefix that it is of; empty for a retention.
        reserved: blocks of a named one that are still to be computed.
        blocks: what it has; nothing if it had to yield, or if this process never had it.
        size: bytes of `blocks`.
    """

    tenant: str = ""
    root: bytes = b""
    keys: Sequence[bytes] = ()
    tokens: int = 0
    ttl: float | None = None
    priority: int = 0
    expires: float = math.inf
    used: int = 0
    stored: bool = False
    name: str = ""
    reserved: int = 0
    blocks: Sequence[Block] = ()
    size: int = 0
    book: Leases[Block] | None = field(default=None, repr=False)

    @property
    def key(self) -> bytes:
        return self.keys[-1]

    @property
    def rank(self) -> tuple[bool, int, int]:
        """The lowest rank yields first."""
        return self.ttl is None, self.priority, self.used

    def end(self) -> None:
        """Give back what a named prefix has, or was to have. Once is enough. From any thread."""
        if self.book is not None:
            self.book.end(self)


@dataclass(slots=True)
class _Account(Generic[Block]):
    """A tenant's retentions, by the keys of their last blocks, and how many of them have each block."""

    leases: dict[bytes, Lease[Block]] = field(default_factory=dict)
    blocks: Counter[Block] = field(default_factory=Counter)


class Leases(Generic[Block]):
    """The leases of one engine. All methods may be called from any thread.

    Args:
        budget: bytes of all leases.
        tenant_budget: bytes that one tenant's retentions may have.
        block_bytes: bytes of a block.
        retain_budget: bytes that all retentions may have of the budget; None: all that names leave.
        most: retentions of one tenant.
        longest: seconds; a longer ttl is clipped.
        drop: takes blocks back that no lease has any more, once for each time that they were given. It must not block.
        clock: seconds that pass, from any time on.

    Attributes:
        count: how many retentions there are.
        changed: is called when a retention that is stored begins, is used, or has ended; under the book's lock, on any thread.
        lock: the book's, and of what follows it. Nothing waits under it.
    """

    def __init__(
        self,
        budget: int,
        tenant_budget: int,
        *,
        block_bytes: int,
        retain_budget: int | None = None,
        most: int = 128,
        longest: float = 86_400.0,
        drop: Callable[[Sequence[Block]], None] = lambda blocks: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.budget, self.block_bytes, self.longest = budget, block_bytes, longest
        self.changed: Callable[[Lease[Any]], None] = lambda lease: None
        self._tenant_budget = tenant_budget
        self._retain_budget = budget if retain_budget is None else retain_budget
        self._most, self._clock = most, clock
        self._drop: Callable[[Sequence[Block]], None] = drop
        self.lock = threading.RLock()
        self._accounts: dict[str, _Account[Block]] = {}
        self._named: list[Lease[Block]] = []
        self._named_blocks: Counter[Block] = Counter()
        self.count = 0
        self._uses = 0
        self._next_expiry = math.inf  # nothing expires earlier

    def __contains__(self, lease: Lease[Block]) -> bool:
        account = self._accounts.get(lease.tenant)
        return account is not None and account.leases.get(lease.key) is lease

    @property
    def retained_bytes(self) -> int:
        """Bytes that the retentions of all tenants have."""
        with self.lock:
            return self._retained() * self.block_bytes

    @property
    def named_bytes(self) -> int:
        """Bytes that named prefixes have."""
        return len(self._named_blocks) * self.block_bytes

    @property
    def free(self) -> int:
        """Bytes that further named prefixes may have."""
        with self.lock:
            return self.budget - (len(self._named_blocks) + sum(one.reserved for one in self._named)) * self.block_bytes

    def known(self, tenant: str, key: bytes) -> Lease[Block] | None:
        """A tenant's retention with this last block."""
        with self.lock:
            account = self._accounts.get(tenant)
            return None if account is None else account.leases.get(key)

    def of(self, tenant: str) -> list[Lease[Block]]:
        """A tenant's retentions, the one that yields last at the end."""
        with self.lock:
            account = self._accounts.get(tenant)
            return sorted(account.leases.values(), key=lambda one: one.rank) if account else []

    def all(self) -> list[Lease[Block]]:
        """The retentions of all tenants."""
        with self.lock:
            return [one for account in self._accounts.values() for one in account.leases.values()]

    # Named prefixes

    def reserve(self, name: str, count: int) -> Lease[Block] | None:
        """Room for the blocks of a named prefix that is to be computed; retentions yield to it. None if other names leave too
        little."""
        with self.lock:
            if count * self.block_bytes > self.free:
                return None
            lease = Lease[Block](name=name, reserved=count, book=self)
            self._named.append(lease)
            while self._retained() > self._retainable():
                most = max(self._accounts.values(), key=lambda one: len(one.blocks))
                self._let_go(most.blocks, min((one for one in most.leases.values() if one.blocks), key=_rank))
            return lease

    def fill(self, lease: Lease[Block], blocks: Sequence[Block]) -> None:
        """The blocks are computed, at most as many as were reserved. The book takes over one reference to each of them."""
        with self.lock:
            if lease not in self._named:
                self._drop(blocks)
                return
            lease.reserved = 0
            self._have(self._named_blocks, lease, blocks)

    def end(self, lease: Lease[Block]) -> None:
        """Give back what a named prefix has, or was to have. Once is enough."""
        with self.lock:
            if lease in self._named:
                self._named.remove(lease)
                self._let_go(self._named_blocks, lease)

    # Retentions

    def retain(
        self,
        tenant: str,
        root: bytes,
        keys: Sequence[bytes],
        blocks: Sequence[Block],
        wish: Retention,
        *,
        block_size: int,
        whole: bool,
    ) -> RetentionAnswer:
        """Keep a prefix. The book takes over one reference to each of `blocks`, and drops those that it does not keep.

        Args:
            root: root key of the prefix.
            keys: of the prefix's full blocks; `blocks`: those that continuing behind it needs.
            block_size: tokens per key.
            whole: the blocks are useless without the last one, so the prefix cannot be clipped.
        """
        with self.lock:
            self.expire()
            ttl = None if wish.ttl is None else min(wish.ttl, self.longest)
            new = Lease[Block](tenant, root, keys, 0, ttl, wish.priority, stored=wish.stored, book=self)
            return self._retain(new, blocks, block_size, whole)

    def _retain(self, new: Lease[Block], blocks: Sequence[Block], size: int, whole: bool) -> RetentionAnswer:
        account = self._accounts.setdefault(new.tenant, _Account())
        self._uses += 1
        new.used = self._uses
        count, reason = self._room(account, blocks, new.rank)
        if whole and count < len(blocks):
            count = 0
        if not new.keys or not count:
            self._drop(blocks)
            self._forget_empty(new.tenant)
            return RetentionAnswer("refused", 0, None, reason or f"shorter than a block of {size} tokens")
        clipped = count < len(blocks)
        new.keys = new.keys[:count] if clipped else new.keys
        new.tokens = len(new.keys) * size
        full = self._count_refusal(account, new)
        if full:
            self._drop(blocks)
            self._forget_empty(new.tenant)
            return RetentionAnswer("refused", 0, None, full)
        self._drop(blocks[count:])
        lease = self._enter(account, new)
        self._have(account.blocks, lease, blocks[:count])
        self._tell(lease)
        self._make_room(account, lease)
        return RetentionAnswer("clipped" if clipped else "accepted", lease.tokens, lease.ttl, reason if clipped else "")

    def _room(self, account: _Account[Block], blocks: Sequence[Block], rank: tuple[bool, int, int]) -> tuple[int, str]:
        """How many leading blocks of a prefix fit beside what ranks higher, and why not more."""
        limit = self._limit(account)
        if sum(account.blocks.get(block, 0) == 0 for block in blocks) + len(account.blocks) <= limit:
            return len(blocks), ""
        fixed: set[Block] = set()
        for one in account.leases.values():
            if one.rank > rank:
                fixed.update(one.blocks)
        room = limit - len(fixed)
        count = 0
        for block in blocks:
            room -= block not in fixed
            if room < 0:
                break
            count += 1
        size = limit * self.block_bytes
        reason = f"the budget of {size:,} bytes is spent" if fixed else f"longer than the budget of {size:,} bytes"
        return count, "" if count == len(blocks) else reason

    def _retained(self) -> int:
        return sum(len(one.blocks) for one in self._accounts.values())

    def _retainable(self) -> int:
        """Blocks that all retentions may have."""
        return min(self._retain_budget, self.free) // self.block_bytes

    def _limit(self, account: _Account[Block]) -> int:
        """Blocks that a tenant may have: what others leave, and at least an equal share."""
        using = [len(one.blocks) for one in self._accounts.values() if one is not account and one.blocks]
        budget = self._retainable()
        share = max(budget - sum(using), budget // (len(using) + 1))
        return min(self._tenant_budget // self.block_bytes, share)

    def _count_refusal(self, account: _Account[Block], new: Lease[Block]) -> str:
        """Make room for one more retention of a tenant. Why that is impossible, if it is."""
        if new.key in account.leases:
            return ""
        if len(account.leases) >= self._most:
            lowest = min(account.leases.values(), key=_rank)
            if lowest.rank > new.rank:
                return f"all {self._most} retentions have a higher priority"
            self._end(lowest)
        return f"the engine has {_MAX_LEASES} retentions already" if self.count >= _MAX_LEASES else ""

    def _enter(self, account: _Account[Block], new: Lease[Block]) -> Lease[Block]:
        """The lease that is known with the same last block, which takes over what is new; or the new one."""
        new.expires = math.inf if new.ttl is None else self._clock() + new.ttl
        self._next_expiry = min(self._next_expiry, new.expires)
        known = account.leases.get(new.key)
        if known is None:
            self._add(account, new)
            return new
        self._let_go(account.blocks, known)
        _merge(known, new)
        known.used = new.used
        return known

    def _add(self, account: _Account[Block], lease: Lease[Block]) -> None:
        self._accounts[lease.tenant] = account
        account.leases[lease.key] = lease
        self.count += 1

    def _make_room(self, account: _Account[Block], new: Lease[Block]) -> None:
        """End what ranks lowest until all budgets hold."""
        limit = self._limit(account)
        while len(account.blocks) > limit:
            self._end(min((one for one in account.leases.values() if one is not new and one.blocks), key=_rank))
        while self._retained() > self._retainable():
            most = max((one for one in self._accounts.values() if one is not account), key=lambda one: len(one.blocks))
            self._end(min((one for one in most.leases.values() if one.blocks), key=_rank))

    # Use and end

    def on_path(self, tenant: str, keys: Iterable[bytes]) -> list[Lease[Block]]:
        """A tenant's retentions that a prompt with these block keys passes, the shortest first. They count as used."""
        if tenant not in self._accounts:
            return []
        with self.lock:
            self.expire()
            found = self._along(tenant, keys)
            for one in found:
                self._uses += 1
                one.used = self._uses
                if one.ttl is not None:
                    one.expires = max(one.expires, self._clock() + one.ttl)
                self._tell(one)
            return found

    def _along(self, tenant: str, keys: Iterable[bytes]) -> list[Lease[Block]]:
        account = self._accounts.get(tenant, _Account[Block]())
        return [one for key in keys if (one := account.leases.get(key)) is not None]

    def adopt(self, lease: Lease[Block]) -> bool:
        """Enter a retention of another process, which has no blocks here yet; one that is known here takes over what is longer
        or more urgent. False if the tenant has too many."""
        with self.lock:
            account = self._accounts.get(lease.tenant, _Account[Block]())
            known = account.leases.get(lease.key)
            if known is not None:
                _merge(known, lease)
                return True
            if len(account.leases) >= self._most or self.count >= _MAX_LEASES:
                return False
            self._add(account, lease)
            self._next_expiry = min(self._next_expiry, lease.expires)
            return True

    def yield_blocks(self) -> bool:
        """Give up the blocks of the retention with the lowest rank. False if no retention has blocks."""
        with self.lock:
            lowest = min((one for one in self.all() if one.blocks), key=_rank, default=None)
            if lowest is not None:
                self._let_go(self._accounts[lowest.tenant].blocks, lowest)
            return lowest is not None

    def release(self, tenant: str, keys: Iterable[bytes]) -> list[Lease[Block]]:
        """End a tenant's retentions along a chain of keys."""
        with self.lock:
            found = self._along(tenant, keys)
            for one in found:
                self._end(one)
            return found

    def expire(self) -> None:
        """End the retentions whose time is over."""
        with self.lock:
            now = self._clock()
            if now < self._next_expiry:
                return
            for one in [one for one in self.all() if one.expires <= now]:
                self._end(one)
            self._next_expiry = min((one.expires for one in self.all()), default=math.inf)

    def _end(self, lease: Lease[Block]) -> None:
        account = self._accounts[lease.tenant]
        self._let_go(account.blocks, lease)
        del account.leases[lease.key]
        self.count -= 1
        self._forget_empty(lease.tenant)
        self._tell(lease)

    def _tell(self, lease: Lease[Block]) -> None:
        if lease.stored:
            self.changed(lease)

    def _have(self, counted: Counter[Block], lease: Lease[Block], blocks: Sequence[Block]) -> None:
        lease.blocks, lease.size = tuple(blocks), len(blocks) * self.block_bytes
        counted.update(lease.blocks)

    def _let_go(self, counted: Counter[Block], lease: Lease[Block]) -> None:
        blocks, lease.blocks, lease.size = lease.blocks, (), 0
        for block in blocks:
            counted[block] -= 1
            if not counted[block]:
                del counted[block]
        if blocks:
            self._drop(blocks)

    def _forget_empty(self, tenant: str) -> None:
        account = self._accounts.get(tenant)
        if account is not None and not account.leases:
            del self._accounts[tenant]


def _merge(known: Lease[Any], new: Lease[Any]) -> None:
    """A retention takes over what another one of the same prefix says: the later end with its ttl, and the higher priority."""
    if new.expires >= known.expires:
        known.ttl, known.expires = new.ttl, new.expires
    known.priority, known.stored = max(known.priority, new.priority), known.stored or new.stored


def _rank(lease: Lease[Any]) -> tuple[bool, int, int]:
    return lease.rank
