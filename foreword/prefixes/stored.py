"""Named prefixes in an engine's stores: their records, and pins that keep their blocks from eviction."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence

from foreword.blocks.keys import Scope, chain_keys
from foreword.blocks.salt import Salt
from foreword.prefixes.book import NamedPrefix
from foreword.prefixes.records import PrefixRecord, PrefixRecords
from foreword.prefixes.store_pins import StorePins
from foreword.store.base import Store


class PrefixStorage(ABC):
    """The stores of an engine, as named prefixes use them. All methods block, for seconds at most."""

    @property
    @abstractmethod
    def records(self) -> PrefixRecords:
        """The records of the engine's model."""

    @abstractmethod
    def keys(self, tokens: Sequence[int], salt: bytes) -> list[bytes]:
        """Keys of the full blocks of a prefix; none if the block size is not known."""

    def check_room(self, name: str, tokens: Sequence[int], pinned: Sequence[Sequence[int]]) -> None:  # noqa: B027
        """Raises PrefixBudgetExceeded if a store cannot pin what `tokens` do not share with `pinned` prefixes."""

    def current(self, salt: bytes) -> bytes:
        """The salt of a tenant in its generation now, where callers do not know it."""
        return salt

    def all(self, salt: bytes) -> list[PrefixRecord] | None:
        """The records of a tenant; None if they cannot be listed."""
        return self.records.all(self.current(salt))

    def get(self, name: str, salt: bytes) -> PrefixRecord | None:
        return self.records.get(name, self.current(salt))

    def put(self, prefix: NamedPrefix, salt: bytes) -> None:
        """Write the record of a prefix. Raises StoreError."""
        keys = self.keys(prefix.tokens, salt)
        self.records.put(prefix, keys[-1] if keys else b"", self.current(salt))

    def remove(self, name: str, salt: bytes) -> None:
        """Delete the record. Raises StoreError: a record that stays would bring the prefix back."""
        self.records.remove(name, self.current(salt))

    @abstractmethod
    def unpin(self, tokens: Sequence[int], salt: bytes, needed: Sequence[Sequence[int]]) -> None:
        """Unpin the blocks of a prefix that none of the `needed` prefixes shares."""


class StoredPrefixes(PrefixStorage):
    """The stores of Foreword's own engine. Their only bound is the budget of the device.

    Args:
        fingerprint: of the model, hexadecimal. `model`: its name, for tools.
        pins: of the blocks of all prefixes.
    """

    def __init__(self, store: Store, pins: StorePins, fingerprint: str, model: str, block_size: int) -> None:
        self._records = PrefixRecords(store, fingerprint, model, block_size)
        self._pins = pins
        self._model = bytes.fromhex(fingerprint)
        self._block_size = block_size

    @property
    def records(self) -> PrefixRecords:
        return self._records

    def keys(self, tokens: Sequence[int], salt: bytes) -> list[bytes]:
        return chain_keys(self._root(salt), tokens, self._block_size)

    def _root(self, salt: bytes) -> bytes:
        return Scope(self._model, self._block_size, Salt(salt)).root()

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
