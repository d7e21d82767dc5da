"""Records in the stores of leases: named ones, and retentions. All instances share them; the KV itself is stored as
ordinary blocks.

    retained/<model>/<tenant>/<last block key>      a retention, and until when it is kept
    prefixes/<model>/<tenant>/<name>                a named prefix with its content, which is kept until it is removed

`<tenant>` is a digest of the tenant's salt, which is secret. `pins.py` pins the blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec

from foreword.blocks.keys import KEY_BYTES
from foreword.blocks.retention import MAX_PRIORITY
from foreword.store.shared_records import RecordKind, SharedRecords

Shared = TypeVar("Shared", bound=msgspec.Struct)

READ_SECONDS: Final = 2.0
# Versions, tokens and seconds of real records are less.
Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
Chain = Sequence[bytes]


class LeaseRecord(msgspec.Struct, frozen=True):
    """Blocks of a lease: the fields of all records.

    Attributes:
        num_tokens, block_size: of a named prefix for tools only.
        root: hexadecimal. keys: of its blocks, joined. Empty in records of named prefixes before 0.2.
    """

    num_tokens: Number
    block_size: Number
    root: str = ""
    keys: bytes = b""

    def __post_init__(self) -> None:
        if len(self.keys) % KEY_BYTES or len(bytes.fromhex(self.root)) != (KEY_BYTES if self.keys else 0):
            raise ValueError("not a chain")

    @property
    def chain(self) -> list[bytes]:
        return [self.keys[at : at + KEY_BYTES] for at in range(0, len(self.keys), KEY_BYTES)]


class RetentionRecord(LeaseRecord, frozen=True, kw_only=True):
    """A retention in a store.

    Attributes:
        ttl: as in `Lease`.
        expires: seconds since the epoch, for people and earlier builds. Like `ttl` None if it is kept until it is released.
        clock, ends_at: as in `RecordKind.ends`.
    """

    ttl: float | None
    expires: float | None
    priority: Annotated[int, msgspec.Meta(ge=0, le=MAX_PRIORITY)]
    format: Literal[2] = 2
    clock: str = ""
    ends_at: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        joined = self.keys and self.num_tokens * KEY_BYTES == self.block_size * len(self.keys)
        ending = self.expires is None if self.ttl is None else self.expires is not None and 0 < self.ttl < math.inf
        if not (joined and ending):
            raise ValueError("not a retention")

    @property
    def lasts(self) -> float:
        return math.inf if self.ttl is None else self.ttl


class PrefixRecord(LeaseRecord, frozen=True, kw_only=True):
    """A named prefix in a store. Tokens are computed from the content.

    Attributes:
        last_key: key of its last full block in hexadecimal.
        format: 1 in records of version 0.1, which have no checksum.
    """

    name: str
    version: Annotated[int, msgspec.Meta(gt=0, lt=1 << 40)]
    kind: Literal["text", "messages"]
    content: str | tuple[dict[str, Any], ...]
    created: Annotated[float, msgspec.Meta(ge=0, lt=1 << 40)]
    model: str
    last_key: str
    format: Literal[1, 2] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind != ("text" if isinstance(self.content, str) else "messages"):
            raise ValueError("kind")
        bytes.fromhex(self.last_key)


PREFIXES: Final = RecordKind("prefixes", PrefixRecord, of_tenants=True, name=lambda record: record.name)
RETENTIONS: Final = RecordKind(
    "retained",
    RetentionRecord,
    of_tenants=True,
    name=lambda record: record.keys[-KEY_BYTES:].hex(),
    lasts=lambda record: record.lasts,
    ends=lambda record: (record.clock, record.ends_at),
)


def remove_expired(records: SharedRecords[Shared], key: str) -> Shared | None:
    """Delete a record if its time is over; returned if another instance has renewed it. Raises StoreError."""
    found = records.get(key)
    if found is not None and records.left(key, found) <= 0:
        records.remove(key)
        return None
    return found
