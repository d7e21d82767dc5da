"""The named prefixes of an engine in its stores: their records, and the pins of their blocks. Blocking: seconds at most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from foreword.blocks.keys import Scope, chain_keys
from foreword.engine.tokenizer import Tokenizer
from foreword.errors import BadRequest
from foreword.offload.manager import OffloadManager
from foreword.prefixes.book import NamedPrefix
from foreword.prefixes.records import PrefixRecord, PrefixRecords
from foreword.prefixes.tokens import prefix_tokens

if TYPE_CHECKING:
    from foreword.entrypoints.build import ModelInfo


class StoredPrefixes:
    """What an engine's stores know of its model's named prefixes.

    Attributes:
        records: of all tenants.
    """

    def __init__(self, offload: OffloadManager, info: ModelInfo, tokenizer: Tokenizer) -> None:
        self.records = PrefixRecords(offload.store, info.fingerprint, info.name, info.block_size)
        self._off_device = offload
        self._info = info
        self._tokenizer = tokenizer

    def put(self, prefix: NamedPrefix, salt: bytes) -> None:
        """Keep a version in place of the one before, and its blocks from eviction. Raises StoreError if no store took it."""
        keys = self._keys(prefix.tokens, salt)
        self.records.put(prefix, keys[-1] if keys else b"", salt)
        self._off_device.pin(keys)

    def remove(self, prefix: NamedPrefix, salt: bytes) -> None:
        """Raises StoreError: a prefix that stays in a store comes back."""
        self.records.remove(prefix.name, salt)
        self._off_device.pin(self._keys(prefix.tokens, salt), pinned=False)

    def adopted(self, record: PrefixRecord) -> NamedPrefix | None:
        """The version that another instance, or an earlier process, registered, with the tokens that it has here; None if its
        content does not suit this model's template."""
        text = record.content if isinstance(record.content, str) else None
        messages = None if isinstance(record.content, str) else record.content
        try:
            kind, content, tokens = prefix_tokens(self._tokenizer, text, messages)
        except BadRequest:
            return None
        return NamedPrefix(record.name, record.version, kind, content, tokens, record.created)

    def _keys(self, tokens: Sequence[int], salt: bytes) -> list[bytes]:
        """Of the prefix's full blocks."""
        info = self._info
        return chain_keys(Scope(bytes.fromhex(info.fingerprint), info.block_size, salt).root(), tokens, info.block_size)
