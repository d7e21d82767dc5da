"""Which replica served a session's last request, and with which weights. Bounded, with a time to live. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple

from foreword.errors import ConfigError

# Blocks that are searched, from the end of the prompt.
_SEARCHED: Final = 4096


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
        self._homes: OrderedDict[str | bytes, tuple[SessionHome, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._homes)

    def find(self, session: str | None, keys: Sequence[bytes], now: float) -> SessionHome | None:
        """Where the session was served last, or without a session what the prompt continues."""
        if session is not None:
            return self._find(session, now)
        count = len(keys)
        homes = self._homes
        for i in range(count - 1, max((count + 1) // 2 - 1, count - _SEARCHED, 0) - 1, -1):
            if keys[i] in homes and (found := self._find(keys[i], now)) is not None:
                return found._replace(blocks=i + 1)
        return None

    def record(
        self, session: str | None, keys: Sequence[bytes], replica: str, now: float, weights: str | None = ""
    ) -> None:
        """Note that a request of the session was sent to a replica, which has these weights."""
        name = session if session is not None else keys[-1] if keys else None
        if name is None:
            return
        self._homes[name] = (SessionHome(replica, weights), now + self.ttl)
        self._homes.move_to_end(name)
        while len(self._homes) > self.size:
            self._homes.popitem(last=False)

    def remove_replica(self, replica: str) -> None:
        """A replica was removed. Of its sessions only the weights are remembered, if they are known."""
        for name in [name for name, (home, _) in self._homes.items() if home.replica == replica]:
            home, expires = self._homes[name]
            if home.weights:
                self._homes[name] = (home._replace(replica=None), expires)
            else:
                del self._homes[name]

    def _find(self, name: str | bytes, now: float) -> SessionHome | None:
        found = self._homes.get(name)
        if found is None:
            return None
        if found[1] <= now:
            del self._homes[name]
            return None
        return found[0]
