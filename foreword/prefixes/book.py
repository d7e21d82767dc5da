"""Named prefixes: name -> tokens, version, pinned blocks, use (R15 to R18). Bookkeeping only; the engine computes and pins."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from foreword.errors import BadRequest, PrefixBudgetExceeded, UnknownPrefix

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class NamedPrefix:
    """One version of a named prefix.

    Attributes:
        kind: `text` stands before the prompt of a completion; `messages` stand before a chat's.
        bytes: device memory that its pinned blocks take. `ready` once its KV is computed.
        created, last_used: seconds since the epoch.
        uses, hit_tokens: requests that named it, and the prompt tokens that they found cached.
    """

    name: str
    version: int
    kind: Literal["text", "messages"]
    content: str | tuple[Message, ...]
    tokens: tuple[int, ...]
    created: float
    bytes: int = 0
    uses: int = 0
    hit_tokens: int = 0
    last_used: float | None = None
    ready: bool = False


@dataclass(slots=True)
class _Entry:
    prefix: NamedPrefix
    blocks: list[int]


class PrefixBook:
    """All named prefixes of one engine, per tenant, within a byte budget. Names of tenants do not meet.

    Args:
        budget_bytes: what all of them together may pin. `used_bytes` never passes it, not even while one is computed.
        block_bytes, block_size: to know a prefix's size before it is computed.
        unpin: gives blocks back.
    """

    def __init__(
        self, budget_bytes: int, block_bytes: int, block_size: int, unpin: Callable[[Sequence[int]], None]
    ) -> None:
        self.budget_bytes = budget_bytes
        self._block_bytes = block_bytes
        self._block_size = block_size
        self._unpin = unpin
        self._entries: dict[tuple[bytes, str], _Entry] = {}
        self._promised = 0

    @property
    def pinned_bytes(self) -> int:
        # A copy: other threads ask while the engine's thread adds and removes.
        return sum(entry.prefix.bytes for entry in list(self._entries.values()))

    def size_of(self, tokens: Sequence[int]) -> int:
        """Bytes that pinning these tokens takes: full blocks only, the rest is recomputed."""
        return len(tokens) // self._block_size * self._block_bytes

    def promise(self, name: str, tokens: Sequence[int], *, salt: bytes, replacing: bool) -> int:
        """Check the name and set the bytes aside while the prefix is computed; `keep` or `break_promise` ends that.

        A replaced version stays until the new one is ready, and counts until then. Raises BadRequest or
        PrefixBudgetExceeded.
        """
        if not _NAME.fullmatch(name):
            raise BadRequest(
                f"{name!r} is not a name for a prefix: letters, digits, '.', '_' and '-', at most 128", param="name"
            )
        if not replacing and (salt, name) in self._entries:
            raise BadRequest(f"a prefix named {name!r} exists; replace it with PUT /v1/prefixes/{name}", param="name")
        if not tokens:
            raise BadRequest("the prefix is empty", param="content")
        size = self.size_of(tokens)
        free = self.budget_bytes - self.pinned_bytes - self._promised
        if size > free:
            raise PrefixBudgetExceeded(
                f"prefix {name!r} needs {size:,} bytes, but of the {self.budget_bytes:,} bytes that named prefixes may pin "
                f"{max(free, 0):,} are left; remove one, or raise prefixes.budget",
                param="content",
            )
        self._promised += size
        return size

    def break_promise(self, size: int) -> None:
        self._promised -= size

    def keep(
        self,
        name: str,
        kind: Literal["text", "messages"],
        content: str | tuple[Message, ...],
        tokens: Sequence[int],
        blocks: list[int],
        *,
        salt: bytes,
        stored_version: int = 0,
        adopted: NamedPrefix | None = None,
    ) -> NamedPrefix:
        """The prefix is computed and `blocks` are pinned; an earlier version gives its blocks back.

        `stored_version` is one that other instances know; the new one comes after it. `adopted` is the very version that is
        now on the device.
        """
        self._promised -= self.size_of(tokens)
        known = self._entries.pop((salt, name), None)
        if known is not None:
            self._unpin(known.blocks)
        before = max(known.prefix.version if known is not None else 0, stored_version)
        prefix = NamedPrefix(
            name=name,
            version=adopted.version if adopted is not None else before + 1,
            kind=kind,
            content=content,
            tokens=tuple(tokens),
            created=adopted.created if adopted is not None else time.time(),
            bytes=len(blocks) * self._block_bytes,
            ready=True,
        )
        if adopted is not None and known is not None:
            was = known.prefix
            prefix = replace(prefix, uses=was.uses, hit_tokens=was.hit_tokens, last_used=was.last_used)
        self._entries[salt, name] = _Entry(prefix, blocks)
        return prefix

    def adopt(self, prefix: NamedPrefix, *, salt: bytes) -> None:
        """A version that another instance, or an earlier process, registered: known from now on, pinned later, if at all."""
        known = self._entries.pop((salt, prefix.name), None)
        if known is not None:
            self._unpin(known.blocks)
        self._entries[salt, prefix.name] = _Entry(replace(prefix, bytes=0, ready=False), [])

    def version(self, name: str, *, salt: bytes) -> int:
        """0 if the name is not known here."""
        entry = self._entries.get((salt, name))
        return entry.prefix.version if entry is not None else 0

    def get(self, name: str, *, salt: bytes = b"") -> NamedPrefix:
        """Raises UnknownPrefix with close names (R17)."""
        entry = self._entries.get((salt, name))
        if entry is None:
            raise UnknownPrefix(name, [known for owner, known in list(self._entries) if owner == salt])
        return entry.prefix

    def use(self, name: str, kind: Literal["text", "messages"], *, salt: bytes = b"") -> NamedPrefix:
        """The prefix, for a request of this kind; counts the use. Raises UnknownPrefix, or BadRequest for another kind."""
        prefix = self.get(name, salt=salt)
        if prefix.kind != kind:
            where = {"text": "/v1/completions", "messages": "/v1/chat/completions"}
            given = {"text": "content", "messages": "messages"}
            raise BadRequest(
                f"prefix {name!r} was registered with {given[prefix.kind]!r} and serves {where[prefix.kind]}; "
                f"register it with {given[kind]!r} to use it in {where[kind]}",
                param="prefix",
            )
        used = replace(prefix, uses=prefix.uses + 1, last_used=time.time())
        entry = self._entries.get((salt, name))
        if entry is not None:  # removed meanwhile: its blocks stay cached while they can
            entry.prefix = used
        return used

    def note_hit(self, name: str, tokens: int, *, salt: bytes = b"") -> None:
        """A request that named the prefix found `tokens` of its prompt cached."""
        entry = self._entries.get((salt, name))
        if entry is not None:
            held = min(tokens, len(entry.prefix.tokens))
            entry.prefix = replace(entry.prefix, hit_tokens=entry.prefix.hit_tokens + held)

    def remove(self, name: str, *, salt: bytes = b"") -> NamedPrefix:
        """Unpin it; its blocks stay cached while they can. Raises UnknownPrefix."""
        prefix = self.get(name, salt=salt)
        self._unpin(self._entries.pop((salt, name)).blocks)
        return prefix

    def list(self, *, salt: bytes = b"") -> list[NamedPrefix]:
        """By name."""
        return sorted(
            (e.prefix for (owner, _), e in list(self._entries.items()) if owner == salt), key=lambda p: p.name
        )
