"""The named prefixes that clients registered at the router: names, contents and versions, per tenant, within a budget."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from foreword.errors import BadRequest, ConfigError, NotFound, PrefixBudgetExceeded, UnknownPrefix, reason_of

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
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


class RegisteredPrefix(msgspec.Struct, frozen=True):
    """One version of a named prefix. `content` is text or messages."""

    tenant: str
    name: str
    content: str | list[dict[str, Any]]
    version: int
    created: float

    @property
    def kind(self) -> str:
        return "text" if isinstance(self.content, str) else "messages"

    @property
    def body(self) -> dict[str, Any]:
        """The content as in a body of `/v1/prefixes`."""
        return {"content" if isinstance(self.content, str) else "messages": self.content}

    @property
    def size(self) -> int:
        return len(msgspec.json.encode(self.content)) + 200

    def describe(self) -> dict[str, Any]:
        """The prefix as JSON: the fields that are known without an engine."""
        return {
            "id": self.name,
            "object": "prefix",
            "name": self.name,
            "version": self.version,
            "kind": self.kind,
            "created": int(self.created),
        }


class PrefixRegistry:
    """All registered prefixes.

    Args:
        path: a file that keeps them over restarts.

    Raises ConfigError for an unreadable file.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._prefixes: dict[tuple[str, str], RegisteredPrefix] = {}
        self._bytes: Counter[str] = Counter()
        for prefix in _read(path) if path is not None and path.exists() else ():
            self._put(prefix)

    def __len__(self) -> int:
        return len(self._prefixes)

    def __iter__(self) -> Iterator[RegisteredPrefix]:
        return iter(list(self._prefixes.values()))

    def of(self, tenant: str) -> list[RegisteredPrefix]:
        """A tenant's prefixes."""
        return [prefix for (owner, _), prefix in self._prefixes.items() if owner == tenant]

    def find(self, tenant: str, name: object) -> RegisteredPrefix | None:
        return self._prefixes.get((tenant, name)) if isinstance(name, str) else None

    def get(self, tenant: str, name: object) -> RegisteredPrefix:
        """Raises UnknownPrefix."""
        found = self.find(tenant, name)
        if found is None:
            raise UnknownPrefix(str(name)[:200], [prefix.name for prefix in self.of(tenant)])
        return found

    def make(self, tenant: str, new: NewPrefix) -> RegisteredPrefix:
        """What `put` takes. Raises BadRequest and PrefixBudgetExceeded."""
        if not _NAME.fullmatch(new.name):
            problem = f"{new.name[:200]!r} is not a name for a prefix: letters, digits, '.', '_' and '-', at most 128"
            raise BadRequest(problem, param="name")
        content = new.content if new.messages is None else new.messages
        if content is None or (new.content is not None and new.messages is not None):
            raise BadRequest("content: give either content (text) or messages (for chats)", param="content")
        known = self.find(tenant, new.name)
        if known is not None and not new.replace:
            raise BadRequest(f"a prefix named {new.name!r} exists; replace it with PUT", param="name")
        prefix = RegisteredPrefix(tenant, new.name, content, known.version + 1 if known else 1, time.time())
        self._check_budget(tenant, prefix.size - (known.size if known else 0), 0 if known else 1)
        return prefix

    def _check_budget(self, tenant: str, size: int, count: int) -> None:
        too_many = sum(owner == tenant for owner, _ in self._prefixes) + count > _TENANT_PREFIXES
        too_large = self._bytes[tenant] + size > _MAX_BYTES * _TENANT_SHARE or self._bytes.total() + size > _MAX_BYTES
        if too_many or too_large:
            raise PrefixBudgetExceeded("The router keeps no more named prefixes for this tenant; remove some")

    def put(self, prefix: RegisteredPrefix) -> None:
        """Register a prefix or a new version of it."""
        self._put(prefix)

    def _put(self, prefix: RegisteredPrefix) -> None:
        self._drop(prefix.tenant, prefix.name)
        self._prefixes[prefix.tenant, prefix.name] = prefix
        self._bytes[prefix.tenant] += prefix.size

    def remove(self, tenant: str, name: str) -> RegisteredPrefix:
        """Raises NotFound."""
        found = self._drop(tenant, name)
        if found is None:
            raise NotFound(f"No prefix named {name[:200]!r} is registered")
        return found

    def _drop(self, tenant: str, name: str) -> RegisteredPrefix | None:
        found = self._prefixes.pop((tenant, name), None)
        if found is not None:
            self._bytes[tenant] -= found.size
            if not self._bytes[tenant]:
                del self._bytes[tenant]
        return found

    def write(self, prefixes: Sequence[RegisteredPrefix]) -> None:
        """Write the file with these prefixes, if there is one. Takes time; runs on any thread. Raises OSError."""
        if self._path is None:
            return
        temporary = self._path.with_name(self._path.name + ".new")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(prefixes))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path)


def _read(path: Path) -> list[RegisteredPrefix]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[RegisteredPrefix])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"cannot read router.prefix_file {path}: {reason_of(error)}") from None
