"""Calls of the offload manager to the copies straight between a device and the memory tier, as types.

`direct_tier.py` implements them, and type checkers read them. A process without such copies does not import them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from foreword.offload.device import Event
    from foreword.offload.load import StoreLoad
    from foreword.offload.staging import StagingArena
    from foreword.offload.writer import WriteBehind
    from foreword.store.frame import Header
    from foreword.store.tiered import TieredStore, Tiers


class DirectLoad(Protocol):
    """Blocks of a load on their way from the tier into the device."""

    @property
    def copied(self) -> Event:
        """The end of the copies."""

    @property
    def count(self) -> int:
        """The number of blocks."""

    def end(self, load: StoreLoad, *, copied: bool, timed: bool) -> None:
        """The copies have ended, or failed if not `copied`: count what is right. A wrong block, of which nothing is in KV,
        ends the load. `timed`: the time that it took says how fast the tier is."""


class DirectCopies(ABC):
    """Copies between a device and the first tier.

    Attributes:
        place: number of the tier.
        usable: the device has passed the test. `state`: "on" then, or why not; "" as long as it is being tested.
        saved, failed: blocks that the tier has stored or had, and that it has not.
        loads_at_once: how many loads of the same blocks' request may be on their way.
    """

    place: int
    usable: bool
    state: str
    saved: int
    failed: int
    loads_at_once: int

    @abstractmethod
    def save(self, units: Sequence[int], headers: Sequence[Header], tiers: Tiers, group: int) -> tuple[int, Tiers]:
        """Reserve slots for units of a group, which `launch` copies. Returns for how many of the first there was room. If they
        cannot be copied directly, returns the tiers that are to get all of them through the staging arena."""

    @abstractmethod
    def launch(self) -> None:
        """Queue the copies of what was reserved. On return the blocks may be overwritten by work that is queued after."""

    @abstractmethod
    def await_room(self, timeout: float) -> None:
        """Wait until `save` may find room, if it found none."""

    @property
    @abstractmethod
    def pending(self) -> int:
        """Blocks whose copies have not ended."""

    @abstractmethod
    def flush(self, timeout: float) -> bool:
        """Wait until what was saved is published. False if that takes longer."""

    @abstractmethod
    def count(self, places: Sequence[int], done: int, size: int) -> int:
        """How many blocks of a load, from number `done` on, this tier has together, of at most so many bytes."""

    @property
    @abstractmethod
    def has_room(self) -> bool:
        """Whether a load can begin now."""

    @abstractmethod
    def loads(self, load: StoreLoad, done: int, count: int, deadline: float) -> Generator[DirectLoad, None, None]:
        """Queue the copies of blocks of a load, part by part, up to one that is missing, or until there is no room."""

    @abstractmethod
    def close(self) -> None:
        """Publish what is copied, and release the memory if no copy uses it."""


class DirectExtra(ABC):
    """Calls of the offload manager to the package. It has no state."""

    @abstractmethod
    def open(self, store: TieredStore, staging: StagingArena, writer: WriteBehind) -> DirectCopies | None:
        """The copies; None and a line in the log that says what is missing."""
