"""`hold=`: a tier that gets blocks late, from a faster one, and not those that were deleted before."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
from processes import in_child

from foreword.blocks.layout import LayerLayout, Layout
from foreword.conformance import SMALL_PAYLOAD, make_frames, names_of, present, soon
from foreword.errors import StoreConfigError, StoreTimeout
from foreword.prefixes.tier_erasure import erase_tier
from foreword.store.base import Name
from foreword.store.frame import HEADER_BYTES, Frame
from foreword.store.memory.memory_store import MemoryStore
from foreword.store.tier_admission import AdmissionRule
from foreword.store.tier_counters import TierState
from foreword.store.tiered import TieredStore
from foreword.store.urls import check_stores, open_store

SIZE = HEADER_BYTES + SMALL_PAYLOAD


def opened(hold: int, memory: int = 1 << 20) -> TieredStore:
    """Memory, and a tier behind it that holds `hold` blocks back."""
    stores = [MemoryStore(memory, label="memory"), MemoryStore(1 << 20, label="late")]
    return TieredStore(stores, rules=[None, AdmissionRule(hold=hold * SIZE)])


def late(store: TieredStore, frames: Sequence[Frame]) -> list[bool]:
    return present(store.tiers[1].store, frames)


def refused(store: TieredStore) -> dict[str, int]:
    return dict(store.tiers[1].counters.refused)


def test_the_oldest_are_written_when_more_wait() -> None:
    """A tier gets the oldest blocks, from memory, when more wait than it holds back, and the others at the end."""
    store, chain = opened(4), make_frames(1, 10, SMALL_PAYLOAD)
    for frame in chain:
        assert store.put([frame], deadline=soon()) == 1
    assert late(store, chain) == [True] * 6 + [False] * 4 and store.tiers[1].state is TierState.HOLDING
    store.write_deferred(1.0)
    assert store.tiers[1].state is TierState.OK
    assert late(store, chain) == [True] * 10
    assert refused(store) == {}


def test_what_is_deleted_or_superseded_is_never_written() -> None:
    """Blocks that are deleted, erased, or superseded while they wait are not written. Superseded ones stay in memory."""
    store, chain = opened(100), make_frames(1, 9, SMALL_PAYLOAD)
    other = make_frames(2, 3, SMALL_PAYLOAD)
    store.put(chain, deadline=soon())
    store.put(other, deadline=soon())
    store.delete(names_of(chain[6:]), deadline=soon())
    store.drop_deferred(names_of(chain[3:6]))
    for tier in store.tiers:
        for step in erase_tier(tier, b"", other[0].header.root, names_of(other), soon()):
            assert step.problem is None
    store.write_deferred(1.0)
    assert late(store, chain) == [True] * 3 + [False] * 6
    assert late(store, other) == [False] * 3
    assert present(store.tiers[0].store, chain) == [True] * 6 + [False] * 3
    assert refused(store) == {"unneeded": 9}


def test_what_is_pinned_is_written() -> None:
    """A pin, as of a named prefix, holds in a tier that would get the blocks later."""
    frames = make_frames(3, 4, SMALL_PAYLOAD)
    with closing(opened(hold=8)) as store:
        store.put(frames, deadline=soon())
        assert late(store, frames) == [False] * 4
        assert store.pin(names_of(frames), deadline=soon()) == 4
        assert late(store, frames) == [True] * 4
        assert store.tiers[1].store.status().pinned_bytes == store.tiers[0].store.status().pinned_bytes > 0


def test_what_memory_has_lost_is_counted() -> None:
    """A block that no faster tier has any more when it is its turn is a counted loss, not an error."""
    store, chain = opened(100, memory=5 * SIZE), make_frames(1, 9, SMALL_PAYLOAD)
    store.put(chain, deadline=soon())
    kept = present(store.tiers[0].store, chain)
    store.write_deferred(1.0)
    assert late(store, chain) == kept
    assert False in kept and refused(store) == {"gone": kept.count(False)}


class _Slow(MemoryStore):
    """Waits inside of a write."""

    def __init__(self) -> None:
        super().__init__(1 << 20, label="late")
        self.entered, self.go_on = threading.Event(), threading.Event()

    def put(self, frames: Sequence[Frame], *, deadline: float) -> int:
        self.entered.set()
        assert self.go_on.wait(20)
        return super().put(frames, deadline=deadline)


def test_a_deletion_covers_what_is_being_written() -> None:
    """Blocks that were being written from what was held back when they were erased are not there afterwards; an erasure that
    cannot wait for the write says so. A close does not wait longer than it may."""
    slow, chain = _Slow(), make_frames(1, 3, SMALL_PAYLOAD)
    store = TieredStore([MemoryStore(1 << 20, label="memory"), slow], rules=[None, AdmissionRule(hold=1 << 20)])
    store.put(chain, deadline=soon())
    writing = threading.Thread(target=store.write_deferred, args=(20.0,))
    writing.start()
    assert slow.entered.wait(20)
    store.write_deferred(0.05)  # at the end of a process: it does not wait for a write that hangs
    with pytest.raises(StoreTimeout):
        store.tiers[1].delete(names_of(chain), soon(0.05))
    gone: list[int] = []
    erasing = threading.Thread(target=lambda: gone.append(store.tiers[1].delete(names_of(chain), soon(20))))
    erasing.start()
    slow.go_on.set()
    writing.join(20)
    erasing.join(20)
    assert late(store, chain) == [False] * 3


def test_a_forked_child_is_not_held_up() -> None:
    """A child that is forked while a thread of its parent writes what was held back stores and deletes blocks: that thread,
    which the child does not have, holds no lock there."""
    slow, chain, more = _Slow(), make_frames(1, 3, SMALL_PAYLOAD), make_frames(2, 3, SMALL_PAYLOAD)
    store = TieredStore([MemoryStore(1 << 20, label="memory"), slow], rules=[None, AdmissionRule(hold=1 << 20)])
    store.put(chain, deadline=soon())
    writing = threading.Thread(target=store.write_deferred, args=(20.0,))
    writing.start()
    assert slow.entered.wait(20)

    def child() -> None:
        signal.alarm(20)  # ends the child: a put waits for the lock
        slow.go_on.set()
        assert store.put(more, deadline=soon(10)) == 3
        store.tiers[1].delete(names_of(more[2:]), soon(10))
        store.write_deferred(10.0)
        assert late(store, more) == [True, True, False]

    assert in_child(child) == 0
    slow.go_on.set()
    writing.join(20)


@pytest.mark.parametrize("seed", range(10))
def test_any_order_of_calls(seed: int) -> None:
    """After random puts and deletions, and a close, the late tier has exactly the blocks that were not deleted after they were
    put, and memory never fewer."""
    rng = random.Random(seed)
    store, frames = opened(rng.randint(1, 12)), make_frames(seed + 1, 40, SMALL_PAYLOAD)
    living: set[Name] = set()
    for _ in range(60):
        low = rng.randrange(40)
        some = frames[low : low + rng.randint(1, 8)]
        if rng.random() < 0.6:
            store.put(some, deadline=soon())
            living |= set(names_of(some))
        else:
            store.delete(names_of(some), deadline=soon())
            living -= set(names_of(some))
        assert present(store.tiers[0].store, frames) == [frame.name in living for frame in frames]
    store.write_deferred(1.0)
    assert late(store, frames) == [frame.name in living for frame in frames]


def test_configuration(tmp_path: Path) -> None:
    """`hold=` is bytes, and needs a tier before it, but for tools, which write no blocks."""
    layout = Layout(b"model", 16, (LayerLayout(1, 8, 8),), "bfloat16")
    alone = [f"disk://{tmp_path}?hold=1MiB&size=16MiB"]
    for refused_by in (check_stores, lambda urls: open_store(urls, layout)):
        with pytest.raises(StoreConfigError, match="faster tier"):
            refused_by(alone)
    with closing(open_store(alone)) as tool:
        assert not tool.defers
    with pytest.raises(StoreConfigError, match="hold"):
        open_store(["memory://?size=1MiB", f"disk://{tmp_path}?hold=much&size=16MiB"])
    with closing(open_store(["memory://?size=1MiB", f"disk://{tmp_path}?hold=64KiB&size=16MiB"], layout)) as store:
        assert store.defers and store.selective
