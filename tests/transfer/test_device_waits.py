"""No lock is held while a thread waits for a device, and the engine's thread never waits for one: every place of the package
that waits runs here, on a device whose step does not end, with locks that know who holds them."""

from __future__ import annotations

import ast
import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import whole_loads
from actors import LAYOUT as SENT
from actors import PATIENCE, Prefill, Recorder, keys_of
from busy_device import WITHIN, BusyDevice, DeviceEvent
from test_transfers import request, two
from torch import Tensor
from vllm_stub import stubbed_vllm

import foreword
from foreword.blocks.keys import chain_keys
from foreword.blocks.layout import LayerLayout, Layout, block_names
from foreword.disaggregation.kv_transfer import KVReceive
from foreword.disaggregation.kv_view import KVView
from foreword.engine.external_kv import EngineStores
from foreword.integrations.vllm_extras.step_parts import BlockLease
from foreword.offload import direct_tier
from foreword.offload.device import Stream
from foreword.offload.ring import DeviceRing
from foreword.offload.slots import StagingSlots
from foreword.offload.staging import StagingArena
from foreword.store.frame import HEADER_BYTES
from foreword.store.memory.memory_store import MemoryStore
from foreword.store.tiered import TieredStore
from foreword.transfer.link import Payload, Received
from foreword.transfer.transfers import KVDestination, TransferSide
from foreword.transfer.wire_format import KVPart

pytest.importorskip("triton")
PACKAGE = Path(foreword.__file__).parent
LAYOUT = Layout(b"m" * 32, 16, (LayerLayout(1, 1, 1),), "uint8")
ROOT, BLOCKS = b"r" * 32, 8
KEYS = chain_keys(ROOT, [7] * 16 * BLOCKS, 16)
_held = threading.local()


class KnownLock:
    """A lock that knows which thread holds it. `Condition` uses the methods with an underscore."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._lock = make()
        self._owner: list[KnownLock] = []

    def acquire(self, *how: Any, **more: Any) -> bool:
        got: bool = self._lock.acquire(*how, **more)
        if got:
            self._owner = vars(_held).setdefault("locks", [])
            self._owner.append(self)
        return got

    def release(self) -> None:
        self._owner.remove(self)
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def locked(self) -> bool:
        return bool(self._lock.locked())

    def _is_owned(self) -> bool:
        return self in vars(_held).get("locks", [])

    def _release_save(self) -> int:
        count = self._owner.count(self)
        for _ in range(count):
            self.release()
        return count

    def _acquire_restore(self, count: int) -> None:
        for _ in range(count):
            self.acquire()


class Waits(NamedTuple):
    """Where threads have waited for the device, and where they held a lock."""

    places: set[tuple[str, int]]
    wrong: list[tuple[str, int]]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    """Locks that are made from now on are known, and each wait for a device is noted."""
    found, wait = Waits(set(), []), DeviceEvent.synchronize

    def noted(event: DeviceEvent) -> None:
        caller = sys._getframe(1)
        place = str(Path(caller.f_code.co_filename).relative_to(PACKAGE)), caller.f_lineno
        found.places.add(place)
        if vars(_held).get("locks"):
            found.wrong.append(place)
        wait(event)

    lock, reentrant = threading.Lock, threading.RLock
    monkeypatch.setattr(threading, "Lock", lambda: KnownLock(lock))
    monkeypatch.setattr(threading, "RLock", lambda: KnownLock(reentrant))
    monkeypatch.setattr(DeviceEvent, "synchronize", noted)
    return found


class Paged(NamedTuple):
    k_blocks: Tensor
    v_blocks: Tensor


def transfers(engine: BusyDevice) -> None:
    """KV that another instance sends comes while the device is busy, and the transfer is cancelled meanwhile."""
    layers = {one: Paged(*(torch.zeros(8, 16, 2, 16, dtype=torch.bfloat16) for _ in "kv")) for one in range(3)}
    woken = threading.Event()
    receive = KVReceive(KVView(layers, SENT, lambda: engine), woken.set)

    class Service(Recorder):
        def part(self, destination: KVDestination, part: KVPart, payload: Payload) -> None:
            receive.part(part, payload)

        def ended(self, transfer: TransferSide) -> None:
            receive.end()

    engine.begin_step()
    receive.begin(keys_of(3, 100), 0, range(7))
    with two(Prefill(), Service()) as (connection, _):
        destination = connection.pull(request(3, 100), keys_of(3, 100))
        engine.settle(lambda: receive.done)
        closing = threading.Thread(target=lambda: (receive.stop(), destination.cancel()), daemon=True)
        closing.start()
        closing.join(PATIENCE / 6)
        freed = receive.done or not receive.writing
        late = closing.is_alive()
        engine.end_step()
        closing.join(PATIENCE)
        assert late or (not freed and woken.wait(PATIENCE))
        assert receive.over and receive.done
        assert not late, "ending a transfer waited for the device"


def loads(engine: BusyDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves, loads, and a load whose copies cannot all be queued."""
    blocks = torch.zeros(BLOCKS, LAYOUT.block_bytes, dtype=torch.uint8)
    staging = StagingArena([[blocks]], 16, engine)
    offload = EngineStores(TieredStore([MemoryStore(1 << 20)]), staging, [LAYOUT], lookup_timeout=WITHIN)
    assert offload.save(ROOT, KEYS, ROOT, 0, range(BLOCKS)) == BLOCKS
    assert offload.flush(WITHIN)
    start = staging.start_scatter

    def failing(*given: Any, **more: Any) -> None:
        start(*given, **more)
        raise RuntimeError("the device is lost")

    for begin in (start, failing):
        monkeypatch.setattr(staging, "start_scatter", begin)
        engine.begin_step()
        found = whole_loads.load(offload, ROOT, KEYS, range(BLOCKS))
        engine.settle(lambda load=found: load.done)  # type: ignore[misc]
        assert not found.done
        found.close()
        engine.end_step()
        while not found.done:
            engine.settle(lambda load=found: load.done)  # type: ignore[misc]
    monkeypatch.setattr(staging, "start_scatter", start)
    offload.close(WITHIN)
    staging.scatter([0], [0])


def direct_copies(engine: BusyDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks go straight to and from a memory tier, after the test at the start; then copies cannot all be queued."""
    monkeypatch.setattr(direct_tier, "SMALLEST_PAYLOAD", 0)
    monkeypatch.setattr(direct_tier, "PIECE_BYTES", 4 * (LAYOUT.block_bytes + HEADER_BYTES))
    blocks = torch.zeros(BLOCKS, LAYOUT.block_bytes, dtype=torch.uint8)
    with ThreadPoolExecutor(
        1
    ) as starting:  # the engine's thread waits for the device at the start, and at no other time
        made = partial(StagingArena, [[blocks]], 16, engine)

        def start() -> EngineStores:
            store = TieredStore([MemoryStore(1 << 20)])
            return EngineStores(store, staging=made(), groups=[LAYOUT], lookup_timeout=WITHIN, direct=True)

        with monkeypatch.context() as broken:  # the device is lost in the test at the start
            broken.setattr(DeviceRing, "reseal", lambda *given: failing(DeviceRing.loaded, given[0]))
            lost = starting.submit(start).result(WITHIN)
        lost_direct: Any = lost._direct
        assert not lost_direct.usable and "is lost" in lost_direct.state
        lost.close(WITHIN)
        offload = starting.submit(start).result(WITHIN)
        # From the staging arena, through three pieces of which a thread has two.
        scattered = range(12), [number % BLOCKS for number in range(12)]
        starting.submit(offload._staging.scatter, *scattered).result(WITHIN)
    direct: Any = offload._direct
    assert direct.usable and offload.save(ROOT, KEYS, ROOT, 0, range(BLOCKS)) == BLOCKS
    assert offload.flush(WITHIN) and direct.saved == BLOCKS
    save, load = DeviceRing._save_piece, DeviceRing.load
    for begin in (load, lambda *given: failing(load, *given)):
        monkeypatch.setattr(DeviceRing, "load", begin)
        engine.begin_step()
        found = whole_loads.load(offload, ROOT, KEYS, range(BLOCKS))
        engine.settle(lambda load=found: load.done)  # type: ignore[misc]
        assert not found.done
        found.close()
        engine.end_step()
        while not found.done:
            engine.settle(lambda load=found: load.done)  # type: ignore[misc]
    monkeypatch.setattr(DeviceRing, "load", load)
    calls = iter([save, lambda *given: failing(save, *given)])
    monkeypatch.setattr(DeviceRing, "_save_piece", lambda *given: next(calls)(*given))
    others = [bytes(32 - 1) + bytes([number]) for number in range(6)]
    saving = threading.Thread(target=lambda: suppressed(offload.save, ROOT, others, ROOT, 0, range(6)))
    saving.start()
    saving.join(WITHIN)
    assert offload.store.tiers[0].store.status().blocks == BLOCKS, "what was not copied is not found"
    offload.close(WITHIN)


def failing(call: Callable[..., Any], *given: Any) -> None:
    call(*given)
    raise RuntimeError("the device is lost")


def suppressed(call: Callable[..., Any], *given: Any) -> None:
    with pytest.raises(RuntimeError, match="is lost"):
        call(*given)


def leases(engine: BusyDevice) -> None:
    """A prompt's blocks are kept for another instance, and a window's are copied before the next step overwrites them."""
    with stubbed_vllm():
        module, messages = (
            importlib.import_module(f"foreword.integrations.{name}")
            for name in ("vllm_extras.endpoints", "vllm.step_messages")
        )
        cache = torch.arange(1, 9, dtype=torch.uint8)[:, None].repeat(1, LAYOUT.block_bytes)
        staging = StagingArena([[cache]], 8, engine)
        kept = module.KVLeases([LAYOUT], staging, [], WITHIN)

        def saved(number: int, block: int) -> Any:
            return messages.BlockSave(0, ROOT, KEYS[number : number + 1], ROOT, number, (block,))

        engine.begin_step()
        kept.add(BlockLease("request", b"l" * 16, (saved(0, 7),), (saved(1, 3),)))
        engine.submit(Stream.COMPUTE, lambda: cache[3].fill_(99))  # the next step
        names = block_names(LAYOUT.fingerprint, ROOT, KEYS[:2])
        assert kept.locate(names, WITHIN) == 2
        read: list[bytes] = []

        def reader() -> None:
            for frames in kept.get(names, staging.frame_bytes, float("inf")):
                read.extend(bytes(one)[:-HEADER_BYTES] for one in frames if one is not None)

        thread = threading.Thread(target=reader, daemon=True)
        thread.start()
        engine.settle(lambda: bool(read))
        assert not read
        engine.end_step()
        while thread.is_alive():
            engine.settle(lambda: bool(read))
            thread.join(0.01)
        assert read == [bytes([value]) * LAYOUT.block_bytes for value in (8, 4)]
        kept.close()


def test_copies_for_others_hang_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of windows for other instances have no room, since the device does not end its step: vLLM's thread waits for the
    first one only, and for a bounded time. The blocks that were not copied are missing for readers, the others are not."""
    engine, deadlines, wait = BusyDevice(), list[float](), StagingSlots.wait_for

    def noted(slots: StagingSlots, count: int, deadline: float) -> list[int] | None:
        found = slots.take(count)
        if found is None:
            deadlines.append(deadline - time.monotonic())
            found = wait(slots, count, min(deadline, time.monotonic() + 0.01))
        return found

    monkeypatch.setattr(StagingSlots, "wait_for", noted)
    with stubbed_vllm():
        module, messages = (
            importlib.import_module(f"foreword.integrations.{name}")
            for name in ("vllm_extras.endpoints", "vllm.step_messages")
        )
        cache = torch.zeros(8, LAYOUT.block_bytes, dtype=torch.uint8)
        staging = StagingArena([[cache]], 8, engine)
        kept = module.KVLeases([LAYOUT], staging, [], WITHIN)
        engine.begin_step()
        saves = tuple(
            messages.BlockSave(0, ROOT, KEYS[at : at + 1], ROOT, at, (at,)) for at in range(BLOCKS) for _ in range(3)
        )
        kept.add(BlockLease("request", b"l" * 16, (), saves))
        assert len(deadlines) == len(saves) - 4, "half of the slots are for copies"
        assert deadlines[0] > 1.0 and max(deadlines[1:]) <= 0.0
        engine.end_step()
        names = block_names(LAYOUT.fingerprint, ROOT, KEYS[:2])
        frames = [one for some in kept.get(names, staging.frame_bytes, float("inf")) for one in some]
        assert len(frames) == 2 and None not in frames
        kept.close()


def places() -> Iterator[tuple[str, int]]:
    """Where the package waits for an event of a device."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "synchronize":
                yield str(path.relative_to(PACKAGE)), node.lineno


def run(engine: BusyDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    transfers(engine)
    loads(engine, monkeypatch)
    direct_copies(engine, monkeypatch)
    leases(engine)


def test_no_lock_is_held_over_a_wait_for_the_device(waits: Waits, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each place that waits is reached, none with a lock, and none on the thread of the engine but `scatter`, whose caller
    wants it. What is to be written is held until it is, and what the next step overwrites was copied before."""
    engine = BusyDevice()
    run(engine, monkeypatch)
    assert not waits.wrong
    assert waits.places == set(places())
    assert engine.waits[threading.get_ident()] <= 1


class Notifying(KVDestination):
    """Parts are written under the lock with which the transfer ends."""

    def _got_part(self, part: KVPart, received: Received) -> None:
        with self._notifying:
            super()._got_part(part, received)


def test_a_lock_that_is_held_is_found(waits: Waits, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing a part under a lock is found, and ending the transfer waits then."""
    monkeypatch.setattr("foreword.transfer.connection.KVDestination", Notifying)
    monkeypatch.setattr("test_device_waits.PATIENCE", 3.0)
    with pytest.raises(AssertionError, match="waited for the device"):
        transfers(BusyDevice())
    assert waits.wrong
