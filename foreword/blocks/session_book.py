"""Sessions: which blocks only one conversation of an agent uses, so that they go when it has no more use for them.

A client tells when a session begins (`open`, or `fork` from another one), when its history was replaced by a shorter one
(`compact`), and when it ends (`end`). A session is one line of requests: when a request of it does not continue the one before,
what that had more is superseded. Requests outside of such sessions are noted too, each by its own id, so that a conversation
that the client has shortened can be found again (`supersedes`).

What a session has alone is the end of its chain: keys are chained, so others share leading blocks only. Blocks that any request
of another family has used, or that were cached before the session came to them, are shared from then on. The members of
one family, a session and its forks, leave shared blocks to those of them that go on.

A fork costs nothing: it is a name for what its parent has. Pure: no I/O. Thread-safe.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from foreword.blocks.keys import KEY_BYTES
from foreword.errors import BadRequest, NotFound

DEFAULT_IDLE: Final = 3600.0
_ENDED_BLOCKS: Final = 1 << 16


@dataclass(slots=True, eq=False)
class AgentSession:
    """A session of a tenant, or one request outside of sessions.

    Attributes:
        family: the name of the session that it and its relatives descend from; "" for a request outside of sessions.
        chain: keys of its newest blocks, one behind the other.
        shared: leading blocks that others have used.
        idle: seconds without a request after which it is forgotten; its blocks are then left to the eviction order.
        used: seconds since the epoch.
        places: where an engine has its blocks, as the engine says it; of sessions only.
    """

    name: str
    family: str
    parent: str = ""
    idle: float = DEFAULT_IDLE
    used: float = 0.0
    root: bytes = b""
    chain: bytes = b""
    shared: int = 0
    requests: int = 0
    places: Any = ()

    @property
    def blocks(self) -> int:
        return len(self.chain) // KEY_BYTES

    def describe(self) -> dict[str, Any]:
        """A session as JSON. `blocks`: of its newest request; `shared_blocks`: those of them that others have used."""
        shown = {"id": self.name, "parent": self.parent or None, "requests": self.requests}
        return {**shown, "blocks": self.blocks, "shared_blocks": self.shared, "expires": int(self.used + self.idle)}


@dataclass(frozen=True, slots=True)
class Alone:
    """Blocks that nothing continues any more: keys of a chain with this root, in order, behind its `first` blocks. `drop`: the
    client has said so. `places`: of the whole chain."""

    root: bytes
    keys: Sequence[bytes]
    drop: bool
    first: int = 0
    places: Any = ()


class SessionBook:
    """The sessions of one engine, by tenant.

    Args:
        most: sessions of one tenant.
        most_noted: requests outside of sessions that are remembered of one tenant. most_of_all: both, of all tenants.
        most_blocks: blocks of all sessions and requests. Those unused for longest are forgotten first.
    """

    def __init__(
        self,
        most: int = 1024,
        *,
        most_noted: int = 256,
        most_of_all: int = 1 << 15,
        most_blocks: int = 1 << 20,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._most, self._most_noted, self._most_of_all, self._most_blocks = most, most_noted, most_of_all, most_blocks
        self._clock, self._lock = clock, threading.Lock()
        self._tenants: dict[bytes, OrderedDict[str, AgentSession]] = {}
        self._all: OrderedDict[AgentSession, bytes] = OrderedDict()  # least recently used first
        self._blocks, self._next_look = 0, 0.0
        self._ended: OrderedDict[tuple[bytes, str], AgentSession] = OrderedDict()  # requests of them may still run

    def open(self, tenant: bytes, name: str, parent: str = "", idle: float | None = None) -> AgentSession:
        """Begin a session; with `parent`, a fork of that one. Raises BadRequest, NotFound for a parent that is not open."""
        with self._lock:
            self._expire()
            own: Mapping[str, AgentSession] = self._tenants.get(tenant, {})
            if name in own:
                raise BadRequest(f"a session {name!r} is open already", param="session_id")
            if sum(bool(one.family) for one in own.values()) >= self._most:
                raise BadRequest(f"{self._most} sessions are open already; end some of them", param="session_id")
            session = AgentSession(name, name, parent, idle or DEFAULT_IDLE)
            if parent:
                known = self._find(tenant, parent, "parent_session_id")
                session.family, session.root, session.chain = known.family, known.root, known.chain
                session.shared, session.places = known.shared, known.places
            self._enter(tenant, session)
            return session

    def all(self, tenant: bytes) -> list[AgentSession]:
        """The open sessions of a tenant."""
        with self._lock:
            self._expire()
            return [one for one in self._tenants.get(tenant, {}).values() if one.family]

    def note(
        self,
        tenant: bytes,
        request: str,
        root: bytes,
        keys: Sequence[bytes],
        cached: int,
        *,
        session: str = "",
        supersedes: str = "",
        started: float = math.inf,
        places: Any = (),
    ) -> list[Alone]:
        """A request has ended that used these blocks, of which the first `cached` were there before, and that came at `started`
        (seconds since the epoch). Returns what nothing continues any more: of the session's last request, of a session that has
        ended since, and of `supersedes`, a request outside of sessions whose history this one has in a shorter form."""
        chain = b"".join(keys)
        with self._lock:
            self._expire()
            own: Mapping[str, AgentSession] = self._tenants.get(tenant, {})
            late = self._ended.get((tenant, session)) if session not in own else None
            late = late if late is not None and started <= late.used else None
            mine = own.get(session) or late or AgentSession(request, "")
            mine = mine if mine.family else AgentSession(request, "")
            known = kept = common_blocks(mine.chain, chain) if mine.root == root else 0
            shared = min(mine.shared, kept)
            for other in [one for one in own.values() if one is not mine and one.root == root]:
                at = min(known, shared, other.shared) * KEY_BYTES
                if at >= len(other.chain) or not chain.startswith(other.chain[at : at + KEY_BYTES], at):
                    continue  # it has no more in common than is known
                common = common_blocks(other.chain, chain)
                known = max(known, common)
                if mine.family and other.family == mine.family:
                    shared = max(shared, min(other.shared, common))
                elif not mine.family and not other.family and common == other.blocks:  # the turn before
                    shared = max(shared, other.shared)
                    self._remove(tenant, other)
                else:
                    other.shared, shared = max(other.shared, common), max(shared, common)
            if cached > known:
                shared = max(shared, cached)
            if late is not None:
                late.root, late.chain, late.shared, late.places = root, chain, shared, places
                found = [self._alone(tenant, late, 0, drop=True)]
                return found if found[0].keys else []
            found = [self._alone(tenant, mine, kept, drop=False)]
            if mine in self._all:
                self._remove(tenant, mine)
            mine.root, mine.chain, mine.shared, mine.requests = root, chain, shared, mine.requests + 1
            mine.places = places if mine.family else ()
            self._enter(tenant, mine)
            old = own.get(supersedes)
            if old is not None and not old.family and old is not mine:
                self._remove(tenant, old)
                found.append(self._alone(tenant, old, 0, drop=False))
            return [one for one in found if one.keys]

    def compact(self, tenant: bytes, name: str, keep: int = 0) -> Alone:
        """A session's history will be shorter: nothing behind its first `keep` blocks is needed. Raises NotFound."""
        return self._shorten(tenant, name, keep, end=False)

    def end(self, tenant: bytes, name: str) -> Alone:
        """A session has ended. Its forks go on; what its running requests use is found when they are noted. Raises NotFound."""
        return self._shorten(tenant, name, 0, end=True)

    def _shorten(self, tenant: bytes, name: str, keep: int, *, end: bool) -> Alone:
        with self._lock:
            session = self._find(tenant, name, "session_id")
            alone = self._alone(tenant, session, keep, drop=True)
            self._remove(tenant, session)
            if not end:
                session.chain = session.chain[: (session.blocks - len(alone.keys)) * KEY_BYTES]
                self._enter(tenant, session)
                return alone
            session.used = self._clock()
            ended = self._ended
            ended[tenant, name] = session
            ended.move_to_end((tenant, name))
            while len(ended) > self._most_noted or sum(one.blocks for one in ended.values()) > _ENDED_BLOCKS:
                ended.popitem(last=False)
            return alone

    def follows(self, tenant: bytes) -> bool:
        """Whether a tenant has sessions, or requests of ended ones that may still run."""
        return bool(self.all(tenant)) or any(one == tenant for one, _ in list(self._ended))

    def forget(self, tenant: bytes) -> None:
        """Forget all of a tenant."""
        with self._lock:
            for session in list(self._tenants.get(tenant, {}).values()):
                self._remove(tenant, session)
            self._ended = OrderedDict((key, one) for key, one in self._ended.items() if key[0] != tenant)

    def _alone(self, tenant: bytes, session: AgentSession, first: int, *, drop: bool) -> Alone:
        """Blocks of a session, from number `first` on, that neither others nor its relatives have."""
        for one in self._tenants.get(tenant, {}).values() if session.family else ():
            if one is not session and one.family == session.family and one.root == session.root:
                first = max(first, common_blocks(one.chain, session.chain))
        first = max(first, session.shared) * KEY_BYTES
        chain = session.chain
        keys = [chain[at : at + KEY_BYTES] for at in range(first, len(chain), KEY_BYTES)]
        return Alone(session.root, keys, drop, first // KEY_BYTES, session.places)

    def _find(self, tenant: bytes, name: str, param: str) -> AgentSession:
        own: Mapping[str, AgentSession] = self._tenants.get(tenant, {})
        session = own.get(name)
        if session is None or not session.family:
            raise NotFound(f"no session {name!r} is open", param=param)
        return session

    def _enter(self, tenant: bytes, session: AgentSession) -> None:
        session.used = self._clock()
        own = self._tenants.setdefault(tenant, OrderedDict())
        own[session.name] = session
        self._all[session] = tenant
        self._blocks += session.blocks
        if not session.family and len(own) > self._most_noted:
            noted = [one for one in own.values() if not one.family]
            for one in noted[: max(len(noted) - self._most_noted, 0)]:
                self._remove(tenant, one)
        while self._blocks > self._most_blocks or len(self._all) > self._most_of_all:
            oldest = next(iter(self._all))
            self._remove(self._all[oldest], oldest)

    def _remove(self, tenant: bytes, session: AgentSession) -> None:
        own = self._tenants[tenant]
        del own[session.name], self._all[session]
        self._blocks -= session.blocks
        if not own:
            del self._tenants[tenant]

    def _expire(self) -> None:
        now = self._clock()
        if now >= self._next_look:
            self._next_look = now + 1.0
            for session, tenant in [(one, tenant) for one, tenant in self._all.items() if one.used + one.idle <= now]:
                self._remove(tenant, session)
            while self._ended and next(iter(self._ended.values())).used + DEFAULT_IDLE <= now:
                self._ended.popitem(last=False)


def common_blocks(one: bytes, other: bytes) -> int:
    """How many leading keys two chains have in common: the first that differs ends it, since keys are chained."""
    low, high = 0, min(len(one), len(other)) // KEY_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        at = (middle - 1) * KEY_BYTES
        if one[at : at + KEY_BYTES] == other[at : at + KEY_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low
