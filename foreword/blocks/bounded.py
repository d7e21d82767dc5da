"""Mappings with a limit in bytes, for what is kept to be fast or to be answered later: nothing that grows with requests grows
without end. What was set or used longest ago leaves first.

Entries may belong to owners, as tenants are. Each has a share of the limit, which is the limit divided by the number of owners
that have entries (`fair_share.py`): while the mapping is full, entries leave of those that have more than that.

    bytes <= limit, whatever is set, and an owner with at most its share loses nothing to the others

A mapping whose entries come from few of the requests would take long to fill, and memory would seem to leak meanwhile. Where it
has a window, entries leave that were not used in the last `window` uses; requests that set nothing are counted by `passed`.
Then it is full after `window` requests, whatever these are.
"""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping
from collections.abc import Set as AbstractSet
from enum import Enum
from sys import getsizeof
from typing import Any, Final, TypeVar
from weakref import WeakSet

from foreword.blocks.fair_share import TenantUse, choose, compared, share

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

# Of an entry, besides its key and value: places in two dictionaries, and its record here.
ENTRY_BYTES: Final = 400
_all: WeakSet[Bounded[Any, Any]] = WeakSet()


def size_of(value: object) -> int:
    """Bytes that a value takes with all within it, about: texts, numbers, arrays, containers, and objects of plain classes.
    What is in several places within it counts at each."""
    total, left = 0, [value]
    while left:
        one = left.pop()
        if one is None or isinstance(one, bool | type | Enum):
            continue
        total += getsizeof(one)
        if isinstance(one, str | bytes | bytearray | int | float | array):
            continue
        if isinstance(one, Mapping):
            left.extend(one.keys())
            left.extend(one.values())
        elif isinstance(one, tuple | list | AbstractSet | deque):
            left.extend(one)
        else:
            left.extend(_attributes(one))
    return total


def _attributes(one: object) -> Iterator[object]:
    yield from getattr(one, "__dict__", {}).values()
    for base in type(one).__mro__:
        slots = base.__dict__.get("__slots__") or base.__dict__.get("__struct_fields__") or ()
        for name in (slots,) if isinstance(slots, str) else slots:
            yield getattr(one, name, None)


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
        name: says in a count what is kept.
        size: bytes of an entry; by default those of key and value, about.
        owner: of an entry; by default all entries have the same.
        most: maximum number of entries, too.
        window: uses after which an entry leaves that was not used meanwhile; None for no such limit.
        dropped: called with each entry that left because of a limit.
    """

    def __init__(
        self,
        name: str,
        limit: int,
        *,
        size: Callable[[K, V], int] | None = None,
        owner: Callable[[K], Hashable] = lambda key: None,
        most: int | None = None,
        window: int | None = None,
        dropped: Callable[[K, V], None] = lambda key, value: None,
    ) -> None:
        self.name, self.limit, self.bytes = name, limit, 0
        self._size = size or (lambda key, value: ENTRY_BYTES + size_of(key) + size_of(value))
        self._owner, self._most, self._window, self._dropped = owner, most, window, dropped
        # With a window the least recently used first.
        self._values: dict[K, V] = {} if window is None else OrderedDict()
        self._owned: dict[Hashable, _Owned] = {}
        self._uses = 0
        _all.add(self)

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
        self.pop(key, None)
        size = self._size(key, value)
        if size > self.limit:
            self._dropped(key, value)
            return
        self._values[key] = value
        owned = self._owned.setdefault(self._owner(key), _Owned())
        self._uses += 1
        owned.keys[key] = size, self._uses
        owned.bytes += size
        owned.used_at = time.monotonic()
        self.bytes += size
        while self.bytes > self.limit or (self._most is not None and len(self._values) > self._most):
            self._drop_one()
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

    def of(self, owner: Hashable) -> list[K]:
        """Keys of an owner, the least recently used first."""
        return list(self._owned[owner].keys) if owner in self._owned else []

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


def kept_bytes() -> dict[str, int]:
    """Bytes of all mappings of this process, by their names."""
    found: dict[str, int] = {}
    for one in list(_all):
        found[one.name] = found.get(one.name, 0) + one.bytes
    return found
