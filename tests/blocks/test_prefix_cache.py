"""Automatic prefix caching: lookup, sharing, eviction, partial blocks, publishing, retraction, pins."""

from __future__ import annotations

import pytest

from foreword.blocks import partial_blocks
from foreword.blocks.keys import chain_keys
from foreword.blocks.prefix_cache import BlockTable, Copy, Match, PrefixCache
from foreword.blocks.salt import NO_SALT, Salt
from foreword.errors import BadRequest, IntegrityError

ABC = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]  # ten tokens: blocks 1-4, 5-8, and 9-10 in a third


def snapshot(cache: PrefixCache, *tables: BlockTable) -> tuple[object, ...]:
    """All that the cache and the tables know, orders included."""
    pool, blocks = cache.pool, range(cache.pool.num_blocks)
    return (
        pool.free_blocks(),
        pool.num_free,
        [pool.references(block) for block in blocks],
        [pool.key(block) for block in blocks],
        list(pool._index.items()),
        [(name, list(others)) for name, others in pool._copies.items()],
        [(name, block, list(tokens)) for name, (block, tokens, _) in cache._partials._noted.items()],
        list(cache._partials._keys.items()),
        [(t.chain.tokens.tolist(), list(t.blocks), t.published, t.next_block_at) for t in tables],
    )


def admit(cache: PrefixCache, tokens: list[int], salt: Salt = NO_SALT) -> tuple[BlockTable, Match]:
    """Admit a prompt and make room for all of it."""
    table = cache.open(tokens, salt=salt)
    match = cache.lookup(table)
    cache.admit(table, match)
    assert cache.advance(table, len(tokens))
    cache.check()
    return table, match


def serve(cache: PrefixCache, tokens: list[int], salt: Salt = NO_SALT) -> Match:
    """Admit a prompt, compute it, note its partial block and end the sequence, as the scheduler does."""
    table, match = admit(cache, tokens, salt)
    cache.note_partial(table, len(tokens))
    cache.release(table)
    cache.check()
    return match


def found(cache: PrefixCache, tokens: list[int], salt: Salt = NO_SALT) -> Match:
    return cache.lookup(cache.open(tokens, salt=salt))


def test_blocks_in_use_and_free_make_the_pool() -> None:
    """Through a sequence's whole life every block of the pool is either in its table or free."""
    cache = PrefixCache(6, 4)
    table, _ = admit(cache, ABC)
    for token in range(100, 110):
        table.append(token)
        assert cache.advance(table, len(table))
        assert sorted([*table.blocks, *cache.pool.free_blocks()]) == list(range(6))
    cache.release(table)
    assert sorted(cache.pool.free_blocks()) == list(range(6))
    assert (table.blocks, table.published) == ([], 0)


def test_only_full_blocks_are_named_and_shared() -> None:
    """A prompt's full blocks get the chained keys of its tokens; the partial last one gets none."""
    cache = PrefixCache(6, 4, model=b"m", partial_reuse=False)
    table, _ = admit(cache, ABC)
    keys = chain_keys(cache.root(NO_SALT), ABC, 4)
    assert [cache.pool.key(block) for block in table.blocks] == [*keys, None]
    assert found(cache, ABC) == Match([0, 1], -1, 0, 8)


def test_tenants_models_and_extras_do_not_meet() -> None:
    """A different salt or extra never finds the blocks; the same one does."""
    cache = PrefixCache(12, 4)
    serve(cache, ABC, salt=Salt(b"one"))
    assert found(cache, ABC, salt=Salt(b"two")).cached_tokens == 0
    assert found(cache, ABC).cached_tokens == 0
    assert found(cache, ABC, salt=Salt(b"one")).blocks == [0, 1]
    table = cache.open(ABC, extras=[b"", b"adapter"])
    cache.admit(table, cache.lookup(table))
    assert cache.advance(table, 8)
    assert cache.lookup(cache.open(ABC, extras=[b"", b"adapter"])).blocks == table.blocks
    assert cache.lookup(cache.open(ABC)).blocks == table.blocks[:1]
    assert PrefixCache(1, 4, model=b"a").root(NO_SALT) != PrefixCache(1, 4, model=b"b").root(NO_SALT)


def test_roots_of_many_tenants_are_bounded_and_right() -> None:
    """However many tenants come by, a tenant's root stays what it was."""
    cache = PrefixCache(2, 4)
    first = cache.root(Salt(b"first"))
    for number in range(3000):
        cache.root(Salt(b"first", str(number).encode()))
    assert cache.root(Salt(b"first")) == first
    assert cache.root.cache_info().currsize <= 1024


def test_bad_tokens_are_refused_before_anything_is_taken() -> None:
    """A token that no key can hold is the client's mistake, and the pool does not notice it."""
    cache = PrefixCache(2, 4)
    with pytest.raises(BadRequest):
        cache.open([1, -1])
    assert cache.pool.num_free == 2


@pytest.mark.parametrize("tokens", [ABC, ABC[:7], [*ABC[:5], 99, 99, 99], [99], [], ABC * 3])
def test_lookup_changes_nothing(tokens: list[int]) -> None:
    """No reference, no order, no key, no partial block and no table is different after a lookup, hit or miss."""
    cache = PrefixCache(8, 4)
    running, _ = admit(cache, [*ABC[:4], 50, 51, 52, 53])
    serve(cache, ABC)
    table = cache.open(tokens)
    before = snapshot(cache, running, table)
    for _ in range(3):
        match = cache.lookup(table)
        cache.new_blocks(table, match, len(tokens))
    assert snapshot(cache, running, table) == before


def test_three_endings_of_one_admission() -> None:
    """A prompt of one admission hits a block in use, hits a free block, and misses onto a free block whose key is evicted
    first."""
    removed: list[list[bytes]] = []
    cache = PrefixCache(4, 4, partial_reuse=False, on_removed=removed.append)
    running, _ = admit(cache, ABC[:4])  # block 0, in use
    serve(cache, ABC[:8])  # block 1, free
    serve(cache, [90, 91, 92, 93, 94, 95, 96, 97])  # blocks 2 and 3, free: 3 before 2
    assert cache.pool.free_blocks() == [1, 3, 2]
    evicted = cache.pool.key(3)
    table, match = admit(cache, [*ABC[:8], 60, 61, 62])
    assert match.blocks == [0, 1]
    assert table.blocks == [0, 1, 3]
    assert [cache.pool.references(block) for block in range(4)] == [2, 1, 0, 1]
    assert cache.pool.free_blocks() == [2]
    assert removed == [[evicted]]
    assert found(cache, [90, 91, 92, 93, 94]).blocks == [2]
    assert running.blocks == [0]


def test_new_blocks_predicts_what_admission_takes() -> None:
    """`new_blocks` counts misses and hits on free blocks, and hits on blocks in use for nothing."""
    cache = PrefixCache(8, 4, partial_reuse=False)
    admit(cache, ABC[:4])
    serve(cache, ABC[:8])
    table = cache.open([*ABC[:8], 60, 61, 62])
    match = cache.lookup(table)
    expected = cache.new_blocks(table, match, len(table))
    assert expected == 2
    before = cache.pool.num_free
    cache.admit(table, match)
    assert cache.advance(table, len(table))
    assert before - cache.pool.num_free == expected


def test_tail_before_head_and_older_before_newer() -> None:
    """A sequence's blocks are evicted from its last block, after those of sequences that ended before it."""
    cache = PrefixCache(8, 2)
    serve(cache, [1, 2, 3, 4, 5, 6])
    serve(cache, [7, 8, 9, 10])
    order = [cache.pool.key(block) for block in cache.pool.free_blocks()]
    first, second = (
        chain_keys(cache.root(NO_SALT), [1, 2, 3, 4, 5, 6], 2),
        chain_keys(cache.root(NO_SALT), [7, 8, 9, 10], 2),
    )
    assert order == [None, None, None, *reversed(first), *reversed(second)]


def test_a_use_makes_a_prefix_the_latest() -> None:
    """Blocks that are hit go to the back again when they are freed."""
    cache = PrefixCache(4, 2)
    serve(cache, [1, 2, 3, 4])
    serve(cache, [5, 6, 7, 8])
    serve(cache, [1, 2, 3, 4])
    assert cache.pool.free_blocks() == [3, 2, 1, 0]


def test_unfilled_blocks_go_to_the_front() -> None:
    """The block that a sequence did not fill is the next to be taken."""
    cache = PrefixCache(5, 4)
    serve(cache, ABC)
    assert cache.pool.free_blocks() == [2, 3, 4, 1, 0]


def test_tables_are_append_only() -> None:
    """A table only grows: its blocks stay in place while other sequences come, share, copy and end."""
    cache = PrefixCache(12, 4)
    table, _ = admit(cache, ABC)
    seen = list(table.blocks)
    others = [admit(cache, ABC)[0], admit(cache, [*ABC, 11, 12])[0]]
    for token in (11, 12, 13):
        table.append(token)
        assert cache.advance(table, len(table))
        assert table.blocks[: len(seen)] == seen
        seen = list(table.blocks)
    for other in others:
        cache.release(other)
        assert table.blocks == seen


def test_two_that_fill_one_block_at_once_keep_their_own() -> None:
    """Both sequences keep their copy of a block that both filled, and lookups find the first."""
    cache = PrefixCache(8, 4, partial_reuse=False)
    first, _ = admit(cache, [1, 2, 3])
    second, _ = admit(cache, [1, 2, 3])
    for table in (first, second):
        table.append(4)
        assert cache.advance(table, 4)
    assert (first.blocks, second.blocks) == ([0], [1])
    assert cache.pool.key(0) == cache.pool.key(1)
    assert found(cache, [1, 2, 3, 4]).blocks == [0]
    cache.release(first)
    assert (second.blocks, found(cache, [1, 2, 3, 4]).blocks) == ([1], [0])
    cache.release(second)
    cache.check()
    assert found(cache, [1, 2, 3, 4]).blocks == [1]


def test_a_prompt_cached_to_its_last_token_needs_one_token() -> None:
    """A prompt seen before is cached but for its last token; a full last block is shared whole."""
    cache = PrefixCache(8, 4)
    serve(cache, ABC)
    assert found(cache, ABC).cached_tokens == 9
    serve(cache, ABC[:8])
    assert found(cache, ABC[:8]) == Match([0, 1], -1, 0, 8)
    assert cache.new_blocks(cache.open(ABC[:8]), found(cache, ABC[:8]), 8) == 2  # the two that were free, no new one


def test_the_tail_of_a_running_sequence_is_copied() -> None:
    """A partly filled block in use is copied into a block of the new sequence; the original may still grow."""
    cache = PrefixCache(8, 4)
    running, _ = admit(cache, ABC)
    cache.note_partial(running, 10)
    table = cache.open([*ABC, 11])
    match = cache.lookup(table)
    assert (match.blocks, match.partial_block, match.partial_tokens, match.cached_tokens) == ([0, 1], 2, 2, 10)
    cache.admit(table, match)
    assert cache.advance(table, 11)
    assert cache.copy_partial(table, match) == Copy(2, 3, 2)
    for token in (20, 21, 22):
        running.append(token)
        assert cache.advance(running, len(running))
    assert running.blocks[2] == 2
    assert found(cache, [*ABC, 11]).partial_tokens == 2
    cache.check()


def test_source_and_target_may_be_the_same_block() -> None:
    """If the free list hands out the very block that was to be copied, there is nothing to copy and the tokens count."""
    cache = PrefixCache(5, 4)
    serve(cache, ABC)
    assert cache.pool.free_blocks()[0] == 2
    table = cache.open([*ABC, 11])
    match = cache.lookup(table)
    assert (match.partial_block, match.cached_tokens) == (2, 10)
    cache.admit(table, match)
    assert cache.advance(table, 11)
    assert table.blocks == [0, 1, 2]
    assert cache.copy_partial(table, match) is None
    cache.check()


def test_the_source_may_be_a_later_block_of_the_same_table() -> None:
    """A partial block that is allocated as a later block of the same table is still copied, before that block is written."""
    cache = PrefixCache(4, 4)
    source, _ = admit(cache, [1, 2, 3])
    other, _ = admit(cache, [50])
    cache.note_partial(source, 3)
    cache.release(source)
    cache.release(other)
    assert cache.pool.free_blocks() == [1, 0, 2, 3]
    table, match = admit(cache, [1, 2, 3, 4, 5, 6])
    assert (match.partial_block, match.partial_tokens) == (0, 3)
    assert table.blocks == [1, 0]
    assert cache.copy_partial(table, match) == Copy(0, 1, 3)


@pytest.mark.parametrize(
    ("tokens", "cached"),
    [
        ([*ABC[:8], 9, 10, 11, 12], 10),
        ([*ABC[:8], 9, 99, 98], 9),
        ([*ABC[:8], 9, 10], 9),  # the last token is left to be computed
        ([*ABC[:8], 9], 8),
        ([*ABC[:8], 99, 10], 8),
        ([*ABC[:6], 99, 99, 9, 10], 4),  # divergence inside a full block: only noted partial blocks are copied
        ([99, *ABC[1:]], 0),
    ],
)
def test_divergence_inside_the_block(tokens: list[int], cached: int) -> None:
    """Only the leading tokens that the partial block and the prompt have in common are copied."""
    cache = PrefixCache(8, 4)
    serve(cache, ABC)
    assert found(cache, tokens).cached_tokens == cached


def test_a_short_prompt_is_a_partial_block_at_the_root() -> None:
    """A prompt shorter than a block is reused too, but only under its own salt."""
    cache = PrefixCache(8, 4)
    serve(cache, [1, 2, 3], salt=Salt(b"one"))
    assert found(cache, [1, 2, 3], salt=Salt(b"one")) == Match([], 0, 2, 2)
    assert found(cache, [1, 2, 3], salt=Salt(b"two")).cached_tokens == 0


def test_a_partial_block_is_gone_when_its_block_is_allocated() -> None:
    """A partial block is not offered any more as soon as its block is taken for something else."""
    cache = PrefixCache(4, 4)
    serve(cache, ABC)
    other, _ = admit(cache, [50, 51])
    assert other.blocks == [2]
    assert found(cache, ABC) == Match([0, 1], -1, 0, 8)
    cache.note_partial(other, 2)
    cache.release(other)
    cache.check()


def test_the_latest_partial_block_wins() -> None:
    """The later one of two partial blocks with the same parent is offered."""
    cache = PrefixCache(8, 4)
    one, _ = admit(cache, [*ABC[:4], 20, 21])
    two, _ = admit(cache, [*ABC[:4], 30, 31])
    cache.note_partial(one, 6)
    cache.note_partial(two, 6)
    assert found(cache, [*ABC[:4], 20, 21, 22]).cached_tokens == 4
    assert found(cache, [*ABC[:4], 30, 31, 32]).cached_tokens == 6
    cache.note_partial(one, 6)
    assert found(cache, [*ABC[:4], 20, 21, 22]).cached_tokens == 6
    cache.check()


def test_noting_again_updates_the_partial_block() -> None:
    """A partial block that is noted again with more tokens is offered with all of them."""
    cache = PrefixCache(8, 4)
    table, _ = admit(cache, [1, 2])
    cache.note_partial(table, 2)
    table.append(3)
    cache.note_partial(table, 3)
    assert found(cache, [1, 2, 3, 4]).cached_tokens == 3
    cache.check()


def test_nothing_to_note() -> None:
    """Full blocks and blocks that the table does not have are no partial blocks."""
    cache = PrefixCache(8, 4)
    table, _ = admit(cache, ABC[:8])
    cache.note_partial(table, 8)
    cache.note_partial(cache.open(ABC), 10)
    cache.note_partial(table, 0)
    assert not cache._partials


def test_tails_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notes of more sequences than the bound push out those noted first."""
    monkeypatch.setattr(partial_blocks, "MAX_PARTIAL_BLOCKS", 100)
    cache = PrefixCache(110, 2)
    for number in range(105):
        table = cache.open([number], salt=Salt(number.to_bytes(3, "little")))
        assert cache.advance(table, 1)
        cache.note_partial(table, 1)
    cache.check()
    assert len(cache._partials) == 100


def test_partial_reuse_can_be_switched_off() -> None:
    """Without partial reuse only full blocks are found."""
    cache = PrefixCache(8, 4, partial_reuse=False)
    serve(cache, ABC)
    match = found(cache, ABC)
    assert match == Match([0, 1], -1, 0, 8)
    table = cache.open(ABC)
    cache.admit(table, match)
    assert cache.advance(table, 10)
    assert cache.copy_partial(table, match) is None


def test_a_block_is_published_when_the_step_that_fills_it_is_scheduled() -> None:
    """The next request of the same step shares the blocks that the one before it is about to fill."""
    cache = PrefixCache(8, 4)
    first, _ = admit(cache, ABC)
    second, match = admit(cache, ABC)
    assert match.blocks == first.blocks[:2]
    assert second.blocks == [0, 1, 3]
    assert [cache.pool.references(block) for block in (0, 1, 2, 3)] == [2, 2, 1, 1]


def test_published_and_removed_keys_are_reported_once_each() -> None:
    """The hooks report every published key with its parent, and every key that is gone."""
    stored: list[tuple[bytes, list[bytes]]] = []
    removed: list[list[bytes]] = []

    def on_published(table: BlockTable, start: int, end: int) -> None:
        stored.append((table.chain.key_before(start), table.chain.keys_to(end)[start:end]))

    cache = PrefixCache(3, 4, on_published=on_published, on_removed=removed.append)
    root = cache.root(NO_SALT)
    keys = chain_keys(root, ABC, 4)
    table = cache.open(ABC)
    assert cache.advance(table, 4)
    assert cache.advance(table, 7)
    assert cache.advance(table, 10)
    assert stored == [(root, keys[:1]), (keys[0], keys[1:])]
    cache.release(table)
    assert removed == []
    assert cache.advance(cache.open([9] * 12), 12)
    assert removed == [[keys[1], keys[0]]]


def test_only_what_the_step_needs_is_taken() -> None:
    """Advancing chunk by chunk takes blocks as the chunks need them."""
    cache = PrefixCache(10, 4)
    table = cache.open(range(20))
    taken = []
    for computed in (3, 4, 5, 8, 9, 20):
        assert cache.advance(table, computed)
        taken.append((len(table.blocks), table.published))
    assert taken == [(1, 0), (1, 1), (2, 1), (2, 2), (3, 2), (5, 5)]


def test_a_few_blocks_ahead() -> None:
    """Lookahead makes `advance` take that many blocks more when it takes any, and use them up before the next taking."""
    cache = PrefixCache(10, 4, lookahead_blocks=2)
    table = cache.open(range(20))
    taken = []
    for computed in range(1, 18):
        assert cache.advance(table, computed)
        taken.append(len(table.blocks))
        cache.check()
    assert taken == [3] * 12 + [6] * 5
    assert table.published == 4
    cache.release(table)
    assert sorted(cache.pool.free_blocks()) == list(range(10))


def test_lookahead_never_refuses() -> None:
    """Blocks ahead are taken only if they are there; what is needed is taken without them."""
    cache = PrefixCache(3, 4, lookahead_blocks=5)
    table = cache.open(range(13))
    for computed in range(1, 13):
        assert cache.advance(table, computed)
    assert len(table.blocks) == 3
    assert not cache.advance(table, 13)


def test_quiet_steps_do_nothing() -> None:
    """`advance` below `next_block_at` is right to do nothing: the full path would not change anything either."""
    for enabled in (True, False):
        for ahead in (0, 1, 3):
            cache = PrefixCache(20, 4, lookahead_blocks=ahead, enabled=enabled)
            table = cache.open(range(40))
            for computed in range(1, 41):
                quiet = computed < table.next_block_at
                before = snapshot(cache, table)
                assert cache.advance(table, computed)
                if quiet:
                    assert snapshot(cache, table) == before
                assert len(table.blocks) * 4 >= computed
                assert table.published == (computed // 4 if enabled else 0)


def test_too_little_memory_is_said_and_nothing_happens() -> None:
    """An advance that does not fit answers False and changes nothing; after a preemption it fits."""
    cache = PrefixCache(4, 4)
    running, _ = admit(cache, ABC)
    late, _ = admit(cache, [50, 51])
    for token in (11, 12, 13):
        running.append(token)
    before = snapshot(cache, running, late)
    assert not cache.advance(running, 13)
    assert snapshot(cache, running, late) == before
    cache.release(late)
    assert cache.advance(running, 13)
    cache.check()


def test_a_preempted_sequence_finds_its_blocks_again() -> None:
    """The blocks of a preempted sequence stay cached until evicted, its partial block too, and it resumes where it was."""
    cache = PrefixCache(6, 4)
    table, _ = admit(cache, ABC)
    blocks = list(table.blocks)
    cache.note_partial(table, 10)
    cache.release(table)
    table.append(11)
    match = cache.lookup(table)
    assert match.cached_tokens == 10
    cache.admit(table, match)
    assert cache.advance(table, 11)
    assert table.blocks == blocks
    assert cache.copy_partial(table, match) is None


def test_a_preempted_sequence_loses_only_what_was_needed() -> None:
    """When some of a preempted sequence's blocks were taken, the head of its chain is still found."""
    cache = PrefixCache(4, 4)
    table, _ = admit(cache, list(range(16)))
    cache.release(table)
    other, _ = admit(cache, [90, 91, 92, 93, 94])
    assert other.blocks == [3, 2]
    assert cache.lookup(table).blocks == [0, 1]


def test_retract_withdraws_what_a_failed_step_named() -> None:
    """After a failed step, lookups do not find the blocks that it would have filled; earlier blocks stay."""
    removed: list[list[bytes]] = []
    cache = PrefixCache(8, 4, partial_reuse=False, on_removed=removed.append)
    table = cache.open(list(range(16)))
    assert cache.advance(table, 6)
    named = table.published
    assert cache.advance(table, 16)
    sharing, match = admit(cache, list(range(16)))  # in the same step
    assert len(match.blocks) == 4
    cache.retract(table, named)
    cache.retract(sharing, 4)
    assert (table.published, removed) == (1, [chain_keys(cache.root(NO_SALT), range(16), 4)[1:]])
    assert found(cache, list(range(16))).blocks == [0]
    cache.release(sharing)
    cache.release(table)
    cache.check()
    assert cache.pool.free_blocks()[-1] == 0
    assert cache.pool.num_cached == 1


def test_retract_leaves_no_tail_in_a_withdrawn_block() -> None:
    """Who shared a block of a failed step in that step cannot offer it for copying when it ends: nothing is in it."""
    cache = PrefixCache(8, 4)
    first, _ = admit(cache, [1, 2, 3, 4])
    second, match = admit(cache, [1, 2, 3, 4])  # in the same step; its last token is recomputed
    assert match.cached_tokens == 4
    cache.retract(first, 0)
    cache.retract(second, 1)
    cache.note_partial(second, 3)
    cache.release(second)
    cache.release(first)
    assert found(cache, [1, 2, 3, 9]).cached_tokens == 0
    cache.check()


def test_retract_then_compute_again() -> None:
    """A table whose blocks were withdrawn can compute them again: then they are found."""
    cache = PrefixCache(8, 4)
    table = cache.open(list(range(9)))
    assert cache.advance(table, 9)
    cache.retract(table, 0)
    assert found(cache, list(range(9))).cached_tokens == 0
    assert cache.advance(table, 9)
    assert found(cache, list(range(9))).blocks == table.blocks[:2]
    cache.check()


def test_pinned_blocks_are_never_evicted() -> None:
    """Pinned blocks stay cached, in order, while everything else is taken; unpinned they are evicted like any other."""
    cache = PrefixCache(5, 4)
    table, _ = admit(cache, ABC)
    pinned = cache.pin(table, 2)
    assert pinned == [0, 1]
    cache.release(table)
    other, _ = admit(cache, [50] * 12)
    assert not cache.advance(cache.open([60]), 1)
    assert cache.clear() == 0
    assert found(cache, ABC).blocks == [0, 1]
    cache.release(other)
    cache.unpin(pinned)
    cache.check()
    assert cache.pool.free_blocks()[-2:] == [1, 0]
    assert cache.clear() == 5


def test_pin_takes_only_published_blocks() -> None:
    """A block that is not full cannot be pinned."""
    cache = PrefixCache(5, 4)
    table, _ = admit(cache, ABC)
    pinned = cache.pin(table, 3)
    assert pinned == table.blocks[:2]
    cache.unpin(pinned)
    assert [cache.pool.references(block) for block in table.blocks] == [1, 1, 1]


def test_clear_forgets_what_is_not_in_use() -> None:
    """After `clear` only running sequences' full blocks are found, and no partial block."""
    cache = PrefixCache(8, 4)
    running, _ = admit(cache, [*ABC[:4], 60, 61])
    cache.note_partial(running, 6)
    serve(cache, ABC)
    assert cache.clear() == 1
    cache.check()
    assert found(cache, ABC).blocks == running.blocks[:1]
    assert found(cache, [*ABC[:4], 60, 61, 62]).cached_tokens == 4


def test_clear_of_one_tenant() -> None:
    """`clear` with a tenant drops its blocks and partial blocks, those of its clients' salts too, and no other tenant's; with
    a client's salt those of that salt only."""
    cache = PrefixCache(32, 4)
    one, two = Salt.of(b"alice", "one"), Salt.of(b"alice", "two")
    for salt in (Salt(b"alice"), one, two, Salt(b"bob")):
        serve(cache, ABC, salt=salt)
    assert cache.clear(one) > 0 and cache.clear(one) == 0
    for salt in (Salt(b"alice"), two):
        assert found(cache, [*ABC, 99], salt=salt).cached_tokens == 8
    before = found(cache, [*ABC, 99], salt=Salt(b"bob")).cached_tokens
    assert cache.clear(Salt(b"alice")) > 0
    cache.check()
    for salt in (Salt(b"alice"), one, two):
        assert found(cache, [*ABC, 99], salt=salt).cached_tokens == 0
    assert found(cache, [*ABC, 99], salt=Salt(b"bob")).cached_tokens == before > 8
    assert cache.clear(Salt(b"alice")) == 0


def test_disabled_nothing_is_named_and_nothing_is_found() -> None:
    """Pool with caching off works as before, every lookup misses, and freed blocks hold nothing."""
    heard: list[object] = []
    cache = PrefixCache(8, 4, enabled=False, on_published=lambda *blocks: heard.append(blocks), on_removed=heard.append)
    table, match = admit(cache, ABC)
    cache.note_partial(table, 10)
    assert (match, table.published) == (Match((), -1, 0, 0), 0)
    assert found(cache, ABC).cached_tokens == 0
    assert cache.pool.num_cached == 0
    cache.retract(table, 0)
    cache.release(table)
    cache.check()
    assert (cache.pool.num_free, cache.clear(), heard) == (8, 0, [])


def test_check_finds_a_stray_partial_block() -> None:
    """A partial block that is missing in one of the two maps is a broken invariant."""
    cache = PrefixCache(4, 4)
    table, _ = admit(cache, [1, 2])
    cache.note_partial(table, 2)
    cache.check()
    cache._partials._keys.clear()
    with pytest.raises(IntegrityError, match="partial block"):
        cache.check()
