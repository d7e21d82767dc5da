"""Reference counts, keys, copies and eviction of the block pool."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.blocks.pool import BlockPool
from foreword.errors import ConfigError, IntegrityError


def key(name: str) -> bytes:
    return name.encode().ljust(32, b".")


def fill(pool: BlockPool, names: str) -> list[int]:
    """Allocate one block per letter and publish each under that letter's key; the blocks are in use."""
    blocks = pool.allocate(len(names))
    assert blocks is not None
    pool.publish(blocks, [key(name) for name in names])
    pool.check()
    return blocks


def names(pool: BlockPool) -> str:
    """Keys along the free list, `.` for a block without one."""
    keys = [pool.key(block) for block in pool.free_blocks()]
    return "".join(chr(k[0]) if k is not None else "." for k in keys)


def snapshot(pool: BlockPool) -> tuple[object, ...]:
    """All that the pool knows, orders included."""
    blocks = range(pool.num_blocks)
    return (
        pool.free_blocks(),
        pool.num_free,
        pool.num_cached,
        [pool.references(block) for block in blocks],
        [pool.key(block) for block in blocks],
        list(pool._index.items()),
        [(name, list(others)) for name, others in pool._copies.items()],
    )


def test_the_pool_is_fixed() -> None:
    """All blocks are there at once, free and empty, and there are never more or fewer."""
    pool = BlockPool(5)
    assert pool.free_blocks() == [0, 1, 2, 3, 4]
    assert (pool.num_blocks, pool.num_free, pool.num_cached) == (5, 5, 0)
    held = fill(pool, "abc")
    assert sorted([*held, *pool.free_blocks()]) == [0, 1, 2, 3, 4]
    pool.release(held)
    assert sorted(pool.free_blocks()) == [0, 1, 2, 3, 4]
    assert pool.num_free == 5


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_a_pool_without_blocks_is_refused(num_blocks: int) -> None:
    """A pool needs a block, and says so to the operator."""
    with pytest.raises(ConfigError, match="at least one block"):
        BlockPool(num_blocks)


def test_lookup_changes_nothing() -> None:
    """Whether it finds all, some or nothing, a lookup leaves references, keys and order as they were."""
    pool = BlockPool(6)
    held = fill(pool, "abc")
    pool.release(held)
    fill(pool, "x")
    before = snapshot(pool)
    assert pool.lookup([key("a"), key("b"), key("c"), key("d")]) == held
    assert pool.lookup([key("a"), key("z"), key("c")]) == held[:1]
    assert pool.lookup([key("z"), key("a")]) == []
    assert pool.lookup([]) == []
    assert pool.count_free(held) == 3
    assert snapshot(pool) == before


def test_miss_takes_a_free_block_and_evicts_what_it_caches() -> None:
    """A miss takes the front of the free list; a key on it is gone before the block is handed out."""
    removed: list[list[bytes]] = []
    pool = BlockPool(3, on_removed=removed.append)
    pool.release(fill(pool, "abc"))
    assert names(pool) == "cba"
    assert pool.allocate(2) == [2, 1]
    assert removed == [[key("c"), key("b")]]
    assert [pool.key(block) for block in (2, 1)] == [None, None]
    assert [pool.references(block) for block in (0, 1, 2)] == [0, 1, 1]
    assert pool.lookup([key("a"), key("b")]) == [0]
    pool.check()


def test_miss_without_a_key_evicts_nothing() -> None:
    """An empty free block is taken without a word to anybody."""
    removed: list[list[bytes]] = []
    pool = BlockPool(3, on_removed=removed.append)
    assert pool.allocate(3) == [0, 1, 2]
    assert removed == []


def test_hit_on_a_free_block_takes_it_out_of_the_free_list() -> None:
    """Sharing a free block removes it from the middle of the list and gives it its first reference; it keeps its key."""
    pool = BlockPool(4)
    blocks = fill(pool, "abcd")
    pool.release(blocks)
    assert names(pool) == "dcba"
    pool.share([1])
    assert names(pool) == "dca"
    assert (pool.references(1), pool.key(1)) == (1, key("b"))
    pool.check()


def test_hit_on_a_block_in_use_only_adds_a_reference() -> None:
    """Sharing a block in use changes one number; it is free again after the last release."""
    pool = BlockPool(4)
    blocks = fill(pool, "a")
    before = snapshot(pool)
    pool.share(blocks)
    assert pool.references(0) == 2
    pool.release(blocks)
    assert snapshot(pool) == before
    pool.release(blocks)
    assert pool.free_blocks() == [1, 2, 3, 0]


def test_too_little_memory_changes_nothing() -> None:
    """An allocation that does not fit takes nothing and evicts nothing."""
    pool = BlockPool(4)
    pool.release(fill(pool, "ab"))
    pool.share([0])
    before = snapshot(pool)
    assert pool.allocate(4) is None
    assert snapshot(pool) == before
    assert pool.allocate(0) == []
    assert snapshot(pool) == before


def test_least_recently_used_first_and_the_tail_before_the_head() -> None:
    """Sequences are evicted in the order in which they were freed, and each from its last block."""
    pool = BlockPool(7)
    first, second = fill(pool, "abc"), fill(pool, "xy")
    pool.release(second)
    pool.release(first)
    assert names(pool) == "..yxcba"
    pool.share(second)  # used again: now the latest
    pool.release(second)
    assert names(pool) == "..cbayx"


def test_an_unfilled_block_goes_to_the_front() -> None:
    """Blocks without a key are taken before anything useful is evicted."""
    pool = BlockPool(6)
    pool.release(fill(pool, "ab"))
    table = [*fill(pool, "c"), *(pool.allocate(2) or ())]
    assert table == [2, 3, 4]
    pool.release(table)
    assert names(pool) == "...bac"
    assert pool.free_blocks() == [3, 4, 5, 1, 0, 2]


def test_a_chain_that_was_freed_lies_in_a_row_again() -> None:
    """A chain that was freed last block first is allocated again in ascending order; short runs keep their order."""
    pool = BlockPool(9)
    fill(pool, "abcdefghi")
    pool.release([0, 1, 2, 3, 4])
    pool.release([7, 6, 8, 5])
    assert pool.free_blocks() == [4, 3, 2, 1, 0, 5, 8, 6, 7]
    assert pool.allocate(3) == [4, 3, 2]
    pool.publish([2, 3, 4], [key("c"), key("d"), key("e")])
    pool.release([2, 3, 4])
    assert pool.free_blocks() == [1, 0, 5, 8, 6, 7, 4, 3, 2]
    assert pool.allocate(9) == [1, 0, 5, 8, 6, 7, 4, 3, 2]
    pool.publish(range(9), [key(name) for name in "abcdefghi"])
    pool.release([5, 6, 7, 8, 0, 1, 2, 3, 4])
    assert pool.free_blocks() == [4, 3, 2, 1, 0, 8, 7, 6, 5]
    assert pool.allocate(9) == [0, 1, 2, 3, 4, 5, 6, 7, 8]


@given(st.permutations(range(12)), st.integers(0, 12))
def test_whatever_their_order_the_front_of_the_list_is_taken(order: list[int], count: int) -> None:
    """An allocation takes exactly the blocks at the front of the free list, and what is left keeps its order."""
    pool = BlockPool(12)
    fill(pool, "abcdefghijkl")
    pool.release(order[::-1])
    assert pool.free_blocks() == order
    taken = pool.allocate(count)
    assert taken is not None
    assert sorted(taken) == sorted(order[:count])
    assert pool.free_blocks() == order[count:]
    pool.check()


def test_the_first_copy_is_found() -> None:
    """While two blocks in use have one key, a lookup finds the one that was filled first."""
    pool = BlockPool(4)
    first, second, third = fill(pool, "a"), fill(pool, "a"), fill(pool, "a")
    assert pool.lookup([key("a")]) == first
    assert [pool.key(block) for block in (*first, *second, *third)] == [key("a")] * 3
    assert pool.num_cached == 1


def test_a_copy_freed_while_the_first_is_in_use_loses_its_name() -> None:
    """A freed copy of a block in use loses its key and goes to the front of the free list."""
    pool = BlockPool(4)
    pool.release(fill(pool, "x"))
    first, second = fill(pool, "a"), fill(pool, "a")
    pool.release(second)
    assert pool.key(second[0]) is None
    assert pool.free_blocks()[0] == second[0]
    assert pool.lookup([key("a")]) == first
    pool.check()


def test_of_two_free_copies_the_one_used_last_stays() -> None:
    """The parent goes where the children just went, so that it is not evicted before them (decision 0003)."""
    pool = BlockPool(6)
    first, second = fill(pool, "a"), fill(pool, "ab")
    pool.release(first)
    assert pool.lookup([key("a")]) == first
    pool.release(second)
    assert pool.lookup([key("a"), key("b")]) == second
    assert names(pool) == "....ba"
    assert pool.free_blocks()[0] == first[0]
    pool.check()


def test_eviction_of_the_first_copy_leads_to_the_next() -> None:
    """When the first copy is evicted while another is in use, lookups find the other and no removal is reported."""
    removed: list[list[bytes]] = []
    pool = BlockPool(3, on_removed=removed.append)
    first, second, third = fill(pool, "a"), fill(pool, "a"), fill(pool, "a")
    pool.release(first)
    assert pool.allocate(1) == first
    assert pool.lookup([key("a")]) == second
    pool.check()
    pool.release(second)
    assert pool.allocate(1) == second
    assert pool.lookup([key("a")]) == third
    pool.release(third)
    assert removed == []
    assert pool.allocate(1) == third
    assert removed == [[key("a")]]
    pool.check()


def test_retract_takes_names_away_from_blocks_in_use() -> None:
    """A retracted block is not found any more and is empty when it is freed."""
    removed: list[list[bytes]] = []
    pool = BlockPool(4, on_removed=removed.append)
    blocks = fill(pool, "ab")
    pool.retract(blocks)
    assert pool.lookup([key("a")]) == []
    assert removed == [[key("a"), key("b")]]
    pool.retract(blocks)  # there is nothing left to take away
    pool.check()
    pool.release(blocks)
    assert names(pool) == "...."
    assert len(removed) == 1


@pytest.mark.parametrize("which", [0, 1, 2])
def test_retract_of_one_copy_leaves_the_others(which: int) -> None:
    """Whichever copy is retracted, lookups find the first of the rest, and no removal is reported."""
    removed: list[list[bytes]] = []
    pool = BlockPool(4, on_removed=removed.append)
    copies = [fill(pool, "a"), fill(pool, "a"), fill(pool, "a")]
    pool.retract(copies.pop(which))
    pool.check()
    assert pool.lookup([key("a")]) == copies[0]
    pool.retract(copies[0])
    assert pool.lookup([key("a")]) == copies[1]
    pool.retract(copies[1])
    assert pool.lookup([key("a")]) == []
    assert removed == [[key("a")]]
    pool.check()


def test_clear_forgets_what_is_free() -> None:
    """`clear` empties free blocks, reports their keys, and does not touch blocks in use."""
    removed: list[list[bytes]] = []
    pool = BlockPool(5, on_removed=removed.append)
    held = fill(pool, "ab")
    pool.release(fill(pool, "cd"))
    order = pool.free_blocks()
    assert pool.clear() == 2
    assert sorted(removed[0]) == [key("c"), key("d")]
    assert pool.free_blocks() == order
    assert pool.lookup([key("a"), key("b")]) == held
    assert pool.num_cached == 2
    assert pool.clear() == 0
    assert len(removed) == 1
    pool.check()


def test_clear_leaves_a_copy_in_use() -> None:
    """When the free first copy is cleared, the copy in use takes its place."""
    removed: list[list[bytes]] = []
    pool = BlockPool(3, on_removed=removed.append)
    first, second = fill(pool, "a"), fill(pool, "a")
    pool.release(first)
    assert pool.clear() == 1
    assert pool.lookup([key("a")]) == second
    assert removed == []
    pool.check()


def break_references(pool: BlockPool) -> None:
    pool._refs[0] = 0


def break_negative(pool: BlockPool) -> None:
    pool._refs[4] = -1


def break_free_list(pool: BlockPool) -> None:
    pool._free.append([0])


def break_length(pool: BlockPool) -> None:
    pool._free._length += 1


def break_index(pool: BlockPool) -> None:
    pool._index[key("z")] = 4


def break_name(pool: BlockPool) -> None:
    pool._keys[4] = key("z")


def break_copies(pool: BlockPool) -> None:
    pool._copies[key("a")].clear()


def break_stray_copies(pool: BlockPool) -> None:
    pool._copies[key("z")] = []


def break_order(pool: BlockPool) -> None:
    pool._index[key("b")], pool._copies[key("b")] = 3, [1]


def break_two_free(pool: BlockPool) -> None:
    pool._refs[3] = 0
    pool._free.append([3])


@pytest.mark.parametrize(
    ("damage", "invariant"),
    [
        (break_references, "exactly when it has no reference"),
        (break_negative, "no reference count is negative"),
        (break_free_list, "exactly when it has no reference"),
        (break_length, "each block once"),
        (break_index, "exactly the keys that blocks have"),
        (break_name, "exactly the keys that blocks have"),
        (break_copies, "list each block of a key once"),
        (break_stray_copies, "no empty or stray list of copies"),
        (break_order, "is the one in the index"),
        (break_two_free, "at most one free block has a given key"),
    ],
)
def test_check_names_the_broken_invariant(damage: Callable[[BlockPool], None], invariant: str) -> None:
    """Every kind of damage to the pool is found, and the error says which invariant does not hold."""
    pool = BlockPool(6)
    fill(pool, "a")  # block 0
    fill(pool, "b")  # block 1
    fill(pool, "a")  # block 2, a copy
    fill(pool, "b")  # block 3, a copy
    pool.release([1])  # 4 and 5 are empty
    pool.check()
    damage(pool)
    with pytest.raises(IntegrityError, match=invariant):
        pool.check()
