"""Prompts that are larger than the write queue, over real stores: all of them is saved while vLLM keeps the blocks, in order,
and nothing is read from blocks that vLLM has taken back."""

from __future__ import annotations

import importlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from example_counts import represented
from vllm_stub import stubbed_vllm
from vllm_waits import WITHIN

from foreword.blocks.keys import chain_keys
from foreword.blocks.layout import BlockUnits, LayerLayout, Layout, chain_prefix
from foreword.conformance import FlakyStore, soon
from foreword.offload.manager import OffloadManager
from foreword.offload.staging import StagingArena
from foreword.store.base import Name, Store
from foreword.store.frame import HEADER_BYTES, Frame
from foreword.store.memory.memory_store import MemoryStore
from foreword.store.tiered import TieredStore

pytestmark = pytest.mark.timeout(2 * WITHIN)
LAYOUT = Layout(b"m" * 32, 16, (LayerLayout(1, 1, 1),), "uint8")
BYTES = LAYOUT.block_bytes
ROOT = b"r" * 32
SLOTS = 16  # of them 8 for saves
LENGTHS = {"2x": 2 * SLOTS, "8x": 8 * SLOTS}
BLOCKS = 160


class Gated(FlakyStore):
    """A store that writes nothing while its gate is closed."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.gate = threading.Event()

    def put(self, frames: Sequence[Frame], *, deadline: float) -> int:
        assert self.gate.wait(WITHIN)
        return super().put(frames, deadline=deadline)


class Saver:
    """A device, late saves, and a store whose writes can be held up."""

    def __init__(self, vllm: Callable[[str], Any], slots: int = SLOTS, per_block: int = 1) -> None:
        self.messages = vllm("step_messages")
        self.memory = MemoryStore(4 << 20)
        self.store = Gated(self.memory)
        self.per_block = per_block
        self.blocks = torch.zeros(BLOCKS, BYTES * per_block, dtype=torch.uint8)
        staging = StagingArena([[self.blocks.view(-1, BYTES)]], slots)
        units = [BlockUnits((LAYOUT,), (LAYOUT,), per_block, True)]
        self.offload = OffloadManager(TieredStore([self.store]), staging, units)
        late = vllm("late_saves").LateSaves
        self.late = late(self._save, self.offload.await_room, self.offload.note_dropped)

    def _save(self, save: Any) -> int:
        where = save.depth, save.blocks, save.group
        return self.offload.save(save.root, save.keys, save.parent, *where)

    def keys(self, chain: int, count: int) -> list[bytes]:
        return chain_keys(ROOT, [chain] * 16 * count, 16)

    def compute(self, chain: int, blocks: Sequence[int], first: int = 0) -> None:
        """A step computes blocks of a chain, from number `first` on, and saves them. Their bytes are the chain's number."""
        self.blocks[list(blocks)] = chain
        first *= self.per_block
        keys = self.keys(chain, first + len(blocks) * self.per_block)
        parent = keys[first - 1] if first else ROOT
        save = self.messages.BlockSave(
            0, ROOT, tuple(keys[first:]), parent, first, tuple(blocks), request_id=f"r{chain}"
        )
        with self.late.lock, self.offload.saving():
            self.late.add([save])

    def wait_saved(self) -> None:
        until = time.monotonic() + WITHIN
        while self.late.requests():
            assert time.monotonic() < until, "saves wait for ever"
            time.sleep(0.001)
        assert self.offload.flush(WITHIN)

    def stored(self, chain: int, count: int) -> int:
        """How many of a chain's first blocks the store has, after a look at their bytes."""
        names = [Name(chain_prefix(LAYOUT.fingerprint, ROOT) + key) for key in self.keys(chain, count)]
        buffers = [memoryview(bytearray(HEADER_BYTES + BYTES)) for _ in names]
        sizes = self.memory.get(names, buffers, deadline=soon())
        found = next((at for at, size in enumerate(sizes) if not size), count)
        assert all(bytes(one[:BYTES]) == bytes([chain]) * BYTES for one in buffers[:found]), "bytes of another request"
        return found


@pytest.fixture(scope="module")
def vllm() -> Iterator[Callable[[str], Any]]:
    """Imports a module of the connector."""
    with stubbed_vllm():
        yield lambda name: importlib.import_module(f"foreword.integrations.vllm.{name}")


@pytest.fixture
def saver(vllm: Callable[[str], Any]) -> Iterator[Saver]:
    made = Saver(vllm)
    yield made
    made.store.gate.set()
    made.late.close(1.0)
    made.offload.close(1.0)


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS)
def test_a_prompt_larger_than_the_queue(saver: Saver, length: int, steps: int) -> None:
    """A prompt of 2 and 8 times the staging arena, computed in one step or in some while the store writes nothing: every block
    is saved, and none is dropped."""
    part = length // steps
    for step in range(steps):
        saver.compute(7, range(step * part, (step + 1) * part), step * part)
    assert saver.late.has("r7")
    saver.store.gate.set()
    saver.wait_saved()
    assert saver.stored(7, length) == length and not saver.offload.status().dropped


@pytest.mark.parametrize("seed", represented(range(60), *range(12)))
def test_any_prompt_over_any_arena(vllm: Callable[[str], Any], seed: int) -> None:
    """A prompt of any length, computed in steps of any size, of blocks that are divided into some frames, over an arena of any
    size that has room for two blocks of saves: all of it is saved while vLLM keeps the blocks. If it takes them back,
    every frame is in the store or counted as dropped, and what is there is a start of the chain."""
    draw = random.Random(seed)
    per_block = draw.choice((1, 1, 2, 3, 8))
    saver = Saver(vllm, draw.randint(4 * per_block, 40 + 4 * per_block), per_block)
    length = draw.randint(1, BLOCKS)
    computed = 0
    while computed < length:
        part = min(draw.randint(1, draw.choice((3, BLOCKS))), length - computed)
        saver.compute(7, range(computed, computed + part), computed)
        computed += part
        if draw.random() < 0.3:
            saver.store.gate.set()
    if draw.random() < 0.3:
        saver.late.drop(["r7"])
        saver.blocks[:] = 99
    saver.store.gate.set()
    saver.wait_saved()
    dropped = saver.offload.status().dropped * per_block
    frames = saver.stored(7, length * per_block)
    assert frames == length * per_block - dropped or (
        dropped and 0 <= frames - (length * per_block - dropped) < per_block
    )
    saver.late.close(1.0)
    saver.offload.close(1.0)


def test_blocks_that_vllm_takes_back(saver: Saver) -> None:
    """vLLM takes back the blocks of a request, which gets others: nothing of these is saved under the names of the first. What
    has not been saved counts as dropped, and another request's blocks are saved all the same."""
    saver.compute(7, range(32))
    saver.compute(8, range(32, 64))
    saver.late.drop(["r7"])
    saver.blocks[:32] = 99
    saver.store.gate.set()
    saver.wait_saved()
    count = saver.stored(7, 32)
    assert count + saver.offload.status().dropped == 32 and count <= SLOTS // 2
    assert saver.stored(8, 32) == 32


@pytest.mark.parametrize("seed", represented(range(20), *range(4)))
def test_random_requests(saver: Saver, seed: int) -> None:
    """Requests compute, end and are preempted in random order while the store stops and continues: each that kept its blocks is
    saved whole, the others have nothing but their own bytes in the store, and every block was saved or counted as dropped."""
    draw = random.Random(seed)
    free, running, lost = list(range(BLOCKS)), dict[int, list[int]](), dict[int, int]()
    kept: dict[int, int] = {}
    chain = 0
    for _ in range(40):
        action = draw.choice(["compute", "compute", "grow", "preempt", "end", "gate"])
        if action == "compute" and len(free) >= 40:
            chain += 1
            running[chain] = [free.pop(draw.randrange(len(free))) for _ in range(draw.randint(1, 40))]
            saver.compute(chain, running[chain])
        elif action == "grow" and running and free:
            one = draw.choice(list(running))
            new = [free.pop() for _ in range(min(draw.randint(1, 6), len(free)))]
            saver.compute(one, new, len(running[one]))
            running[one] += new
        elif action == "preempt" and running:
            one = draw.choice(list(running))
            saver.late.drop([f"r{one}"])
            blocks = running.pop(one)
            lost[one] = len(blocks)
            saver.blocks[blocks] = 255
            free += blocks
        elif action == "end" and running:
            one = draw.choice(list(running))
            if not saver.late.has(f"r{one}"):  # vLLM keeps the blocks of the others
                blocks = running.pop(one)
                kept[one] = len(blocks)
                saver.blocks[blocks] = 255
                free += blocks
        elif action == "gate":
            if draw.random() < 0.5:
                saver.store.gate.set()
            else:
                saver.store.gate.clear()
    saver.store.gate.set()
    saver.wait_saved()
    for one, count in [*kept.items(), *((one, len(blocks)) for one, blocks in running.items())]:
        assert saver.stored(one, count) == count
    saved = sum(saver.stored(one, count) for one, count in lost.items())
    assert saved + saver.offload.status().dropped == sum(lost.values())


def test_closing(saver: Saver) -> None:
    """A server that stops waits for its saves for a while, and counts what it could not write."""
    saver.compute(7, range(32))
    saver.late.close(0.01)
    assert not saver.late.requests() and saver.offload.status().dropped >= 32 - SLOTS // 2
