"""Where a session's last request went: bounded, and forgotten after a while. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from foreword.errors import ConfigError

_SHORT_KEY: Final = 8
# Blocks that are looked at, from the prompt's end.
_LOOKED_AT: Final = 4096


class Sessions:
    """A table of at most `size` sessions, the least recently used forgotten first, each after `ttl` seconds without a request.

    Sessions are named by the caller (who puts the tenant into the name), or by the prompt itself: a prompt that begins with
    another's last full block goes on with its conversation, unless that covers less than half of it: what has so much in common
    with a short prompt is the system prompt. An entry takes about 250 bytes.

    Raises ConfigError for a table without room.
    """

    def __init__(self, size: int = 100_000, ttl: float = 3600.0) -> None:
        if size < 1 or not ttl > 0:
            raise ConfigError(f"the table of sessions needs a size and a lifetime of more than 0, not {size} and {ttl}")
        self.size = size
        self.ttl = ttl
        self._homes: OrderedDict[str | bytes, tuple[str, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._homes)

    def home(self, session: str | None, keys: Sequence[bytes], now: float) -> str | None:
        """The replica that served the session last; without a session, the one that served what this prompt continues."""
        if session is not None:
            return self._look(session, now)
        count = len(keys)
        for i in range(count - 1, max((count + 1) // 2 - 1, count - _LOOKED_AT, 0) - 1, -1):
            found = self._look(keys[i][:_SHORT_KEY], now)
            if found is not None:
                return found
        return None

    def went(self, session: str | None, keys: Sequence[bytes], replica: str, now: float) -> None:
        """A request of the session was sent to a replica."""
        name = session if session is not None else keys[-1][:_SHORT_KEY] if keys else None
        if name is None:
            return
        self._homes[name] = (replica, now + self.ttl)
        self._homes.move_to_end(name)
        while len(self._homes) > self.size:
            self._homes.popitem(last=False)

    def left(self, replica: str) -> None:
        """A replica is gone: its sessions have no home."""
        for name in [name for name, (home, _) in self._homes.items() if home == replica]:
            del self._homes[name]

    def _look(self, name: str | bytes, now: float) -> str | None:
        found = self._homes.get(name)
        if found is None:
            return None
        if found[1] <= now:
            del self._homes[name]
            return None
        return found[0]
