"""The offload manager as the embedded engine uses it: its searches and loads for the scheduler (`external_kv`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

from foreword.blocks.layout import BlockUnits, Layout
from foreword.blocks.resume import GroupKind, KVGroup
from foreword.offload.load import StoreLoad
from foreword.offload.load_plan import LoadPlan
from foreword.offload.lookups import StoreSearch
from foreword.offload.manager import MIN_PATIENCE, OffloadManager
from foreword.offload.search import StoredGroup
from foreword.offload.writer import WRITE_TIMEOUT
from foreword.store.tier_counters import LookupOutcome
from foreword.store.tiered import TieredStore

if TYPE_CHECKING:
    from foreword.offload.staging import StagingArena


Done = TypeVar("Done")


class EngineStores(OffloadManager):
    """An `OffloadManager` whose calls take chains of keys. The `Stores` of `external_kv`.

    Args:
        kinds: the KV groups of the model's layers; None: each layout has one with full attention.
    """

    def __init__(
        self,
        store: TieredStore,
        staging: StagingArena,
        groups: Sequence[Layout | BlockUnits],
        *,
        kinds: Sequence[KVGroup] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(store, staging, groups, **options)
        sizes = [one.tokens * one.per_block for one in self.units]
        kinds = [KVGroup(GroupKind.FULL, size) for size in sizes] if kinds is None else kinds
        self.groups = [
            StoredGroup(kind, tuple(layout.fingerprint for layout in one.layouts), one.per_block, divided=True)
            for kind, one in zip(kinds, self.units, strict=True)
        ]

    def search(
        self, root: bytes, keys: Sequence[bytes], held: int, limit: int, *, patient: bool = False
    ) -> StoreSearch:
        """Start a search in the stores (`StoreLookups.search`)."""
        return self.lookups.search(self.groups, root, keys, held, limit, patient=patient)

    def refuse_lookup(self, outcome: LookupOutcome, tokens: int) -> None:
        """Count a request, and its tokens, for which nothing is looked up."""
        self.lookups.refuse(outcome, tokens)

    def load(
        self, plan: LoadPlan, root: bytes, keys: Sequence[bytes], blocks: Sequence[int], *, patient: bool = False
    ) -> StoreLoad:
        """Start to load what is planned into the device blocks `blocks`: of each KV group, in order, those behind the first
        `plan.held` tokens."""
        free = iter(blocks)
        parts = plan.blocks(self.groups, keys, lambda group, block: next(free))
        load = self.hand_over(root, parts, plan.position - plan.held, patient=patient)
        assert next(free, None) is None, "a block for which nothing is planned"
        self.start(load)
        return load

    def hurry(self, load: StoreLoad) -> None:
        """A request waits for this patient load: from now on it may take as long as computing its blocks."""
        per_token = self.costs.seconds_per_token
        if load.patient and per_token is not None:
            load.patient = False
            load.deadline = min(load.deadline, time.monotonic() + max(load.tokens * per_token, MIN_PATIENCE))

    def after_writes(self, work: Callable[[], Done]) -> Future[Done]:
        """Do something once what waits to be written is written."""

        def both() -> Done:
            self.flush_writes(WRITE_TIMEOUT)
            return work()

        return self.later(both)

    def erasing(self, roots: Sequence[bytes], timeout: float = 5.0) -> AbstractContextManager[int]:
        """The stores are swept inside of chains whose roots begin with one of these bytes. Drops what waits to be written of
        them, and lets no load bring such blocks into a tier meanwhile. Gives how many blocks are still being written after
        `timeout` seconds."""
        return self._writer.erasing(roots, timeout)
