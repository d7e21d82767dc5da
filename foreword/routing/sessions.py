"""The replica of each session's last request, and its weights. Bounded, with a time to live. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple

from foreword.errors import ConfigError

# Blocks that are searched, from the end of the prompt.
_SEARCHED: Final = 4096
# Slots in which a name may be.
_WAYS: Final = 16
_FREE: Final = 0
_MOST_PLACES: Final = (1 << 16) - 1


class SessionHome(NamedTuple):
    """Where a session's last request was served.

    Attributes:
        replica: None if it was removed since.
        weights: of the replica; None or empty if they are not known.
        blocks: leading blocks of the prompt by which a session without a name was recognized.
    """

    replica: str | None
    weights: str | None = ""
    blocks: int = 0


class SessionTable:
    """A table of at most `size` sessions. A session expires `ttl` seconds after its last request.

    A session is named by the caller (who includes the tenant in the name) or recognized by its prompt: a prompt that
    contains the last full block of an earlier prompt continues that conversation. The block must lie in the second half of
    the prompt, because a short common part is only a shared system prompt.

    A session takes up to 22 bytes, which the table has from the start: it does not grow. A name has 16 slots, from a hash of 64
    bits whose seed is the process's own; the session that was recorded longest ago leaves its slot for another.

    Raises ConfigError for a size or TTL that is not positive.
    """

    def __init__(self, size: int = 100_000, ttl: float = 3600.0) -> None:
        if size < 1 or not ttl > 0:
            raise ConfigError(f"the session table needs a size and a TTL above 0, not {size} and {ttl}")
        self.ttl = ttl
        self._ways = min(_WAYS, size)
        self._sets = -(-size // self._ways)
        self.size = self._ways * self._sets
        self._names = array("Q", bytes(8 * self.size))  # hashes
        # Names by the last bits of their hashes: most blocks of a prompt are no name, which one look here tells.
        self._counts = array("H", bytes(2 << self.size.bit_length()))
        self._expires = array("d", bytes(8 * self.size))
        self._places = array("H", bytes(2 * self.size))  # numbers in `_homes`
        # Places, by number and back; a place without sessions is free for another.
        self._homes: list[SessionHome | None] = []
        self._numbers: dict[SessionHome, int] = {}

    def __len__(self) -> int:
        return self.size - self._names.count(_FREE)

    def find(self, session: str | None, keys: Sequence[bytes], now: float) -> SessionHome | None:
        """Where the session was served last, or without a session what the prompt continues."""
        if session is not None:
            return self._find(session, now)
        count, counts, mask = len(keys), self._counts, len(self._counts) - 1
        for i in range(count - 1, max((count + 1) // 2 - 1, count - _SEARCHED, 0) - 1, -1):
            if counts[hash(keys[i]) & mask] and (found := self._find(keys[i], now)) is not None:
                return found._replace(blocks=i + 1)
        return None

    def record(
        self, session: str | None, keys: Sequence[bytes], replica: str, now: float, weights: str | None = ""
    ) -> None:
        """Note that a request of the session was sent to a replica, which has these weights."""
        name = session if session is not None else keys[-1] if keys else None
        if name is None:
            return
        number = self._numbers.get((replica, weights, 0))  # type: ignore[call-overload]  # equal to a SessionHome
        if number is None:
            number = self._number(SessionHome(replica, weights))
        hashed, first = self._hashed(name)
        slots = self._names[first : first + self._ways]
        if hashed in slots:
            slot = first + slots.index(hashed)
        elif _FREE in slots:
            slot = first + slots.index(_FREE)
        else:
            slot = min(range(first, first + self._ways), key=self._expires.__getitem__)
        self._name(slot, hashed)
        self._expires[slot], self._places[slot] = now + self.ttl, number

    def remove_replica(self, replica: str) -> None:
        """A replica was removed. Of its sessions only the weights are remembered, if they are known."""
        gone = [(home, number) for home, number in self._numbers.items() if home.replica == replica]
        for home, number in gone:
            del self._numbers[home]
            self._homes[number] = None
            left = self._number(home._replace(replica=None), instead=number) if home.weights else None
            if left == number:
                continue
            for slot in [slot for slot, place in enumerate(self._places) if place == number]:
                if left is None:
                    self._name(slot, _FREE)
                else:
                    self._places[slot] = left

    def _number(self, home: SessionHome, instead: int | None = None) -> int:
        """The number of a place; a new one is `instead`, if given."""
        found = self._numbers.get(home)
        if found is not None:
            return found
        if instead is None:
            instead = next((number for number, one in enumerate(self._homes) if one is None), len(self._homes))
        if instead == len(self._homes):
            self._homes.append(None)
        if instead > _MOST_PLACES:  # replicas and weights of a lifetime: begin again
            self._homes, self._numbers, instead = [None], {}, 0
            self._names, self._counts = array("Q", bytes(8 * self.size)), array("H", bytes(2 * len(self._counts)))
        self._homes[instead], self._numbers[home] = home, instead
        return instead

    def _name(self, slot: int, hashed: int) -> None:
        """Give a slot to a name."""
        counts, mask, before = self._counts, len(self._counts) - 1, self._names[slot]
        if before == hashed:
            return
        if before != _FREE:
            counts[before & mask] -= 1
        if hashed != _FREE:
            counts[hashed & mask] += 1
        self._names[slot] = hashed

    def _hashed(self, name: str | bytes) -> tuple[int, int]:
        """The hash of a name, which is not `_FREE`, and its first slot."""
        hashed = hash(name) & 0xFFFF_FFFF_FFFF_FFFF or 1
        return hashed, hashed % self._sets * self._ways

    def _find(self, name: str | bytes, now: float) -> SessionHome | None:
        hashed, first = self._hashed(name)
        slots = self._names[first : first + self._ways]
        if hashed not in slots:
            return None
        slot = first + slots.index(hashed)
        if self._expires[slot] <= now:
            self._name(slot, _FREE)
            return None
        return self._homes[self._places[slot]]
