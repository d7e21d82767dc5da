"""Pins of blocks in stores, which named prefixes and retentions share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from foreword.blocks.resume import KVGroup
from foreword.offload.search import StoredGroup

if TYPE_CHECKING:
    from foreword.offload.manager import OffloadManager

Chain = Sequence[bytes]


class PrefixPins(ABC):
    """Pins and unpins what continuing behind a prefix needs. A prefix is given by its root key and its block keys.

    Attributes:
        groups: KV groups of the stored blocks.
        needed: functions that return prefixes whose blocks stay pinned.
    """

    def __init__(self, groups: Sequence[StoredGroup]) -> None:
        self.groups = groups
        self.needed: list[Callable[[], Iterable[Chain]]] = []

    @abstractmethod
    def pin(self, root: bytes, keys: Chain) -> object:
        """Pin a prefix."""

    def unpin(self, root: bytes, keys: Chain, also_needed: Iterable[Chain] = ()) -> None:
        """Unpin the blocks of a prefix that no other one shares."""
        others = [*also_needed, *(chain for source in self.needed for chain in source())]
        for number, group in enumerate(self.groups):
            kept = {key for other in others for key in group.behind(other)}
            self.unpin_keys(root, number, [key for key in group.behind(keys) if key not in kept])

    @abstractmethod
    def unpin_keys(self, root: bytes, number: int, keys: Chain) -> None:
        """Unpin blocks of the KV group with this number."""

    def tick(self) -> None:  # noqa: B027
        """Is called about once a second."""


class StorePins(PrefixPins):
    """Pins of an engine with an offload manager, which writes queued blocks before it pins."""

    def __init__(self, offload: OffloadManager, groups: Sequence[KVGroup]) -> None:
        super().__init__([StoredGroup(group, ()) for group in groups])
        self._offload = offload

    def pin(self, root: bytes, keys: Chain) -> None:
        for number, group in enumerate(self.groups):
            self._offload.pin(root, group.behind(keys), group=number)

    def unpin_keys(self, root: bytes, number: int, keys: Chain) -> None:
        self._offload.pin(root, keys, pinned=False, group=number)
