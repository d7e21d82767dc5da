"""Blocks that a device copies straight to and from a memory tier (offload/direct_tier.py), on simulated streams and in Triton's
interpreter: the host touches no byte, what is wrong never reaches KV, and without a sound device the other way is taken."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import random
import threading
import types
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from direct_engine import (
    BYTES,
    FRAME,
    ROOT,
    DirectEngine,
    Make,
    QuickChecksums,
    direct,
    keys_of,
    names_of_chain,
    small_pieces,
)
from example_counts import represented

import foreword.offload.direct_tier
import foreword.offload.pinned
import foreword.offload.ring
from benchmarks.store.direct import measure
from foreword.blocks.layout import LayerLayout, Layout
from foreword.conformance import FlakyStore, soon
from foreword.engine.external_kv import EngineStores
from foreword.errors import StoreTimeout
from foreword.offload import numa
from foreword.offload.device import Stream
from foreword.offload.device_checksum import DeviceChecksums
from foreword.offload.lent_share import LentShare
from foreword.offload.pinned import PinnedMemory, allocated
from foreword.offload.staging import StagingArena
from foreword.store import frame as frames_module
from foreword.store.frame import HEADER_BYTES, RAW, Header, check, seal
from foreword.store.memory import memory_store
from foreword.store.memory.memory_store import MemoryStore
from foreword.store.tiered import TieredStore

pytest.importorskip("triton")
assert direct  # a fixture


class Touched:
    """Bytes that the host hashes or copies."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hashed = self.copied = 0
        write, copy = memory_store.MemoryArena.write, memory_store._copy

        def hashed(data: Any = b"") -> Any:
            self.hashed += memoryview(data).nbytes
            return xxhash.xxh3_128(data)

        def written(arena: Any, offset: int, data: memoryview, size: int = 0) -> None:
            self.copied += size or data.nbytes
            write(arena, offset, data, size)

        def copied(data: memoryview, buffer: memoryview) -> None:
            self.copied += data.nbytes
            copy(data, buffer)

        monkeypatch.setattr(frames_module, "xxhash", type("Counted", (), {"xxh3_128": staticmethod(hashed)}))
        monkeypatch.setattr(memory_store.MemoryArena, "write", written)
        monkeypatch.setattr(memory_store, "_copy", copied)


def test_the_host_touches_no_byte(direct: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are saved and loaded, more of them than the ring or the staging arena has room for, and the host hashes and copies
    none of their bytes; what the device has sealed is what the host seals."""
    monkeypatch.setattr(foreword.offload.ring, "DeviceChecksums", DeviceChecksums)
    engine, touched = direct(), Touched(monkeypatch)
    engine.store(7, 10)
    engine.blocks.zero_()
    assert engine.await_load(engine.load(7, range(10))) == 10
    assert engine.values(range(24)) == [7] * 10 + [0] * 14
    assert (touched.hashed, touched.copied) == (0, 0)
    names, buffer = names_of_chain(7, 10), memoryview(bytearray(FRAME))
    for name in names:
        assert engine.memory.get([name], [buffer], deadline=soon()) == [FRAME]
        mine = bytes(check(buffer, name).data)
        assert mine == bytes(seal(check(buffer, name).header, buffer).data)
    assert engine.offload.status().saved == 10 and not engine.offload.status().dropped


def test_frames_of_the_host(direct: Make) -> None:
    """A chain that was sealed by the host in part, and by the device in part, is loaded, in one group of the ring too."""
    engine = direct()
    for number in (0, 1, 3):
        header = Header(*_parts(5, number), number, RAW, BYTES, BYTES)
        buffer = memoryview(bytearray(FRAME))
        buffer[:BYTES] = bytes([5]) * BYTES
        engine.memory.put([seal(header, buffer)], deadline=soon())
    engine.store(5, 6)
    engine.blocks.zero_()
    assert engine.await_load(engine.load(5, range(6))) == 6 and engine.values(range(6)) == [5] * 6


def _parts(chain: int, number: int) -> tuple[bytes, bytes, bytes, bytes]:
    keys = [ROOT, *keys_of(chain, number + 1)]
    name = names_of_chain(chain, number + 1)[number]
    return name[:16], name[16:32], keys[number + 1], keys[number]


@pytest.mark.parametrize("seed", represented(range(12), 0, 1, 2))
def test_a_flipped_bit_never_reaches_a_block(direct: Make, seed: int) -> None:
    """Wherever in a frame it is: the load ends before the block, of which no byte is written, and the block is counted as
    damaged and deleted. The others stay."""
    chance = random.Random(seed)
    engine = direct(seed=seed)
    engine.store(7, 8)
    engine.blocks.zero_()
    number, tier = chance.randrange(8), engine.offload.store.tiers[0]
    place = chance.choice([chance.randrange(BYTES), BYTES + chance.randrange(176)])
    with engine.memory.lend(names_of_chain(7, 8), deadline=soon()) as lent:
        lent.frames[number][place] ^= 1 << chance.randrange(8)
    load = engine.load(7, range(8))
    assert engine.await_load(load) == number
    assert engine.values([number]) == [0] and engine.values(range(number)) == [7] * number
    assert sum(tier.counters.bad.values()) == 1
    assert engine.memory.present(names_of_chain(7, 8), deadline=soon()) == [at != number for at in range(8)]


def test_another_block_under_a_name(direct: Make) -> None:
    """A whole, sound frame of another block is not taken for the wanted one."""
    engine = direct()
    engine.store(7, 4)
    engine.store(8, 4)
    with engine.memory.lend([names_of_chain(7, 4)[2], names_of_chain(8, 4)[2]], deadline=soon()) as lent:
        lent.frames[0][:] = bytes(lent.frames[1])
    engine.blocks.zero_()
    assert engine.await_load(engine.load(7, range(4))) == 2 and engine.values(range(4))[2] == 0


def test_a_load_takes_one_event_of_the_model(direct: Make) -> None:
    """However many pieces it needs: one event of the stream that computes, and one wait for it; the engine's thread waits for
    nothing, and later steps do not hold the load up."""
    engine = direct()
    engine.store(7, 20)
    engine.blocks.zero_()
    device = engine.device
    device.begin_step()
    marks, waits = device.marks, device.waits_for_marks
    load: Any = engine.load(7, range(20))
    device.settle(lambda: load.done)
    assert not load.done and engine.values(range(20)) == [0] * 20
    device.begin_step()
    device.end_step()
    device.settle(lambda: load.done)
    assert load.done and load.loaded == 20 and engine.values(range(20)) == [7] * 20
    assert (device.marks - marks, device.waits_for_marks - waits) == (1, 1)
    assert not device.waits[threading.get_ident()], "the engine's thread waited for the device"


def test_an_abort_keeps_blocks_and_slots_until_the_copies_ended(direct: Make) -> None:
    """A load that is closed while its copies wait for a step: what has begun writes into its blocks and no others, its slots
    are not evicted meanwhile, and everything is free afterwards."""
    engine = direct(tier_blocks=10)
    engine.store(7, 8)
    device = engine.device
    device.begin_step()
    load: Any = engine.load(7, range(8))
    device.settle(lambda: load.done)
    load.close()
    assert not load.done and load.copying
    assert engine.save(9, range(8, 18)) < 10  # two free slots, those that are not lent
    device.end_step()
    device.settle(lambda: load.done)
    while not load.done:
        device.settle(lambda: load.done)
    assert engine.values(range(8, 18)) == [9] * 10
    assert engine.offload.flush(60)
    engine.store(9, 10)
    assert engine.await_load(engine.load(9, range(10))) == 10


class LateToTell(MemoryStore):
    """A tier that does not tell how long its slots are before it lends some: as if they had grown then."""

    @property
    def slot_bytes(self) -> int:
        return 0


@pytest.mark.parametrize(("kind", "slot"), [(MemoryStore, FRAME), (LateToTell, 2 * FRAME)])
def test_loads_leave_slots_for_saves(direct: Make, kind: type[MemoryStore], slot: int) -> None:
    """Loads of all of a tier, while their copies wait for a step, are lent half of it, also if its slots are longer than it has
    said: what a step computes is saved meanwhile, in place of other blocks. Each load gets all of its blocks that are not
    evicted, in further stretches."""
    engine = direct(memory=kind(32 * slot, slot_bytes=slot), blocks=64)
    for chain in (7, 8):
        engine.store(chain, 16)
    engine.blocks.zero_()
    device = engine.device
    device.begin_step()
    loads: list[Any] = [engine.load(7, range(16)), engine.load(8, range(16, 32))]
    for load in loads:
        while not load.copying:  # its thread has not begun to queue copies
            device.settle(lambda load=load: load.done or load.copying)  # type: ignore[misc]
        assert not load.done
    assert engine.save(9, range(48, 64)) == 16
    device.end_step()
    assert engine.offload.flush(60)
    for chain, load in zip((7, 8), loads, strict=True):
        first = 16 * (chain - 7)
        count = engine.await_load(load)
        assert count >= 2 and engine.values(range(first, first + count)) == [chain] * count
    assert engine.memory.lookup(names_of_chain(9, 16), deadline=soon()) == 16
    engine.store(7, 16)
    assert engine.await_load(engine.load(7, range(16))) == 16


def test_a_share_is_never_used_up() -> None:
    """A load is lent half of what is left of half of a tier, up to a limit, in whole pieces of the ring; one that finds nothing
    left gets a block. What is given back is lent again."""
    share = LentShare(512, 100)
    assert [share.take(50, 8, 5) for _ in range(5)] == [10, 10, 5, 3, 2]
    assert [share.take(50, 8, 5) for _ in range(3)] == [1, 1, 1]
    share.give(10, 8)
    share.give(10, 8)
    assert share.take(50, 8, 5) == 5 and share.take(4, 8, 5) == 4
    assert LentShare(1 << 20, 100).take(50, 10, 64) == 10
    assert LentShare(1024, 100).take(12, 8, 5) == 12 and LentShare(8, 100).take(50, 8, 5) == 1


def test_a_prompt_is_lent_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a load of 256 blocks of 2 MiB, headers included, is asked of a tier of 4 GiB together: each stretch that is lent
    has a cost of its own, which a last one of a single block would have, too. The first load of all begins with one block."""
    asked, real = list[int](), MemoryStore.lend

    def counted(store: MemoryStore, names: list[bytes], *, deadline: float) -> Any:
        asked.extend([len(names)] * bool(names))
        return real(store, names, deadline=deadline)

    monkeypatch.setattr(MemoryStore, "lend", counted)
    measure(2 << 20, 1, direct=True)
    assert asked[:2] == [1, 255] and asked[2:] == [256] * 8


def test_a_tier_that_is_full_of_what_is_in_flight(direct: Make) -> None:
    """Nothing is dropped: save says for how many blocks there was room, and takes the others when slots are published."""
    engine = direct(tier_blocks=6)
    engine.device.begin_step()
    engine.device.stall(stalled=True)
    assert engine.save(7, range(10)) == 6
    assert engine.save(7, range(6, 10), done=6) == 0
    engine.device.stall(stalled=False)
    engine.device.end_step()
    assert engine.offload.flush(60)
    assert engine.offload.status().saved == 6 and not engine.offload.status().dropped


def test_a_tier_that_is_full_of_pins(direct: Make) -> None:
    """Blocks for which nothing in flight will make room go to further tiers through the staging arena: they are not given again
    for ever, and memory keeps what it has of their chain."""
    behind = MemoryStore(1 << 20, label="behind")
    engine = direct(tier_blocks=8, behind=[behind])
    engine.store(7, 4)
    assert engine.memory.pin(names_of_chain(7, 4), deadline=soon()) == 4
    assert engine.save(8, range(8)) == 4
    assert engine.offload.flush(60)
    assert engine.save(8, range(4, 8), done=4) == 4
    assert engine.offload.flush(60)
    status = engine.offload.status()
    assert (status.saved, status.failed) == (12, 0)
    assert engine.memory.lookup(names_of_chain(8, 8), deadline=soon()) == 4
    assert behind.lookup(names_of_chain(8, 8), deadline=soon()) == 8


def test_nothing_but_the_ring_is_on_the_device(direct: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a further tier are loaded, and blocks for which memory has no room saved, through the pieces of the ring: the
    staging arena has no mirror. Whatever a step does meanwhile, they have their bytes."""
    behind = MemoryStore(1 << 20, label="behind")
    engine = direct(tier_blocks=4, behind=[behind])
    engine.store(7, 4)
    assert engine.memory.pin(names_of_chain(7, 2), deadline=soon()) == 2
    done = 0
    while done < 10:  # two find room, the others go to the further tier
        done += engine.save(8, range(done, 10), done=done)
        assert engine.offload.flush(60)
    engine.device.begin_step()
    load: Any = engine.load(8, range(10, 20))
    engine.device.submit(Stream.COMPUTE, partial(engine.blocks[:10].fill_, 1))
    assert engine.await_load(load) == 10 and engine.values(range(20)) == [1] * 10 + [8] * 10
    assert behind.lookup(names_of_chain(8, 10), deadline=soon()) == 10
    assert engine.staging._on_device._mirror is None and not engine.offload._direct.ring.loading  # type: ignore[union-attr]


def test_a_load_through_the_ring_is_aborted(direct: Make) -> None:
    """A load of a further tier's blocks that is aborted while its copies wait for a step frees its blocks and its piece when
    the copies have ended."""
    behind = MemoryStore(1 << 20, label="behind")
    engine = direct(behind=[behind])
    engine.store(7, 8)
    engine.memory.delete(names_of_chain(7, 8), deadline=soon())
    device = engine.device
    device.begin_step()
    load: Any = engine.load(7, range(8, 16))
    device.settle(lambda: load.done)
    load.close()
    assert not load.done and load.copying
    device.end_step()
    while not load.done:
        device.settle(lambda: load.done)
    engine.blocks.zero_()
    device.settle(lambda: not engine.offload._direct.ring.loading)  # type: ignore[union-attr]
    assert engine.values(range(24)) == [0] * 24


def test_a_tenant_with_its_quota_full_of_pins(direct: Make) -> None:
    """Blocks that memory refuses since a tenant has used up its quota count as failed if there is no further tier."""
    engine = direct(memory=MemoryStore(16 * FRAME, slot_bytes=FRAME, tenant_quota=0.25))
    engine.store(7, 4)
    assert engine.memory.pin(names_of_chain(7, 4), deadline=soon()) == 4
    assert engine.save(8, range(6)) == 6 and engine.offload.flush(60)
    assert (engine.offload.status().saved, engine.offload.status().failed) == (4, 6)


def test_tiers_behind_get_blocks_from_the_slots(direct: Make) -> None:
    """A further tier is given the frames where they lie; while it hangs they are not evicted, and afterwards they may be."""
    behind = FlakyStore(MemoryStore(1 << 20, label="behind"))
    engine = direct(tier_blocks=8, behind=[behind])
    behind.stick()
    assert engine.save(7, range(4)) == 4
    engine.device.settle(lambda: engine.offload._writer.queued == 4)
    engine.save(8, range(8, 16))
    assert engine.memory.present(names_of_chain(7, 4), deadline=soon()) == [True] * 4
    behind.release()
    assert engine.offload.flush(60)
    assert behind.inner.lookup(names_of_chain(7, 4), deadline=soon()) == 4
    engine.store(9, 8)
    assert engine.memory.lookup(names_of_chain(9, 8), deadline=soon()) == 8


@pytest.mark.parametrize("when", ["copying", "lending", "published"])
def test_an_erasure_beside_a_save(direct: Make, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are erased while the device writes them, just before they are queued for a further tier, or before it has
    them, appear nowhere."""
    behind = MemoryStore(1 << 20, label="behind")
    engine = direct(behind=[behind])

    def erase() -> None:
        with engine.offload.erasing([ROOT[:16]]) as queued:
            assert queued == 0
            for tier in engine.offload.store.tiers:
                tier.store.erase(b"", ROOT[:16], deadline=soon())

    tier, erased = engine.offload.store.tiers[0], list[int]()
    lend = tier.lend_unverified

    @contextlib.contextmanager
    def erased_when_lent(names: Any, deadline: float) -> Any:
        with lend(names, deadline) as loan:
            if names:
                erase()
                erased.append(len(loan.frames))
            yield loan

    if when == "lending":
        monkeypatch.setattr(tier, "lend_unverified", erased_when_lent)
    engine.device.begin_step()
    engine.device.stall(stalled=when == "copying")
    assert engine.save(7, range(4)) == 4
    if when == "published":
        engine.device.end_step()
        assert engine.offload.flush(60)
    if when != "lending":
        erase()
    engine.device.stall(stalled=False)
    engine.device.end_step()
    assert engine.offload.flush(60) and erased == [4] * (when == "lending")
    for store in (engine.memory, behind):
        assert store.present(names_of_chain(7, 4), deadline=soon()) == [False] * 4


def test_blocks_that_are_saved_while_the_tier_deletes_them(direct: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that is saved while the tier's own deletion of it runs is there afterwards: it takes the write queue, which
    waits for that, since the engine's thread does not."""
    engine, deleting, go_on = direct(), threading.Event(), threading.Event()
    engine.store(7, 3)
    delete = engine.memory.delete

    def slowly(*given: Any, **named: Any) -> int:
        deleting.set()
        assert go_on.wait(60)
        return int(delete(*given, **named))

    monkeypatch.setattr(engine.memory, "delete", slowly)
    deletion = engine.offload.delete(keys_of(7, 3), lambda: names_of_chain(7, 3))
    assert deleting.wait(60) and engine.save(7, range(3)) == 3
    go_on.set()
    assert deletion.result(60) == {"memory": 3} and engine.offload.flush(60)
    assert engine.memory.present(names_of_chain(7, 3), deadline=soon()) == [True] * 3


def test_saves_that_the_device_refuses(direct: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks whose copies cannot be queued count as failed, no call finds them, and their slots are free."""
    engine = direct(tier_blocks=4)
    monkeypatch.setattr(engine.offload._direct.ring, "_save_piece", lambda *given: 1 // 0)  # type: ignore[union-attr]
    with pytest.raises(ZeroDivisionError), engine.offload.saving():
        assert engine.save(7, range(4)) == 4
    assert engine.offload.flush(60)
    assert (engine.offload.status().saved, engine.offload.status().failed) == (0, 4)
    assert engine.memory.present(names_of_chain(7, 4), deadline=soon()) == [False] * 4
    monkeypatch.undo()
    small_pieces(monkeypatch)
    assert engine.save(8, range(4)) == 4 and engine.offload.flush(60)


def test_a_tier_that_reserves_nothing(direct: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it fails, its blocks take the way through the staging arena, and further tiers get them."""
    behind = MemoryStore(1 << 20, label="behind")
    engine = direct(behind=[behind])

    def late(*given: Any, **options: Any) -> None:
        raise StoreTimeout("late")

    with monkeypatch.context() as patched:
        patched.setattr(engine.memory, "reserve", late)
        engine.store(7, 4)
    assert behind.lookup(names_of_chain(7, 4), deadline=soon()) == 4
    assert (engine.offload.status().saved, engine.offload.status().failed) == (4, 0)
    engine.blocks.zero_()
    assert engine.await_load(engine.load(7, range(4))) == 4 and engine.values(range(4)) == [7] * 4


def test_blocks_that_are_saved_twice_in_a_step(direct: Make) -> None:
    """By two requests: the second finds their slots being written. None counts as failed, and none goes through staging."""
    behind = MemoryStore(1 << 20, label="behind")
    engine = direct(behind=[behind])
    with engine.offload.saving():
        assert engine.save(7, range(4)) == 4
        assert engine.save(7, range(4, 10)) == 6
    assert engine.offload._writer.queued == 0
    assert engine.save(7, range(10, 16)) == 6  # those may be on their way still
    assert engine.offload.flush(60)
    status = engine.offload.status()
    assert (status.saved, status.failed, status.queued, status.dropped) == (16, 0, 0, 0)
    assert behind.lookup(names_of_chain(7, 6), deadline=soon()) == 6


def test_an_error_behind_what_is_published(direct: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that memory has are counted once, whatever fails on their way to further tiers."""
    engine = direct(behind=[MemoryStore(1 << 20, label="behind")])
    monkeypatch.setattr(engine.offload._writer, "add_lent", lambda *given: 1 // 0)
    with engine.offload.saving():
        assert engine.save(7, range(4)) == 4 and engine.save(8, range(4, 8)) == 4
    assert engine.offload.flush(60)
    assert (engine.offload.status().saved, engine.offload.status().failed) == (8, 0)
    assert engine.memory.lookup(names_of_chain(8, 4), deadline=soon()) == 4


def test_what_fails_is_counted(direct: Make) -> None:
    """Also where nothing was queued: a tenant has used up its quota."""
    engine = direct(memory=MemoryStore(16 * FRAME, slot_bytes=FRAME, tenant_quota=0.25))
    engine.store(7, 4)
    assert engine.memory.pin(names_of_chain(7, 4), deadline=soon()) == 4
    assert engine.save(8, range(6)) == 6 and engine.offload.status().failed == 6


@pytest.mark.parametrize("longer", [3, 6])
def test_slots_that_grow_later(direct: Make, caplog: pytest.LogCaptureFixture, longer: int) -> None:
    """A longer frame of somebody else makes the tier's slots longer than pieces of the ring: blocks take the other way."""
    engine = direct(memory=MemoryStore(64 * FRAME))
    engine.store(7, 4)
    big = foreword.offload.direct_tier._made_up(longer * FRAME)
    frame = seal(big, memoryview(bytearray(longer * FRAME + HEADER_BYTES)))
    assert engine.memory.put([frame], deadline=soon()) == 1
    for number in range(4):
        header = Header(*_parts(5, number), number, RAW, BYTES, BYTES)
        buffer = memoryview(bytearray(FRAME))
        buffer[:BYTES] = bytes([5]) * BYTES
        engine.memory.put([seal(header, buffer)], deadline=soon())
    assert engine.await_load(engine.load(5, range(4))) == 4 and engine.values(range(4)) == [5] * 4
    engine.store(8, 4)
    engine.blocks.zero_()
    assert engine.await_load(engine.load(8, range(4))) == 4 and engine.values(range(4)) == [8] * 4
    assert engine.offload.status().saved == 8 and not engine.offload.status().failed
    assert "larger than a piece of the ring" in engine.offload.direct_state and "staging arena" in caplog.text


def test_slots_that_grow_are_whole_words(direct: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the frame is for which a tier's slots grow: a device goes on, which reads and writes words."""
    monkeypatch.setattr(foreword.offload.ring, "DeviceChecksums", DeviceChecksums)
    engine = direct(memory=MemoryStore(64 * FRAME))
    engine.store(7, 4)
    odd = foreword.offload.direct_tier._made_up(BYTES + 133)
    assert engine.memory.put([seal(odd, memoryview(bytearray(FRAME + 133)))], deadline=soon()) == 1
    engine.store(8, 4)
    engine.blocks.zero_()
    assert engine.await_load(engine.load(8, range(4))) == 4 and engine.values(range(4)) == [8] * 4
    assert engine.offload._direct.saved == 8  # type: ignore[union-attr]


# Pieces of the ring, for blocks that take the other way


def test_a_load_that_cannot_be_planned_keeps_no_piece(direct: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next load finds a piece, as after memory could not be page-locked."""
    engine = direct()
    ring: Any = engine.offload._direct.ring  # type: ignore[union-attr]
    with monkeypatch.context() as patched:
        patched.setattr(ring, "plan_load", lambda *given, **options: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            engine.staging.scatter([0], [0])
    assert not ring.loading


def test_a_load_that_finds_no_piece_ends(monkeypatch: pytest.MonkeyPatch, direct: Make) -> None:
    """At its deadline: copies of others have all pieces."""
    behind = MemoryStore(1 << 20, label="behind")
    engine = direct(behind=[behind])
    engine.store(7, 4)
    engine.memory.delete(names_of_chain(7, 4), deadline=soon())
    ring: Any = engine.offload._direct.ring  # type: ignore[union-attr]
    pieces = [ring.wait_for(soon()) for _ in range(3)]
    monkeypatch.setattr(engine.offload, "_load_timeout", 0.1)
    load: Any = engine.load(7, range(4))
    with pytest.raises(StoreTimeout):
        load.task.result(60)
    assert load.done and not load.copying and not load.loaded
    for one in pieces:
        ring.give(one)
    monkeypatch.setattr(engine.offload, "_load_timeout", 60.0)
    assert engine.await_load(engine.load(7, range(4))) == 4


def test_a_device_that_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without direct copies, where the first save finds no memory: the error is raised, and no slot of the arena is lost."""
    engine = DirectEngine(memory=FlakyStore(MemoryStore(1 << 20)))
    try:
        for _ in range(3):
            with monkeypatch.context() as patched:
                patched.setattr(engine.staging, "gather", lambda *given: 1 // 0)
                with pytest.raises(ZeroDivisionError):
                    engine.save(7, range(4))
        engine.store(7, 4)
    finally:
        engine.close()


# Where the device is not used


def broken(monkeypatch: pytest.MonkeyPatch, how: str) -> str:
    """Let something be missing or wrong; returns what the log says of it."""
    module = foreword.offload.direct_tier
    if how == "no Triton":
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        return "Triton is not installed"
    if how == "AMD":
        monkeypatch.setattr(torch.version, "hip", "6.4")
        return "AMD"
    if how == "small blocks":
        monkeypatch.setattr(module, "SMALLEST_PAYLOAD", BYTES + 1)
        return "too small"
    if how == "large blocks":
        monkeypatch.setattr(module, "PIECE_BYTES", 2 * FRAME - 1)
        return "larger than half a piece"
    if how == "it seals wrongly":
        seal = DeviceChecksums.seal
        monkeypatch.setattr(
            DeviceChecksums, "seal", lambda self, frames, slots, size: seal(self, frames, slots[1:], size)
        )
        return "what it sealed is wrong"
    if how == "it finds all right":
        monkeypatch.setattr(DeviceChecksums, "check", lambda self, frames, slots, size, heads, found: found.fill_(1))
        return "its verdicts"
    monkeypatch.setattr(DeviceChecksums, "check", lambda *given: 1 // 0)
    return "the device failed: ZeroDivisionError"


@pytest.mark.parametrize(
    "how",
    ["no Triton", "AMD", "small blocks", "large blocks", "it seals wrongly", "it finds all right", "it fails"],
)
def test_the_other_way(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str) -> None:
    """Without what is needed, or with a device that does not pass the test at the start, one line says why, and blocks take the
    way through the staging arena, as right as ever."""
    small_pieces(monkeypatch, tests=True)
    said = broken(monkeypatch, how)
    caplog.set_level(logging.INFO, "foreword.offload")
    engine = DirectEngine()
    try:
        [line] = [record.getMessage() for record in caplog.records if record.name == "foreword.offload"]
        assert said in line and "staging arena" in line
        assert engine.memory.status().blocks == 0
        engine.store(7, 4)
        engine.blocks.zero_()
        assert engine.await_load(engine.load(7, range(4))) == 4 and engine.values(range(4)) == [7] * 4
        # The ring has all memory of the device that it ever takes: later there may be none.
        mirror = engine.staging._on_device._mirror  # type: ignore[union-attr]
        assert (mirror is None) == (engine.offload._direct is not None) == how.startswith("it ")
    finally:
        engine.close()


def test_kv_on_a_processor(caplog: pytest.LogCaptureFixture) -> None:
    """The setting has no effect there, and the log says so."""
    blocks = torch.full((4, 32 << 10), 7, dtype=torch.uint8)
    layout = Layout(b"m" * 32, 16, (LayerLayout(1, 1024, 1024),), "uint8")
    offload = EngineStores(
        TieredStore([MemoryStore(1 << 20)]), StagingArena([[blocks]], 8), [layout], lookup_timeout=60.0, direct=True
    )
    assert "KV is on the CPU" in caplog.text and offload.direct_state != "on"
    assert offload.save(ROOT, keys_of(7, 2), ROOT, 0, range(2)) == 2 and offload.flush(60)
    assert offload.status().saved == 2
    offload.close(60)


def test_the_first_store_is_no_memory(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A store that reserves no slots, such as a wrapped one, is used through the staging arena."""
    small_pieces(monkeypatch)
    engine = DirectEngine(memory=FlakyStore(MemoryStore(1 << 20)))
    engine.store(7, 4)
    engine.blocks.zero_()
    assert engine.await_load(engine.load(7, range(4))) == 4 and engine.values(range(4)) == [7] * 4
    assert "the first store is not memory://" in caplog.text
    engine.close()


class Locks:
    """Page-locks memory on paper, as far as a test lets it.

    Attributes:
        placed: what was to be near the device.
        gives: it allocates memory.
    """

    def __init__(self, refused: int = 1 << 40, *, gives: bool = False) -> None:
        self.locked: dict[int, int] = {}
        self.refused = refused
        self.gives = gives
        self.placed: list[tuple[int, int]] = []
        self.more = threading.Semaphore(0)

    def place(self, address: int, size: int) -> None:
        assert not self.locked
        self.placed.append((address, size))

    def allocate(self, size: int) -> memoryview | None:
        return memoryview(bytearray(size)) if self.gives else None

    def lock(self, address: int, size: int) -> str | None:
        self.more.acquire()
        if len(self.locked) == self.refused:
            return "operation not permitted"
        self.locked[address] = size
        return None

    def unlock(self, address: int) -> None:
        del self.locked[address]


def test_memory_is_locked_in_pieces() -> None:
    """From its start to its end; after each piece it asks whether it is enough, until it is; all pieces are released once."""
    locks, ready = Locks(), threading.Event()
    later: list[int] = []

    def asked() -> bool | None:
        """The first time it is too early."""
        later.append(memory.end)
        if len(later) == 2:
            ready.set()
        return True if len(later) == 2 else None

    memory = PinnedMemory(b"", 4096, 1000, locks, asked, piece=300)
    memory.start()
    locks.more.release(2)
    assert ready.wait(60) and later == [300, 600]
    locks.more.release(2)
    memory._thread.join(60)
    assert memory.end == 1000 and len(later) == 2 and locks.locked == {4096: 300, 4396: 300, 4696: 300, 4996: 100}
    assert locks.placed == [(4096, 1000)]
    assert memory.close(60) and not locks.locked and not memory.end


@pytest.mark.parametrize("how", ["it works", "it fails", "refused"])
def test_memory_is_unlocked(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """After a failed test at the start, or a refusal before it, no memory stays locked; else none after the end."""
    small_pieces(monkeypatch)
    locks, module = Locks(refused=1 if how == "refused" else 1 << 40), foreword.offload.direct_tier
    outcomes = iter(["" if how == "it works" else "no"])

    def tested(tier: object) -> str:
        if how == "refused":
            raise module._LaterError
        return next(outcomes)

    monkeypatch.setattr(module.DirectTier, "_test", tested)
    monkeypatch.setattr(module, "CudaPinning", lambda device: locks)
    monkeypatch.setattr(module, "PinnedMemory", partial(PinnedMemory, piece=8 * FRAME))
    monkeypatch.setattr(module, "is_cuda", lambda device: True)
    locks.more.release(100)
    engine = DirectEngine()
    direct: Any = engine.offload._direct
    direct._pinned._thread.join(60)
    assert bool(locks.locked) == direct.usable == (how == "it works")
    assert not direct.ring.loading
    engine.close()
    assert not locks.locked


def locked_by(monkeypatch: pytest.MonkeyPatch, locks: Locks) -> None:
    module = foreword.offload.direct_tier
    monkeypatch.setattr(module, "CudaPinning", lambda device: locks)
    monkeypatch.setattr(module, "is_cuda", lambda device: True)
    locks.more.release(100)


@pytest.mark.parametrize("early", [False, True])
def test_memory_that_may_not_be_locked_is_allocated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, early: bool
) -> None:
    """Memory that cannot be page-locked, as on a confidential machine, is replaced by memory that is allocated so, and one line
    says why. Blocks go straight there; one that came before is a miss."""
    small_pieces(monkeypatch)
    locks = Locks(refused=0, gives=True)
    locked_by(monkeypatch, locks)
    caplog.set_level(logging.INFO, "foreword.offload")
    memory = MemoryStore(16 * FRAME, slot_bytes=FRAME)
    if early:
        header = Header(*_parts(5, 0), 0, RAW, BYTES, BYTES)
        buffer = memoryview(bytearray(FRAME))
        memory.put([seal(header, buffer)], deadline=soon())
    before = memory.memory
    engine = DirectEngine(memory=memory)
    direct: Any = engine.offload._direct
    direct._pinned._thread.join(60)
    assert direct.usable and memory.memory is not before and not locks.locked
    [line, _] = [record.getMessage() for record in caplog.records if record.name == "foreword.offload"]
    assert "allocated page-locked" in line and "operation not permitted" in line
    engine.store(7, 8)
    engine.blocks.zero_()
    assert engine.await_load(engine.load(7, range(8))) == 8 and engine.values(range(8)) == [7] * 8
    assert memory.status().blocks == 8 and engine.offload.status().saved == 8
    engine.close()


def test_memory_that_may_not_be_moved(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """While a block is pinned the tier keeps its memory: blocks go through the staging arena."""
    small_pieces(monkeypatch)
    monkeypatch.setattr(foreword.offload.pinned, "_PATIENCE", 0.0)
    locked_by(monkeypatch, Locks(refused=0, gives=True))
    memory = MemoryStore(16 * FRAME, slot_bytes=FRAME)
    header = Header(*_parts(5, 0), 0, RAW, BYTES, BYTES)
    memory.put([seal(header, memoryview(bytearray(FRAME)))], deadline=soon())
    assert memory.pin([header.name], deadline=soon()) == 1
    engine = DirectEngine(memory=memory)
    direct: Any = engine.offload._direct
    direct._pinned._thread.join(60)
    assert not direct.usable and "cannot be page-locked: operation not permitted" in caplog.text
    engine.store(7, 4)
    assert memory.lookup([header.name], deadline=soon()) == 1 and memory.status().blocks == 5
    engine.close()


@pytest.mark.parametrize("call", ["place", "lock", "allocate", "move_to"])
def test_a_driver_whose_calls_fail(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    """The log names the error, and why blocks go through the staging arena, or they go straight if it does not matter."""
    small_pieces(monkeypatch)
    caplog.set_level(logging.INFO, "foreword.offload")
    locks = Locks(refused=1 << 40 if call == "place" else 0, gives=True)
    locked_by(monkeypatch, locks)
    memory = MemoryStore(16 * FRAME, slot_bytes=FRAME)

    def fail(*given: Any) -> Any:
        raise OSError("libcuda.so.1: cannot open")

    monkeypatch.setattr(memory if call == "move_to" else locks, call, fail)
    engine = DirectEngine(memory=memory)
    direct: Any = engine.offload._direct
    direct._pinned._thread.join(60)
    assert "OSError: libcuda.so.1" in caplog.text
    assert bool(engine.offload.direct_state == "on") == (call in ("place", "lock"))
    engine.store(7, 4)
    engine.blocks.zero_()
    assert engine.await_load(engine.load(7, range(4))) == 4 and engine.values(range(4)) == [7] * 4
    engine.close()


def test_memory_is_not_allocated_while_a_block_is_pinned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """There are not two of a tier's size in the meantime; the log says what was in the way."""
    small_pieces(monkeypatch)
    monkeypatch.setattr(foreword.offload.pinned, "_PATIENCE", 0.0)
    locks = Locks(refused=0, gives=True)
    locked_by(monkeypatch, locks)
    monkeypatch.setattr(locks, "allocate", lambda size: pytest.fail("too early"))
    memory = MemoryStore(16 * FRAME, slot_bytes=FRAME)
    header = Header(*_parts(5, 0), 0, RAW, BYTES, BYTES)
    memory.put([seal(header, memoryview(bytearray(FRAME)))], deadline=soon())
    assert memory.pin([header.name], deadline=soon()) == 1
    engine = DirectEngine(memory=memory)
    direct: Any = engine.offload._direct
    direct._pinned._thread.join(60)
    assert "operation not permitted" in caplog.text and "a block is pinned" in caplog.text
    engine.close()


def test_memory_of_the_driver_ends_with_its_last_view() -> None:
    """Not before: a view of a frame may outlive the store. It is freed in the context in which it was made, on any thread, and
    a thread without one gets none."""
    kept, calls = bytearray(b"x" * 64), list[tuple[str, Any]]()
    address, contexts = ctypes.addressof(ctypes.c_char.from_buffer(kept)), [7]

    def current(found: Any) -> int:
        found._obj.value = contexts[-1]
        return 0

    def allocate(found: Any, size: Any, flags: Any) -> int:
        found._obj.value = address
        return 0 if size.value == 64 else 2

    driver = types.SimpleNamespace(
        cuCtxGetCurrent=current,
        cuMemHostAlloc=allocate,
        cuCtxPushCurrent_v2=lambda context: calls.append(("push", context.value)),
        cuMemFreeHost=lambda found: calls.append(("free", found.value)),
        cuCtxPopCurrent_v2=lambda context: calls.append(("pop", context._obj.value)),
    )
    assert allocated(65, driver) is None
    memory = allocated(64, driver)
    assert memory is not None and memory.nbytes == 64
    memory[:2] = b"ab"
    contexts.append(0)
    assert allocated(64, driver) is None
    frame, memory = memory[:4], None
    assert bytes(frame) == b"abxx" and not calls
    del frame
    assert calls == [("push", 7), ("free", address), ("pop", None)]


def test_memory_near_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system says which node a device is at, or nothing; it is asked for pages of that node, whole and those that are
    there."""
    for name, text in (("0000:3b:00.0", "1\n"), ("0000:3c:00.0", "-1\n"), ("0000:3d:00.0", "?")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "numa_node").write_text(text)
    addresses = ("0000:3B:00.0", "0000:3c:00.0", "0000:3d:00.0", "0000:3e:00.0")
    assert [numa.node_of(address, tmp_path) for address in addresses] == [1, None, None, None]
    asked: list[Any] = []

    def syscall(*given: Any) -> int:
        asked.extend(bytes(one._obj) if hasattr(one, "_obj") else one.value for one in given)
        return 0

    monkeypatch.setattr(numa.ctypes, "CDLL", lambda name: types.SimpleNamespace(syscall=syscall))
    monkeypatch.setattr(numa.platform, "machine", lambda: "x86_64")
    assert numa.prefer(4096, 8192, 9)
    assert asked == [237, 4096, 8192, 1, bytes([0, 2]) + bytes(126), 1025, 2]
    monkeypatch.setattr(numa.platform, "machine", lambda: "riscv64")
    assert not numa.prefer(4096, 8192, 9)


def test_slots_that_are_longer_than_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test at the start takes no more slots than a piece of the ring has room for: two here."""
    small_pieces(monkeypatch, tests=True)
    for name in ("seal", "check"):
        monkeypatch.setattr(DeviceChecksums, name, getattr(QuickChecksums, name))
    monkeypatch.setattr(DeviceChecksums, "_digest", staticmethod(QuickChecksums._digest), raising=False)
    monkeypatch.setattr(DeviceChecksums, "_right", QuickChecksums._right, raising=False)
    engine = DirectEngine(memory=MemoryStore(16 * FRAME, slot_bytes=2 * FRAME))
    try:
        assert engine.offload.direct_state == "on"
    finally:
        engine.close()


def test_blocks_beyond_the_locked_memory(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Blocks that come before anything is locked put the test at the start off. Only what lies in page-locked slots is copied
    directly, also across two pieces that were locked apart; the rest takes the other way. A refusal is one line in the log."""
    small_pieces(monkeypatch, tests=True)
    locks, module = Locks(refused=3), foreword.offload.direct_tier
    piece = FRAME * 5 // 2
    monkeypatch.setattr(module, "PIN_BYTES", piece)
    monkeypatch.setattr(module, "CudaPinning", lambda device: locks)
    monkeypatch.setattr(module, "PinnedMemory", partial(PinnedMemory, piece=piece))
    monkeypatch.setattr(module, "is_cuda", lambda device: True)
    caplog.set_level(logging.INFO, "foreword.offload")
    engine = DirectEngine()
    direct: Any = engine.offload._direct
    assert not direct.usable
    engine.store(6, 2)  # through the staging arena, before anything is locked
    locks.more.release(4)
    direct._pinned._thread.join(60)
    assert direct.usable and len(locks.locked) == 3
    assert "only" in caplog.text and "operation not permitted" in caplog.text
    engine.store(7, 4)
    engine.store(8, 4)
    for chain, count in ((6, 2), (7, 4), (8, 4)):
        engine.blocks.zero_()
        assert engine.await_load(engine.load(chain, range(count))) == count
        assert engine.values(range(count)) == [chain] * count
    engine.close()
    assert not locks.locked
