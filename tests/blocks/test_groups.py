"""PrefixCache with KV groups against a slow reference: what each block holds is known, and a hit is checked by brute force."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest
from example_counts import represented

from foreword.blocks.prefix_cache import HOLE, BlockTable, Match, PrefixCache
from foreword.blocks.resume import GroupKind, KVGroup
from foreword.errors import ConfigError

FULL, WINDOW = GroupKind.FULL, GroupKind.WINDOW
Prefix = tuple[int, ...]

KINDS = {
    "window": [(WINDOW, 9)],
    "full and window": [(FULL, 0), (WINDOW, 9)],
    "five windows per full": [(FULL, 0), *[(WINDOW, 6)] * 5],
    "several full": [(FULL, 0), (FULL, 0), (WINDOW, 14)],
    "two windows": [(WINDOW, 17), (WINDOW, 2)],
}


def make_groups(kinds: list[tuple[GroupKind, int]], size: int) -> list[KVGroup]:
    return [KVGroup(kind, size, span) for kind, span in kinds]


@dataclass(eq=False)
class Live:
    table: BlockTable
    computed: int


class World:
    """Sequences over one cache, and the group and the prefix that each block holds."""

    def __init__(self, kinds: list[tuple[GroupKind, int]], size: int, num_blocks: int, seed: int) -> None:
        self.size = size
        self.cache = PrefixCache(num_blocks, size, groups=make_groups(kinds, size))
        self.random = random.Random(seed)
        self.holds: dict[int, tuple[int, Prefix]] = {}
        self.live: list[Live] = []
        self.texts = [tuple(self.random.randrange(3) for _ in range(60)) for _ in range(3)]
        self.hits = self.evictions = 0

    def prompt(self) -> list[int]:
        text = self.random.choice(self.texts)
        cut = self.random.randrange(1, len(text))
        return [*text[:cut], *(self.random.randrange(3) for _ in range(self.random.randrange(4)))]

    def present(self, prefix: Prefix, group: int, index: int) -> bool:
        """Whether any block that a lookup may return holds block `index` of this text in this group."""
        wanted = (group, prefix[: (index + 1) * self.size])
        pool = self.cache.pool
        return any(held == wanted and pool.key(block) is not None for block, held in self.holds.items())

    def longest_hit(self, tokens: Prefix) -> int:
        """The last full-block position from which all groups can continue, by trying every one."""
        for depth in range(len(tokens) // self.size, 0, -1):
            needed = [(g, i) for g, group in enumerate(self.cache.groups) for i in group.needed(depth * self.size)]
            if all(self.present(tokens, g, i) for g, i in needed):
                return depth
        return 0

    def check_match(self, tokens: Prefix, match: Match) -> None:
        depth = len(match.blocks)
        assert depth == self.longest_hit(tokens)
        for g, (group, blocks) in enumerate(zip(self.cache.groups, (match.blocks, *match.others), strict=True)):
            assert len(blocks) == depth
            needed = set(group.needed(depth * self.size))
            for i, block in enumerate(blocks):
                assert (block != HOLE) == (i in needed)
                assert block == HOLE or self.holds[block] == (g, tokens[: (i + 1) * self.size])

    def come(self) -> None:
        tokens = self.prompt()
        table = self.cache.open(tokens)
        match = self.cache.lookup(table)
        self.check_match(tuple(tokens), match)
        chunk = self.random.randrange(1, 20)
        start = min(len(match.blocks) * self.size, len(tokens) - 1)
        count = min(chunk, len(tokens) - start)
        if self.cache.new_blocks(table, match, start + count, 20) > self.cache.pool.num_free:
            return
        self.hits += bool(match.blocks)
        self.cache.admit(table, match)
        assert self.cache.advance(table, start + count)
        self.live.append(Live(table, start))
        self.compute(self.live[-1], start + count)

    def grow(self, one: Live) -> None:
        if one.computed == len(one.table):
            one.table.append(self.random.randrange(3))
        end = min(one.computed + self.random.randrange(1, 20), len(one.table))
        self.cache.trim(one.table, one.computed)
        if self.cache.advance(one.table, end):
            self.compute(one, end)
        else:
            self.end(one)

    def compute(self, one: Live, end: int) -> None:
        """Runs a step: fills the new blocks; every token finds all that its window needs."""
        tokens = tuple(one.table.chain.tokens)
        for g, (group, blocks) in enumerate(zip(self.cache.groups, one.table.groups, strict=True)):
            for i in range(one.computed // self.size, -(-end // self.size)):
                prefix = tokens[: min((i + 1) * self.size, end)]
                if self.cache.pool.references(blocks[i]) == 1 or blocks[i] not in self.holds:
                    self.evictions += blocks[i] in self.holds
                    self.holds[blocks[i]] = (g, prefix)
            seen = 0 if group.whole else max(one.computed - group.span + 2, 0)
            for position in range(seen, end):
                block = blocks[position // self.size]
                assert block != HOLE
                held, prefix = self.holds[block]
                assert (held, prefix[: position + 1]) == (g, tokens[: position + 1])
        one.computed = end

    def end(self, one: Live) -> None:
        self.cache.release(one.table)
        self.live.remove(one)

    def step(self) -> None:
        kind = self.random.choice(["come", "grow", "grow", "grow", "end"])
        if kind == "come" and len(self.live) < 4:
            self.come()
        elif self.live:
            one = self.random.choice(self.live)
            self.end(one) if kind == "end" else self.grow(one)


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("size", represented([1, 4], 4))
@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 10), marks=pytest.mark.slow)], ids=["few", "many"])
def test_against_a_reference(kinds: list[tuple[GroupKind, int]], size: int, seeds: range) -> None:
    """A lookup finds the longest resumable prefix, and exactly its blocks; no block is freed while a window needs it; and
    none leaks."""
    hits = 0
    for seed in seeds:
        world = World(kinds, size, num_blocks=(120 // size) * len(kinds), seed=seed)
        for _ in range(150):
            world.step()
            world.cache.check()
            held = Counter(b for one in world.live for blocks in one.table.groups for b in blocks if b != HOLE)
            pool = world.cache.pool
            assert all(pool.references(block) == held[block] for block in range(pool.num_blocks))
        for one in list(world.live):
            world.end(one)
        assert world.cache.pool.num_free == world.cache.pool.num_blocks
        hits += world.hits
        assert world.evictions
    assert hits > 3 * len(seeds)


def fill(cache: PrefixCache, tokens: list[int], step: int = 8) -> BlockTable:
    """Compute a text in steps."""
    table = cache.open(tokens)
    for end in range(step, len(tokens) + step, step):
        cache.trim(table, end - step)
        assert cache.advance(table, min(end, len(tokens)))
    cache.trim(table, len(tokens))
    return table


def count_held(table: BlockTable) -> list[int]:
    return [sum(block != HOLE for block in blocks) for blocks in table.groups]


def test_a_window_holds_its_last_blocks() -> None:
    """A window of 8 holds two blocks of 4 out of 120 tokens, full attention all 30."""
    cache = PrefixCache(100, 4, groups=make_groups([(FULL, 0), (WINDOW, 9)], 4))
    table = fill(cache, list(range(120)))
    assert count_held(table) == [30, 2]
    assert cache.pool.num_free == 100 - 32


def test_a_hit_needs_the_last_window_only() -> None:
    """When the front of a window group was evicted, the whole prefix is still a hit, and a shorter one is not."""
    cache = PrefixCache(48, 4, groups=make_groups([(FULL, 0), (WINDOW, 9)], 4))
    cache.release(fill(cache, list(range(80))))  # 20 blocks of full attention
    fresh = fill(cache, list(range(1000, 1044)))  # evicts what left the first text's window
    match = cache.lookup(cache.open([*range(80), 7]))
    assert (match.cached_tokens, match.others[0][:18]) == (80, [HOLE] * 18)
    assert cache.lookup(cache.open([*range(60), 7])).cached_tokens == 0
    cache.release(fresh)
    cache.check()


def test_a_pin_keeps_what_a_hit_needs() -> None:
    """A pinned prefix is a hit after everything else was evicted; its blocks are as many as promised."""
    cache = PrefixCache(60, 4, groups=make_groups([(FULL, 0), (WINDOW, 9), (WINDOW, 9)], 4))
    table = fill(cache, list(range(42)))
    pinned = cache.pin(table, 10)
    cache.release(table)
    assert len(pinned) == cache.pinned_blocks(42) == 10 + 2 + 2
    blocks = cache.pool.allocate(cache.pool.num_free)
    assert blocks is not None and len(blocks) == 60 - len(pinned)
    assert cache.lookup(cache.open(list(range(45)))).cached_tokens == 40
    cache.unpin(pinned)
    cache.pool.release(blocks)
    cache.check()


def test_removed_keys_are_those_of_chains() -> None:
    """`on_removed` reports a key when the first group's block is evicted, and nothing for other groups."""
    removed: list[bytes] = []
    cache = PrefixCache(8, 4, groups=make_groups([(FULL, 0), (WINDOW, 9)], 4), on_removed=removed.extend)
    table = cache.open(list(range(16)))
    assert cache.advance(table, 16)
    keys = table.chain.keys_to(4)[:4]
    cache.release(table)
    assert cache.pool.allocate(8) is not None
    assert sorted(removed) == sorted(keys)


def test_groups_that_are_refused() -> None:
    """Groups that the cache cannot manage are a configuration error."""
    for group in (KVGroup(FULL, 8), KVGroup(GroupKind.STATE, 4), KVGroup(WINDOW, 4, 9, sinks=4)):
        with pytest.raises(ConfigError):
            PrefixCache(8, 4, groups=[group])


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_the_longest_sequence_fits_alone(kinds: list[tuple[GroupKind, int]]) -> None:
    """A sequence as long as `longest` says can be computed in an empty pool, from its start or after a hit."""
    cache = PrefixCache(20 * len(kinds), 4, groups=make_groups(kinds, 4))
    tokens = list(range(cache.longest(200, 8)))
    for _ in range(2):
        table = cache.open(tokens)
        match = cache.lookup(table)
        assert cache.new_blocks(table, match, len(tokens), 8) <= cache.pool.num_free
        cache.admit(table, match)
        for end in range(match.cached_tokens + 8, len(tokens) + 8, 8):
            cache.trim(table, end - 8)
            assert cache.advance(table, min(end, len(tokens)))
        cache.release(table)
    cache.check()
