"""Two worked examples, block number by block number: evictions in a small pool, and two copies of a prefix."""

from __future__ import annotations

import pytest

from foreword.blocks.keys import chain_keys
from foreword.blocks.prefix_cache import BlockTable, Copy, PrefixCache
from foreword.blocks.salt import NO_SALT

A_PROMPT = list(range(100, 115))  # 15 tokens
A_OUTPUT = [115, 116]
B_PROMPT = [*A_PROMPT[:10], 200, 201, 202, 203]  # 14 tokens, the first 10 as in A
C_PROMPT = [*A_PROMPT[:12], *range(300, 317)]  # 29 tokens, the first 12 as in A
PAIR = [1, 2, 3, 4, 5, 6, 7]  # ABCDEFG


def admit(cache: PrefixCache, tokens: list[int]) -> tuple[BlockTable, int]:
    """Admit a prompt and compute all of it; the table, and the tokens found cached."""
    table = cache.open(tokens)
    match = cache.lookup(table)
    cache.admit(table, match)
    assert cache.advance(table, len(tokens))
    cache.check()
    return table, match.cached_tokens


def decode(cache: PrefixCache, table: BlockTable, token: int) -> None:
    """Generates one token, whose KV the next step computes."""
    table.append(token)
    assert cache.advance(table, len(table))
    cache.check()


def until_b_ends(cache: PrefixCache) -> None:
    """The eviction example up to request C."""
    assert cache.pool.free_blocks() == list(range(10))
    a, cached = admit(cache, A_PROMPT)
    assert (a.blocks, a.published, cached) == ([0, 1, 2, 3], 3, 0)
    decode(cache, a, A_OUTPUT[0])
    assert (a.blocks, a.published) == ([0, 1, 2, 3], 4)
    decode(cache, a, A_OUTPUT[1])
    assert (a.blocks, a.published) == ([0, 1, 2, 3, 4], 4)
    b, cached = admit(cache, B_PROMPT)
    assert (b.blocks, cached) == ([0, 1, 5, 6], 8)
    assert [cache.pool.references(block) for block in range(10)] == [2, 2, 1, 1, 1, 1, 1, 0, 0, 0]
    cache.release(a)
    cache.check()
    assert [cache.pool.references(block) for block in range(10)] == [1, 1, 0, 0, 0, 1, 1, 0, 0, 0]
    cache.release(b)
    cache.check()
    assert cache.pool.num_cached == 5  # 0 1 2 3 of A, 5 of B


@pytest.mark.parametrize("partial_reuse", [False, True])
def test_with_unfilled_blocks_first(partial_reuse: bool) -> None:
    """Unfilled blocks 4 and 6 are reused before anything is evicted, and C evicts nothing.

    By hand: while A and B run, 7-8-9 are free. A ends and gives 4, 3, 2 back (0 and 1 are B's too). 4 holds one token and
    has no key, so it goes to the front; 3 and 2 are cached and go to the back in this order: 4-7-8-9-3-2. B ends and
    gives 6, 5, 1, 0 back. 6 holds two tokens, so it goes to the front; 5, 1, 0 go to the back: 6-4-7-8-9-3-2-5-1-0.
    C takes 0, 1, 2 out of the middle and five new blocks from the front: 6, 4, 7, 8, 9. None of them held a key. 3 and 5,
    the last blocks, which C does not share, stay cached.
    """
    removed: list[bytes] = []
    cache = PrefixCache(10, 4, partial_reuse=partial_reuse, on_removed=removed.extend)
    until_b_ends(cache)
    assert cache.pool.free_blocks() == [6, 4, 7, 8, 9, 3, 2, 5, 1, 0]
    c, cached = admit(cache, C_PROMPT)
    assert (c.blocks, cached) == ([0, 1, 2, 6, 4, 7, 8, 9], 12)
    assert removed == []
    assert cache.pool.free_blocks() == [3, 5]


def test_both_copies_stay() -> None:
    """Two greedy requests with one prompt fill tables [0,1,...] and [0,3,...]; both copies stay and lookups find block 1.

    The first request has filled block 1 and taken block 2 when the second comes.
    """
    cache = PrefixCache(10, 4)
    first, _ = admit(cache, PAIR)
    assert first.blocks == [0, 1]
    decode(cache, first, 8)
    decode(cache, first, 9)
    assert first.blocks == [0, 1, 2]
    second, cached = admit(cache, PAIR)
    assert (second.blocks, cached) == ([0, 3], 4)
    decode(cache, second, 8)
    assert cache.pool.key(3) == cache.pool.key(1) == chain_keys(cache.root(NO_SALT), [*PAIR, 8], 4)[1]
    assert (first.blocks, second.blocks) == ([0, 1, 2], [0, 3])
    assert [cache.pool.references(block) for block in (0, 1, 3)] == [2, 1, 1]
    assert cache.lookup(cache.open([*PAIR, 8])).blocks == [0, 1]


@pytest.mark.parametrize("first_ends_first", [True, False])
def test_the_copy_is_dropped_when_it_is_freed(first_ends_first: bool) -> None:
    """When both requests have ended, in either order, one of the two copies is left and is found."""
    cache = PrefixCache(10, 4)
    first, _ = admit(cache, [*PAIR, 8])
    second = cache.open([*PAIR, 8])
    cache.admit(second, cache.lookup(cache.open(PAIR)))  # as if it had come before the first filled block 1
    assert cache.advance(second, 8)
    assert (first.blocks, second.blocks) == ([0, 1], [0, 2])
    for table in (first, second) if first_ends_first else (second, first):
        assert cache.lookup(cache.open([*PAIR, 8])).blocks == [0, 1]
        cache.release(table)
        cache.check()
    assert cache.lookup(cache.open([*PAIR, 8])).blocks == [0, 2 if first_ends_first else 1]
    assert cache.pool.free_blocks()[0] == (1 if first_ends_first else 2)
    assert cache.pool.num_cached == 2


def test_with_a_partly_filled_block_to_copy() -> None:
    """A second request copies E and F and recomputes only G where the partial block of the first prompt was noted."""
    cache = PrefixCache(10, 4)
    first, _ = admit(cache, PAIR)
    cache.note_partial(first, 7)
    decode(cache, first, 8)
    decode(cache, first, 9)
    second = cache.open(PAIR)
    match = cache.lookup(second)
    assert (match.blocks, match.partial_block, match.partial_tokens, match.cached_tokens) == ([0], 1, 2, 6)
    cache.admit(second, match)
    assert cache.advance(second, 7)
    assert second.blocks == [0, 3]
    assert cache.copy_partial(second, match) == Copy(1, 3, 2)
