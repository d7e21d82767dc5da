"""The named prefixes that clients registered at the router, per tenant: names as in an engine, and contents within a budget."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from foreword.decoders import decode_json
from foreword.errors import ConfigError, PrefixBudgetExceeded, reason_of
from foreword.prefixes.book import KeptBytes, NamedPrefix, PrefixBook, content_of

_MAX_BYTES: Final = 256 << 20
# Of all bytes, what one tenant may use.
_TENANT_SHARE: Final = 0.25
_TENANT_PREFIXES: Final = 1000


class NewPrefix(msgspec.Struct):
    """The body that registers a prefix: text for completions, or messages for chats."""

    name: str = ""
    content: str | None = None
    messages: list[dict[str, Any]] | None = None
    replace: bool = False


class _Saved(msgspec.Struct, frozen=True):
    """A prefix in the file."""

    tenant: str
    name: str
    content: str | tuple[Mapping[str, Any], ...]
    version: int
    created: float


class PrefixRegistry:
    """All registered prefixes.

    Args:
        path: a file that keeps them over restarts.

    Raises ConfigError for an unreadable file.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._book = PrefixBook()
        for one in _read(path) if path is not None and path.exists() else ():
            self.put(one.tenant, NamedPrefix(one.name, one.version, one.content, (), one.created))

    def all(self) -> list[tuple[str, NamedPrefix]]:
        """Tenants and their prefixes."""
        return [(tenant.decode(), prefix) for tenant, prefix in self._book.all()]

    def of(self, tenant: str) -> list[NamedPrefix]:
        """A tenant's prefixes, by name."""
        return self._book.list(salt=tenant.encode())

    def find(self, tenant: str, name: str) -> NamedPrefix | None:
        """One of the tenant's own."""
        return self.get(tenant, name) if self._book.version(name, salt=tenant.encode()) else None

    def get(self, tenant: str, name: str) -> NamedPrefix:
        """Raises UnknownPrefix."""
        return self._book.get(name, salt=tenant.encode())

    def make(self, tenant: str, new: NewPrefix) -> NamedPrefix:
        """What `put` takes. Raises BadRequest and PrefixBudgetExceeded."""
        content, salt = content_of(new.content, new.messages), tenant.encode()
        self._book.check(new.name, content, salt=salt, replace=new.replace)
        version = self._book.version(new.name, salt=salt) + 1
        prefix = NamedPrefix(new.name, version, content, (), time.time(), _size(content))
        others = [(owner, one.bytes) for owner, one in self.all() if (owner, one.name) != (tenant, new.name)]
        mine = [size for owner, size in others if owner == tenant]
        room = min(_MAX_BYTES - sum(size for _, size in others), _MAX_BYTES * _TENANT_SHARE - sum(mine))
        if prefix.bytes > room or len(mine) >= _TENANT_PREFIXES:
            raise PrefixBudgetExceeded("The router keeps no more named prefixes for this tenant; remove some")
        return prefix

    def put(self, tenant: str, prefix: NamedPrefix) -> None:
        """Register a prefix or a new version of it."""
        self._book.commit(prefix, KeptBytes(prefix.bytes or _size(prefix.content)), salt=tenant.encode())

    def remove(self, tenant: str, name: str) -> NamedPrefix:
        """Raises UnknownPrefix."""
        return self._book.remove(name, salt=tenant.encode())

    def write(self, prefixes: Sequence[tuple[str, NamedPrefix]]) -> None:
        """Write the file with these prefixes, if there is one. Takes time; runs on any thread. Raises OSError."""
        if self._path is None:
            return
        saved = [_Saved(owner, one.name, one.content, one.version, one.created) for owner, one in prefixes]
        temporary = self._path.with_name(self._path.name + ".new")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(saved))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path)


def _size(content: object) -> int:
    """About the bytes that a prefix takes."""
    return len(msgspec.json.encode(content)) + 200


def _read(path: Path) -> list[_Saved]:
    try:
        return decode_json(path.read_bytes(), list[_Saved])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"cannot read router.prefix_file {path}: {reason_of(error)}") from None
