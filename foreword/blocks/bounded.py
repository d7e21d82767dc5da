"""Mappings with a limit in bytes, for what is kept to be fast or to be answered later: nothing that grows with requests grows
without end. What was set or used longest ago leaves first.

Entries may belong to owners, as tenants are. Each has a share of the limit, which is the limit divided by the number of owners
that have entries (`fair_share.py`): while the mapping is full, entries leave of those that have more than that.

    bytes <= limit, whatever is set, and an owner with at most its share loses nothing to the others

With a window, entries leave that were not used in the last `window` uses, to which `passed` adds requests that set nothing: the
mapping is full after that many requests, however few of them set something.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, MutableMapping
from typing import Any, TypeVar

from foreword.blocks.fair_share import TenantUse, choose, compared, share

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class _Owned:
    """Entries of one owner, the least recently used first."""

    __slots__ = ("bytes", "keys", "used_at")

    def __init__(self) -> None:
        self.keys: OrderedDict[Any, tuple[int, int]] = OrderedDict()  # size, and number of the last use
        self.bytes = 0
        self.used_at = 0.0


class Bounded(MutableMapping[K, V]):
    """A mapping of at most `limit` bytes. An entry that is larger than that is not kept. Not for several threads at a time.

    Args:
        size: bytes of an entry.
        owner: of an entry; by default all entries have the same.
        most: maximum number of entries, too.
        window: uses after which an entry leaves that was not used meanwhile; None for no such limit.
        dropped: called with each entry that left because of a limit.
    """

    def __init__(
        self,
        limit: int,
        *,
        size: Callable[[K, V], int],
        owner: Callable[[K], Hashable] = lambda key: None,
        most: int | None = None,
        window: int | None = None,
        dropped: Callable[[K, V], None] = lambda key, value: None,
    ) -> None:
        self.limit, self.bytes = limit, 0
        self._size = size
        self._owner, self._most, self._window, self._dropped = owner, most, window, dropped
        # With a window the least recently used first.
        self._values: dict[K, V] = {} if window is None else OrderedDict()
        self._owned: dict[Hashable, _Owned] = {}
        self._uses = 0

    def __getitem__(self, key: K) -> V:
        return self._values[key]

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[K]:
        return iter(self._values)

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __setitem__(self, key: K, value: V) -> None:
        if key in self._values:
            del self[key]
        size = self._size(key, value)
        if size > self.limit:
            self._dropped(key, value)
            return
        self._values[key] = value
        owner = self._owner(key)
        owned = self._owned.get(owner)
        if owned is None:
            owned = self._owned[owner] = _Owned()
        self._uses += 1
        owned.keys[key] = size, self._uses
        owned.bytes += size
        owned.used_at = time.monotonic()
        self.bytes += size
        while self.bytes > self.limit or (self._most is not None and len(self._values) > self._most):
            self._drop_one()
        if self._window is not None:
            self._drop_old()

    def __delitem__(self, key: K) -> None:
        del self._values[key]
        owner = self._owner(key)
        owned = self._owned[owner]
        size, _ = owned.keys.pop(key)
        owned.bytes -= size
        self.bytes -= size
        if not owned.keys:
            del self._owned[owner]

    def use(self, key: K) -> V | None:
        """The value, which is the last to leave from now on; None if it is not kept."""
        if key not in self._values:
            return None
        owned = self._owned[self._owner(key)]
        self._uses += 1
        owned.keys[key] = owned.keys[key][0], self._uses
        owned.keys.move_to_end(key)
        owned.used_at = time.monotonic()
        if isinstance(self._values, OrderedDict):
            self._values.move_to_end(key)
        return self._values[key]

    def passed(self, count: int = 1) -> None:
        """Count requests that set and use nothing here."""
        self._uses += count
        self._drop_old()

    def change(self, key: K) -> None:
        """Count an entry anew whose value has changed, and use it."""
        self[key] = self._values[key]

    def newest(self, owner: Hashable) -> Iterator[V]:
        """Values of an owner, the most recently used first. Nothing may change meanwhile."""
        if owner in self._owned:
            yield from map(self._values.__getitem__, reversed(self._owned[owner].keys))

    def _drop_one(self) -> None:
        found = compared(self._owned)
        now = time.monotonic()
        if len(found) > 1:
            use = {one: TenantUse(self._owned[one].bytes, self._owned[one].used_at) for one in found}
            everybody = [TenantUse(one.bytes, one.used_at) for one in self._owned.values()]
            oldest = {one: next(iter(self._owned[one].keys.values()))[1] for one in found}
            owner = choose(oldest, use, share(everybody, self.limit, now), now)
        else:
            owner = found[0]
        self._drop(next(iter(self._owned[owner].keys)))

    def _drop_old(self) -> None:
        """Drop entries that have not been used within the window."""
        while self._window is not None and self._values:
            key = next(iter(self._values))
            _, used = self._owned[self._owner(key)].keys[key]
            if used > self._uses - self._window:
                return
            self._drop(key)

    def _drop(self, key: K) -> None:
        value = self._values[key]
        del self[key]
        self._dropped(key, value)
