"""Pins of an engine's blocks in its stores, which named prefixes and retentions share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from foreword.blocks.resume import KVGroup

if TYPE_CHECKING:
    from foreword.offload.manager import OffloadManager

Chain = Sequence[bytes]


class StorePins:
    """Pins and unpins what continuing behind a prefix needs. A prefix is given by its root key and the keys of its
    full blocks.

    Args:
        groups: KV groups of the stored blocks.

    Attributes:
        needed: functions that return prefixes whose blocks stay pinned.
    """

    def __init__(self, offload: OffloadManager, groups: Sequence[KVGroup], block_size: int) -> None:
        self.needed: list[Callable[[], Iterable[Chain]]] = []
        self._offload = offload
        self._groups = groups
        self._block_size = block_size

    def pin(self, root: bytes, keys: Chain) -> list[Future[int]]:
        """Pin a prefix. The results are the numbers of blocks that at least one store has pinned."""
        return [self._offload.pin(root, some, group=number) for number, some in enumerate(self._blocks(keys))]

    def unpin(self, root: bytes, keys: Chain, also_needed: Iterable[Chain] = ()) -> None:
        """Unpin the blocks of a prefix that no other one shares."""
        others = [*also_needed, *(chain for source in self.needed for chain in source())]
        needed = [self._blocks(other) for other in others]
        for number, some in enumerate(self._blocks(keys)):
            kept = {key for other in needed for key in other[number]}
            self._offload.pin(root, [key for key in some if key not in kept], pinned=False, group=number)

    def tick(self) -> None:
        """Nothing is left to do: the offload manager writes queued blocks before it pins."""

    def _blocks(self, keys: Chain) -> list[list[bytes]]:
        """Keys of the blocks with which a request continues behind a prefix, by KV group."""
        position = len(keys) * self._block_size
        return [[keys[block] for block in sorted(group.needed(position))] for group in self._groups]
