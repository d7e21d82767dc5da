"""Tests of the contract in `foreword.store.base.Store`."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest

from foreword.blocks.layout import ROOT_BYTES, tenant_of
from foreword.blocks.salt import TENANT_BYTES
from foreword.conformance.budget_contract import BudgetContract
from foreword.conformance.calls import call_from_threads
from foreword.conformance.frames import make_frames, names_of, present, put_all, read, soon, whole
from foreword.conformance.read_only_contract import Holding, ReadContract
from foreword.conformance.reserve_contract import ReserveContract
from foreword.errors import BadFrame
from foreword.store.background import at_once
from foreword.store.base import Store
from foreword.store.frame import Frame, check, frame
from foreword.store.tiered import TieredStore
from foreword.store_config import EncryptionConfig

Damage = Callable[[Store, Frame, bytes], None]


def fill(store: Store, frames: Sequence[Frame]) -> Store:
    """Put frames into an empty store that has room for them, and return the store."""
    assert store.put(frames, deadline=soon()) == len(frames)
    return store


class StoreContract(ReadContract, BudgetContract, ReserveContract):
    """Tests of `foreword.store.base.Store`. Subclass it as `Test...` and provide the fixture `store`.

    Attributes:
        bounded: whether the store has a budget of bytes and evicts. It then needs the fixture `small`.
        pins: whether `pin` has an effect.
        reserves: whether the store reserves slots in its memory.
        small_pins: how many of the SMALL_BLOCKS blocks in `small` may be pinned.
    """

    bounded: ClassVar[bool] = False

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        """An empty store with room for at least 64 MiB of frames of up to 64 KiB."""
        raise NotImplementedError("provide the fixture `store`")

    @pytest.fixture
    def holding(self, store: Store) -> Holding:
        """A function that puts frames into `store` and returns it."""
        return partial(fill, store)

    @pytest.fixture
    def small(self) -> Iterator[Store]:
        """An empty store with room for exactly SMALL_BLOCKS frames of SMALL_PAYLOAD bytes."""
        if self.bounded:
            raise NotImplementedError("a store with a budget needs the fixture `small`")
        pytest.skip("the store has no budget")

    @pytest.fixture
    def second(self) -> Iterator[Store]:
        """A second store object on the same data as `store`, if the backend allows that."""
        pytest.skip("the store is not shared")

    # Blocks

    def test_what_a_store_knows_by_itself(self, store: Store) -> None:
        """`known` says of no block that is present that it is absent, nor of one that was just deleted that it is present."""
        first, other = make_frames(91, 3, 900), make_frames(92, 3, 900)
        assert True not in store.known(names_of(first))
        store.put(first, deadline=soon())
        told = store.known(names_of(first + other))
        assert len(told) == 6 and False not in told[:3] and True not in told[3:]
        store.delete(names_of(first[1:]), deadline=soon())
        told = store.known(names_of(first))
        assert told[0] is not False and True not in told[1:]
        assert list(store.known([])) == []

    def test_what_a_store_knows_of_blocks_of_another_object(self, store: Store, second: Store) -> None:
        """A block that another object puts on the same data, also another process, is at no moment known to be absent."""
        for seed in range(94, 97):
            frames = make_frames(seed, 3, 900)
            store.known(names_of(frames))
            second.put(frames, deadline=soon())
            assert False not in store.known(names_of(frames))
            assert store.lookup(names_of(frames), deadline=soon()) == 3

    def test_an_empty_store_has_nothing(self, store: Store) -> None:
        """Names that were never put are misses in every call, and batches may be empty."""
        frames = make_frames(2, 3, 100)
        assert read(store, frames) == [None] * 3
        assert store.lookup(names_of(frames), deadline=soon()) == 0
        assert store.delete(names_of(frames), deadline=soon()) == 0
        assert store.pin(names_of(frames), deadline=soon()) == 0
        assert list(store.scan(deadline=soon())) == []
        assert store.records("", deadline=soon()) == []
        assert store.get([], [], deadline=soon()) == []
        assert store.put([], deadline=soon()) == store.lookup([], deadline=soon()) == 0
        assert store.delete([], deadline=soon()) == store.pin([], deadline=soon()) == 0

    def test_frames_of_several_sizes(self, store: Store) -> None:
        """Frames may have different sizes; the largest is in the first put."""
        frames = [make_frames(5, 1, size)[0] for size in (40_000, 1, 0, 4096, 39_999, 127)]
        assert store.put(frames, deadline=soon()) == len(frames)
        assert read(store, frames) == whole(frames)

    def test_putting_again_has_no_effect(self, store: Store) -> None:
        """put counts a frame that is present and does not change it, even if the bytes differ."""
        frames = make_frames(6, 4, 900)
        store.put(frames[:3], deadline=soon())
        other = [frame(one.header, bytes(900)) for one in frames]
        assert store.put(other, deadline=soon()) == 4
        assert read(store, frames) == [*whole(frames[:3]), bytes(other[3].data)]

    def test_a_name_twice_in_a_batch(self, store: Store) -> None:
        """A frame that occurs twice in one put is stored once and counted twice."""
        [one] = make_frames(7, 1, 900)
        assert store.put([one, one], deadline=soon()) == 2
        assert read(store, [one]) == whole([one])
        assert [entry.name for entry in store.scan(deadline=soon())] == [one.name]

    def test_buffers_may_be_reused_after_put(self, store: Store) -> None:
        """put keeps no reference to the caller's buffers."""
        frames = make_frames(8, 3, 2000)
        before = whole(frames)
        store.put(frames, deadline=soon())
        for one in frames:
            one.data[:] = bytes(len(one.data))
        assert read(store, frames) == before

    def test_frames_in_read_only_memory(self, store: Store) -> None:
        """put accepts frames in read-only memory."""
        frames = [Frame(one.header, memoryview(bytes(one.data))) for one in make_frames(9, 3, 1 << 16)]
        store.put(frames, deadline=soon())
        assert read(store, frames) == whole(frames)

    def test_lookup_stops_at_the_first_gap(self, store: Store) -> None:
        """lookup counts from the first name up to the first missing one, in batches of any length."""
        frames = make_frames(10, 400, 64)
        names = names_of(frames)
        store.put(frames[:399], deadline=soon())
        assert store.lookup(names[:1], deadline=soon()) == 1
        assert store.lookup(names, deadline=soon()) == 399
        assert store.lookup(names[5:], deadline=soon()) == 394
        assert store.lookup(names[::-1], deadline=soon()) == 0
        for gap in (398, 300, 64, 63, 1, 0):
            assert store.delete([names[gap]], deadline=soon()) == 1
            assert store.lookup(names, deadline=soon()) == gap
        assert store.lookup(names[2:], deadline=soon()) == 61

    def test_lent_frames(self, store: Store) -> None:
        """A store lends nothing, or the frames that get returns, empty ones in place of those that are missing. They stay as
        they are while they are deleted and others are stored. A deleted one is not lent again."""
        frames, others = make_frames(13, 9, 900), make_frames(14, 9, 900)
        store.put(frames[:7], deadline=soon())
        there = [*whole(frames[:7]), b"", b""]
        with store.lend(names_of(frames), deadline=soon()) as lent:
            store.delete(names_of(frames[:7]), deadline=soon())
            put_all(store, others)
            places = [
                lent.memory[slot * lent.stride :][: len(one)] for slot, one in zip(lent.slots, lent.frames, strict=True)
            ]
            assert list(lent.frames) == places and places in (there, [])
        with store.lend(names_of(frames), deadline=soon()) as lent:
            assert not any(lent.frames)

    def test_present_answers_for_each_name(self, store: Store) -> None:
        """present tells of each name by itself, behind gaps too, and of no name that was deleted."""
        frames = make_frames(11, 90, 64)
        names = names_of(frames)
        chosen = random.Random(11).sample(range(90), 40)
        store.put([frames[i] for i in sorted(chosen)], deadline=soon())
        assert store.present(names, deadline=soon()) == [i in chosen for i in range(90)]
        assert store.present([], deadline=soon()) == []
        store.delete([names[chosen[0]]], deadline=soon())
        assert store.present([names[chosen[0]], names[chosen[1]]], deadline=soon()) == [False, True]

    def test_layouts_are_kept_apart(self, store: Store) -> None:
        """A key under two layouts names two blocks."""
        mine = make_frames(12, 3, 500)
        others = [frame(replace(one.header, layout=b"another layout!!"), bytes(500)) for one in mine]
        store.put(mine, deadline=soon())
        assert store.lookup(names_of(others), deadline=soon()) == 0
        store.put(others[:2], deadline=soon())
        assert read(store, mine) == whole(mine)
        assert read(store, others) == [*whole(others[:2]), None]
        assert store.delete(names_of(mine), deadline=soon()) == 3
        assert store.lookup(names_of(others), deadline=soon()) == 2

    def test_delete(self, store: Store) -> None:
        """delete removes blocks, pinned or not, and returns how many were present. They can be put again."""
        frames = make_frames(13, 6, 500)
        names = names_of(frames)
        store.put(frames[:5], deadline=soon())
        store.pin(names[:2], deadline=soon())
        assert store.delete([names[1], names[3], names[5]], deadline=soon()) == 2
        assert store.delete([names[1], names[3], names[5]], deadline=soon()) == 0
        assert present(store, frames) == [True, False, True, False, True, False]
        assert read(store, frames)[1] is None
        store.put(frames, deadline=soon())
        assert read(store, frames) == whole(frames)
        assert store.delete(names, deadline=soon()) == 6
        assert list(store.scan(deadline=soon())) == []

    def test_pin_counts(self, store: Store) -> None:
        """pin returns how many of the names are pinned now, or unpinned. Missing blocks do not count."""
        if not self.pins:
            pytest.skip("the store does not pin")
        frames = make_frames(14, 4, 500)
        names = names_of(frames)
        store.put(frames[:3], deadline=soon())
        assert store.pin(names, deadline=soon()) == 3
        assert store.pin(names[:2], deadline=soon()) == 2
        assert store.pin(names[:1], pinned=False, deadline=soon()) == 1
        assert {entry.name: entry.pinned for entry in store.scan(deadline=soon())} == {
            names[0]: False,
            names[1]: True,
            names[2]: True,
        }
        assert store.pin(names, pinned=False, deadline=soon()) == 3
        assert not any(entry.pinned for entry in store.scan(deadline=soon()))

    def test_scan(self, store: Store) -> None:
        """scan lists every block once, with its size and its position in the chain if the store knows them."""
        frames = [*make_frames(15, 30, 300), *make_frames(16, 5, 200, layout=b"another layout!!")]
        store.put(frames, deadline=soon())
        entries = list(store.scan(deadline=soon()))
        assert sorted(entry.name for entry in entries) == sorted(names_of(frames))
        by_name = {one.name: one for one in frames}
        for entry in entries:
            one = by_name[entry.name]
            assert entry.size in (0, len(one.data)) and entry.hits >= 0 and not entry.pinned
            assert entry.parent in (b"", one.header.parent)
            assert not entry.parent or entry.depth == one.header.depth

    def test_list_names_and_erase(self, store: Store) -> None:
        """list_names finds every block of a layout, of a root, of a tenant's roots, of both, and of any, and no other block,
        also where chains have gaps. What it lists may be deleted while it lists. erase deletes the same blocks and no other."""
        tenants = [bytes([number]) * 32 for number in (1, 2)]
        salted = tenants[0][:TENANT_BYTES] + bytes(20)
        layouts = [bytes([number]) * 16 for number in (3, 4)]
        chains = {
            (layout, root): make_frames(number, 70, 100, layout=layout, root=root)
            for number, (layout, root) in enumerate(itertools.product(layouts, [*tenants, salted]))
        }
        for chain in chains.values():
            store.put(chain, deadline=soon())
            store.delete(names_of([chain[0], chain[30]]), deadline=soon())

        def listed(layout: bytes = b"", root: bytes = b"") -> set[bytes]:
            return {name for names in store.list_names(layout, root, deadline=soon()) for name in names}

        wanted = {place: {*names_of(chain)} - {chain[0].name, chain[30].name} for place, chain in chains.items()}
        roots = [b"", *(root[:size] for root in (*tenants, salted) for size in (TENANT_BYTES, ROOT_BYTES))]
        for layout, root in itertools.product((b"", *layouts), roots):
            some = [names for at, names in wanted.items() if at[0].startswith(layout) and at[1].startswith(root)]
            assert listed(layout, root) == set().union(*some)
        assert listed(bytes(16)) == listed(b"", bytes(16)) == listed(b"", bytes(TENANT_BYTES)) == set()
        for names in store.list_names(layouts[0], tenants[0][:16], deadline=soon()):
            assert store.delete(names, deadline=soon()) == len(set(names))
        assert listed(b"", tenants[0][:16]) == wanted[layouts[1], tenants[0]]
        assert store.erase(b"", tenants[0][:16], deadline=soon()) >= 68
        assert listed(b"", tenants[0][:16]) == set()
        assert listed(b"", salted[:16]) == wanted[layouts[0], salted] | wanted[layouts[1], salted]
        assert store.erase(layouts[0], tenants[0][:TENANT_BYTES], deadline=soon()) >= 68
        assert listed(b"", tenants[0][:TENANT_BYTES]) == wanted[layouts[1], salted]
        assert listed(b"", tenants[1][:16]) == wanted[layouts[0], tenants[1]] | wanted[layouts[1], tenants[1]]

    def test_deleting_while_scanning(self, store: Store) -> None:
        """Blocks may be deleted during a scan. It ends, and lists only blocks that existed."""
        frames = make_frames(17, 40, 100)
        store.put(frames, deadline=soon())
        scanned = set()
        for entry in store.scan(deadline=soon()):
            scanned.add(entry.name)
            store.delete([entry.name], deadline=soon())
        assert scanned <= set(names_of(frames)) and scanned
        assert present(store, frames) == [one.name not in scanned for one in frames]

    def test_status(self, store: Store) -> None:
        """status reports blocks and bytes, if the store knows them, and does not raise after close."""
        frames = make_frames(18, 10, 1000)
        store.put(frames, deadline=soon())
        status = store.status()
        assert status.blocks in (-1, 10)
        assert status.bytes >= (0 if status.blocks < 0 else sum(len(one.data) for one in frames))
        store.delete(names_of(frames), deadline=soon())
        assert store.status().blocks in (-1, 0)
        store.close()
        store.status()

    # Damage

    @pytest.fixture
    def damage(self) -> Damage:
        """A function that replaces the stored bytes of a block behind the store's back, if the backend keeps them elsewhere
        than in this process."""
        pytest.skip("stored bytes cannot be changed from outside")

    @pytest.mark.parametrize("kind", ["empty", "short", "long", "longer than any frame", "flipped"])
    def test_a_damaged_block(self, store: Store, damage: Damage, kind: str) -> None:
        """A damaged block costs no other block of the batch. Behind a tiered store it is deleted, and a put heals it."""
        frames = make_frames(23, 8, 3000)
        store.put(frames, deadline=soon())
        damage(store, frames[5], _damaged(frames[5], kind))
        sound = [*frames[:5], *frames[6:]]
        assert read(store, sound) == whole(sound)
        others = [i for i in range(8) if i != 5]
        for name, buffer, length in zip(names_of(frames), *_get(store, frames), strict=True):
            if name == frames[5].name:
                with pytest.raises(BadFrame):
                    check(buffer[: max(length, 0)], name)
            else:
                check(buffer[:length], name)
        tiers = TieredStore([store])
        found = read(tiers, frames)
        assert [found[i] for i in others] == [bytes(frames[i].data) for i in others] and found[5] is None
        assert tiers.put(frames, deadline=soon()) == 8 and read(tiers, frames) == whole(frames)

    # Records

    def test_records(self, store: Store) -> None:
        """Records can be stored, replaced, listed and deleted; they may be binary, empty and long."""
        assert store.get_record("prefix/a", deadline=soon()) is None
        assert store.delete_record("prefix/a", deadline=soon()) is False
        store.put_record("prefix/a", b"one", deadline=soon())
        store.put_record("prefix/a", b"\x00two\xff", deadline=soon())
        store.put_record("prefix/b", b"", deadline=soon())
        assert store.get_record("prefix/a", deadline=soon()) == b"\x00two\xff"
        assert store.get_record("prefix/b", deadline=soon()) == b""
        long = random.Random(1).randbytes(1 << 20)
        store.put_record("x", long, deadline=soon())
        assert store.get_record("x", deadline=soon()) == long
        assert store.delete_record("prefix/a", deadline=soon()) is True
        assert store.get_record("prefix/a", deadline=soon()) is None
        assert store.delete_record("prefix/a", deadline=soon()) is False

    def test_records_by_prefix(self, store: Store) -> None:
        """records lists the keys that start with a string, sorted. The string need not end at a slash."""
        keys = ["a", "a/b", "a/b/c", "ab", "b/a-1_2.x", "b/a", "A/b"]
        for key in keys:
            store.put_record(key, key.encode(), deadline=soon())
        for prefix in ("", "a", "a/", "a/b", "a/b/", "b/a-", "c", "A"):
            assert store.records(prefix, deadline=soon()) == sorted(key for key in keys if key.startswith(prefix))
        assert [store.get_record(key, deadline=soon()) for key in keys] == [key.encode() for key in keys]

    def test_blocks_and_records_are_separate(self, store: Store) -> None:
        """scan does not list records, and deleting a block does not delete a record of the same key."""
        frames = make_frames(19, 2, 100)
        store.put(frames, deadline=soon())
        store.put_record(frames[0].header.key.hex(), b"record", deadline=soon())
        assert len(list(store.scan(deadline=soon()))) == 2
        store.delete(names_of(frames), deadline=soon())
        assert store.get_record(frames[0].header.key.hex(), deadline=soon()) == b"record"

    # Encryption

    def test_encrypted_blocks_and_records(self, store: Store, tmp_path: Path) -> None:
        """Behind encryption blocks and records come back as they were, and the store has nothing of their content. Once the
        tenant's data key is destroyed none comes back, none is written, and all can still be listed and erased."""
        pytest.importorskip("cryptography")
        sealing = pytest.importorskip("foreword.store.sealing")
        if store.authenticates or isinstance(store, TieredStore):
            pytest.skip("the store seals frames, or its tiers do")
        config = EncryptionConfig(key_store=str(tmp_path / "keys"), master_keys=(f"test:{'5a' * 32}",))
        with closing(sealing.DataKeys(config, call_seconds=60.0)) as keys:
            sealed = sealing.KeyRing(data=keys).sealed(store)
            frames = [*make_frames(24, 6, 3000), *make_frames(25, 2, 0), *make_frames(26, 2, 1)]
            tenant = tenant_of(frames[0].name)
            record = f"prefixes/model/{tenant.hex()}00000000/name"
            sealed.put_record(record, b"a tenant's text", deadline=soon())
            assert sealed.put(frames, deadline=soon()) == len(frames)
            assert read(sealed, frames) == whole(frames)
            assert read(sealed, frames) == whole(frames), "reading changes nothing in the store"
            assert sealed.get_record(record, deadline=soon()) == b"a tenant's text"
            for one, stored in zip(frames[:6], read(store, frames[:6]), strict=True):
                assert stored is not None and len(stored) == len(one.data)
                assert not {stored[i : i + 8] for i in range(2993)} & {
                    bytes(one.payload[i : i + 8]) for i in range(2993)
                }
            assert b"text" not in (store.get_record(record, deadline=soon()) or b"")
            assert [number for one, number in keys.destroy(tenant) if one == tenant]
            tiers = TieredStore([sealed])
            assert read(tiers, frames) == read(sealed, frames) == [None] * len(frames)
            assert not tiers.tiers[0].counters.bad, "what cannot be read any more is not damaged"
            assert sealed.get_record(record, deadline=soon()) is None
            assert sealed.put(make_frames(27, 2, 100), deadline=soon()) == 0
            assert len(list(sealed.scan(deadline=soon()))) == len(frames)
            assert sealed.erase(b"", tenant, deadline=soon()) == len(frames)

    def test_threads_at_once(self, store: Store) -> None:
        """Concurrent calls never return a wrong or incomplete frame, and afterwards the store works."""
        chains = [make_frames(100 + number, 8, 2000) for number in range(4)]
        for seed in range(2):
            call_from_threads(store, chains, seed, threads=4, steps=40)
        for chain in chains:
            store.delete(names_of(chain), deadline=soon())
            assert store.put(chain, deadline=soon()) == len(chain)
        for chain in chains:
            assert store.lookup(names_of(chain), deadline=soon()) == len(chain)
            assert read(store, chain) == whole(chain)
        assert len(list(store.scan(deadline=soon()))) == sum(map(len, chains))

    # Shared data

    def test_two_stores_on_the_same_data(self, store: Store, second: Store) -> None:
        """Each of two stores sees the blocks and records that the other puts and deletes."""
        frames = make_frames(22, 6, 4000)
        store.put(frames[:4], deadline=soon())
        assert second.lookup(names_of(frames), deadline=soon()) == 4
        assert read(second, frames) == [*whole(frames[:4]), None, None]
        assert second.put(frames, deadline=soon()) == 6
        assert store.lookup(names_of(frames), deadline=soon()) == 6
        assert store.delete(names_of(frames[2:3]), deadline=soon()) == 1
        assert second.lookup(names_of(frames), deadline=soon()) == 2
        store.put_record("key", b"data", deadline=soon())
        assert second.get_record("key", deadline=soon()) == b"data"
        store.close()
        assert read(second, frames[:2]) == whole(frames[:2])

    def test_a_record_is_added_once(self, store: Store, second: Store) -> None:
        """All that add a record at once get the same one, which stays; one that is there already is returned."""
        started = threading.Barrier(4)

        def add(number: int) -> set[bytes]:
            found = set()
            for one in range(20):
                started.wait(60)
                some = (store, second)[number % 2].add_record(f"added/{one}", b"%d" % number, deadline=soon())
                found.add(b"%d %b" % (one, some))
            return found

        found = at_once([partial(add, number) for number in range(4)])
        assert found.count(found[0]) == 4 and len(found[0]) == 20
        for one in range(20):
            there = store.get_record(f"added/{one}", deadline=soon())
            assert b"%d %b" % (one, there or b"") in found[0]
            assert second.add_record(f"added/{one}", b"late", deadline=soon()) == there


def _damaged(one: Frame, kind: str) -> bytes:
    """The frame's bytes with this damage."""
    data = bytes(one.data)
    if kind == "flipped":
        return data[:-1] + bytes([data[-1] ^ 1])
    return {"empty": b"", "short": data[:-7], "long": data + b"x", "longer than any frame": bytes(9 << 20)}[kind]


def _get(store: Store, frames: Sequence[Frame]) -> tuple[list[memoryview], list[int]]:
    buffers = [memoryview(bytearray(len(one.data))) for one in frames]
    return buffers, store.get(names_of(frames), buffers, deadline=soon())
