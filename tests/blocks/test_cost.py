"""The cost of operations, counted in bytecodes instead of seconds: the result does not depend on the machine's load."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from foreword.blocks.pool import BlockPool, FreeList
from foreword.blocks.prefix_cache import BlockTable, PrefixCache


def bytecodes(operation: Callable[[], object]) -> int:
    """Bytecode instructions that the operation executes in `foreword.blocks`.

    Other frames are not counted. The garbage collector is off meanwhile: a collection in the middle of the operation would
    run finalizers of other tests and Hypothesis's callback.
    """
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if not frame.f_globals.get("__name__", "").startswith("foreword.blocks"):
            return None
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    gc.disable()
    sys.settrace(trace)
    try:
        operation()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


def test_the_collector_is_not_counted() -> None:
    """A garbage collection that is due during an operation, with a callback, does not change the count."""

    def callback(phase: str, info: dict[str, int]) -> None:
        sum(range(3))

    def cost() -> int:
        pool = BlockPool(64)
        return bytecodes(lambda: [pool.lookup([b"a"]) for _ in range(100)])

    expected, threshold = cost(), gc.get_threshold()
    gc.callbacks.append(callback)
    gc.set_threshold(1)
    try:
        assert cost() == expected > 100
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(callback)


def admitted(cache: PrefixCache, num_tokens: int) -> BlockTable:
    table = cache.open(range(num_tokens))
    cache.admit(table, cache.lookup(table))
    assert cache.advance(table, num_tokens)
    return table


FREE_LIST_OPERATIONS: dict[str, Callable[[FreeList], object]] = {
    "take": lambda free: free.take(1),
    "remove": lambda free: free.remove(5),
    "append": lambda free: free.append((5,)),
    "push_front": lambda free: free.push_front((5,)),
}


@pytest.mark.parametrize("name", FREE_LIST_OPERATIONS)
def test_free_list_operations_do_not_depend_on_its_length(name: str) -> None:
    """Taking, removing from the middle and putting back execute the same instructions for 10 and for 10 000 blocks."""
    costs = set()
    for num_blocks in (10, 10_000):
        free = FreeList(num_blocks)
        if name in ("append", "push_front"):
            free.remove(5)
        operation = FREE_LIST_OPERATIONS[name]
        costs.add(bytecodes(lambda free=free, operation=operation: operation(free)))  # type: ignore[misc]
    assert len(costs) == 1
    assert costs.pop() < 200


@pytest.mark.parametrize("operation", ["allocate", "share", "release", "lookup"])
def test_pool_operations_do_not_depend_on_its_size(operation: str) -> None:
    """Operations on four blocks cost the same in a pool of 10 and in one of 10 000, all of them cached."""
    costs = set()
    for num_blocks in (10, 10_000):
        pool = BlockPool(num_blocks)
        blocks = pool.allocate(num_blocks)
        assert blocks is not None
        keys = [block.to_bytes(32, "big") for block in blocks]
        pool.publish(blocks, keys)
        pool.release(blocks)
        if operation == "release":
            pool.share(blocks[2:6])
        four: dict[str, Callable[[], object]] = {
            "allocate": lambda pool=pool: pool.allocate(4),  # type: ignore[misc]
            "share": lambda pool=pool, blocks=blocks: pool.share(blocks[2:6]),  # type: ignore[misc]
            "release": lambda pool=pool, blocks=blocks: pool.release(blocks[2:6]),  # type: ignore[misc]
            "lookup": lambda pool=pool, keys=keys: pool.lookup(keys[2:6]),  # type: ignore[misc]
        }
        costs.add(bytecodes(four[operation]))
    assert len(costs) == 1


def test_a_decoding_step_does_not_depend_on_the_sequence() -> None:
    """A decoded token costs the same after 20 and after 2 000 tokens, whether it stays in its block or begins or fills one."""
    costs = []
    for length in (20, 2_000):
        cache = PrefixCache(400, 8)
        table = admitted(cache, length)
        mine = []
        for token in range(16):
            table.append(token)
            computed = len(table)
            mine.append(bytecodes(lambda t=table, n=computed, c=cache: c.advance(t, n)))  # type: ignore[misc]
        costs.append(sorted(mine))
    assert costs[0] == costs[1]


def test_a_token_inside_a_block_costs_next_to_nothing() -> None:
    """Advancing by a token that neither begins nor fills a block is a comparison."""
    cache = PrefixCache(10, 8)
    table = admitted(cache, 9)
    table.append(1)
    assert bytecodes(lambda: cache.advance(table, 10)) < 40


def test_admission_grows_with_the_prompt_and_no_faster() -> None:
    """Looking up, admitting and freeing twice as many blocks takes at most twice as many instructions."""
    costs = []
    for length in (1_600, 3_200):
        cache = PrefixCache(400, 16)
        cache.release(admitted(cache, length))
        costs.append(bytecodes(lambda n=length, c=cache: c.release(admitted(c, n))))  # type: ignore[misc]
    assert costs[0] < costs[1] <= 2 * costs[0]


def test_serving_without_reuse_leaves_nothing_behind() -> None:
    """Once the pool is full, thousands of requests that share nothing leave as many objects as there were."""
    cache = PrefixCache(64, 4)

    def serve(first: int, count: int) -> None:
        for number in range(first, first + count):
            table = cache.open([number, 1, 2, 3, 4, 5, 6, 7, 8])
            cache.admit(table, cache.lookup(table))
            assert cache.advance(table, 9)
            cache.note_partial(table, 9)
            cache.release(table)

    serve(0, 300)
    gc.collect()
    before = sys.getallocatedblocks()
    serve(300, 3_000)
    gc.collect()
    assert sys.getallocatedblocks() - before < 1_000
    cache.check()
