"""A simulated device whose blocks are saved to and loaded from a memory tier directly, under the offload manager."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
import whole_loads
import xxhash
from busy_device import WITHIN, BusyDevice

import foreword.offload.direct_tier
import foreword.offload.ring
from foreword.blocks.keys import chain_keys
from foreword.blocks.layout import LayerLayout, Layout, block_names
from foreword.engine.external_kv import EngineStores
from foreword.offload.load import StoreLoad
from foreword.offload.staging import StagingArena
from foreword.store.base import Store
from foreword.store.frame import HEADER_BYTES
from foreword.store.memory.memory_store import MemoryStore
from foreword.store.tiered import TieredStore

LAYOUT = Layout(b"m" * 32, 16, (LayerLayout(1, 4, 4),), "uint8")
BYTES = LAYOUT.block_bytes
FRAME = BYTES + HEADER_BYTES
ROOT = b"r" * 32


def keys_of(chain: int, blocks: int) -> list[bytes]:
    return chain_keys(ROOT, [chain] * 16 * blocks, 16)


def names_of_chain(chain: int, blocks: int) -> list[bytes]:
    return block_names(LAYOUT.fingerprint, ROOT, keys_of(chain, blocks))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(cast(Any, tensor.numpy()))


class QuickChecksums:
    """The checksums of `DeviceChecksums`, computed by the library that the host uses: the interpreter takes seconds."""

    def __init__(self, device: torch.device) -> None: ...

    @staticmethod
    def _digest(one: memoryview, size: int) -> bytes:
        return xxhash.xxh3_128(one[: size + HEADER_BYTES - 32]).digest() + bytes(16)

    def seal(self, frames: torch.Tensor, slots: torch.Tensor, size: int) -> None:
        for slot in slots.tolist():
            one = _bytes_of(frames[slot])
            one[size + HEADER_BYTES - 32 : size + HEADER_BYTES] = self._digest(one, size)

    def check(
        self, frames: torch.Tensor, slots: torch.Tensor, size: int, heads: torch.Tensor, found: torch.Tensor
    ) -> None:
        wanted = heads.view(len(slots), -1)
        right = [self._right(*one, size) for one in zip(frames[slots], wanted, strict=True)]
        found.copy_(torch.tensor(right, dtype=torch.int32))

    def _right(self, frame: torch.Tensor, head: torch.Tensor, size: int) -> bool:
        one = _bytes_of(frame)
        lengths = bytes(one[size + 112 : size + 128]) == 2 * size.to_bytes(8, "little")
        named = bytes(one[size : size + len(head)]) == bytes(_bytes_of(head))
        return named and lengths and bytes(one[size + 160 : size + HEADER_BYTES]) == self._digest(one, size)


class DirectEngine:
    """Blocks of a chain have the number of the chain as bytes.

    Args:
        tier_blocks: blocks that the memory tier has room for.
        behind: further tiers.
    """

    def __init__(
        self,
        *,
        tier_blocks: int = 64,
        blocks: int = 24,
        seed: int = 0,
        behind: Sequence[Store] = (),
        memory: Any = None,
    ) -> None:
        self.device = BusyDevice(seed)
        self.blocks = torch.zeros(blocks, BYTES, dtype=torch.uint8)
        self.memory = memory or MemoryStore(tier_blocks * FRAME, slot_bytes=FRAME)
        self.staging = StagingArena([[self.blocks]], 8, self.device)
        store = TieredStore([self.memory, *behind])
        self.offload = EngineStores(store, self.staging, [LAYOUT], lookup_timeout=WITHIN, direct=True)

    def save(self, chain: int, blocks: Sequence[int], done: int = 0) -> int:
        """Fill blocks of a chain and save them, on the engine's thread."""
        self.blocks[list(blocks)] = chain
        keys = keys_of(chain, done + len(blocks))
        return self.offload.save(ROOT, keys[done:], keys[done - 1] if done else ROOT, done, blocks)

    def store(self, chain: int, blocks: int) -> None:
        assert self.save(chain, range(blocks)) == blocks
        assert self.offload.flush(WITHIN)

    def load(self, chain: int, blocks: Sequence[int]) -> StoreLoad:
        return whole_loads.load(self.offload, ROOT, keys_of(chain, len(blocks)), blocks)

    def await_load(self, load: StoreLoad) -> int:
        """The number of blocks that were loaded, on an idle device."""
        until = time.monotonic() + WITHIN
        while not load.done:
            self.device.end_step()
            self.device.settle(lambda: load.done)
            assert time.monotonic() < until
        return len(load.close())

    def values(self, blocks: Sequence[int]) -> list[int]:
        """The number in each block, -1 if it has several."""
        return [int(one[0]) if bool((one == one[0]).all()) else -1 for one in self.blocks[list(blocks)]]

    def close(self) -> None:
        self.device.stall(stalled=False)
        self.device.end_step()
        self.offload.close(WITHIN)


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes engines with a ring of pieces of some blocks, and closes them in the end."""
    engines: list[DirectEngine] = []
    small_pieces(monkeypatch)

    def make(**options: Any) -> DirectEngine:
        engines.append(DirectEngine(**options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def small_pieces(monkeypatch: pytest.MonkeyPatch, blocks: int = 4, *, tests: bool = False) -> None:
    """Pieces of the ring have room for so many blocks, and small blocks are copied directly; with the test at the start, which
    takes seconds in the interpreter, or without and with quick checksums."""
    if not tests:
        monkeypatch.setattr(foreword.offload.ring, "DeviceChecksums", QuickChecksums)
        monkeypatch.setattr(foreword.offload.direct_tier.DirectTier, "_test", lambda self: "")
    monkeypatch.setattr(foreword.offload.direct_tier, "SMALLEST_PAYLOAD", 0)
    monkeypatch.setattr(foreword.offload.direct_tier, "PIECE_BYTES", blocks * FRAME)


Make = Callable[..., DirectEngine]
