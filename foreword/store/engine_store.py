"""Blocks of one layout and one tenant in the stores, for what runs in the engine's process (`foreword.Cache`, integrations):
found, loaded and saved in the order of their chain."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from foreword.blocks.keys import Scope, chain_keys
from foreword.blocks.layout import ROOT_BYTES, Layout, chain_prefix
from foreword.blocks.salt import Salt
from foreword.errors import StoreConfigError
from foreword.newest import Newest
from foreword.store.frame import RAW, Frame, Header, seal
from foreword.store.store_keys import keys_from_environment
from foreword.store.tier import used_once
from foreword.store.tier_counters import LookupOutcome
from foreword.store.tiered import TieredStore, TierSearch
from foreword.store.urls import loss_of, open_store

if TYPE_CHECKING:
    from foreword.store.key_interfaces import StoreKeys

# Blocks per call of a store.
BATCH_BLOCKS = 64
_ROOTS = 4096


class EngineStore:
    """The blocks of one layout and one tenant.

    A store that fails, is slow or has a damaged block finds, loads and saves less, and raises no error.

    Args:
        layout: of the blocks; codecs of the stores may add their loss.
        store: one URL, several (the fastest first), or an open `TieredStore`, which the caller closes.
        salt: of the tenant; blocks with different salts are never shared.
        keys: those with which an open store encrypts; None if it does not. With URLs they come from the environment.
        lossy: lossy codecs are possible.

    Attributes:
        saved_blocks: how many blocks were saved.
        lookups: how many prompts were looked up, by outcome.

    Raises:
        StoreError: a wrong URL.
    """

    def __init__(
        self,
        layout: Layout,
        store: str | Sequence[str] | TieredStore,
        salt: bytes = b"",
        *,
        lossy: bool = False,
        keys: StoreKeys | None = None,
    ) -> None:
        self._opened = not isinstance(store, TieredStore)
        self._salt = salt
        self._keys = keys = keys if isinstance(store, TieredStore) else keys_from_environment()
        if isinstance(store, TieredStore):
            self.layout, self.store = layout, store
        else:
            urls = (store,) if isinstance(store, str) else tuple(store)
            loss = loss_of(urls) if urls else ""
            if loss and not lossy:
                raise StoreConfigError(f"lossy codecs do not know the state of {layout.order}; use raw or lossless")
            self.layout = replace(layout, loss=loss)
            self.store = open_store(urls, self.layout, keys=keys)
        self.saved_blocks = 0
        # The roots of chains, by their first keys: of the newest, so that nothing that was computed before an erasure is saved.
        self._roots: Newest[bytes, bytes] = Newest(_ROOTS)
        self.lookups: Counter[LookupOutcome] = Counter()

    @property
    def root(self) -> bytes:
        """The root key of the tenant's chains, in the generation that its data key has now."""
        salt = self._salt if self._keys is None else self._keys.current(self._salt)
        return Scope(self.layout.model, self.layout.block_size, Salt(salt)).root()

    def keys(self, tokens: Sequence[int]) -> list[bytes]:
        """The keys of the full blocks of these tokens."""
        root = self.root
        found = chain_keys(root, tokens, self.layout.block_size)
        if found and self._keys is not None:
            self._roots[found[0]] = root
        return found

    def names(self, keys: Sequence[bytes]) -> list[bytes]:
        prefix = chain_prefix(self.layout.fingerprint, self.root)
        return [prefix + key for key in keys]

    def find(self, keys: Sequence[bytes], deadline: float) -> int:
        """How many of the leading blocks the stores seem to have. Counted as a lookup."""
        search = TierSearch(deadline)
        found = len(self.store.locate(self.names(keys), search=search))
        self.lookups[(LookupOutcome.FOUND if found else search.reason) if keys else LookupOutcome.TOO_SMALL] += 1
        return found

    def load(self, keys: Sequence[bytes], rows: Sequence[memoryview], deadline: float) -> int:
        """Load blocks into `rows` of `block_bytes + HEADER_BYTES` each; returns how many of the leading ones are verified."""
        return sum(itertools.takewhile(bool, self.read(keys, rows, deadline)))

    def read(self, keys: Sequence[bytes], rows: Sequence[memoryview], deadline: float) -> list[bool]:
        """Read blocks into `rows`, each by itself; True for each one that is verified."""
        found = self.store.fetch(self.names(keys), rows, deadline=deadline, on_late=used_once)
        return [
            one is not None and one.frame.header.codec == RAW and len(one.frame.data) == len(row)
            for one, row in zip(found, rows, strict=True)
        ]

    def save(self, keys: Sequence[bytes], low: int, rows: Sequence[memoryview], deadline: float) -> bool:
        """Save the blocks of a chain from block `low` on, one in each row with `HEADER_BYTES` to spare behind it. False, and
        nothing is saved, if no time is left, or if the tenant was forgotten since the keys were made."""
        if time.monotonic() >= deadline:
            return False
        root = self.root
        if keys and self._roots.get(keys[0], root) != root:
            return False
        parents = (keys[number - 1] if number else root for number in range(low, low + len(rows)))
        frames = [
            self.seal(root, keys[number], parent, number, row)
            for number, (parent, row) in enumerate(zip(parents, rows, strict=True), low)
        ]
        self.saved_blocks += self.store.put(frames, deadline=deadline)
        return True

    def seal(self, root: bytes, key: bytes, parent: bytes, depth: int, row: memoryview) -> Frame:
        """The frame of a block that lies in `row`, with `HEADER_BYTES` to spare behind it. It follows `parent` at position
        `depth` of a chain with this root key."""
        length = self.layout.block_bytes
        return seal(Header(self.layout.fingerprint, root[:ROOT_BYTES], key, parent, depth, RAW, length, length), row)

    def close(self) -> None:
        """Close the stores, unless the caller opened them."""
        if self._opened:
            self.store.close()
