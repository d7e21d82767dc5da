"""Named prefixes in a store: they outlive the server, and every instance that shares the store knows them (R18).

A record `prefixes/<model>/<tenant>/<name>` holds content, version and times as JSON; the KV lies in the store like any other.
`<tenant>` is a digest of the tenant's salt, which is itself secret.
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
_READ_WITHIN = 2.0
_WRITE_WITHIN = 10.0


@dataclass(frozen=True, slots=True)
class PrefixRecord:
    """What a store knows of a named prefix. `num_tokens` and `block_size` are for tools; tokens are made from the content."""

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
    """Which tenant a record belongs to, without telling the salt."""
    return sha256(b"foreword/tenant\x00" + salt).hexdigest()[:32]


class PrefixRecords:
    """The named prefixes of one model in a store. Blocking: seconds at most.

    Args:
        store: where records lie.
        fingerprint: of the model, hexadecimal; prefixes of another model are another's.
    """

    def __init__(self, store: Store, fingerprint: str, model: str, block_size: int) -> None:
        self._store = store
        self._start = f"prefixes/{fingerprint[:32]}/"
        self._model = model
        self._block_size = block_size

    def _word(self, salt: bytes, name: str) -> str:
        return f"{self._start}{tenant_digest(salt)}/{name}"

    def put(self, prefix: NamedPrefix, last_key: bytes, salt: bytes) -> None:
        """Keep a version in place of the one before. Raises StoreError."""
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
        self._store.put_record(self._word(salt, prefix.name), data, deadline=time.monotonic() + _WRITE_WITHIN)

    def get(self, name: str, salt: bytes) -> PrefixRecord | None:
        """None if there is none, or none that can be read."""
        try:
            data = self._store.get_record(self._word(salt, name), deadline=time.monotonic() + _READ_WITHIN)
        except StoreError:
            return None
        return read_record(data) if data is not None else None

    def names(self, salt: bytes) -> list[str] | None:
        """None if the store does not say."""
        start = self._word(salt, "")
        try:
            words = self._store.records(start, deadline=time.monotonic() + _READ_WITHIN)
        except StoreError:
            return None
        return [word.removeprefix(start) for word in words]

    def all(self, salt: bytes) -> list[PrefixRecord] | None:
        """None if the store does not say."""
        names = self.names(salt)
        if names is None:
            return None
        return [record for name in names if (record := self.get(name, salt)) is not None]

    def remove(self, name: str, salt: bytes) -> bool:
        """Raises StoreError: a prefix that stays in a store comes back."""
        return self._store.delete_record(self._word(salt, name), deadline=time.monotonic() + _WRITE_WITHIN)


def read_record(data: bytes) -> PrefixRecord | None:
    """None for bytes that are not a record of this format: then the prefix is unknown, as if it had never been stored."""
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
