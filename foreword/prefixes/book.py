"""The book of named prefixes: names, versions and use. In memory only; safe from any thread. The KV behind a name is a lease,
within the budget of all leases (`blocks/leases.py`)."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from foreword.blocks.salt import PUBLIC
from foreword.errors import BadRequest
from foreword.prefixes.errors import PrefixBudgetExceeded, UnknownPrefix

if TYPE_CHECKING:
    from foreword.blocks.leases import Lease

TENANT_PREFIXES, TENANT_BYTES, MOST_BYTES = 1000, 64 << 20, 256 << 20  # names and bytes of a tenant, bytes of all
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
Message = Mapping[str, Any]
Kind = Literal["text", "messages"]
Content = str | tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class NamedPrefix:
    """A version of a named prefix.

    Attributes:
        tokens: none where nothing is computed, at a router.
        bytes: KV that is kept for it; at a router, its content. `ready`: its KV has been computed.
        created, last_used: seconds since the epoch.
        uses, hit_tokens: requests that named it, and the prompt tokens that they found cached.
        made: at a router, when this version was made, by `time.monotonic`.
    """

    name: str
    version: int
    content: Content
    tokens: tuple[int, ...]
    created: float
    bytes: int = 0
    uses: int = 0
    hit_tokens: int = 0
    last_used: float | None = None
    ready: bool = False
    made: float = 0.0

    @property
    def kind(self) -> Kind:
        """`text` stands before the prompt of a completion; `messages` stand before those of a chat."""
        return "text" if isinstance(self.content, str) else "messages"

    @property
    def body(self) -> dict[str, Any]:
        """The content as in a body of `/v1/prefixes`."""
        return {"content": self.content} if isinstance(self.content, str) else {"messages": list(self.content)}

    def describe(self) -> dict[str, Any]:
        """The prefix as JSON, without its content. `bytes` is the KV that is kept for it; times are seconds since 1970."""
        return {
            "id": self.name,
            "object": "prefix",
            "name": self.name,
            "version": self.version,
            "kind": self.kind,
            "num_tokens": len(self.tokens),
            "bytes": self.bytes,
            "ready": self.ready,
            "created": int(self.created),
            "uses": self.uses,
            "hit_tokens": self.hit_tokens,
            "last_used": self.last_used,
        }


def content_of(content: str | None, messages: Sequence[Message] | None) -> Content:
    """The content that a body of `/v1/prefixes` registers. Raises BadRequest."""
    if (content is None) == (messages is None):
        raise BadRequest("give either 'content' (text) or 'messages' (for a chat)", param="content")
    return content if content is not None else tuple(messages or ())


@dataclass(slots=True)
class _Entry:
    prefix: NamedPrefix
    lease: Lease[int] | None
    size: int


def size_of(content: Content, tokens: Sequence[int] | None = ()) -> int:
    """About the bytes that a prefix takes in a book; a token is an object of Python."""
    return len(content if isinstance(content, str) else repr(content)) + 36 * len(tokens or ()) + 1024


class PrefixBook:
    """The named prefixes of one engine or router, per tenant (`salt`). Each tenant has its own names, and uses those of the
    salt PUBLIC where it has none of that name. Its limits hold beside the budget of KV, of which short ones take nothing."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._entries: dict[tuple[bytes, str], _Entry] = {}

    def check(self, name: str, content: Content, tokens: Sequence[int] | None, *, salt: bytes, replace: bool) -> None:
        """Raises BadRequest for a name or prefix that cannot be registered, PrefixBudgetExceeded for one that is too much."""
        if not _NAME.fullmatch(name):
            text = "is not a name for a prefix: letters, digits, '.', '_' and '-', at most 128"
            raise BadRequest(f"{name[:200]!r} {text}", param="name")
        if not content or (tokens is not None and not tokens):
            raise BadRequest("the prefix is empty", param="content")
        exists = self.version(name, salt=salt)
        if exists and not replace:
            text = f"a prefix named {name!r} exists; replace it with PUT /v1/prefixes/{name}, or with --replace"
            raise BadRequest(text, param="name")
        sizes = [(one.size, owner == salt) for (owner, _), one in list(self._entries.items())]
        mine, size = [one for one, own in sizes if own], size_of(content, tokens)
        full = size + sum(mine) > TENANT_BYTES or size + sum(one for one, _ in sizes) > MOST_BYTES
        if full or (len(mine) >= TENANT_PREFIXES and not exists):
            raise PrefixBudgetExceeded("no more named prefixes are kept for this tenant; remove some", param="name")

    def commit(self, prefix: NamedPrefix, lease: Lease[int] | None = None, *, salt: bytes) -> NamedPrefix:
        """Enter a computed prefix instead of the version before it, whose lease ends. Counts of use carry over if the version
        is the same."""
        with self._lock:
            prefix = replace(prefix, ready=True)
            known = self._entries.get((salt, prefix.name))
            if known is not None and known.prefix.version == prefix.version:
                was = known.prefix
                prefix = replace(prefix, uses=was.uses, hit_tokens=was.hit_tokens, last_used=was.last_used)
            self._enter(prefix, lease, salt)
        return prefix

    def adopt(self, prefix: NamedPrefix, *, salt: bytes) -> None:
        """Enter a version that another instance, or an earlier process, has registered. Its KV is not kept yet."""
        with self._lock:
            self._enter(replace(prefix, bytes=0, ready=False), None, salt)

    def _enter(self, prefix: NamedPrefix, lease: Lease[int] | None, salt: bytes) -> None:
        known = self._entries.get((salt, prefix.name))
        self._entries[salt, prefix.name] = _Entry(prefix, lease, size_of(prefix.content, prefix.tokens))
        if known is not None and known.lease is not None:
            known.lease.end()

    def version(self, name: str, *, salt: bytes) -> int:
        """0 for a name that is not known here."""
        entry = self._entries.get((salt, name))
        return entry.prefix.version if entry is not None else 0

    def get(self, name: str, *, salt: bytes = b"") -> NamedPrefix:
        """Raises UnknownPrefix, which lists similar names of the same tenant."""
        with self._lock:
            return self._entry(name, (salt, PUBLIC.tenant)).prefix

    def knows(self, name: str, *, salt: bytes) -> bool:
        """Whether `get` finds a prefix."""
        return bool(self.version(name, salt=salt) or self.version(name, salt=PUBLIC.tenant))

    def _entry(self, name: str, owners: Sequence[bytes]) -> _Entry:
        """Raises UnknownPrefix."""
        found = next((self._entries[owner, name] for owner in owners if (owner, name) in self._entries), None)
        if found is None:
            raise UnknownPrefix(name[:200], [known for owner, known in self._entries if owner in owners])
        return found

    def use(self, name: str, kind: Kind, *, salt: bytes = b"") -> NamedPrefix:
        """The prefix, for a request of this kind; counts the use. Raises UnknownPrefix, or BadRequest for another kind."""
        with self._lock:
            prefix = self.get(name, salt=salt)
            if prefix.kind != kind:
                endpoint = {"text": "/v1/completions", "messages": "/v1/chat/completions"}
                given = {"text": "content", "messages": "messages"}
                raise BadRequest(
                    f"prefix {name!r} was registered with {given[prefix.kind]!r} and serves {endpoint[prefix.kind]}; "
                    f"register it with {given[kind]!r} to use it in {endpoint[kind]}",
                    param="prefix",
                )
            entry = self._entry(name, (salt, PUBLIC.tenant))
            entry.prefix = replace(prefix, uses=prefix.uses + 1, last_used=time.time())
            return entry.prefix

    def note_hit(self, name: str, tokens: int, *, salt: bytes = b"") -> None:
        """A request that named the prefix found `tokens` of its prompt cached."""
        with self._lock:
            if self.knows(name, salt=salt):
                entry = self._entry(name, (salt, PUBLIC.tenant))
                was = entry.prefix
                entry.prefix = replace(was, hit_tokens=was.hit_tokens + min(tokens, len(was.tokens)))

    def remove(self, name: str, *, salt: bytes = b"") -> NamedPrefix:
        """Remove a prefix; its blocks stay cached until they are evicted. Raises UnknownPrefix."""
        with self._lock:
            entry = self._entry(name, (salt,))
            del self._entries[salt, name]
            if entry.lease is not None:
                entry.lease.end()
        return entry.prefix

    def all(self) -> list[tuple[bytes, NamedPrefix]]:
        """The prefixes of all tenants."""
        return [(salt, entry.prefix) for (salt, _), entry in list(self._entries.items())]

    def list(self, *, salt: bytes = b"") -> list[NamedPrefix]:
        """The prefixes of a tenant, by name."""
        return sorted((prefix for owner, prefix in self.all() if owner == salt), key=lambda prefix: prefix.name)
