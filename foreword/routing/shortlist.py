"""Replicas of a large fleet that are worth pricing for a request: those that hold its prefix, and the least loaded ones. Pure.

Pricing every replica takes time that grows with the fleet. A shortlist has a bounded number of replicas, found in orders that
are updated when the load of a replica changes:

- the session's replica;
- replicas that hold the longest part of the prompt, and the least loaded ones of those that hold half as much;
- of each group of like replicas (same role, prompt costs within a factor of two), the fastest ones without a queue, those with
  the shortest queues and those with the least recent work.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Final

# Fleets of at most this size are priced as a whole.
MAX_PRICED: Final = 16
# From this size on the prefixes of prompts are noted, so that a growing fleet knows them.
_MIN_NOTED: Final = 4
_HOLDERS: Final = 4
# Replicas of each order, divided among the groups.
_LEAST_LOADED: Final = 8
_MIN_PER_GROUP: Final = 2
# A prefix is known at these numbers of blocks: each is about a fifth more than the one before.
_GROWTH: Final = 1.2
_MAX_DEPTH: Final = 1 << 16
_NOTED_REPLICAS: Final = 12
_NOTED_PER_REPLICA: Final = 1024
_MIN_NOTED_BLOCKS: Final = 1 << 16


def _depths() -> list[int]:
    found = [1]
    while found[-1] < _MAX_DEPTH:
        found.append(max(found[-1] + 1, int(found[-1] * _GROWTH)))
    return found


_DEPTHS: Final = _depths()

# Queued work that can be compared: lower is less. The first number is at least `QUEUED` if there is any.
Load = tuple[float, float]
QUEUED: Final = 1.0
Group = tuple[str, int]
_Entry = tuple[float, float, str]


class _Order:
    """Names in ascending order of a value. A change moves one entry of a list."""

    __slots__ = ("_entries", "_values")

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._values: dict[str, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def set(self, name: str, value: Load) -> _Entry:
        entry = (value[0], value[1], name)
        if self._values.get(name) != entry:
            self.discard(name)
            self._values[name] = entry
            insort(self._entries, entry)
        return entry

    def discard(self, name: str) -> None:
        entry = self._values.pop(name, None)
        if entry is not None:
            del self._entries[bisect_left(self._entries, entry)]

    def first(self, count: int, avoid: Collection[str], least: float = -math.inf) -> list[str]:
        """The first `count` names that are not to be avoided, of those with a value of at least `least`."""
        start = 0 if least == -math.inf else bisect_left(self._entries, (least, -math.inf, ""))
        enough = [name for _, _, name in self._entries[start : start + count + len(avoid)]]
        return [name for name in enough if name not in avoid][:count] if avoid else enough


class SentPrefixes:
    """The replicas to which prompts with a prefix were sent most recently: 12 for each of a bounded number of prefixes.

    An entry takes about 200 bytes. A prompt has one for each depth in `_DEPTHS`, so of a prefix at least five sixths are found.
    """

    def __init__(self) -> None:
        self._replicas: OrderedDict[bytes, dict[str, None]] = OrderedDict()

    def add(self, replica: str, keys: Sequence[bytes], fleet_size: int) -> None:
        known = self._replicas
        for depth in _DEPTHS[: bisect_right(_DEPTHS, len(keys))]:
            key = keys[depth - 1]
            replicas = known.pop(key, None) or {}
            replicas.pop(replica, None)
            replicas[replica] = None
            if len(replicas) > _NOTED_REPLICAS:
                del replicas[next(iter(replicas))]
            known[key] = replicas
        while len(known) > max(_NOTED_PER_REPLICA * fleet_size, _MIN_NOTED_BLOCKS):
            known.popitem(last=False)

    def find(self, keys: Sequence[bytes]) -> dict[str, int]:
        """Replicas with the number of leading blocks that were sent there, at least."""
        found: dict[str, int] = {}
        for depth in reversed(_DEPTHS[: bisect_right(_DEPTHS, len(keys))]):
            for name in self._replicas.get(keys[depth - 1], ()):
                found.setdefault(name, depth)
            if len(found) >= _NOTED_REPLICAS:
                break
        return found


class Shortlist:
    """The orders of one fleet's replicas."""

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}
        self._orders: dict[Group, tuple[_Order, _Order]] = {}
        self._loads: dict[str, _Entry] = {}
        self._sent = SentPrefixes()

    def update(self, name: str, role: str, prefill: float, queued: Load, recent: float) -> None:
        """A replica takes requests. `prefill`: its seconds per prompt token. `recent`: recent work, on any scale."""
        group = (role, round(math.log2(max(prefill, 1e-12))))
        if self._groups.get(name) != group:
            self.discard(name)
            self._groups[name] = group
        orders = self._orders.get(group)
        if orders is None:
            orders = self._orders[group] = (_Order(), _Order())
        self._loads[name] = orders[0].set(name, queued)
        orders[1].set(name, (recent, 0.0))

    def discard(self, name: str) -> None:
        """A replica takes no requests."""
        group = self._groups.pop(name, None)
        if group is not None:
            del self._loads[name]
            for order in self._orders[group]:
                order.discard(name)
            if not len(self._orders[group][0]):
                del self._orders[group]

    def sent(self, name: str, keys: Sequence[bytes], fleet_size: int) -> None:
        """A prompt with these blocks was sent to a replica."""
        if fleet_size >= _MIN_NOTED:
            self._sent.add(name, keys, fleet_size)

    def sent_to(self, keys: Sequence[bytes]) -> dict[str, int]:
        """Replicas to which a prompt with the same prefix was sent, with the number of its leading blocks."""
        return self._sent.find(keys)

    def choose(self, held: Mapping[str, int], home: str | None, avoid: Collection[str]) -> dict[str, float]:
        """The replicas to price, each with the number of replicas that it stands for.

        Args:
            held: tokens of the prompt that replicas hold.
        """
        found = self._best_holders(held, avoid)
        if home in self._groups:
            found[home] = 1.0
        each = max(_LEAST_LOADED // max(len(self._orders), 1), _MIN_PER_GROUP)
        known = dict.fromkeys(self._orders, 0)
        for name, weight in found.items():
            known[self._groups[name]] += round(weight)
        for group, (queued, recent) in self._orders.items():
            # A fast replica with a short queue may be better than slow ones without.
            picked = [*queued.first(each, avoid), *queued.first(each, avoid, QUEUED), *recent.first(each, avoid)]
            fresh = [name for name in dict.fromkeys(picked) if name not in found]
            weight = max(len(queued) - known[group], len(fresh)) / max(len(fresh), 1)
            found.update(dict.fromkeys(fresh, weight))
        return found

    def _best_holders(self, held: Mapping[str, int], avoid: Collection[str]) -> dict[str, float]:
        loads = self._loads
        able = [name for name in held if name in loads and name not in avoid]
        if len(able) <= _HOLDERS:
            return dict.fromkeys(able, 1.0)
        longest = max(map(held.__getitem__, able))
        # Entries are sorted as they are: there may be thousands of them.
        half = sorted(map(loads.__getitem__, [name for name in able if 2 * held[name] >= longest]))
        loaded_least = [name for _, _, name in half[:_HOLDERS]]
        if all(held[name] == longest for name in able):
            best = loaded_least  # often all hold the same, such as a system prompt
        else:
            # The longest ones are among these, unless there are few.
            among = half if len(half) >= _HOLDERS else list(map(loads.__getitem__, able))
            longest_first = sorted([(-held[name], load, rest, name) for load, rest, name in among])
            best = [name for _, _, _, name in longest_first[:_HOLDERS]]
        found = dict.fromkeys(best + loaded_least)
        return dict.fromkeys(found, max(len(half) / len(found), 1.0))
