"""Which replica served a session's last request. Bounded, with a time to live. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from foreword.errors import ConfigError

# Blocks that are searched, from the end of the prompt.
_SEARCHED: Final = 4096


class SessionTable:
    """An LRU table of at most `size` sessions. A session expires `ttl` seconds after its last request.

    A session is named by the caller (who includes the tenant in the name) or recognized by its prompt: a prompt that
    contains the last full block of an earlier prompt continues that conversation. The block must lie in the second half of
    the prompt, because a short common part is only a shared system prompt. An entry takes about 250 bytes.

    Raises ConfigError for a size or TTL that is not positive.
    """

    def __init__(self, size: int = 100_000, ttl: float = 3600.0) -> None:
        if size < 1 or not ttl > 0:
            raise ConfigError(f"the session table needs a size and a TTL above 0, not {size} and {ttl}")
        self.size = size
        self.ttl = ttl
        self._homes: OrderedDict[str | bytes, tuple[str, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._homes)

    def home(self, session: str | None, keys: Sequence[bytes], now: float) -> str | None:
        """The replica that served the session last, or without a session the one that served what the prompt continues."""
        if session is not None:
            return self._find(session, now)
        count = len(keys)
        homes = self._homes
        for i in range(count - 1, max((count + 1) // 2 - 1, count - _SEARCHED, 0) - 1, -1):
            if keys[i] in homes and (found := self._find(keys[i], now)) is not None:
                return found
        return None

    def record(self, session: str | None, keys: Sequence[bytes], replica: str, now: float) -> None:
        """Note that a request of the session was sent to a replica."""
        name = session if session is not None else keys[-1] if keys else None
        if name is None:
            return
        self._homes[name] = (replica, now + self.ttl)
        self._homes.move_to_end(name)
        while len(self._homes) > self.size:
            self._homes.popitem(last=False)

    def remove_replica(self, replica: str) -> None:
        """Forget all sessions of a removed replica."""
        for name in [name for name, (home, _) in self._homes.items() if home == replica]:
            del self._homes[name]

    def _find(self, name: str | bytes, now: float) -> str | None:
        found = self._homes.get(name)
        if found is None:
            return None
        if found[1] <= now:
            del self._homes[name]
            return None
        return found[0]
