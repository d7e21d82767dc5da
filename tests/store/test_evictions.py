"""Evictions of a full disk store for a put, and their cost: beside a simple model, and by counts."""

from __future__ import annotations

import math
import os
import random
import sqlite3
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from foreword.blocks.keys import Scope
from foreword.blocks.salt import Salt
from foreword.conformance import make_frames, names_of, present, read, soon
from foreword.store.base import Name
from foreword.store.chain_lru import FairShare
from foreword.store.disk import files, pieces
from foreword.store.disk.disk_store import DiskStore
from foreword.store.disk.index_rows import IndexTransaction
from foreword.store.frame import HEADER_BYTES, Frame

PIECE = 1 << 20
KINDS = pytest.mark.parametrize("piece", [0, PIECE], ids=["files", "pieces"])


def root_of(tenant: int) -> bytes:
    return Scope(b"model", 16, Salt.of(b"tenant %d" % tenant, None)).root()


@dataclass(slots=True)
class Block:
    tenant: int
    parent: Name
    depth: int
    size: int
    row: int
    used: int
    pinned: bool = False


@dataclass(slots=True)
class Model:
    """A disk store of `size` bytes and at most `quota` for each tenant: plain loops over all blocks."""

    size: int
    quota: int
    blocks: dict[Name, Block] = field(default_factory=dict)
    evicted: list[Name] = field(default_factory=list)
    clock: int = 0
    rows: int = 0

    def amount(self, tenant: int) -> int:
        return sum(one.size for one in self.blocks.values() if one.tenant == tenant)

    def leaves(self, tenant: int, before: int) -> list[tuple[int, int, int, Name]]:
        """Leaves that can be evicted, in that order."""
        parents = {one.parent for one in self.blocks.values()}
        found = self.blocks.items()
        mine = [(name, one) for name, one in found if one.tenant == tenant and not one.pinned and one.used < before]
        return sorted((one.used, -one.depth, one.row, name) for name, one in mine if name not in parents)

    def use(self, names: Sequence[Name]) -> None:
        self.clock += 1
        for name in names:
            if name in self.blocks:
                self.blocks[name].used = self.clock

    def put(self, tenant: int, frames: Sequence[Frame]) -> int:
        """Returns how many of these are there then."""
        new = [one for one in frames if one.name not in self.blocks]
        self.use([*names_of(frames), *(one.header.parent_name for one in new)])
        while new:
            more = sum(len(one.data) for one in new)
            over = self.amount(tenant) + more - self.quota
            full = sum(one.size for one in self.blocks.values()) + more - self.size
            if max(over, full) <= 0:
                break
            if not self.evict(tenant, more, full, over):
                new.pop()
        for one in new:
            self.rows += 1
            head = one.header
            parent = head.parent_name if head.depth else b""
            self.blocks[one.name] = Block(tenant, parent, head.depth, len(one.data), self.rows, self.clock)
        return sum(one.name in self.blocks for one in frames)

    def delete(self, names: Sequence[Name]) -> None:
        for name in reversed(names):
            gone = self.blocks.pop(name, None)
            if gone is not None and gone.parent in self.blocks:  # it was used when its child was
                above = self.blocks[gone.parent]
                above.used = max(above.used, gone.used)

    def evict(self, adding: int, more: int, full: int, over: int) -> bool:
        """Evict a leaf, and those above it that are leaves of the same use then, while its tenant is over its share."""
        tenants = {one.tenant for one in self.blocks.values()} | {adding}
        amounts = {one: self.amount(one) + more * (one == adding) for one in tenants}
        among = [adding] if over > 0 else tenants
        oldest = {one: found[0] for one in among if (found := self.leaves(one, self.clock))}
        if not oldest:
            return False
        keep = self.quota if over > 0 else self.size / len(tenants)
        larger = [one for one in oldest if amounts[one] > keep]
        largest = sorted(oldest, key=amounts.__getitem__)
        assert larger or len(largest) < 2 or amounts[largest[-1]] > amounts[largest[-2]], "no rule says which"
        tenant = min(larger, key=oldest.__getitem__) if larger else largest[-1]
        need = over if over > 0 else full if len(oldest) == 1 else min(full, int(amounts[tenant] - keep))
        used, _, _, name = oldest[tenant]
        while True:
            gone = self.blocks.pop(name)
            self.evicted.append(name)
            need -= gone.size
            above = self.blocks.get(gone.parent)
            if above is None:
                return True
            above.used = max(above.used, used)
            again = any(one.parent == gone.parent for one in self.blocks.values())
            if need <= 0 or again or above.pinned or above.used > used:
                return True
            name = gone.parent


@KINDS
@pytest.mark.parametrize(("tenants", "quota"), [(1, 1.0), (3, 1.0), (2, 0.4)])
@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_eviction(tmp_path: Path, piece: int, tenants: int, quota: float, seed: int) -> None:
    """Puts evict the same blocks in the same order as a model that looks at all of them for each: with branches, uses, pins,
    deletions, gaps, shares of tenants and quotas."""
    draw = random.Random(f"{seed}/{tenants}/{quota}")
    size = 200_000
    with closing(DiskStore(tmp_path, size, pieces=piece, tenant_quota=quota)) as store:
        model, evicted = Model(size, int(quota * size)), list[Name]()
        store.on_evicted = evicted.append
        known: list[list[Frame]] = [[] for _ in range(tenants)]
        for step in range(80):
            tenant = draw.randrange(tenants)
            mine = known[tenant]
            action = draw.random()
            if action < 0.65 or not mine:
                after = draw.choice(mine) if mine and draw.random() < 0.5 else None
                some = make_frames(step, draw.randint(1, 14), draw.randint(64, 6000), root=root_of(tenant), after=after)
                mine += some
                assert store.put(some, deadline=soon()) == model.put(tenant, some)
            elif action < 0.75:
                again = [one for one in mine if one.header.depth < 6][-5:]
                assert store.put(again, deadline=soon()) == model.put(tenant, again)
            elif action < 0.87:
                names = names_of(wanted := draw.sample(mine, min(len(mine), 6)))
                there = [name for name, data in zip(names, read(store, wanted), strict=True) if data is not None]
                assert there == [name for name in names if name in model.blocks]
                if there:
                    model.use(there)
            elif action < 0.93:
                names = names_of(draw.sample(mine, min(len(mine), 8)))
                assert store.delete(names, deadline=soon()) == sum(name in model.blocks for name in names)
                model.delete(names)
            else:
                pinned, name = draw.random() < 0.5, draw.choice(mine).name
                if store.pin([name], pinned=pinned, deadline=soon()):
                    model.blocks[name].pinned = pinned
            assert evicted == model.evicted
            everything = [one for some in known for one in some]
            assert present(store, everything) == [one.name in model.blocks for one in everything]
            status = store.status()
            assert status.blocks == len(model.blocks) and status.bytes == sum(one.size for one in model.blocks.values())
        assert len(evicted) > 100
        store._index.check(soon())


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts steps of SQLite, pieces that are changed, holes and files that are removed."""
    counts = Counter[str]()

    class Counted(sqlite3.Connection):
        def __init__(self, *given: Any, **more: Any) -> None:
            super().__init__(*given, **more)
            self.set_progress_handler(partial(counts.update, ["step"]), 1)

    def counted(module: Any, name: str) -> None:
        real = getattr(module, name)

        def call(*given: Any, **more: Any) -> Any:
            counts[name] += 1
            return real(*given, **more)

        monkeypatch.setattr(module, name, call)

    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Counted))
    counted(pieces, "remove_blocks")
    counted(pieces, "_fallocate")
    counted(files, "remove_file")
    counted(IndexTransaction, "victims")
    return counts


@KINDS
def test_evictions_look_at_few_tenants(tmp_path: Path, piece: int, steps: Counter[str]) -> None:
    """A put that evicts takes about as many steps of SQLite with 800 tenants as with 50."""
    taken = list[float]()
    for tenants in (50, 800):
        block = HEADER_BYTES + 64
        roots = [root_of(number) for number in range(tenants)]
        with closing(DiskStore(tmp_path / str(tenants), 4800 * block, pieces=piece)) as store:
            for number, root in enumerate(roots):
                store.put(make_frames(number, 4800 // tenants, 64, root=root), deadline=soon())
            assert store.status().evictions == 0
            for number in range(24):
                if number == 4:  # tenants were counted for a minute
                    steps.clear()
                frames = make_frames(1000 + number, 32, 64, root=roots[number])
                assert store.put(frames, deadline=soon()) == 32
            assert store.status().evictions == 24 * 32
            taken.append(steps["step"] / steps["victims"])
    assert taken[1] < 2 * taken[0], taken


def test_evictions_from_a_piece_are_one_change(tmp_path: Path, steps: Counter[str]) -> None:
    """Blocks that a put evicts of a chain in a piece are chosen and removed at once: the piece is opened once, those that lie
    together become one hole, and a piece of which nothing stays is only unlinked."""
    with closing(DiskStore(tmp_path, 64 * 8192, pieces=PIECE)) as store:
        old = make_frames(30, 48, 8192 - HEADER_BYTES)
        assert store.put(old, deadline=soon()) == 48
        steps.clear()
        assert store.put(make_frames(31, 32, 8192 - HEADER_BYTES), deadline=soon()) == 32
        assert (steps["victims"], steps["remove_blocks"], steps["_fallocate"]) == (1, 1, 1)
        assert present(store, old) == [True] * 32 + [False] * 16
        steps.clear()
        assert store.put(make_frames(32, 32, 8192 - HEADER_BYTES), deadline=soon()) == 32
        assert (steps["victims"], steps["remove_blocks"], steps["_fallocate"]) == (1, 1, 0)
        assert not any(present(store, old)) and len([*tmp_path.glob("*/*/pieces/*")]) == 2
        steps.clear()
        assert store.delete(names_of(make_frames(31, 32, 8192 - HEADER_BYTES)), deadline=soon()) == 32
        assert (steps["remove_blocks"], steps["_fallocate"]) == (1, 0)
        assert store.status().evictions == 48


@pytest.mark.parametrize("seed", range(8))
def test_blocks_of_a_piece_that_are_removed_together(tmp_path: Path, seed: int) -> None:
    """Blocks that are removed from a piece at once, whichever and in any order, leave what they leave one by one: the same
    entries, and no byte of what was removed, also if a process was killed behind the entry of one, or an entry is damaged."""
    draw = random.Random(seed)
    frames = [draw.randbytes(draw.choice((4096, 5000, 9000) if seed % 2 else (100, 200))) for _ in range(24)]
    keys = [draw.randbytes(32) for _ in range(24)]
    _, offsets = pieces.layout_of([len(one) for one in frames])
    gone = draw.sample(range(24), draw.randrange(1, 24))
    half = draw.choice(gone) if seed % 3 == 1 else None
    harmed = draw.choice(gone) if seed % 3 == 2 else None
    found = []
    for name in ("together", "alone"):
        with (tmp_path / name).open("wb+", 0) as file:
            pieces.write(file.fileno(), keys, [memoryview(one) for one in frames])
            if half is not None:
                os.pwrite(file.fileno(), bytes(48), 16 + 48 * half)
            if harmed is not None:  # its key
                os.pwrite(file.fileno(), b"\xff" * 32, 16 + 48 * harmed)
            for some in [gone] if name == "together" else [[one] for one in gone]:
                removed, more = pieces.remove_blocks(file.fileno(), {keys[one]: offsets[one] for one in some})
                assert removed == {keys[one] for one in some} - {keys[one] for one in (half, harmed) if one is not None}
            assert more
            found.append((pieces.entries(file.fileno()), (tmp_path / name).read_bytes()))
    assert found[0] == found[1] and len(found[0][0]) == 24 - len(gone)
    assert not any(frames[one][:64] in found[0][1] for one in gone)
    assert all(frames[one] in found[0][1] for one in set(range(24)) - set(gone))


@KINDS
def test_what_cannot_be_removed_stays_with_those_above(
    tmp_path: Path, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the files of a block cannot be removed, a put evicts others: those of the chain above it keep their files, and are
    found."""
    block = HEADER_BYTES + 4096
    with closing(DiskStore(tmp_path, 32 * block, pieces=piece)) as store:
        first = make_frames(40, 8, 4096)
        rest = make_frames(41, 8, 4096, after=first[-1])  # in a piece of their own
        other = make_frames(42, 16, 4096)
        for some in (first, rest, other):
            assert store.put(some, deadline=soon()) == len(some)
        stuck = first[5].header.key.hex()
        if piece:
            [stuck] = [path.name for path in tmp_path.glob("*/*/pieces/*") if first[0].header.key in path.read_bytes()]
        real_open, real_unlink = os.open, os.unlink

        def refused(real: Any, path: Any, *more: Any, **named: Any) -> Any:
            if str(path).endswith(stuck) and not (real is real_open and not more[0] & os.O_RDWR):
                raise OSError(5, "injected", str(path))
            return real(path, *more, **named)

        monkeypatch.setattr(os, "open", partial(refused, real_open))
        monkeypatch.setattr(os, "unlink", partial(refused, real_unlink))
        new = make_frames(43, 16, 4096)
        assert store.put(new, deadline=soon()) == 16
        monkeypatch.undo()
        kept = 8 if piece else 6
        assert present(store, first) == [True] * kept + [False] * (8 - kept)
        assert all(data is not None for data in read(store, first[:kept]))
        assert not any(present(store, rest)) and all(present(store, new))
        status = store.status()
        assert status.notes["stuck"] == 1 and status.bytes <= 32 * block


@KINDS
def test_the_one_tenant_that_can_be_evicted(tmp_path: Path, piece: int) -> None:
    """A put finds the only one of many tenants whose blocks are not pinned, although it compares a few."""
    block = HEADER_BYTES + 64
    with closing(DiskStore(tmp_path, 100 * 2 * block, pieces=piece, pin_share=1.0)) as store:
        chains = [make_frames(50 + number, 2, 64, root=root_of(number)) for number in range(100)]
        for number, chain in enumerate(chains):
            assert store.put(chain, deadline=soon()) == 2
            if number != 7:
                assert store.pin(names_of(chain), deadline=soon()) == 2
        assert store.put(make_frames(49, 3, 64, root=root_of(3)), deadline=soon()) == 2
        assert [sum(present(store, chain)) for chain in chains] == [2 * (number != 7) for number in range(100)]


def test_when_idle_tenants_are_counted() -> None:
    """Idle tenants are counted when one more is idle, once a minute, and at once where the time is before the last count: an
    index that takes the place of a broken one may begin its clock earlier. Between that, those that are used again, or go, are
    not idle any more; others are not counted less."""
    fair, hour, counts = FairShare(100), 3600.0, list[float]()

    def idle(count: int, used_at: float) -> Callable[[float], tuple[int, float]]:
        def counted(since: float) -> tuple[int, float]:
            counts.append(since)
            return count, used_at

        return counted

    assert fair.among(10, 1e6, idle(5, math.inf)) == 20
    assert fair.among(10, 1e6 + 59, idle(0, math.inf)) == 20
    assert fair.among(10, 1e6 + 60, idle(0, 1e6 + 70 - hour)) == 10
    assert fair.among(10, 1e6 + 69, idle(6, math.inf)) == 10
    assert fair.among(10, 1e6 + 70, idle(6, math.inf)) == 25
    fair.note_end(1e6 + 70 - hour)
    fair.note_end(1e6 + 71 - hour)
    assert fair.among(10, 1e6 + 71, idle(0, math.inf)) == 20
    assert fair.among(10, 9e5, idle(0, math.inf)) == 10
    assert counts == [1e6 - hour, 1e6 + 60 - hour, 1e6 + 70 - hour, 9e5 - hour]
