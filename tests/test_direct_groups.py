"""Models with several KV groups on the way straight between a device and the memory tier: blocks of unlike sizes, whose
requests are cancelled, erased, damaged and evicted at any moment. Streams are simulated, kernels interpreted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from busy_device import WITHIN, BusyDevice
from direct_engine import small_pieces
from example_counts import represented

import foreword.offload.direct_tier
from foreword.blocks.keys import chain_keys
from foreword.blocks.layout import Layout, block_names
from foreword.conformance import soon
from foreword.engine.external_kv import EngineStores
from foreword.offload.device import Stream
from foreword.offload.load import GroupBlocks, StoreLoad
from foreword.offload.staging import StagingArena
from foreword.store.frame import HEADER_BYTES, RAW, Header, check
from foreword.store.memory.memory_store import MemoryStore
from foreword.store.tiered import TieredStore

pytest.importorskip("triton")

# Bytes of a block in each tensor of a group: K and V, a latent with its scales, a window.
SIZES = ((96, 160), (656,), (24, 16))
FRAME = HEADER_BYTES + max(map(sum, SIZES))
BLOCKS, TIER_FRAMES = 16, 14


@dataclass(eq=False)
class Loading:
    """A load into `targets`: group, number in the chain and block of each frame, in order. `least` of the first are in a store
    that evicts nothing, so they come unless the load is `cancelled`."""

    load: StoreLoad
    chain: int
    targets: Sequence[tuple[int, int, int]]
    least: int
    cancelled: bool = False


class Requests:
    """Random requests of an engine with several KV groups. `wrong` has what was found that is not as it was saved."""

    def __init__(self, seed: int) -> None:
        self.chance, self.device = random.Random(seed), BusyDevice(seed)
        self.tensors = [[torch.zeros(BLOCKS, size, dtype=torch.uint8) for size in one] for one in SIZES]
        self.layouts = [
            Layout(b"m" * 32, 16, (), "uint8", group=str(number), opaque_bytes=sum(one))
            for number, one in enumerate(SIZES)
        ]
        self.memory = MemoryStore(TIER_FRAMES * FRAME, longest=FRAME)
        self.behind = MemoryStore(1 << 20, label="behind")
        staging = StagingArena(self.tensors, 16, self.device)
        self.offload = EngineStores(
            TieredStore([self.memory, self.behind]), staging, self.layouts, lookup_timeout=WITHIN,
            load_timeout=10 * WITHIN, direct=True,
        )  # fmt: skip
        self.content = [[0] * BLOCKS for _ in SIZES]
        self.saved: dict[int, dict[tuple[int, int], int]] = {}  # by chain, the number in each block of each group
        self.erased: set[int] = set()
        self.damaged: set[int] = set()
        self.loading: list[Loading] = []
        self.busy: set[tuple[int, int]] = set()
        self.wrong: list[str] = []
        self.value = self.loaded = 0

    def keys(self, chain: int, count: int) -> list[bytes]:
        return chain_keys(self.root(chain), [chain] * 16 * count, 16)

    def root(self, chain: int) -> bytes:
        return chain.to_bytes(4, "big") * 8

    def names(self, chain: int, group: int, count: int) -> list[bytes]:
        return block_names(self.layouts[group].fingerprint, self.root(chain), self.keys(chain, count))

    def free(self, group: int, most: int) -> list[int]:
        found = [block for block in range(BLOCKS) if (group, block) not in self.busy]
        return self.chance.sample(found, min(len(found), most))

    def fill(self, group: int, block: int) -> None:
        """The model computes a block, in its stream."""
        self.value = self.value % 250 + 1
        self.content[group][block] = self.value
        self.device.submit(Stream.COMPUTE, partial(self.write, group, block, self.value))

    def write(self, group: int, block: int, value: int) -> None:
        for number, one in enumerate(self.tensors[group]):
            one[block] = value + number

    def has(self, group: int, block: int, value: int) -> bool:
        return all(bool((one[block] == value + number).all()) for number, one in enumerate(self.tensors[group]))

    # Events

    def compute(self) -> None:
        group = self.chance.randrange(len(SIZES))
        for block in self.free(group, 3):
            self.fill(group, block)

    def save(self) -> None:
        chain = len(self.saved)
        mine = self.saved[chain] = {}
        with self.offload.saving():
            for group in self.chance.sample(range(len(SIZES)), self.chance.randint(1, len(SIZES))):
                blocks = self.free(group, self.chance.randint(1, 5))
                if not blocks:
                    continue
                for block in blocks:
                    self.fill(group, block)
                keys = self.keys(chain, len(blocks))
                done = self.offload.save(self.root(chain), keys, self.root(chain), 0, blocks, group)
                mine.update({(group, number): self.content[group][blocks[number]] for number in range(done)})
        for group in range(len(SIZES)):  # the next step may write there
            for block in self.free(group, 2):
                self.fill(group, block)

    def load(self) -> None:
        if not self.saved:
            return
        chain = self.chance.choice(list(self.saved)[-4:])
        parts, targets = [], list[tuple[int, int, int]]()
        for group in range(len(SIZES)):
            count = sum(one == group for one, _ in self.saved[chain])
            blocks = self.free(group, count)
            if not blocks:
                continue
            for block in blocks:
                self.fill(group, block)
            keys = self.keys(chain, len(blocks))
            numbers = tuple(range(len(blocks)))
            parts.append(GroupBlocks(group, numbers, tuple(keys), (0,) * len(blocks), tuple(blocks)))
            targets += [(group, number, block) for number, block in enumerate(blocks)]
        if targets:
            self.busy.update((group, block) for group, _, block in targets)
            names = [self.names(chain, group, number + 1)[number] for group, number, _ in targets]
            least = self.behind.lookup(names, deadline=soon())
            load = self.offload.hand_over(self.root(chain), parts, 16, patient=True)
            self.offload.start(load)
            self.loading.append(Loading(load, chain, targets, least))

    def cancel(self) -> None:
        if self.loading:
            one = self.chance.choice(self.loading)
            one.cancelled = True
            one.load.close()

    def collect(self) -> None:
        for one in [one for one in self.loading if one.load.done]:
            self.loading.remove(one)
            count = len(one.load.close())
            self.loaded += count
            sound = one.chain not in self.damaged | self.erased
            if sound and not one.cancelled and count < one.least:
                self.wrong.append(f"of chain {one.chain} {count} blocks were loaded, and {one.least} are there")
            for group, number, block in one.targets[:count]:
                value = self.saved[one.chain][group, number]
                self.content[group][block] = value
                if not self.has(group, block, value):
                    self.wrong.append(f"chain {one.chain}, group {group}, block {number} has other bytes")
            self.busy.difference_update((group, block) for group, _, block in one.targets)
            for group, _, block in one.targets[count:]:
                self.fill(group, block)

    def damage(self) -> None:
        frames = [(chain, *place) for chain in list(self.saved)[-4:] for place in self.saved[chain]]
        if not frames:
            return
        chain, group, number = self.chance.choice(frames)
        with self.memory.lend(self.names(chain, group, number + 1)[number:], deadline=soon()) as lent:
            if lent.frames[0].nbytes:
                length = lent.frames[0].nbytes - 16  # the last bytes are the place of a seal
                lent.frames[0][self.chance.randrange(length)] ^= 1 << self.chance.randrange(8)
                self.damaged.add(chain)

    def erase(self) -> None:
        if not self.saved:
            return
        chain = self.chance.choice(list(self.saved)[-6:])
        with self.offload.erasing([self.root(chain)[:16]]) as queued:
            assert queued == 0
            for store in (self.memory, self.behind):
                store.erase(b"", self.root(chain)[:16], deadline=soon())
        self.erased.add(chain)

    def begin_step(self) -> None:
        self.device.begin_step()

    def end_step(self) -> None:
        self.device.end_step()

    def stall(self) -> None:
        self.device.stall(stalled=not self.device.stalled)

    # Checks

    def settle(self) -> None:
        """Everything ends that goes on."""
        self.device.stall(stalled=False)
        until = soon(WITHIN)
        while self.device._steps or self.loading:
            self.device.end_step()
            self.device.settle(lambda: not self.loading or self.loading[0].load.done)
            self.collect()
            assert soon(0) < until
        assert self.offload.flush(WITHIN)
        self.device.record(Stream.COMPUTE).synchronize()

    def check_blocks(self) -> None:
        for group, values in enumerate(self.content):
            for block, value in enumerate(values):
                if value and not self.has(group, block, value):
                    self.wrong.append(f"group {group}, block {block} is not as it was computed")

    def check_stores(self) -> None:
        """Frames are whole unless they were damaged, and of what was erased there are none."""
        for store in (self.memory, self.behind):
            for chain, blocks in self.saved.items():
                for (group, number), value in blocks.items():
                    name = self.names(chain, group, number + 1)[number]
                    if not store.present([name], deadline=soon())[0]:
                        continue
                    if chain in self.erased:
                        self.wrong.append(f"chain {chain} was erased and is in {store.label}")
                    buffer = memoryview(bytearray(FRAME))
                    [length] = store.get([name], [buffer], deadline=soon())
                    if chain in self.damaged:
                        continue
                    payload = check(buffer[:length], name).payload
                    wanted = b"".join(bytes([value + at]) * size for at, size in enumerate(SIZES[group]))
                    if payload != wanted:
                        self.wrong.append(f"chain {chain}, group {group}, block {number} was saved with other bytes")

    def check_free(self) -> None:
        """Every slot and every piece is free again."""
        for chain in self.saved:
            self.memory.erase(b"", self.root(chain)[:16], deadline=soon())
        size = max(map(sum, SIZES))
        headers = [Header(bytes(16), bytes(16), bytes([one]) * 32, bytes(32), 0, RAW, size, size) for one in range(99)]
        reserved = self.memory.reserve(headers, deadline=soon())
        if len(reserved.slots) != TIER_FRAMES:
            self.wrong.append(f"only {len(reserved.slots)} of {TIER_FRAMES} slots are free")
        self.memory.abandon(reserved)
        if self.offload.status().queued or self.offload._direct.ring.loading:  # type: ignore[union-attr]
            self.wrong.append("blocks are on their way")


ACTIONS = (
    "compute", "save", "save", "save", "load", "load", "load", "cancel", "collect", "collect", "damage", "erase",
    "begin_step", "end_step", "end_step", "stall",
)  # fmt: skip


def found_wrong(seed: int, steps: int, actions: Sequence[str] = ACTIONS) -> tuple[list[str], Requests]:
    requests = Requests(seed)
    try:
        for _ in range(steps):
            getattr(requests, requests.chance.choice(actions))()
        requests.settle()
        requests.check_blocks()
        requests.check_stores()
        requests.check_free()
        return requests.wrong, requests
    finally:
        requests.device.stall(stalled=False)
        while requests.device._steps:
            requests.device.end_step()
        requests.offload.close(WITHIN)


@pytest.mark.parametrize("seed", represented(range(20), 1, 5))
def test_requests_of_several_groups(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever happens to saves and loads on their way: what is loaded has the bytes that were saved, no other block changes,
    what was erased is nowhere, and in the end every slot and every piece of the ring is free."""
    small_pieces(monkeypatch)
    monkeypatch.setattr(foreword.offload.direct_tier, "PIECE_BYTES", 4 * FRAME)
    wrong, _ = found_wrong(seed, 60)
    assert not wrong
