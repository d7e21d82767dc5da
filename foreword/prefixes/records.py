"""Named prefixes as records in a store, where they outlive the server and are shared by all instances that use the
store.

A record `prefixes/<model>/<tenant>/<name>` has content, version and times as JSON; the KV is stored as ordinary blocks.
`<tenant>` is a digest of the tenant's salt, which is secret.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal

from foreword.errors import StoreError
from foreword.prefixes.book import Message, NamedPrefix
from foreword.store.base import Store

FORMAT = 1
_READ_TIMEOUT = 2.0
_WRITE_TIMEOUT = 10.0


@dataclass(frozen=True, slots=True)
class PrefixRecord:
    """A named prefix in a store. `num_tokens` and `block_size` inform tools; tokens are computed from the content.

    Attributes:
        last_key: key of its last full block in hexadecimal.
    """

    name: str
    version: int
    kind: Literal["text", "messages"]
    content: str | tuple[Message, ...]
    created: float
    num_tokens: int
    block_size: int
    model: str
    last_key: str


def tenant_digest(salt: bytes) -> str:
    """Identifies the tenant of a record without revealing the salt."""
    return sha256(b"foreword/tenant\x00" + salt).hexdigest()[:32]


class PrefixRecords:
    """The named prefixes of one model in a store. Calls block, for seconds at most.

    Args:
        store: the store that keeps the records.
        fingerprint: fingerprint of the model in hexadecimal. Prefixes belong to one model.
    """

    def __init__(self, store: Store, fingerprint: str, model: str, block_size: int) -> None:
        self._store = store
        self._prefix = f"prefixes/{fingerprint[:32]}/"
        self._model = model
        self._block_size = block_size

    def _key(self, salt: bytes, name: str) -> str:
        return f"{self._prefix}{tenant_digest(salt)}/{name}"

    def put(self, prefix: NamedPrefix, last_key: bytes, salt: bytes) -> None:
        """Store a version, replacing the previous one. Raises StoreError."""
        record = {
            "format": FORMAT,
            "name": prefix.name,
            "version": prefix.version,
            "kind": prefix.kind,
            "content": prefix.content,
            "created": prefix.created,
            "num_tokens": len(prefix.tokens),
            "block_size": self._block_size,
            "model": self._model,
            "last_key": last_key.hex(),
        }
        data = json.dumps(record, ensure_ascii=False).encode()
        self._store.put_record(self._key(salt, prefix.name), data, deadline=time.monotonic() + _WRITE_TIMEOUT)

    def get(self, name: str, salt: bytes) -> PrefixRecord | None:
        """None if there is no record, or it cannot be read."""
        try:
            data = self._store.get_record(self._key(salt, name), deadline=time.monotonic() + _READ_TIMEOUT)
        except StoreError:
            return None
        return read_record(data) if data is not None else None

    def all(self, salt: bytes) -> list[PrefixRecord] | None:
        """All readable records of a tenant. None if the store fails."""
        prefix = self._key(salt, "")
        try:
            keys = self._store.records(prefix, deadline=time.monotonic() + _READ_TIMEOUT)
        except StoreError:
            return None
        names = [key.removeprefix(prefix) for key in keys]
        return [record for name in names if (record := self.get(name, salt)) is not None]

    def remove(self, name: str, salt: bytes) -> bool:
        """Delete a record. Raises StoreError: a record that stays in a store would come back."""
        return self._store.delete_record(self._key(salt, name), deadline=time.monotonic() + _WRITE_TIMEOUT)


def read_record(data: bytes) -> PrefixRecord | None:
    """Parse a record. None if it is not a valid record of this format; its prefix is then treated as unknown."""
    try:
        read: dict[str, Any] = json.loads(data)
        if read.pop("format") != FORMAT:
            return None
        content = read.pop("content")
        record = PrefixRecord(**read, content=content if isinstance(content, str) else _messages(content))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    fine = isinstance(record.name, str) and isinstance(record.version, int) and record.kind in ("text", "messages")
    return record if fine and isinstance(record.content, str) == (record.kind == "text") else None


def _messages(content: Sequence[Message]) -> tuple[Message, ...]:
    return tuple(dict(message) for message in content)
