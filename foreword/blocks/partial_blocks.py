"""Partly filled blocks that another sequence may copy, to continue from their tokens. Pure: no tensors."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

from foreword.errors import IntegrityError

MAX_PARTIAL_BLOCKS: Final = 4096


class PartialBlocks:
    """The newest partly filled blocks, one of each KV group, by the key of the block before them. They have no references: they
    are known until one of them is allocated again, or until newer ones take their place."""

    def __init__(self) -> None:
        # A block of each group, its tokens, the root; least recently noted first.
        self._noted: OrderedDict[bytes, tuple[tuple[int, ...], array[int], bytes]] = OrderedDict()
        self._keys: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._noted)

    def find(self, key: bytes) -> tuple[tuple[int, ...], array[int]] | None:
        """The blocks behind a key, and their tokens."""
        known = self._noted.get(key)
        return known and known[:2]

    def note(self, key: bytes, blocks: tuple[int, ...], tokens: array[int], root: bytes) -> None:
        """Blocks whose KV of these tokens is computed, of the chain with this root key."""
        self.taken(blocks)
        if key in self._noted:
            self._forget(key)
        elif len(self._noted) >= MAX_PARTIAL_BLOCKS:
            self._forget(next(iter(self._noted)))
        self._noted[key] = blocks, tokens, root
        self._keys.update(dict.fromkeys(blocks, key))

    def taken(self, blocks: Iterable[int]) -> None:
        """Blocks are allocated again, or filled otherwise."""
        for block in blocks:
            if block in self._keys:
                self._forget(self._keys[block])

    def forget(self, keys: Sequence[bytes]) -> None:
        """Forget the blocks behind these keys."""
        for key in self._noted.keys() & set(keys):
            self._forget(key)

    def forget_chains(self, root: bytes) -> None:
        """Forget the blocks of the chains whose root keys begin with these bytes."""
        for key in [key for key, (_, _, owner) in self._noted.items() if owner.startswith(root)]:
            self._forget(key)

    def _forget(self, key: bytes) -> None:
        for block in self._noted.pop(key)[0]:
            del self._keys[block]

    def check(self) -> None:
        """Raises IntegrityError."""
        blocks = {block: key for key, (group, _, _) in self._noted.items() for block in group}
        if blocks != self._keys:
            raise IntegrityError("prefix cache: broken invariant: a noted partial block and its key know each other")
