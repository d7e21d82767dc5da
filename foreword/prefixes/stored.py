"""Named prefixes in an engine's stores, where they outlive the server and are shared by all instances: their records, and pins
that keep their blocks from eviction.

A record `prefixes/<model>/<tenant>/<name>` has content, version and times; the KV is stored as ordinary blocks. `<tenant>` is a
digest of the tenant's salt, which is secret.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec

from foreword.blocks.keys import Scope, chain_keys
from foreword.blocks.salt import Salt, tenant_digest
from foreword.prefixes.book import NamedPrefix
from foreword.prefixes.store_pins import StorePins
from foreword.store.shared_records import FoundRecords, RecordKind, SharedRecords
from foreword.store.tiered import TieredStore

_READ_SECONDS: Final = 2.0
# Versions, tokens and seconds of real records are less.
Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]


class PrefixRecord(msgspec.Struct, frozen=True):
    """A named prefix in a store. `num_tokens` and `block_size` inform tools; tokens are computed from the content.

    Attributes:
        last_key: key of its last full block in hexadecimal.
        format: 1 in records of version 0.1, which have no checksum.
    """

    name: str
    version: Annotated[int, msgspec.Meta(gt=0, lt=1 << 40)]
    kind: Literal["text", "messages"]
    content: str | tuple[dict[str, Any], ...]
    created: Annotated[float, msgspec.Meta(ge=0, lt=1 << 40)]
    num_tokens: Number
    block_size: Number
    model: str
    last_key: str
    format: Literal[1, 2] = 2

    def __post_init__(self) -> None:
        if self.kind != ("text" if isinstance(self.content, str) else "messages"):
            raise ValueError("kind")
        bytes.fromhex(self.last_key)


PREFIXES: Final = RecordKind("prefixes", PrefixRecord, of_tenants=True, name=lambda record: record.name)


class PrefixStorage(ABC):
    """The stores of an engine, as named prefixes use them. All methods block, for seconds at most.

    Args:
        model_name: for tools.

    Attributes:
        model: fingerprint of the model. Prefixes belong to one model.
        block_size: tokens per block key; 0 if it is not known.
    """

    model: bytes
    block_size: int

    def __init__(self, store: TieredStore, model_name: str) -> None:
        self._records = SharedRecords(store, PREFIXES, _READ_SECONDS)
        self._model_name = model_name

    def _key(self, name: str, salt: bytes) -> str:
        return PREFIXES.key(self.model.hex()[:32], tenant_digest(self.current(salt)), name)

    @abstractmethod
    def keys(self, tokens: Sequence[int], salt: bytes) -> list[bytes]:
        """Keys of the full blocks of a prefix; none if the block size is not known."""

    def check_room(self, name: str, tokens: Sequence[int], pinned: Sequence[Sequence[int]]) -> None:  # noqa: B027
        """Raises PrefixBudgetExceeded if a store cannot pin what `tokens` do not share with `pinned` prefixes."""

    def current(self, salt: bytes) -> bytes:
        """The salt of a tenant in its generation now, where callers do not know it."""
        return salt

    def all(self, salt: bytes) -> FoundRecords[PrefixRecord]:
        """The records of a tenant. Raises StoreError if they cannot be listed."""
        return self._records.scan(self._key("", salt))

    def get(self, name: str, salt: bytes) -> PrefixRecord | None:
        """Raises StoreError."""
        return self._records.get(self._key(name, salt))

    def put(self, prefix: NamedPrefix, salt: bytes) -> None:
        """Write the record of a prefix. Raises StoreError."""
        content = prefix.content if isinstance(prefix.content, str) else tuple(map(dict, prefix.content))
        keys = self.keys(prefix.tokens, salt)
        facts = prefix.created, len(prefix.tokens), self.block_size, self._model_name, (keys[-1].hex() if keys else "")
        record = PrefixRecord(prefix.name, prefix.version, prefix.kind, content, *facts)
        self._records.put(self._key(prefix.name, salt), record)

    def remove(self, name: str, salt: bytes) -> None:
        """Delete the record. Raises StoreError: a record that stays would bring the prefix back."""
        self._records.remove(self._key(name, salt))

    @abstractmethod
    def unpin(self, tokens: Sequence[int], salt: bytes, needed: Sequence[Sequence[int]]) -> None:
        """Unpin the blocks of a prefix that none of the `needed` prefixes shares."""


class StoredPrefixes(PrefixStorage):
    """The stores of Foreword's own engine. Their only bound is the budget of the device.

    Args:
        fingerprint: of the model, hexadecimal. `model`: its name, for tools.
        pins: of the blocks of all prefixes.
    """

    def __init__(self, store: TieredStore, pins: StorePins, fingerprint: str, model: str, block_size: int) -> None:
        super().__init__(store, model)
        self.model = bytes.fromhex(fingerprint)
        self.block_size = block_size
        self._pins = pins

    def keys(self, tokens: Sequence[int], salt: bytes) -> list[bytes]:
        return chain_keys(self._root(salt), tokens, self.block_size)

    def _root(self, salt: bytes) -> bytes:
        return Scope(self.model, self.block_size, Salt(salt)).root()

    def put(self, prefix: NamedPrefix, salt: bytes) -> None:
        super().put(prefix, salt)
        self._pins.pin(self._root(salt), self.keys(prefix.tokens, salt))

    def unpin(self, tokens: Sequence[int], salt: bytes, needed: Sequence[Sequence[int]]) -> None:
        self._pins.unpin(self._root(salt), self.keys(tokens, salt), [self.keys(other, salt) for other in needed])


def common_length(tokens: Sequence[int], others: Sequence[Sequence[int]]) -> int:
    """How many leading tokens a prefix shares with any of the others, at most."""
    lengths = (
        sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(tokens, other, strict=False)))
        for other in others
    )
    return max(lengths, default=0)
