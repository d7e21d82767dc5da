"""Tests of stores with a budget: the order of eviction, pins, and the budget itself."""

from __future__ import annotations

import random
from typing import ClassVar

import pytest

from foreword.conformance.calls import call_from_threads, calls_of
from foreword.conformance.frames import (
    SMALL_BLOCKS,
    SMALL_BYTES,
    SMALL_PAYLOAD,
    make_frames,
    names_of,
    present,
    put_all,
    read,
    soon,
    whole,
)
from foreword.store.base import Store


class BudgetContract:
    """The part of `StoreContract` that needs the fixture `small`."""

    pins: ClassVar[bool] = True
    small_pins: ClassVar[int] = SMALL_BLOCKS // 2

    def test_threads_at_once_in_a_small_store(self, small: Store) -> None:
        """Concurrent calls while every put evicts: never a wrong block, and never more than the budget."""
        chains = [make_frames(110 + number, 5, SMALL_PAYLOAD) for number in range(4)]
        for seed in range(2):
            call_from_threads(small, chains, seed, threads=4, steps=40)
            assert sum(entry.size for entry in small.scan(deadline=soon())) <= SMALL_BYTES
        for chain in chains:
            small.pin(names_of(chain), pinned=False, deadline=soon())
        for chain in chains:
            assert small.put(chain, deadline=soon()) == len(chain)
            assert read(small, chain) == whole(chain)

    def test_lent_frames_are_not_evicted(self, small: Store) -> None:
        """A full store does not evict what it lends for new frames. Afterwards it does."""
        first, second = make_frames(28, SMALL_BLOCKS, SMALL_PAYLOAD), make_frames(29, SMALL_BLOCKS, SMALL_PAYLOAD)
        put_all(small, first)
        with small.lend(names_of(first[:5]), deadline=soon()) as lent:
            put_all(small, second)
            assert [bytes(one) for one in lent.frames] == whole(first[: len(lent.frames)])
        assert put_all(small, second) == SMALL_BLOCKS
        assert not any(present(small, first))

    def test_eviction_is_leaf_first(self, small: Store) -> None:
        """The last blocks of a chain are evicted first, and only as many as necessary."""
        old, new = make_frames(30, 6, SMALL_PAYLOAD), make_frames(31, 5, SMALL_PAYLOAD)
        put_all(small, old)
        assert put_all(small, new) == 5
        assert present(small, new) == [True] * 5
        assert present(small, old) == [True] * 3 + [False] * 3

    @pytest.mark.parametrize(("call", "is_use"), [("get", True), ("put", True), ("lookup", False), ("scan", False)])
    def test_uses(self, small: Store, call: str, is_use: bool) -> None:
        """get, and put of blocks that are present, are uses: the chain is kept, although the other one was put later."""
        first, second, third = (make_frames(seed, 4, SMALL_PAYLOAD) for seed in (32, 33, 34))
        put_all(small, first)
        put_all(small, second)
        calls_of(small, first, soon())[call]()
        put_all(small, third)
        kept, evicted = (first, second) if is_use else (second, first)
        assert present(small, kept) == present(small, third) == [True] * 4
        assert present(small, evicted) == [False] * 4

    def test_a_growing_chain_is_one_chain(self, small: Store) -> None:
        """The last use of a chain is that of any of its blocks, so old blocks with a new child are not evicted first."""
        chain, other, third = (make_frames(seed, 4, SMALL_PAYLOAD) for seed in (41, 42, 43))
        put_all(small, chain[:3])
        put_all(small, other)
        put_all(small, chain[3:])
        put_all(small, third)
        assert present(small, chain) == [True] * 4 and present(small, other) == [False] * 4

    def test_a_shared_prefix_outlives_a_branch(self, small: Store) -> None:
        """The older branch of two chains with a common prefix is evicted, and the prefix stays with the newer one."""
        head = make_frames(44, 2, SMALL_PAYLOAD)
        old, new = (make_frames(seed, 3, SMALL_PAYLOAD, after=head[-1]) for seed in (45, 46))
        put_all(small, [*head, *old])
        put_all(small, [*head, *new])
        put_all(small, make_frames(47, 3, SMALL_PAYLOAD))
        assert present(small, [*head, *new]) == [True] * 5 and present(small, old) == [False] * 3

    def test_a_child_before_its_parent(self, small: Store) -> None:
        """Blocks may be put in any order. A parent that was put last is still evicted after its child."""
        chain = make_frames(48, 4, SMALL_PAYLOAD)
        for one in (chain[2], chain[1], chain[3], chain[0]):
            put_all(small, [one])
        for count, seed in ((4, 49), (2, 50)):
            put_all(small, make_frames(seed, count, SMALL_PAYLOAD))
        assert present(small, chain) == [True, True, False, False]

    def test_a_parent_deleted_and_put_again(self, small: Store) -> None:
        """A parent that was deleted and put again is still evicted after its child."""
        chain = make_frames(51, 4, SMALL_PAYLOAD)
        put_all(small, chain)
        small.delete([chain[1].name], deadline=soon())
        put_all(small, [chain[1]])
        put_all(small, make_frames(52, 6, SMALL_PAYLOAD))
        assert present(small, chain) == [True, True, False, False]

    def test_a_chain_longer_than_the_store(self, small: Store) -> None:
        """The first blocks of a chain that does not fit are kept: a put never evicts its own blocks or their parents."""
        chain = make_frames(53, SMALL_BLOCKS + 4, SMALL_PAYLOAD)
        put_all(small, make_frames(54, 3, SMALL_PAYLOAD))
        assert put_all(small, chain) == SMALL_BLOCKS
        assert small.lookup(names_of(chain), deadline=soon()) == SMALL_BLOCKS
        assert put_all(small, chain[SMALL_BLOCKS:]) == 0
        assert present(small, chain) == [True] * SMALL_BLOCKS + [False] * 4

    def test_a_block_does_not_evict_its_parent(self, small: Store) -> None:
        """A block whose parent would be evicted next evicts a block of another chain instead."""
        chain, other = make_frames(55, 5, SMALL_PAYLOAD), make_frames(56, 4, SMALL_PAYLOAD)
        put_all(small, chain[:4])
        put_all(small, other)
        assert put_all(small, chain[4:]) == 1
        assert present(small, chain) == [True] * 5 and present(small, other) == [True] * 3 + [False]

    def test_a_frame_larger_than_the_store(self, small: Store) -> None:
        """A frame larger than the budget is not stored, and nothing is evicted for it."""
        chain = make_frames(57, 4, SMALL_PAYLOAD)
        put_all(small, chain)
        assert put_all(small, make_frames(58, 1, SMALL_BYTES)) == 0
        assert present(small, chain) == [True] * 4

    def test_pinned_blocks_stay(self, small: Store) -> None:
        """Pinned blocks and their ancestors are not evicted. After unpin they are evicted like others."""
        if not self.pins:
            pytest.skip("the store does not pin")
        kept = make_frames(59, 3, SMALL_PAYLOAD)
        put_all(small, kept)
        assert small.pin(names_of(kept), deadline=soon()) == 3
        for seed in range(60, 64):
            put_all(small, make_frames(seed, 6, SMALL_PAYLOAD))
            assert present(small, kept) == [True] * 3
        assert small.pin(names_of(kept), pinned=False, deadline=soon()) == 3
        put_all(small, make_frames(64, SMALL_BLOCKS, SMALL_PAYLOAD))
        assert present(small, kept) == [False] * 3

    def test_pins_have_a_budget(self, small: Store) -> None:
        """At most the share for pins is pinned, in the given order. Deleting or unpinning frees it."""
        if not self.pins:
            pytest.skip("the store does not pin")
        chain = make_frames(65, SMALL_BLOCKS, SMALL_PAYLOAD)
        names = names_of(chain)
        put_all(small, chain)
        limit = self.small_pins
        assert small.pin(names, deadline=soon()) == limit
        assert small.status().pinned_bytes <= limit * len(chain[0].data)
        assert {entry.name for entry in small.scan(deadline=soon()) if entry.pinned} == set(names[:limit])
        assert small.pin(names[limit:], deadline=soon()) == 0
        small.delete(names[:1], deadline=soon())
        assert small.pin(names[limit:], deadline=soon()) == 1
        small.pin(names, pinned=False, deadline=soon())
        assert small.pin(names[limit:], deadline=soon()) == min(limit, SMALL_BLOCKS - limit)

    def test_the_budget_is_kept(self, small: Store) -> None:
        """After any put the blocks take at most the budget, and in the end all of it."""
        draw = random.Random(66)
        chains = [make_frames(seed, 5, SMALL_PAYLOAD) for seed in range(70, 76)]
        for _ in range(60):
            put_all(small, draw.choice(chains)[: draw.randint(1, 5)])
            size = sum(entry.size for entry in small.scan(deadline=soon()))
            assert size <= SMALL_BYTES
            assert small.status().bytes <= SMALL_BYTES
        assert size == SMALL_BYTES
