"""Blocks of the embedded engine whose load ends early, on a busy device (busy_device.py): each belongs to the load until
nothing writes into it any more, the scheduler does not wait for the device, and nothing is preempted for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from busy_device import WITHIN, BusyDevice

from foreword.blocks.layout import LayerLayout, Layout
from foreword.blocks.prefix_cache import BlockTable, PrefixCache
from foreword.engine.external_kv import EngineStores
from foreword.engine.request import Request, SamplingParams
from foreword.engine.scheduler import Scheduler
from foreword.engine.sequence import SequenceState
from foreword.offload.staging import StagingArena
from foreword.store.memory.memory_store import MemoryStore
from foreword.store.tiered import TieredStore

pytest.importorskip("triton")
SIZE, BLOCKS = 16, 12
LAYOUT = Layout(b"m" * 32, SIZE, (LayerLayout(1, 1, 1),), "uint8")


class Rig:
    """A scheduler over real stores and a busy device; steps compute nothing."""

    def __init__(self) -> None:
        self.device = BusyDevice()
        self.blocks = torch.zeros(BLOCKS, LAYOUT.block_bytes, dtype=torch.uint8)
        arena = StagingArena([[self.blocks]], 32, self.device)
        self.offload = EngineStores(TieredStore([MemoryStore(1 << 20)]), arena, [LAYOUT], lookup_timeout=WITHIN)
        self.cache = PrefixCache(BLOCKS, SIZE, lookahead_blocks=0)
        self.scheduler = Scheduler(self.cache, max_batch_tokens=512, reserve=0.0, offload=self.offload)

    @property
    def free(self) -> int:
        return self.cache.pool.num_free

    def store(self, tokens: Sequence[int], content: int) -> None:
        """Put the KV of a prompt into the stores."""
        chain, full = self.cache.open(tokens).chain, len(tokens) // SIZE
        self.blocks[:full] = content
        assert self.offload.save(chain.root, chain.keys_to(full)[:full], chain.root, 0, range(full)) == full
        assert self.offload.flush(WITHIN)

    def add(self, tokens: Sequence[int], count: int = 1) -> SequenceState:
        request = Request(f"r{tokens[0]}", tuple(tokens), SamplingParams())
        sequence = SequenceState(request, self.cache.open(tokens), 0, len(tokens) + count)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> None:
        """A step, when all lookups have ended."""
        for one in (*self.scheduler.waiting, *self.scheduler.prefetches._waiting):
            while one.store is not None and not one.store.answered:
                self.offload.wait(self.offload.changes, 0.001)
        self.scheduler.collect()
        step = self.scheduler.schedule()
        self.scheduler.settle(step)
        for chunk in step.chunks:
            if chunk.samples:
                chunk.sequence.table.append(1)

    def load(self, sequence: SequenceState) -> None:
        """Steps until the sequence's blocks are being loaded, behind a step that does not end."""
        while sequence not in self.scheduler.waiting_for_kv:
            self.step()
        external = self.scheduler.waiting_for_kv[sequence]
        self.device.settle(lambda: external.done)
        assert not external.done

    def prefetch(self, tokens: Sequence[int]) -> list[str]:
        """Steps until a prompt is being loaded ahead of its request. Returns where the reason of its end will be."""
        ends: list[str] = []

        def ended(table: BlockTable, reason: str) -> None:
            ends.append(reason)

        self.scheduler.prefetches.add(self.cache.open(tokens), ended)
        while not self.scheduler.prefetches._loading:
            self.step()
        store = self.scheduler.prefetches._loading[0].store
        assert store is not None
        self.device.settle(lambda: store.done)
        assert not store.done
        return ends

    def end_copies(self) -> None:
        """The device continues, until nothing is written any more."""
        self.device.end_step()
        while self.scheduler.settles:
            self.offload.wait(self.offload.changes, 0.001)
            self.scheduler.collect()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    made.store(range(4 * SIZE), 7)
    yield made
    made.device.end_step()
    made.offload.close(1.0)


def test_blocks_of_an_aborted_request(rig: Rig) -> None:
    """A request is aborted while its blocks are loaded: no other request gets them before their copies are done."""
    sequence = rig.add([*range(4 * SIZE), 1])
    rig.device.begin_step()
    rig.load(sequence)
    taken = BLOCKS - rig.free
    rig.scheduler.finish(sequence)
    assert rig.free == BLOCKS - taken, "blocks that are written to are free"
    assert rig.scheduler.has_work() and rig.scheduler.expects_store(), "the loop does not look at them again"
    for _ in range(3):
        rig.step()
    assert rig.free == BLOCKS - taken
    rig.end_copies()
    assert rig.free == BLOCKS and not rig.scheduler.has_work()
    rig.cache.check()


def test_memory_of_a_prefetch_that_a_request_needs(rig: Rig) -> None:
    """A prefetch ends because a request needs its memory: the request gets it when the copies are done, and not before."""
    rig.device.begin_step()
    ends = rig.prefetch(range(4 * SIZE))
    sequence = rig.add(range(1000, 1000 + BLOCKS * SIZE - 8))
    for _ in range(3):
        rig.step()
    assert len(ends) == 1 and ends[0], "the prefetch did not end"
    assert sequence in rig.scheduler.waiting and rig.free == BLOCKS - 4
    rig.end_copies()
    rig.step()
    assert sequence in rig.scheduler.running
    rig.cache.check()


def test_nothing_is_preempted_for_blocks_that_come_back(rig: Rig) -> None:
    """A running request needs a block that a prefetch has: the prefetch ends, and the request skips a step or two. It is not
    preempted, and neither is another one."""
    sequence = rig.add(range(1000, 1000 + 4 * SIZE - 2), 64)
    other = rig.add(range(2000, 2000 + 4 * SIZE - 2), 64)
    rig.step()
    rig.device.begin_step()
    rig.prefetch(range(4 * SIZE))
    for _ in range(6):
        rig.step()
    assert not rig.scheduler.num_preemptions and rig.scheduler.running == [sequence, other]
    length = len(sequence.table)
    rig.end_copies()
    rig.step()
    assert len(sequence.table) > length and not rig.scheduler.num_preemptions
