"""Random sequences of calls of a store, compared with a dictionary (hypothesis)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from foreword.conformance.frames import SMALL_BYTES, SMALL_PAYLOAD, make_frames, names_of, put_all, read, soon
from foreword.store.base import Name, ReservedSlots, Store
from foreword.store.frame import Frame, UnreadBlock

_TRUNK = make_frames(200, 2, SMALL_PAYLOAD)
_CHAINS: tuple[tuple[Frame, ...], ...] = (
    (*_TRUNK, *make_frames(201, 4, SMALL_PAYLOAD, after=_TRUNK[-1])),
    (*_TRUNK, *make_frames(202, 3, SMALL_PAYLOAD, after=_TRUNK[-1])),
    tuple(make_frames(203, 5, SMALL_PAYLOAD)),
    tuple(make_frames(204, 3, SMALL_PAYLOAD, layout=b"another layout!!")),
)
_FRAMES = {one.name: one for chain in _CHAINS for one in chain}
_PARENTS = {one.name: parent for one in _FRAMES.values() if (parent := one.header.parent_name) in _FRAMES}
_parts = st.builds(
    lambda chain, first, length: _CHAINS[chain][first : first + length],
    st.integers(0, len(_CHAINS) - 1),
    st.integers(0, 4),
    st.integers(1, 6),
)
_keys = st.sampled_from(["a", "a/b", "a/b.c", "b-1", "b_2/x"])


class StoreMachine(RuleBasedStateMachine):
    """Random sequences of calls, compared with a dictionary. Subclass it, implement `make_store`, and use its `TestCase`.

    A store without a budget holds exactly the blocks in the dictionary. One with room for SMALL_BLOCKS blocks
    (`bounded`) may have evicted some, but never a pinned block, and never a block whose child it kept.
    """

    bounded: ClassVar[bool] = False
    pins: ClassVar[bool] = True
    reserves: ClassVar[bool] = False
    spoils: ClassVar[bool] = False

    def make_store(self) -> Store:
        """Create an empty store; if `bounded`, like the fixture `small` of StoreContract."""
        raise NotImplementedError

    def spoil(self, names: Sequence[Name]) -> None:
        """Make stored blocks unreadable. The store deletes them when it reads them, as a tiered store does."""
        raise NotImplementedError

    @initialize()
    def begin(self) -> None:
        self.store = self.make_store()
        self.blocks: dict[Name, bytes] = {}
        self.pinned: set[Name] = set()
        self.stored_records: dict[str, bytes] = {}
        self.held: set[Name] = set()
        self.spoiled: set[Name] = set()
        self.reservations: list[tuple[ReservedSlots, list[Frame]]] = []
        self.reserved: dict[
            Name, ReservedSlots
        ] = {}  # blocks that were not deleted since, of reservations that have not ended

    def teardown(self) -> None:
        store = getattr(self, "store", None)
        if store is not None:
            store.close()

    @rule(part=_parts)
    def put(self, part: Sequence[Frame]) -> None:
        kept = put_all(self.store, part)
        stored = [one for one in part if one.name not in self.reserved]
        for one in stored:
            self.blocks[one.name] = bytes(one.data)
        assert kept == len(stored) if not self.bounded else kept <= len(stored)

    @precondition(lambda self: self.reserves)
    @rule(part=_parts, unread=st.booleans())
    def reserve(self, part: Sequence[Frame], unread: bool) -> None:
        blocks = [UnreadBlock(one.name, one.name, one.header.length) for one in part]
        reserved = self.store.reserve(
            blocks if unread else [one.header for one in part], unread=unread, deadline=soon()
        )
        mine = [part[at] for at in reserved.positions]
        asked = names_of(part)
        if unread:  # a reservation of blocks that are read ends at the first without a slot
            asked = list(itertools.takewhile(lambda name: name not in self.blocks and name not in self.reserved, asked))
        new = {name for name in asked if name not in self.blocks and name not in self.reserved}
        assert set(names_of(mine)) == new if not self.bounded else set(names_of(mine)) <= new
        for one, place in zip(mine, reserved.frames(), strict=True):
            place[:] = one.data
        self.reservations.append((reserved, mine))
        self.reserved.update((one.name, reserved) for one in mine)

    @precondition(lambda self: self.reservations)
    @rule(
        which=st.integers(0, 9),
        end=st.sampled_from(["publish", "publish some", "abandon", "lose"]),
        some=st.integers(0, 63),
    )
    def end_reservation(self, which: int, end: str, some: int) -> None:
        reserved, mine = self.reservations.pop(which % len(self.reservations))
        chosen = {number for number in range(len(mine)) if end == "publish" or some >> number & 1}
        # A block that was deleted is not this reservation's any more, though another one may have its name.
        left = {number for number, one in enumerate(mine) if self.reserved.get(one.name) is reserved}
        if end in ("publish", "publish some"):
            assert self.store.publish(reserved, None if end == "publish" else chosen) == len(left & chosen)
            self.blocks.update((mine[number].name, bytes(mine[number].data)) for number in left & chosen)
        elif end == "abandon":
            self.store.abandon(reserved)
        for number in left:
            del self.reserved[mine[number].name]

    @rule(part=_parts)
    def get(self, part: Sequence[Frame]) -> None:
        for one, data in zip(part, read(self.store, part), strict=True):
            assert data == (None if one.name in self.spoiled else self.blocks.get(one.name))
        self._forget(self.spoiled & set(names_of(part)))

    @precondition(lambda self: self.spoils)
    @rule(part=_parts)
    def spoil_some(self, part: Sequence[Frame]) -> None:
        names = [name for name in names_of(part) if name in self.blocks]
        self.spoil(names)
        self.spoiled.update(names)

    def _forget(self, names: set[Name]) -> None:
        for name in names:
            self.blocks.pop(name, None)
        self.pinned -= names
        self.spoiled -= names

    @rule(part=_parts)
    def lookup(self, part: Sequence[Frame]) -> None:
        count = self.store.lookup(names_of(part), deadline=soon())
        expected = next((n for n, one in enumerate(part) if one.name not in self.blocks), len(part))
        assert count == expected

    @rule(part=_parts)
    def delete(self, part: Sequence[Frame]) -> None:
        names = set(names_of(part))
        assert self.store.delete(names_of(part), deadline=soon()) == len(names & self.blocks.keys())
        self._forget(names)
        for name in names:
            self.reserved.pop(name, None)

    @precondition(lambda self: self.pins)
    @rule(part=_parts, pinned=st.booleans())
    def pin(self, part: Sequence[Frame], pinned: bool) -> None:
        present = {name for name in names_of(part) if name in self.blocks}
        count = self.store.pin(names_of(part), pinned=pinned, deadline=soon())
        if not pinned:
            assert count == len(present)
            self.pinned -= present
            return
        now = {entry.name for entry in self.store.scan(deadline=soon()) if entry.pinned}
        assert count == len(now & present) and now <= self.pinned | present
        assert self.bounded or count == len(present)
        self.pinned = now

    @rule(key=_keys, data=st.binary(max_size=20))
    def put_record(self, key: str, data: bytes) -> None:
        self.store.put_record(key, data, deadline=soon())
        self.stored_records[key] = data

    @rule(key=_keys)
    def delete_record(self, key: str) -> None:
        assert self.store.delete_record(key, deadline=soon()) == (self.stored_records.pop(key, None) is not None)

    @rule(key=_keys, prefix=st.sampled_from(["", "a", "a/", "b"]))
    def read_records(self, key: str, prefix: str) -> None:
        assert self.store.get_record(key, deadline=soon()) == self.stored_records.get(key)
        expected = sorted(one for one in self.stored_records if one.startswith(prefix))
        assert self.store.records(prefix, deadline=soon()) == expected

    @invariant()
    def scan_agrees(self) -> None:
        entries = {entry.name: entry for entry in self.store.scan(deadline=soon())}
        assert all(entry.size in (0, len(_FRAMES[name].data)) for name, entry in entries.items())
        if not self.bounded:
            assert entries.keys() == self.blocks.keys()
            return
        assert entries.keys() <= self.blocks.keys() and self.pinned <= entries.keys()
        assert {name for name, entry in entries.items() if entry.pinned} == self.pinned
        assert sum(len(_FRAMES[name].data) for name in entries) <= SMALL_BYTES
        evicted = self.held & (self.blocks.keys() - entries.keys())
        assert not {_PARENTS[name] for name in entries if name in _PARENTS} & evicted
        self.blocks = {name: data for name, data in self.blocks.items() if name in entries}
        self.held = set(entries)
