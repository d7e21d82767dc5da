"""Named prefixes as records in a store, where they outlive the server and are shared by all instances that use the
store.

A record `prefixes/<model>/<tenant>/<name>` has content, version and times as JSON; the KV is stored as ordinary blocks.
`<tenant>` is a digest of the tenant's salt, which is secret. A checksum over all other fields finds accidental damage: a
damaged record counts as missing, and the log says so once.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import xxhash

from foreword.blocks.salt import tenant_digest
from foreword.errors import StoreError
from foreword.prefixes.book import Message, NamedPrefix
from foreword.store.base import Store

log = logging.getLogger("foreword.prefixes")

FORMAT: Final = 2
_WITHOUT_CHECKSUM: Final = 1  # format of records of version 0.1
_MAX_NUMBER = 1 << 40  # versions, tokens and seconds of real records are less
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


class PrefixRecords:
    """The named prefixes of one model in a store. Calls block, for seconds at most.

    Args:
        store: the store that keeps the records.
        fingerprint: fingerprint of the model in hexadecimal. Prefixes belong to one model.
    """

    def __init__(self, store: Store, fingerprint: str, model: str, block_size: int) -> None:
        self._store = store
        self._prefix = f"prefixes/{fingerprint[:32]}/"
        self._damaged: set[str] = set()
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
        data = json.dumps({**record, "checksum": _checksum(record)}, ensure_ascii=False).encode()
        self._store.put_record(self._key(salt, prefix.name), data, deadline=time.monotonic() + _WRITE_TIMEOUT)

    def get(self, name: str, salt: bytes) -> PrefixRecord | None:
        """None if there is no record, or it cannot be read."""
        key = self._key(salt, name)
        try:
            data = self._store.get_record(key, deadline=time.monotonic() + _READ_TIMEOUT)
        except StoreError:
            return None
        record = read_record(data, name) if data is not None else None
        if data is not None and record is None and key not in self._damaged:
            self._damaged.add(key)
            log.warning("the record of the named prefix %r is damaged; register the prefix again", name)
        return record

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


def read_record(data: bytes, name: str | None = None) -> PrefixRecord | None:
    """Parse a record. None if it is not a valid record of this format, or not of the prefix `name` if that is given; its prefix
    is then treated as unknown."""
    try:
        read: dict[str, Any] = json.loads(data)
        if read["format"] != _WITHOUT_CHECKSUM and read.pop("checksum") != _checksum(read):
            return None
        if read.pop("format") not in (FORMAT, _WITHOUT_CHECKSUM):
            return None
        content = read.pop("content")
        record = PrefixRecord(**read, content=content if isinstance(content, str) else _messages(content))
        fine = _is_valid(record) and name in (None, record.name)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return record if fine else None


def _checksum(fields: dict[str, Any]) -> str:
    """XXH3-128 of the fields as JSON with sorted names, in hexadecimal."""
    return str(xxhash.xxh3_128_hexdigest(json.dumps(fields, sort_keys=True).encode()))


def _is_valid(record: PrefixRecord) -> bool:
    """Whether the fields have their types, and numbers that a program has written. Raises ValueError, TypeError."""
    texts = all(isinstance(one, str) for one in (record.name, record.model, record.last_key))
    numbers = all(type(one) is int and 0 <= one < _MAX_NUMBER for one in (record.num_tokens, record.block_size))
    version = type(record.version) is int and 0 < record.version < _MAX_NUMBER
    created = type(record.created) in (int, float) and 0 <= record.created < _MAX_NUMBER
    bytes.fromhex(record.last_key)
    kind = record.kind == ("text" if isinstance(record.content, str) else "messages")
    return texts and numbers and version and created and kind


def _messages(content: Sequence[Message]) -> tuple[Message, ...]:
    return tuple(dict(message) for message in content)
