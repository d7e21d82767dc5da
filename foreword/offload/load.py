"""Loads of blocks from the stores into the device: what is planned, and what runs, as its owner and the loads' threads see it.

A search says what the stores have (`search.Found`), `policy.LoadCosts.best` how much of it is worth loading: a `LoadPlan`. A
load takes the blocks of each KV group with their keys and the device blocks that they go into (`GroupBlocks`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from foreword.offload.search import StoredGroup
from foreword.store.base import Name

if TYPE_CHECKING:
    from foreword.offload.device import Event
    from foreword.offload.writer import BlockRead


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """A load that lets a sequence continue from `position` instead of `held` tokens.

    Attributes:
        places: the tier of each block by `(group, block)`: of those that are needed, and perhaps of more.
    """

    held: int
    position: int
    places: Mapping[tuple[int, int], int]

    def wanted(self, groups: Sequence[StoredGroup]) -> Iterator[tuple[int, int]]:
        """Group and tier of each block that is loaded."""
        for number, one in enumerate(groups):
            for block in one.needed(self.position, self.held):
                yield number, self.places[number, block]

    def blocks(
        self, groups: Sequence[StoredGroup], keys: Sequence[bytes], device_block: Callable[[int, int], int | None]
    ) -> Iterator[GroupBlocks]:
        """The blocks that are loaded, group by group and in the order of the chain, whose keys are `keys`.

        `device_block(group, block)` is the device block for a block; None where a window does not reach.
        """
        for number, one in enumerate(groups):
            wanted = [(block, device_block(number, block)) for block in one.needed(self.position, self.held)]
            pairs = [(block, into) for block, into in wanted if into is not None]
            if pairs:
                numbers, into = zip(*pairs, strict=True)
                places = tuple(self.places[number, block] for block in numbers)
                yield GroupBlocks(number, numbers, tuple(one.keys(keys, numbers)), places, into)


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """Blocks of one KV group to be loaded.

    Attributes:
        numbers: index of each block in the chain.
        keys: keys of the blocks' frames, without a layout fingerprint: one per block, or per unit of its tokens.
        places: index of the tier that has each block.
        blocks: the device blocks.
    """

    group: int
    numbers: tuple[int, ...]
    keys: tuple[bytes, ...]
    places: tuple[int, ...]
    blocks: tuple[int, ...]


@dataclass(slots=True, eq=False)
class StoreLoad:
    """A load for one request.

    The engine's thread owns it, a thread of the loads fills it. The engine's thread never waits for a copy: `close` says that
    no copy begins any more, and the blocks are the load's until it is `done`.

    Attributes:
        lock: of all loads of an engine; held for assignments only.
        names, groups, places: name, KV group and tier of each frame that is loaded.
        blocks: the device block that each goes into: of divided blocks, the unit.
        tokens: how many tokens the load saves.
        read: what was erased since the blocks were handed over.
        patient: load all of it, even if computing it would be faster: no request waits for it.
        mark: the device's work when the blocks were handed over, which their former contents belong to; None on a CPU.
        deadline: end of the load.
        held_up: the load waits for that work, which computing would wait for too: its deadline moves. `waited`: for how many
            seconds it did.
        full: a faster tier has no room for more of it, and gets no later blocks, which would push out the first ones.
        loaded: number of blocks that were loaded; `tiers` are the tiers that they came from.
        copied_at: when the last copy that has ended was seen to have.
        copying: copies into the blocks that have begun and are not known to be done.
        finished: no copy begins any more.
        task: what runs of it. An error may have kept it from saying that it has ended.
    """

    lock: threading.Condition = field(repr=False)
    names: Sequence[Name]
    groups: Sequence[int]
    places: Sequence[int]
    blocks: Sequence[int]
    tokens: int
    read: BlockRead
    patient: bool = False
    mark: Event | None = None
    deadline: float = float("inf")
    held_up: bool = False
    waited: float = 0.0
    copied_at: float = 0.0
    full: bool = False
    loaded: int = 0
    tiers: list[int] = field(default_factory=list)
    copying: int = 0
    started: float = field(default_factory=time.monotonic)
    finished: bool = False
    task: Future[None] | None = None
    _lost: bool = False

    @property
    def done(self) -> bool:
        """Whether the load has ended, or its deadline has passed, and nothing is written into its blocks any more."""
        late = not self.held_up and time.monotonic() >= self.deadline
        if not self.finished and (late or (self.task is not None and self.task.done())):
            self.close()
        return self.finished and not self.copying

    def close(self) -> list[int]:
        """End the load: no copy begins from now on. Those that have begun write until the load is `done`. Returns the tier of
        each block that was loaded by now."""
        with self.lock:
            self.finished = True
            return list(self.tiers)

    def discard(self) -> None:
        """End the load as if no block had been loaded: the device is about to lose its contents."""
        with self.lock:
            self.finished = self._lost = True
            self.tiers = []

    def begin_copy(self) -> bool:
        """Count a copy of the next blocks into the device, which is about to be queued. False if the load was closed: it must
        not be queued then."""
        # The race is with `close`, on the engine's thread. Under the lock a copy is counted before the load is finished, and
        # the engine keeps the blocks until it has ended; or it does not begin. None goes into another sequence's block.
        with self.lock:
            self.copying += not self.finished
            return not self.finished

    def end_copy(self, tiers: Sequence[int] | None, *, whole: bool = True) -> None:
        """The oldest copy is done, of blocks that came from `tiers`. None if it failed, or not `whole` if a block behind these
        was not copied: what follows it does not count."""
        # Copies end in the order in which they began. Behind one that failed, blocks have no whole chain before them.
        with self.lock:
            self._lost |= tiers is None
            if tiers is not None and not self._lost:
                self.loaded += len(tiers)
                self.tiers += tiers
            self._lost |= not whole
            self.copying -= 1
