"""Named prefixes in an engine's stores: their records, and pins that keep their blocks from eviction."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from foreword.blocks.keys import Scope, chain_keys
from foreword.offload.manager import OffloadManager
from foreword.prefixes.book import NamedPrefix
from foreword.prefixes.records import PrefixRecord, PrefixRecords


class StoredPrefixes:
    """Implements `PrefixStorage` over the stores of Foreword's own engine.

    Args:
        fingerprint: of the model, hexadecimal. `model`: its name, for tools.
    """

    def __init__(self, offload: OffloadManager, fingerprint: str, model: str, block_size: int) -> None:
        self._records = PrefixRecords(offload.store, fingerprint, model, block_size)
        self._offload = offload
        self._model = bytes.fromhex(fingerprint)
        self._block_size = block_size

    def check_room(self, name: str, tokens: Sequence[int], pinned: Sequence[Sequence[int]]) -> None:
        """The budget of the device is the only bound."""

    def all(self, salt: bytes) -> list[PrefixRecord] | None:
        return self._records.all(salt)

    def get(self, name: str, salt: bytes) -> PrefixRecord | None:
        return self._records.get(name, salt)

    def put(self, prefix: NamedPrefix, salt: bytes) -> None:
        keys = self._keys(prefix.tokens, salt)
        self._records.put(prefix, keys[-1] if keys else b"", salt)
        self._offload.pin(keys)

    def remove(self, name: str, salt: bytes) -> None:
        self._records.remove(name, salt)

    def unpin(self, tokens: Sequence[int], salt: bytes, needed: Sequence[Sequence[int]]) -> None:
        self._offload.pin(self._keys(tokens, salt)[common_length(tokens, needed) // self._block_size :], pinned=False)

    def _keys(self, tokens: Sequence[int], salt: bytes) -> list[bytes]:
        """Keys of the full blocks."""
        return chain_keys(Scope(self._model, self._block_size, salt).root(), tokens, self._block_size)


def common_length(tokens: Sequence[int], others: Sequence[Sequence[int]]) -> int:
    """How many leading tokens a prefix shares with any of the others, at most."""
    lengths = (
        sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(tokens, other, strict=False)))
        for other in others
    )
    return max(lengths, default=0)
