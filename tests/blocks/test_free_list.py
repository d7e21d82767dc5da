"""The free list behaves like a plain Python list, and its operations create no objects."""

from __future__ import annotations

import gc
import sys
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from foreword.blocks.pool import FreeList

BLOCKS = 9


class FreeListMachine(RuleBasedStateMachine):
    """Drives a FreeList and a list side by side; `out` are the blocks that are in neither."""

    def __init__(self) -> None:
        super().__init__()
        self.real = FreeList(BLOCKS)
        self.plain = list(range(BLOCKS))
        self.out: list[int] = []

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, len(self.plain)))
        taken, self.plain = self.plain[:count], self.plain[count:]
        assert self.real.take(count) == taken
        self.out += taken

    @precondition(lambda self: self.plain)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.plain))
        self.real.remove(block)
        self.plain.remove(block)
        self.out.append(block)

    @rule(data=st.data(), front=st.booleans())
    def put_back(self, data: st.DataObject, front: bool) -> None:
        blocks = data.draw(st.permutations(self.out))[: data.draw(st.integers(0, len(self.out)))]
        self.out = [block for block in self.out if block not in blocks]
        if front:
            self.real.push_front(blocks)
            self.plain = [*reversed(blocks), *self.plain]
        else:
            self.real.append(blocks)
            self.plain += blocks

    @invariant()
    def agree(self) -> None:
        assert list(self.real) == self.plain
        assert len(self.real) == len(self.plain)


TestFreeListIsAPlainList = FreeListMachine.TestCase
TestFreeListIsAPlainList.__doc__ = "Any sequence of operations leaves the order that a plain Python list would have."
TestFreeListIsAPlainList.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(st.integers(0, 30))
def test_all_blocks_are_free_at_first_in_ascending_order(num_blocks: int) -> None:
    """A new list holds every block once, ascending."""
    free = FreeList(num_blocks)
    assert list(free) == list(range(num_blocks))
    assert len(free) == num_blocks


def test_empty_and_back() -> None:
    """A list that was emptied takes blocks at both ends again."""
    free = FreeList(4)
    assert free.take(4) == [0, 1, 2, 3]
    assert (list(free), len(free), free.take(0)) == ([], 0, [])
    free.push_front([2])
    free.append([0, 3])
    free.push_front([1])
    assert list(free) == [1, 2, 0, 3]


@pytest.mark.parametrize("block", [0, 3, 5])
def test_removes_from_anywhere(block: int) -> None:
    """The first, a middle and the last block can be taken out."""
    free = FreeList(6)
    free.remove(block)
    assert list(free) == [b for b in range(6) if b != block]


def churn(free: FreeList, rounds: int, one: tuple[int], two: tuple[int]) -> None:
    """`rounds` times: both blocks out of the middle, one to the back, the other to the front."""
    for _ in range(rounds):
        free.remove(one[0])
        free.remove(two[0])
        free.append(one)
        free.push_front(two)


def test_no_object_per_operation() -> None:
    """After 100 000 operations the interpreter holds as many objects as before, give or take other threads."""
    free = FreeList(10_000)
    one, two = (4_321,), (8_765,)
    churn(free, 100, one, two)
    gc.collect()
    before = sys.getallocatedblocks()
    churn(free, 25_000, one, two)
    assert abs(sys.getallocatedblocks() - before) < 1_000
    assert len(free) == 10_000


def test_no_object_while_operating() -> None:
    """Removing from the middle and putting back never needs more than a few kilobytes, however long the list is."""
    free = FreeList(10_000)
    one, two = (4_321,), (8_765,)
    churn(free, 10, one, two)
    grown = []
    for _ in range(5):  # other threads of the process may take memory meanwhile, but not each time
        tracemalloc.start()
        try:
            churn(free, 1, one, two)
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            churn(free, 1_000, one, two)
            after, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        grown.append((after - before, peak - before))
    assert min(kept for kept, _ in grown) < 4096
    assert min(most for _, most in grown) < 8192


def test_links_hold_one_integer_per_block() -> None:
    """The list itself takes two pointers and one integer per block."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        free = FreeList(100_000)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(free) == 100_000
    assert (after - before) / 100_000 < 2 * 8 + 32 + 8
